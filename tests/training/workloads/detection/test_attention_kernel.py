"""The Triton kernel, interpreted on the CPU and compiled for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[4]
TESTS = Path(__file__).with_name("test_attention.py")


@pytest.mark.slow  # only a change of the kernel changes it
def test_interpreted_the_kernel_passes_the_tests_of_the_others() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        [*command, "-k", "triton or deterministic_kernel"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed, 1 skipped" in done.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [3e-39, 1e-30, 0.7, 1e25])
def test_the_sum_of_a_pixels_terms_fits_into_an_integer_and_is_as_exact_as_a_float(
    largest: float, dtype: torch.dtype
) -> None:
    from training.workloads.detection.attention_kernel import _units

    dout_BQD, weights_BQMLP = torch.full((1, 900, 4), -2.0), torch.full((1, 900, 2, 1, 4), 0.5)
    units = float(_units(largest * dout_BQD, weights_BQMLP.to(dtype), dtype))
    assert units.is_integer() or units < 1
    assert 900 * 4 * largest * units < 2**63, "every query, with every point of a level"
    assert largest * units >= 2**24 or (dtype == torch.float32 and largest < 1e-38)
    for wrong in (torch.nan, torch.inf):
        dout_BQD[0, 5, 1] = wrong
        assert _units(dout_BQD, weights_BQMLP, dtype).isnan()


# Compute capabilities of g4dn, p4, g5, g6, p5 and p6.
ALL = [75, 80, 86, 89, 90, 100]


@pytest.mark.parametrize("kernel", ["_forward", "_backward"])
@pytest.mark.parametrize(
    "capability", [c if c == 86 else pytest.param(c, marks=pytest.mark.slow) for c in ALL]
)
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(capability: int, kernel: str) -> None:
    """To the end, by the assembler that Triton brings; at a width that is no power of two."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from training.workloads.detection import attention_kernel as module

    function: Any = getattr(module, kernel)
    constants = {"num_heads": 8, "width": 24, "num_levels": 4, "num_points": 4}
    constants |= {"BAGS": 32, "COLUMNS": 32, "TYPE": triton.language.float32}
    constants |= {"EXACT": True} if kernel == "_backward" else {}
    kinds = {**dict.fromkeys(constants, "constexpr"), **dict.fromkeys(module._CHANGING, "i32")}
    kinds |= {"levels": "*i32", "value": "*bf16", "dvalue": "*i64"}
    source = ASTSource(
        function,
        {name: kinds.get(name, "*fp32") for name in function.arg_names},
        constexprs=constants,
    )
    fused = {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=fused)
    assert len(compiled.asm["cubin"]) > 10_000


def test_no_default_of_triton_decides_on_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """See the test of this name beside AdamW's kernel."""
    pytest.importorskip("triton")
    from training.workloads.detection import attention_kernel as module

    launches: list[dict[str, Any]] = []
    for kernel in (module._forward, module._backward):
        monkeypatch.setattr(kernel, "run", lambda *_, **kwargs: launches.append(kwargs))
    locations = torch.rand(1, 3, 2, 1, 4, 2, requires_grad=True)
    out = module._Attention.apply(
        torch.rand(1, 16, 2, 8), locations, torch.rand(1, 3, 2, 1, 4), ((4, 4),)
    )
    out.sum().backward()
    assert [launch["enable_fp_fusion"] for launch in launches] == [True, True]
