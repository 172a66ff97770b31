"""The optimizer's Triton kernel, interpreted on the CPU and compiled for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from training.preflight.footprint import _Work
from training.workloads.growth.optimizer import step_fused

ROOT = Path(__file__).parents[4]
# A step of both from the same state, and how far apart they are then.
_STEPS = """
import json, sys, torch
from training.workloads.growth.adamw_kernel import step_by_kernel
from training.workloads.growth.optimizer import _step_slices

torch.manual_seed(0)
torch.set_default_device(sys.argv[1])
start = torch.randn(2500), torch.randn(2500).bfloat16(), torch.rand(2500).bfloat16()
ours, theirs = ([t.clone() for t in start] for _ in range(2))
slope, step = torch.randn(2500), torch.tensor(4.0)
for act, (x, m, v) in ((step_by_kernel, ours), (_step_slices, theirs)):
    act(x, slope, m, v, step, 3e-2, 0.9, 0.95, 1e-8, 0.1)
pairs = [(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True)]
far = [((a - b).abs() / b.abs().clamp(min=1e-3)).max().item() for a, b in pairs]
print(json.dumps({"far": far, "moved": (start[0] - ours[0]).norm().item()}))
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernel_makes_the_steps_of_torchs_own(device: str) -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    interprets = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    done = subprocess.run(
        [sys.executable, "-c", _STEPS, device],
        cwd=ROOT,
        env={**os.environ, **interprets, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["moved"] > 1.0
    # The interpreter cuts bits off where a GPU rounds to nearest (below).
    assert found["far"][0] < 1e-4 and max(found["far"][1:]) < 2.0**-7


def test_a_step_of_a_parameter_moves_20_bytes_and_is_one_kernel() -> None:
    counted = _Work()
    given = [torch.zeros(1000) for _ in range(2)] + [torch.zeros(1000).bfloat16() for _ in range(2)]
    numbers = (1e-3, 0.9, 0.95, 1e-8, 0.1)
    operation: Any = torch.ops.training.step_fused.default
    counted.add(operation, (*given, torch.tensor(0.0), *numbers), {}, None)
    assert (counted.kernels, counted.moved_bytes) == (1, 20 * 1000 + 4)
    assert step_fused._opoverload is operation


# Compute capabilities of g4dn, p4, g5, g6, p5 and p6.
ALL = [75, 80, 86, 89, 90, 100]


@pytest.mark.parametrize(
    "capability", [c if c == 86 else pytest.param(c, marks=pytest.mark.slow) for c in ALL]
)
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(capability: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from training.workloads.growth import adamw_kernel as module

    function: Any = module._adamw
    kinds = dict.fromkeys(("values", "gradient", "step"), "*fp32")
    kinds |= {"mean": "*bf16", "square": "*bf16", "num": "i32", "BLOCK": "constexpr"}
    source = ASTSource(
        function,
        {name: kinds.get(name, "fp32") for name in function.arg_names},
        constexprs={"BLOCK": module._BLOCK},
    )
    fused = {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=fused)
    assert len(compiled.asm["cubin"]) > 1_000
    if capability >= 80:  # before, by integers
        assert "cvt.rn.bf16" in compiled.asm["ptx"]


def test_no_default_of_triton_decides_on_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.9 (torch 2.15) warns that 3.10 will not fuse unless asked: other bits of one run."""
    pytest.importorskip("triton")
    from training.workloads.growth import adamw_kernel as module

    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(module._adamw, "run", lambda *_, **kwargs: launches.append(kwargs))
    module.step_by_kernel(*(torch.zeros(8) for _ in range(5)), 0.1, 0.9, 0.99, 1e-8, 0.0)
    assert [launch["enable_fp_fusion"] for launch in launches] == [True]
