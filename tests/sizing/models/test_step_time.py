"""Step time: each part of the roofline scales with what it should, and nothing else."""

from dataclasses import replace

import pytest

from sizing.catalogue.gpus import find_gpu
from sizing.models.constants import Constants
from sizing.models.step_time import StepTime, roofline

A10G = find_gpu("NVIDIA A10G")


def step(samples: float = 8, **changes: float) -> StepTime:
    given = {
        "flops_per_sample": 1e12,
        "kept_bytes_per_sample": 1e9,
        "optimizer_traffic_bytes": 6e9,
        "launches_seconds": 0.0,
    } | changes
    return roofline(samples=samples, precision="bfloat16", gpu=A10G, constants=Constants(), **given)


def test_the_parts_are_what_the_formula_says() -> None:
    found = step()
    assert found.compute == pytest.approx(8 * 1e12 / 69.5e12)
    assert found.traffic == pytest.approx(8 * 1e9 * Constants().traffic_passes / 600e9)
    assert found.optimizer == pytest.approx(0.01)
    assert found.seconds == pytest.approx(found.compute + found.traffic + found.optimizer)


def test_the_optimizer_does_not_grow_with_the_batch() -> None:
    assert step(samples=64).optimizer == step(samples=8).optimizer


def test_a_small_step_is_bound_by_its_kernel_launches() -> None:
    found = step(flops_per_sample=1e6, kept_bytes_per_sample=1e3, launches_seconds=0.01)
    assert found.bound_by == "kernel launches"
    assert found.seconds == pytest.approx(0.02)


def test_a_gpu_without_bfloat16_computes_it_at_its_float32_rate() -> None:
    t4 = find_gpu("NVIDIA T4")
    assert t4.peak_flops("bfloat16") == t4.peak_flops("float32")
    assert replace(t4, has_bfloat16=True).peak_flops("bfloat16") == 65e12


def test_fails_on_an_unknown_precision_or_gpu() -> None:
    with pytest.raises(ValueError, match="precision 'int3' is unknown"):
        A10G.peak_flops("int3")
    with pytest.raises(ValueError, match=r"add it to sizing/catalogue/gpus\.csv"):
        find_gpu("AMD Radeon Pro V520")
