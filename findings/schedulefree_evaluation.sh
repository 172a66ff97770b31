#!/usr/bin/env bash
# schedulefree 1.4.1, torch 2.14.1: its README asks for eval() before an evaluation and before a
# checkpoint. eval() and train() interpolate the weights there and back in float32, which does not
# return the same bits: a run that evaluates once trains on with other bits than one that does not,
# and a run resumed from a checkpoint as asked for equals only a run that evaluated at that step. A
# checkpoint taken in train mode resumes bit for bit.
# Seen: equal without eval(); after eval() and train() the weights differ by about 1e-8.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  schedulefree==1.4.1 torch==2.14.1 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import io
import sys

import schedulefree
import torch

torch.set_num_threads(1)


def start():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return model, schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=5)


def train(*, evaluates=False, saves=""):
    model, optimizer = start()
    optimizer.train()
    for step in range(24):
        if step == 10 and evaluates:
            optimizer.eval()
            optimizer.train()
        if step == 10 and saves:
            if saves == "eval":
                optimizer.eval()
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            model, optimizer = start()
            for what, state in zip((model, optimizer), torch.load(file), strict=True):
                what.load_state_dict(state)
            optimizer.train()
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 8, generator=draw), torch.randn(16, 4, generator=draw)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


plain, evaluated = train(), train(evaluates=True)
in_train, in_eval = train(saves="train"), train(saves="eval")
print("saved in train mode:", "equal" if torch.equal(plain, in_train) else "other bits")
for name, other in {"evaluated once": evaluated, "saved in eval mode": in_eval}.items():
    print(f"{name}: differs by up to {float((plain - other).abs().max()):.1e}")
print("the two:", "equal" if torch.equal(evaluated, in_eval) else "other bits")
sys.exit(
    not (
        torch.equal(plain, in_train)
        and not torch.equal(plain, evaluated)
        and torch.equal(evaluated, in_eval)
    )
)
PY
