#!/usr/bin/env bash
# pytorch-ignite 0.5.5, torch 2.14.1: a DeterministicEngine that resumes inside an epoch puts the
# saved random state back before a DataLoader without workers has drawn its permutation (it draws
# lazily; with workers, at once): the epoch goes on with another order, so some samples come twice
# and others never. With two workers, and at an epoch's end, it is exact.
# Seen: stopped at batch 4 of 10: without workers 5 of 20 samples twice, 5 never; with 2 exact.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  pytorch-ignite==0.5.5 torch==2.14.1 numpy==2.4.6
cat >"$folder/resume.py" <<'PY'
import sys
import warnings

import torch
from ignite.engine import DeterministicEngine, Events
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")


def run(workers, stop_at=0, state=None):
    seen, saved = [], {}
    engine = DeterministicEngine(lambda engine, batch: seen.extend(batch.tolist()))
    if stop_at:

        @engine.on(Events.ITERATION_COMPLETED(once=stop_at))
        def save(engine):
            saved.update(engine.state_dict())
            engine.terminate()

    torch.manual_seed(0)
    data = DataLoader(torch.arange(20), batch_size=2, shuffle=True, num_workers=workers)
    if state:
        engine.load_state_dict(state)
    engine.run(data, max_epochs=2)
    return seen, saved


def lost(workers, stop_at):
    whole, _ = run(workers)
    first, state = run(workers, stop_at=stop_at)
    rest, _ = run(workers, state=state)
    never = 20 - len(set((first + rest)[:20]))
    print(f"{workers} workers, stopped at batch {stop_at} of 10: {never} samples of the epoch never "
          f"seen; {'as uninterrupted' if first + rest == whole else 'another order'}")
    return never


if __name__ == "__main__":
    sys.exit([lost(0, 4) > 0, lost(2, 4), lost(0, 10)] != [True, 0, 0])
PY
"$folder/venv/bin/python" "$folder/resume.py"
