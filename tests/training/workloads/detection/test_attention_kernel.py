"""The Triton kernel, interpreted on the CPU and compiled for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
TESTS = Path(__file__).with_name("test_attention.py")


def test_interpreted_the_kernel_passes_the_tests_of_the_others() -> None:
    """In a process of its own: Triton decides at import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(
        [*command, "-k", "triton"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed, 1 skipped" in done.stdout


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
    kinds = {**dict.fromkeys(constants, "constexpr"), **dict.fromkeys(module._CHANGING, "i32")}
    kinds |= {"levels": "*i32", "value": "*bf16"}
    source = ASTSource(
        function,
        {name: kinds.get(name, "*fp32") for name in function.arg_names},
        constexprs=constants,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(compiled.asm["cubin"]) > 10_000
