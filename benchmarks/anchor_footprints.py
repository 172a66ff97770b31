"""Count what the models of the ground truths compute and keep, without a GPU or weights.

Writes sizing/evidence/ground_truth_models.json: python -m benchmarks.anchor_footprints
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.anchors.detection import detectors
from benchmarks.anchors.detection import footprint as detection_footprint
from benchmarks.anchors.kept import Kept
from benchmarks.anchors.models import Anchor, anchors
from training.preflight.footprint import starts_kernel

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


def footprint(anchor: Anchor) -> dict[str, int | str]:
    """Return one anchor's counts: per sample what grows with the batch, per step the launches."""
    # Initialization reads numbers, which fake tensors do not have: build first, then fake.
    real = anchor.build().train().to("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = real.to_empty(device="cpu")
        batch = anchor.batch()
        # bfloat16 is as wide as the float16 of the measured runs, and the CPU has its autocast.
        half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=anchor.precision == "float16")
        kept, flops, kernels = Kept(model), FlopCounterMode(display=False), _Kernels()
        # The attention of the measured runs was written out (2022) or in its plain form.
        with kernels, sdpa_kernel(SDPBackend.MATH):
            with flops, kept.watching(), half:
                loss = anchor.loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
    parameters = sum(p.numel() for p in model.parameters())
    # Autocast keeps a half copy of every matrix for backward; that does not grow with the batch.
    copies = 2 * parameters if anchor.precision == "float16" else 0
    return {
        "counted_in": anchor.precision,
        "parameters": parameters,
        # Backward is twice forward; torch's count of it is wrong for grouped convolutions.
        "flops_per_sample": 3 * int(flops.get_total_flops()) // anchor.samples,
        "kept_bytes_per_sample": max(0, kept.bytes - copies) // anchor.samples,
        "kernels_per_step": kernels.count,
    }


def main() -> int:
    """Count every anchor and write the file."""
    models: dict[str, dict[str, int | str]] = {}
    for name, anchor in anchors().items():
        models[name] = footprint(anchor)
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
