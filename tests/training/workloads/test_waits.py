"""How often the host waits for the device in a step of each recipe: a new wait fails.

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

from training.preflight.standalone import standalone_inputs
from training.registry import load_workload, resolve_config
from training.workload import Train

WORKLOADS = Path("training", "workloads").absolute()
# The waits of a step by stage and file. The detector's matcher reads costs and labels, its loss how
# many objects there are; not seen here is the matcher's copy back.
WAITS: dict[tuple[str, str], dict[str, dict[str, int]]] = {
    ("detection", "laptop"): {"detect": {"detection_workload.py": 3}},
    ("growth", "laptop"): {},
    ("imagenet", "laptop"): {},
    ("trajectory", "laptop"): {},
    ("trajectory", "magvit_laptop"): {},
}


class Reads(TorchDispatchMode):
    """Counts what waits, by the file of the workload that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.by_file = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, picked = func._schema.name.removeprefix("aten::").rstrip("_"), args[1:2]
        # Picking by a mask counts the mask's elements.
        is_masked = name in ("index", "index_put") and any(
            place is not None and place.dtype == torch.bool for place in picked[0]
        )
        if is_masked or name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.count()
        return func(*args, **(kwargs or {}))

    def count(self) -> None:
        """Add one."""
        files = [Path(frame.filename) for frame in reversed(traceback.extract_stack())]
        ours = (file.name for file in files if WORKLOADS in file.parents)
        self.by_file[next(ours, "torch")] += 1


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counts what gives a device tensors of numbers of the host, too."""
    found, tensor = Reads(), torch.tensor

    def made(*values: Any, device: Any = None, **options: Any) -> Tensor:
        if device is not None:
            found.count()
        return tensor(*values, device=device, **options)

    def counted(method: Any) -> Any:
        def call(self: Tensor, *arguments: Any, **options: Any) -> Any:
            found.count()
            return method(self, *arguments, **options)

        return call

    monkeypatch.setattr(torch, "tensor", made)
    for name in ("new_tensor", "cpu"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name)))
    return found


@pytest.mark.parametrize(("workload", "recipe"), list(WAITS))
def test_a_step_waits_where_the_table_says(workload: str, recipe: str, reads: Reads) -> None:
    loaded = load_workload(workload)
    config = resolve_config(loaded, recipe, {})
    waits = {}
    for stage in loaded.stages(config):
        if isinstance(stage, Train):
            model = stage.model(standalone_inputs(stage.name, config)).train()
            batch = stage.example(2)
            reads.by_file.clear()
            with reads:
                stage.loss(model, batch, 0, 10).total.backward()
            waits[stage.name] = dict(reads.by_file)
    assert {name: files for name, files in waits.items() if files} == WAITS[workload, recipe]
