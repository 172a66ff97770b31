"""Where Triton's kernel works it is chosen; where it does not, a sentence says why."""

import logging
from typing import Any

import pytest
import torch

from training.workloads.detection import attention
from training.workloads.detection.attention import Implementation, choose, why_not_triton

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_without_a_gpu_sums_of_rows_are_faster_but_for_small_images() -> None:
    assert choose(CPU, torch.float32) == "deterministic"
    assert choose(CPU, torch.float32, max_side=1333) == "deterministic"
    assert choose(CPU, torch.float32, max_side=160) == "reference"


def test_what_the_stage_started_with_is_kept() -> None:
    assert choose(GPU, torch.float32, started_with="deterministic") == "deterministic"
    kept = choose(CPU, torch.float32, started_with="deterministic", max_side=160)
    assert kept == "deterministic"


@pytest.mark.skipif("torch.cuda.is_available()", reason="there is a GPU")
def test_a_kernel_that_does_not_work_is_not_chosen_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose(GPU, torch.bfloat16) == "deterministic"
    (line,) = caplog.messages
    assert line.startswith("[attention] Triton's kernel does not work here (")
    assert line.endswith("sums of rows instead: the same results, but slower")


def test_a_device_without_a_driver_of_tritons_is_a_reason() -> None:
    assert "active drivers" in str(why_not_triton(CPU, torch.float32))


def test_wrong_results_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a compiler had turned the kernel into something else."""
    real = attention._step

    def step(which: Implementation, *given: Any) -> list[torch.Tensor]:
        return [each * (1.1 if which == "triton" else 1.0) for each in real("reference", *given)]

    monkeypatch.setattr(attention, "_step", step)
    assert why_not_triton(CPU, torch.float32) == "the output is wrong by 10.0%"


def test_a_deterministic_recipe_wants_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel added up in another order each time."""
    real, times = attention._step, iter(range(10))

    def step(which: Implementation, *given: Any) -> list[torch.Tensor]:
        off = 1e-6 * next(times) if which == "triton" else 0.0
        return [each + off for each in real("reference", *given)]

    monkeypatch.setattr(attention, "_step", step)
    assert why_not_triton(CPU, torch.float32) is None
    torch.use_deterministic_algorithms(True)
    assert why_not_triton(CPU, torch.float32) == "its bits differ from one run to the next"


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernel_works(dtype: torch.dtype, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    assert why_not_triton(GPU, dtype) is None
    assert choose(GPU, dtype) == "triton"
