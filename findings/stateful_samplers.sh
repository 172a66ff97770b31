#!/usr/bin/env bash
# torchdata 0.11.0: StatefulDataLoader restores the order of `shuffle=True` only. A sampler of
# torch.utils.data that it is given (WeightedRandomSampler for rare classes, SubsetRandomSampler,
# RandomSampler) draws a new order, of which it skips as many as were read: samples come twice,
# others never, unless the sampler has a generator of its own and it is the first epoch. The
# nodes' SamplerWrapper does the same.
# Seen: 100 samples, resumed after 40 with torch's random state: exact with shuffle in both epochs,
# with a sampler's own generator only in its first, with torch's in none; of the 40 samples read
# before, 23 to 31 come again where none should (without weights).
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet torch==2.15.0 \
  torchdata==0.11.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys
from itertools import islice

import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from torchdata.nodes import Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

DATA = list(range(100))


def loader(name, own):
    generator = torch.Generator().manual_seed(1) if own else None
    if name == "shuffle":
        return StatefulDataLoader(DATA, batch_size=None, shuffle=True, generator=generator)
    sampler = {
        "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 101), 100, generator=generator),
        "subset": lambda: SubsetRandomSampler(DATA, generator=generator),
        "random": lambda: RandomSampler(DATA, generator=generator),
        "nodes": lambda: RandomSampler(DATA, generator=generator),
    }[name]()
    if name == "nodes":
        return Loader(SamplerWrapper(sampler))
    return StatefulDataLoader(DATA, batch_size=None, sampler=sampler)


def resume(name, own, epoch):
    """The samples before the resume, those that should follow, and those that do."""
    torch.manual_seed(0)
    data = loader(name, own)
    for _ in range(epoch - 1):
        list(data)
    iterator = iter(data)
    before = list(map(int, islice(iterator, 40)))
    state, random = data.state_dict(), torch.get_rng_state()
    after = list(map(int, iterator))
    torch.manual_seed(0)
    other = loader(name, own)
    other.load_state_dict(state)
    torch.set_rng_state(random)
    return before, after, list(map(int, other))


exact = {}
for name in ("shuffle", "random", "subset", "weighted", "nodes"):
    for own in (True, False):
        runs = [resume(name, own, epoch) for epoch in (1, 2)]
        exact[name, own] = [after == resumed for _, after, resumed in runs]
        again = [len({*before} & {*resumed}) for before, _, resumed in runs]
        print(f"{name}, {'own' if own else 'global'} generator: epochs 1 and 2 exact:",
              *exact[name, own], "; read again:", *again)
expected = {key: [key[1], False] for key in exact}
expected |= {("shuffle", True): [True, True], ("shuffle", False): [True, True]}
sys.exit(exact != expected)
PY
