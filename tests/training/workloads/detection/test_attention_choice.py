"""Where Triton's kernel works it is chosen; where it does not, a sentence says why."""

import logging
from typing import Any

import pytest
import torch

from training.workloads.detection import attention
from training.workloads.detection.attention import Implementation, choose, why_not_triton

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_deterministic_recipe_is_computed_deterministically(device: torch.device) -> None:
    assert choose(device, torch.float32, deterministic=True) == "deterministic"


def test_without_a_gpu_sums_of_rows_are_faster_but_for_small_images() -> None:
    assert choose(CPU, torch.float32, deterministic=False) == "deterministic"
    assert choose(CPU, torch.float32, deterministic=True, max_side=1333) == "deterministic"
    assert choose(CPU, torch.float32, deterministic=True, max_side=160) == "reference"


def test_what_the_stage_started_with_is_kept() -> None:
    assert choose(GPU, torch.float32, False, started_with="deterministic") == "deterministic"
    kept = choose(CPU, torch.float32, False, started_with="deterministic", max_side=160)
    assert kept == "deterministic"


@pytest.mark.skipif("torch.cuda.is_available()", reason="there is a GPU")
def test_a_kernel_that_does_not_work_is_not_chosen_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose(GPU, torch.bfloat16, deterministic=False) == "deterministic"
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_the_kernel_works(dtype: torch.dtype) -> None:
    assert why_not_triton(GPU, dtype) is None
    assert choose(GPU, dtype, deterministic=False) == "triton"
