"""Train steps of a ResNet-50 as torchvision and timm users write them: images a second.

python benchmarks/gpu/resnet.py timm --batch 256 --side 224: in an environment without this project.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

# Learning rate, momentum, weight decay: what a step costs does not depend on them.
_RATE, _MOMENTUM, _DECAY = 0.4, 0.9, 1e-4


def images_per_second(step: Callable[[], object], batch: int, device: str, steps: int) -> float:
    """The best of three times `steps` steps, after as many in which kernels are chosen.

    Of a CPU one time is enough: its figure tests the program.
    """
    for _ in range(steps):
        step()
    best = float("inf")
    for _ in range(1 if device == "cpu" else 3):
        _synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        _synchronize(device)
        best = min(best, time.perf_counter() - began)
    return batch * steps / best


def peer_step(name: str, batch: int, side: int, device: str, *, compiled: bool) -> Any:
    """One step of a peer on a batch that is there, normalized: channels last, bfloat16."""
    last = torch.channels_last
    model, parameters = _torchvision() if name == "torchvision" else _timm()
    model = model.to(device).to(memory_format=last).train()
    if compiled:
        model.compile()
    optimizer = SGD(parameters(model), lr=_RATE, momentum=_MOMENTUM)
    images = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=last)
    labels = torch.randint(1000, (batch,), device=device)
    criterion = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss: Tensor = criterion(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _torchvision() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    models = importlib.import_module("torchvision.models")
    return models.resnet50(), lambda model: [
        {"params": list(model.parameters()), "weight_decay": _DECAY}
    ]


def _timm() -> tuple[nn.Module, Callable[[nn.Module], Any]]:
    timm = importlib.import_module("timm")
    groups = importlib.import_module("timm.optim").param_groups_weight_decay
    return timm.create_model("resnet50"), lambda model: groups(model, _DECAY)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    """Print the peer's version and its images a second as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=("torchvision", "timm"))
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--side", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    step = peer_step(given.name, given.batch, given.side, given.device, compiled=given.compiled)
    rate = images_per_second(step, given.batch, given.device, given.steps)
    version = importlib.import_module(given.name).__version__
    print(json.dumps({"version": version, "torch": torch.__version__, "rate": rate}))


if __name__ == "__main__":
    main()
