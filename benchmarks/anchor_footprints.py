"""Count what the models of the ground truths compute and keep, without a GPU or weights.

Writes sizing/evidence/ground_truth_models.json: python -m benchmarks.anchor_footprints
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.anchors.detection import detectors
from benchmarks.anchors.detection import footprint as detection_footprint
from benchmarks.anchors.models import Anchor, anchors, precisions
from training.preflight.counting import Convolutions, KeptForBackward, starts_kernel

FILE = Path(__file__).parent.parent / "sizing" / "evidence" / "ground_truth_models.json"


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that start a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += starts_kernel(func)
        return out


def footprint(anchor: Anchor, counted: list[str]) -> dict[str, Any]:
    """Return one anchor's counts: what its shapes decide, and what it keeps in each precision."""
    # Initialization reads numbers, which fake tensors do not have: build first, then fake.
    real = anchor.build().train().to("meta")
    return _shapes(anchor, real) | {
        precision: _forward(anchor, real, precision.removeprefix("forward "))
        if precision.startswith("forward ")
        else _step(anchor, real, precision)
        for precision in counted
    }


def _shapes(anchor: Anchor, real: nn.Module) -> dict[str, Any]:
    copied, flops, convolutions = (
        copy.deepcopy(real),
        FlopCounterMode(display=False),
        Convolutions(),
    )
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(SDPBackend.MATH):
        model = copied.to_empty(device="cpu")
        with flops, convolutions:
            anchor.loss(model, anchor.batch(anchor.samples))
    total = flops.get_total_flops()
    return {
        "parameters": sum(p.numel() for p in real.parameters()),
        # Backward is twice forward; torch's count of it is wrong for grouped convolutions.
        "flops_per_sample": 3 * int(total) // anchor.samples,
        "convolution_share": round(convolutions.flops / total, 3),
        "grouped_share": round(convolutions.grouped_flops / total, 3),
    }


def _step(anchor: Anchor, real: nn.Module, precision: str) -> dict[str, int]:
    """Count forward and backward: the bytes kept of one sample, and the kernels of the step."""
    is_pure = precision == "pure float16"
    copied = copy.deepcopy(real).bfloat16() if is_pure else copy.deepcopy(real)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, batch = copied.to_empty(device="cpu"), anchor.batch(anchor.samples)
        kept, kernels = KeptForBackward(model), _Kernels()
        # The attention of the measured runs was written out (2022) or in its plain form.
        with kernels, sdpa_kernel(SDPBackend.MATH):
            with kept.watching(), _autocast(precision):
                loss = anchor.loss(model, _halved(batch) if is_pure else batch)
            loss.backward()  # type: ignore[no-untyped-call]
    # Autocast keeps a half copy of every matrix for backward; that does not grow with the batch.
    copies = 2 * sum(p.numel() for p in real.parameters()) if precision == "float16" else 0
    return {
        "kept_bytes_per_sample": max(0, kept.bytes - copies) // anchor.samples,
        "kernels_per_step": kernels.count,
    }


def _forward(anchor: Anchor, real: nn.Module, precision: str) -> dict[str, int]:
    """Count the kernels of a forward pass without gradients."""
    copied, kernels = copy.deepcopy(real).eval(), _Kernels()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model, batch = copied.to_empty(device="cpu"), anchor.batch(1)
        with kernels, _autocast(precision):
            anchor.loss(model, batch)
    return {"kernels_per_step": kernels.count}


def _autocast(precision: str) -> torch.autocast:
    # bfloat16 is as wide as the float16 of the measured runs, and the CPU has its autocast.
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "float16")


def _halved(batch: Any) -> Any:
    return tuple(t.bfloat16() if t.is_floating_point() else t for t in batch)


def main() -> int:
    """Count every anchor and write the file."""
    models: dict[str, dict[str, Any]] = {}
    for name, anchor in anchors().items():
        models[name] = footprint(anchor, precisions()[name])
        print(f"{name:<20} {models[name]}", flush=True)
    for name, build in detectors().items():
        models[name] = detection_footprint(build())
        print(f"{name:<20} {models[name]}", flush=True)
    content = {
        "command": "python -m benchmarks.anchor_footprints",
        "torch": torch.__version__,
        "models": models,
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
