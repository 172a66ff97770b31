"""Step time: each part scales with what it should, and the range is that of runs like it."""

import math
from dataclasses import replace
from typing import Any

import pytest

from sizing.catalogue.gpus import find_gpu
from sizing.models.constants import Constants
from sizing.models.fitted import ErrorRange, Launch, fitted
from sizing.models.step_time import Step, StepEstimate, launch_of, roofline

A10G, L4, V100 = (find_gpu(f"NVIDIA {name}") for name in ("A10G", "L4", "V100"))
LAUNCH = Launch(low=5e-6, likely=10e-6, high=40e-6, hosts="made up")


def step(
    gpu: Any = A10G, kernels: float = 0, time_factor: float = 1, **changes: Any
) -> StepEstimate:
    given = Step(
        samples=8,
        flops_per_sample=1e12,
        kept_bytes_per_sample=1e9,
        optimizer_traffic_bytes=6e9,
        precision="bfloat16",
    )
    return roofline(
        replace(given, **changes),
        gpu,
        Constants(time_factor=time_factor),
        kernels=kernels,
        launch=LAUNCH,
    )


def test_the_parts_are_what_the_formula_says() -> None:
    found = step()
    assert found.compute == pytest.approx(8 * 1e12 / 69.5e12 * fitted().time_factors["half"])
    assert found.traffic == pytest.approx(8 * 1e9 * fitted().traffic_passes / 600e9)
    assert found.optimizer == pytest.approx(0.01)
    assert found.seconds == pytest.approx(found.compute + found.traffic + found.optimizer)


def test_the_optimizer_does_not_grow_with_the_batch() -> None:
    assert step(samples=64).optimizer == step(samples=8).optimizer


def test_convolutions_in_half_are_slower_with_channels_first() -> None:
    last, first = (step(convolution_share=1.0, channels_last=each) for each in (True, False))
    exponent = fitted().exponents["convolution_in_half_channels_first"]
    assert first.compute / last.compute == pytest.approx(math.exp(exponent))
    assert 1.2 < first.compute / last.compute < 1.5


def test_a_small_step_is_bound_by_its_launches_and_its_range_is_theirs() -> None:
    found = step(flops_per_sample=1e6, kept_bytes_per_sample=1e3, kernels=1000)
    assert found.bound_by == "kernel launches"
    assert found.seconds == pytest.approx(0.02)
    assert (found.seconds_low, found.seconds_high) == pytest.approx((0.015, 0.05))


def test_a_large_step_s_range_is_that_of_runs_like_it() -> None:
    found = step(V100)
    interval = fitted().intervals["other"]
    work = found.compute + found.traffic
    assert found.seconds_low == pytest.approx(work * interval.low + found.optimizer)
    assert found.seconds_high == pytest.approx(work * interval.high + found.optimizer)


@pytest.mark.parametrize("name", ["NVIDIA T4", "NVIDIA L4", "NVIDIA L40S", "NVIDIA A10G"])
def test_a_gpu_with_few_published_runs_says_so(name: str) -> None:
    assert fitted().runs.get(name, 0) < 3
    assert f"published run{'s' if name.endswith('A10G') else ''} on {name}" in (
        step(find_gpu(name), precision="float16").basis
    )


def test_a_gpu_with_published_runs_says_how_many() -> None:
    runs = fitted().runs["NVIDIA V100"]
    assert step(V100).basis.startswith(f"{runs} published runs on NVIDIA V100: ")


def test_a_measured_run_leaves_no_range() -> None:
    found = step(time_factor=1.5)
    assert found.seconds_low == found.seconds == found.seconds_high
    assert found.compute == pytest.approx(1.5 * step().compute)


def test_hosts_of_gpus_launch_at_their_own_speed() -> None:
    assert launch_of(V100).likely > launch_of(A10G).likely > launch_of(L4).likely


def test_kinds_of_steps_have_intervals_of_their_own() -> None:
    kinds = {
        Step(
            samples=1,
            flops_per_sample=1,
            kept_bytes_per_sample=1,
            optimizer_traffic_bytes=0,
            precision="float32",
            convolution_share=convolutions,
            grouped_share=grouped,
        ).kind
        for convolutions, grouped in ((0.0, 0.0), (1.0, 0.0), (1.0, 0.3))
    }
    assert kinds == fitted().intervals.keys()
    assert all(isinstance(each, ErrorRange) for each in fitted().intervals.values())


def test_a_gpu_without_bfloat16_computes_it_at_its_float32_rate() -> None:
    t4 = find_gpu("NVIDIA T4")
    assert t4.peak_flops("bfloat16") == t4.peak_flops("float32")
    assert replace(t4, has_bfloat16=True).peak_flops("bfloat16") == 65e12


def test_fails_on_an_unknown_precision_or_gpu() -> None:
    with pytest.raises(ValueError, match="precision 'int3' is unknown"):
        A10G.peak_flops("int3")
    says = r"NVIDIA B300, NVIDIA RTX PRO Server 6000, .*: add it to sizing/catalogue/gpus\.csv"
    with pytest.raises(ValueError, match=says):
        find_gpu("AMD Radeon Pro V520")
