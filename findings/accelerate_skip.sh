#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.14.1, torchdata 0.11.0: save_state() in the middle of an epoch, then
# load_state() and skip_first_batches(), skips the first batches of another order: the random state
# that comes back is that of after the shuffle. So of the resumed epoch some samples are trained
# twice and others never, and no later epoch is as without the interruption.
# use_stateful_dataloader=True does the same. use_seedable_sampler=True keeps the order within the
# first epoch, but counts epochs from 0 in each process: a resumed epoch has the first one's order.
# That one and loader.set_epoch(epoch) before each epoch, also before the skip, are exact.
# Seen: stopped after 2 of 4 batches of the second of 3 epochs, 4 of 12 samples come twice, 4 never;
# with the stateful loader the same; with the seedable sampler 2 and 2, with set_epoch() none.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    accelerate==1.15.0 torch==2.14.1 torchdata==0.11.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PY'
import warnings

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

warnings.simplefilter("ignore")
EPOCHS, STOP = 3, (1, 2)  # in the second epoch, after two batches


def started(settings):
    set_seed(5)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = torch.utils.data.DataLoader(torch.arange(12.0), batch_size=3, shuffle=True)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def trained(settings, set_epoch, stop=None, resume=None):
    """Return the batches, each as (epoch, samples)."""
    accelerator, _, _, loader = started(settings)
    first_epoch, skip = resume or (0, 0)
    if resume:
        accelerator.load_state("state")
    seen = []
    for epoch in range(first_epoch, EPOCHS):
        batches, done = loader, skip if epoch == first_epoch else 0
        if set_epoch:
            loader.set_epoch(epoch)
        if done and not settings.get("use_stateful_dataloader"):
            batches = accelerator.skip_first_batches(loader, done)
        for batch in batches:
            seen.append((epoch, [int(sample) for sample in batch]))
            done += 1
            if (epoch, done) == stop:
                accelerator.save_state("state")
                return seen
    return seen


CASES = {
    "default": ({}, False),
    "stateful": ({"use_stateful_dataloader": True}, False),
    "seedable": ({"use_seedable_sampler": True}, False),
    "seedable, set_epoch": ({"use_seedable_sampler": True}, True),
}
exact = {}
for name, (settings, set_epoch) in CASES.items():
    whole = trained(settings, set_epoch)
    assert whole == trained(settings, set_epoch), "not repeatable"
    parts = trained(settings, set_epoch, stop=STOP) + trained(settings, set_epoch, resume=STOP)
    samples = [sample for epoch, batch in parts if epoch == STOP[0] for sample in batch]
    twice = sorted(sample for sample in set(samples) if samples.count(sample) > 1)
    never = sorted(set(range(12)) - set(samples))
    exact[name] = parts == whole
    print(f"{name}: exact {exact[name]}, in the resumed epoch twice {twice}, never {never}")
    assert len(parts) == len(whole) and bool(never) != exact[name]
assert [name for name in CASES if exact[name]] == ["seedable, set_epoch"], exact
PY
