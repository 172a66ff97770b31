"""A step of the deterministic detector makes the host wait for the device a few times, not 67.

Counted without a GPU: what a tensor on the device would be read by, or written from the host by.
"""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.config import resolve_config
from training.preflight.standalone import standalone_inputs
from training.workload import Train
from training.workloads.detection import detector
from training.workloads.detection.workload import DETECTION

# The matcher reads costs and labels; the loss reads how many objects there are. Not seen here: the
# matcher's copy back.
OURS = Path(detector.__file__).parent
EXPECTED = {"losses.py": 2, "stages.py": 1}


class Reads(TorchDispatchMode):
    """Counts what waits, by the file of the trainer that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_file = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero"):
            self.count()
        return func(*args, **(kwargs or {}))

    def count(self) -> None:
        files = [Path(frame.filename) for frame in reversed(traceback.extract_stack())]
        ours = (file.name for file in files if file.parent == OURS)
        self.by_file[next(ours, "torch")] += 1


def test_the_host_waits_for_the_matcher_and_the_count_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads, tensor = Reads(), torch.tensor

    def made(*values: Any, device: Any = None, **options: Any) -> Tensor:
        if device is not None:
            reads.count()
        return tensor(*values, device=device, **options)

    def counted(method: Any) -> Any:
        def call(self: Tensor, *arguments: Any, **options: Any) -> Any:
            reads.count()
            return method(self, *arguments, **options)

        return call

    config = resolve_config(DETECTION, "laptop", {})
    (stage,) = (each for each in DETECTION.stages(config) if isinstance(each, Train))
    model, batch = stage.model(standalone_inputs(stage.name, config)).train(), stage.example(2)
    monkeypatch.setattr(torch, "tensor", made)
    for name in ("new_tensor", "cpu"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    with reads:
        stage.loss(model, batch, 0, 10).total.backward()
    assert reads.by_file == EXPECTED
