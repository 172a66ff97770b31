"""Serving: waiting by queueing theory held against a simulation, idle instances paid for."""

import numpy as np
import pytest

from sizing.models.serving import (
    Throughput,
    batch_usd_per_million,
    models,
    published,
    serve_online,
    wait_ms,
)


def given(per_second: float, latency_ms: float | None = None) -> Throughput:
    return Throughput(
        size="c5.xlarge", per_second=per_second, latency_ms=latency_ms, basis="given",
        note="", source="a test",
    )  # fmt: skip


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8, 0.9])
def test_the_modelled_wait_is_that_of_a_simulated_queue(load: float) -> None:
    generator = np.random.default_rng(4)
    service, num = 0.05, 400_000
    gaps = generator.exponential(service / load, num)
    # Lindley's recursion, as a running maximum.
    sums = np.concatenate([[0.0], np.cumsum(service - gaps[1:])])
    waits = sums - np.minimum.accumulate(sums)
    simulated = 1000 * np.quantile(waits, 0.95)
    modelled = wait_ms(per_second=1 / service, demand_per_second=load / service)
    assert modelled == pytest.approx(simulated, rel=0.08, abs=1.0)


def test_a_queue_that_only_grows_has_no_wait_and_a_calm_one_none() -> None:
    assert wait_ms(per_second=10, demand_per_second=10) == float("inf")
    assert wait_ms(per_second=10, demand_per_second=0.4) == 0


def test_instances_are_added_until_the_goal_is_met_and_the_idle_share_is_paid_for() -> None:
    asked = {"demand_per_second": 15.0, "usd_per_hour": 1.0}
    loose = serve_online(given(20), latency_goal_ms=500, **asked)
    tight = serve_online(given(20), latency_goal_ms=100, **asked)
    assert loose and tight
    assert (loose.instances, loose.utilization) == (1, 0.75)
    assert tight.instances > 1
    assert tight.latency_ms <= 100 < loose.latency_ms
    assert loose.usd_per_million == pytest.approx(1.0 / (15 * 3600) * 1e6)
    assert tight.usd_per_million == pytest.approx(tight.instances * loose.usd_per_million)


def test_no_number_of_instances_makes_one_inference_faster() -> None:
    asked = {"demand_per_second": 1.0, "usd_per_hour": 1.0, "latency_goal_ms": 100.0}
    assert serve_online(given(1000, latency_ms=120), **asked) is None
    # No published latency: at least what one at a time would take.
    assert serve_online(given(5), **asked) is None


def test_every_published_throughput_has_a_source_and_the_inverse_of_its_price() -> None:
    assert models() == ("bert-base",)
    figures = {each.size: each for each in published("bert-base", "batch")}
    assert all(each.source for each in figures.values())
    # The blog's own figures: $0.20 and $3.31 a million.
    assert batch_usd_per_million(figures["g4dn.xlarge"], usd_per_hour=0.526) == pytest.approx(
        0.20, abs=0.005
    )
    assert batch_usd_per_million(figures["c5.xlarge"], usd_per_hour=0.17) == pytest.approx(
        3.31, abs=0.005
    )


def test_scaled_throughputs_say_so_and_stay_near_what_was_measured() -> None:
    figures = {each.size: each for each in published("bert-base", "online")}
    assert figures["c5.2xlarge"].per_second == 2 * figures["c5.xlarge"].per_second
    assert figures["c5.2xlarge"].basis == "scaled"
    assert "modelled" in figures["c5.2xlarge"].note
    assert figures["c5.18xlarge"].basis == "measured"
    assert "c5.24xlarge" not in figures
    # The GPU that was measured counts on every size that has one of it.
    assert figures["g5.xlarge"].per_second == figures["g5.4xlarge"].per_second == 163
    assert "by the same GPU" in figures["g5.xlarge"].note
    # An L4 has half of an A10G's bandwidth, an L40S 1.4 times of it.
    assert figures["g6.xlarge"].per_second == pytest.approx(163 / 2)
    assert figures["g6e.xlarge"].per_second == pytest.approx(163 * 1.44)
    assert figures["m5.xlarge"].per_second == pytest.approx(14.27 * 3.1 / 3.6)
    assert figures["m5.large"].basis == "scaled"
