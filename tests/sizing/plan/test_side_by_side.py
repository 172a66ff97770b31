"""Several runs: spread over GPUs, sharing one, or one after the other."""

from dataclasses import replace
from pathlib import Path

import pytest

from sizing.models.data_path import Rate, epoch_data
from sizing.models.step_time import StepEstimate
from sizing.plan.checks import find_problems
from sizing.plan.side_by_side import ways
from sizing.plan.work import share_gpu
from tests.sizing import sample_footprints
from tests.sizing.sample_plan import plan

MIB = sample_footprints.MIB
# What a step of many small kernels looks like: the GPU is busy for a tenth of it.
BUSY = {"flops_per_sample": 2e12}
LAUNCHES = {"kernels": 10_000, "flops_per_sample": 1e6, "activations_each": 1000}


def test_runs_bound_by_launches_share_a_gpu_without_taking_longer(tmp_path: Path) -> None:
    one = plan(tmp_path, footprint=LAUNCHES)
    four = plan(tmp_path, footprint=LAUNCHES, runs=4)
    assert one.work.main.bound_by == four.work.main.bound_by == "kernel launches"
    assert four.work.seconds == pytest.approx(one.work.seconds, rel=0.05)


def test_runs_bound_by_the_gpu_take_turns(tmp_path: Path) -> None:
    one, four = plan(tmp_path, footprint=BUSY), plan(tmp_path, footprint=BUSY, runs=4)
    assert four.work.seconds == pytest.approx(4 * one.work.seconds, rel=0.05)


def test_more_runs_than_vcpus_launch_in_turns() -> None:
    step = StepEstimate(compute=0.001, traffic=0.001, optimizer=0.0, launches=0.01)
    shared = share_gpu(step, runs_per_gpu=16, runs_per_vcpu=2)
    assert shared.seconds == pytest.approx(16 * 0.002)
    assert share_gpu(step, runs_per_gpu=4, runs_per_vcpu=2).seconds == pytest.approx(0.02)
    assert share_gpu(step, runs_per_gpu=1, runs_per_vcpu=0.1) == step


def test_runs_are_spread_over_the_gpus_of_a_size(tmp_path: Path) -> None:
    one = plan(tmp_path, footprint=BUSY, size="g5.12xlarge")
    four = plan(tmp_path, footprint=BUSY, size="g5.12xlarge", runs=4)
    assert four.work.seconds == pytest.approx(one.work.seconds, rel=0.05)
    assert four.gpu_memory_need == one.gpu_memory_need
    eight = plan(tmp_path, size="g5.12xlarge", runs=8)
    assert eight.gpu_memory_need == 2 * one.gpu_memory_need
    assert (one.used_gpus, four.used_gpus, eight.used_gpus) == (1, 4, 4)


def test_runs_share_vcpus_disk_and_notice(tmp_path: Path) -> None:
    one, four = plan(tmp_path), plan(tmp_path, runs=4)
    rate, facts = Rate(baseline=100.0, burst=100.0, burst_seconds=0.0), one.inputs.facts
    assert facts is not None
    waits = [
        epoch_data(
            samples=1000, facts=facts, instance=one.inputs.instance, volume=rate, cache_bytes=0.0,
            epoch_bytes=1e9, runs=runs,
        )
        for runs in (1, 4)
    ]  # fmt: skip
    assert [each["disk"] for each in waits] == [10.0, 40.0]
    # Of eight vCPUs a trainer has one: seven are left to one run, and one to each of four.
    assert waits[1]["loader CPU"] == pytest.approx(7 * waits[0]["loader CPU"])
    assert four.notice.upload == pytest.approx(4 * one.notice.upload)
    pairs = replace(one.request, size="g5.12xlarge", gpus=2, runs=4)
    assert pairs.runs_per_gpu(pairs.find_instance()) == 2


def test_fails_where_the_runs_of_one_gpu_exceed_its_memory(tmp_path: Path) -> None:
    large = {"activations_each": 300 * MIB}
    assert "memory" not in find_problems(plan(tmp_path, footprint=large, size="g5.4xlarge"))
    found = find_problems(plan(tmp_path, footprint=large, size="g5.4xlarge", runs=4))
    assert "4 runs on one GPU need" in found["memory"]
    assert "3 at a time fit" in found["memory"]


def test_the_ways_to_do_four_runs_have_hours_and_dollars(tmp_path: Path) -> None:
    found = {way.what: way for way in ways(plan(tmp_path, footprint=BUSY), 4)}
    after, beside, each = (
        found[name] for name in ("one after the other", "side by side", "a GPU each")
    )
    assert each.size == "g5.12xlarge"
    assert each.hours < beside.hours
    assert after.hours == pytest.approx(beside.hours, rel=0.1)
    # A machine with four GPUs costs 4.7 of one.
    assert after.usd < each.usd
    assert all(way.usd > 0 and way.problem is None for way in found.values())
