#!/usr/bin/env bash
# schedulefree 1.4.1, torch 2.14.1: ScheduleFreeWrapper keeps its `z` in the wrapped optimizer's own
# state before that optimizer's first step. torch's optimizers take a state that is not empty for
# one that they have prepared: RMSprop (the docstring's own example), Adam and RAdam end at the
# first step with a KeyError; SGD works. ScheduleFreeWrapperReference does the same.
# Seen: RMSprop KeyError 'square_avg', Adam and RAdam KeyError 'exp_avg', SGD steps.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  schedulefree==1.4.1 torch==2.14.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import sys

import schedulefree
import torch

seen = {}
for wrapper in (schedulefree.ScheduleFreeWrapper, schedulefree.ScheduleFreeWrapperReference):
    for base in ("SGD", "RMSprop", "Adam", "RAdam"):
        model = torch.nn.Linear(4, 2)
        inner = getattr(torch.optim, base)(model.parameters(), lr=0.0025)
        optimizer = wrapper(inner, momentum=0.9, weight_decay_at_y=0.1)
        optimizer.train()
        model(torch.ones(8, 4)).square().mean().backward()
        try:
            optimizer.step()
            seen[wrapper.__name__, base] = "steps"
        except KeyError as error:
            seen[wrapper.__name__, base] = f"KeyError {error}"
for (name, base), what in seen.items():
    print(f"{name}({base}): {what}")
sys.exit(any((what == "steps") != (base == "SGD") for (_, base), what in seen.items()))
PY
