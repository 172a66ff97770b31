#!/usr/bin/env bash
# came-pytorch 0.1.3 (CAME) and transformers 5.24.0 (Adafactor) keep float32 moments for bfloat16
# weights, and their checkpoints hold float32. torch 2.14.1's load_state_dict casts floating state
# to the weights' type, so a resumed run goes on with moments rounded to bfloat16, and ends with
# other weights; with float32 weights both resume exactly. A fix: put the loaded tensors into
# optimizer.state by hand.
# Seen: float32 weights equal; bfloat16 weights differ by 0.02 (CAME) and 0.002 (Adafactor) or so.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  came-pytorch==0.1.3 transformers==5.24.0 torch==2.14.1 numpy==2.4.6
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import io
import sys

import torch
from came_pytorch import CAME
from transformers.optimization import Adafactor

torch.set_num_threads(1)
OPTIMIZERS = {
    "CAME": lambda weights: CAME(weights, lr=0.01),
    "Adafactor": lambda weights: Adafactor(
        weights, lr=0.01, relative_step=False, scale_parameter=False
    ),
}


def start(make, dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
    ).to(dtype)
    return model, make(model.parameters())


def types(optimizer):
    tensors = (each for state in optimizer.state.values() for each in state.values())
    found = {each.dtype for each in tensors if torch.is_tensor(each)}
    return sorted(str(each).removeprefix("torch.") for each in found)


def train(make, dtype, *, restarts):
    model, optimizer = start(make, dtype)
    saved = loaded = []
    for step in range(16):
        if restarts and step == 8:
            saved, file = types(optimizer), io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            file.seek(0)
            model, optimizer = start(make, dtype)
            for what, state in zip((model, optimizer), torch.load(file), strict=True):
                what.load_state_dict(state)
            loaded = types(optimizer)
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(16, n, generator=draw).to(dtype) for n in (16, 8))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    weights = torch.cat([each.detach().flatten().float() for each in model.parameters()])
    return weights, saved, loaded


ok = True
for name, make in OPTIMIZERS.items():
    for dtype in (torch.float32, torch.bfloat16):
        whole, again = (train(make, dtype, restarts=False)[0] for _ in range(2))
        resumed, saved, loaded = train(make, dtype, restarts=True)
        largest = float((whole - resumed).abs().max())
        print(f"{name}, weights {dtype}: state saved {saved}, loaded {loaded}; "
              f"weights differ by up to {largest:.1e}")
        ok &= torch.equal(whole, again) and (largest == 0) == (dtype == torch.float32)
sys.exit(not ok)
PY
