"""Several machines as one run: what they cost, how often they are taken, and what they wait for."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sizing.plan.plan_inputs import Request
from sizing.plan.side_by_side import one_or_several
from sizing.plan.size_plan import Plan, make_plan
from sizing.plan.work import _exchange_seconds_a_byte


def plan(**more: object) -> Plan:
    asked = Request(workload="imagenet", recipe="full", size="g5.2xlarge")
    return make_plan(replace(asked, **more))  # type: ignore[arg-type]


def test_n_machines_cost_n_times_as_much_and_are_taken_n_times_as_often() -> None:
    one, four = plan(), plan(hosts=4)
    assert four.inputs.price.usd_per_hour == 4 * one.inputs.price.usd_per_hour
    assert four.inputs.spot_price.usd_per_hour == 4 * one.inputs.spot_price.usd_per_hour
    rate = one.inputs.interruptions.rate_per_hour
    assert four.inputs.interruptions.rate_per_hour == 4 * rate
    assert plan(hosts=4, rate_per_hour=0.5).inputs.interruptions.rate_per_hour == 2.0
    assert one.work.seconds / 4 < four.work.seconds < one.work.seconds


def test_hosts_exchange_over_the_network_what_gpus_of_one_host_do_not() -> None:
    # 5 Gb/s, of which four fifths are reached: 0.5 GB/s; each host sends and receives 2 x 3/4.
    assert _exchange_seconds_a_byte(plan(hosts=4).inputs) == pytest.approx(3e-9)
    alone = _exchange_seconds_a_byte(plan(size="g5.12xlarge", gpus=4).inputs)
    assert alone == pytest.approx(2 * 3 / 4 / 10e9)
    # 40 Gb/s.
    eight = plan(size="g5.12xlarge", gpus=4, hosts=2, micro_batch=128)
    both = _exchange_seconds_a_byte(eight.inputs)
    assert both == pytest.approx(alone + 2 * 1 / 2 / 4e9)


def test_one_machine_or_four_is_a_sentence() -> None:
    said = one_or_several(plan(hosts=4))
    assert said.startswith("g5.2xlarge costs least, g5.12xlarge ends first: 4 x g5.2xlarge ")
    assert "; g5.2xlarge " in said and "; g5.12xlarge " in said and "interrupted" in said


def test_the_page_has_what_one_to_eight_hosts_do() -> None:
    page = (Path(__file__).parents[3] / "docs/several-machines.md").read_text()
    columns = []
    runs = {"imagenet": {"micro_batch": 128}, "detection": {"recipe": "coco_12"}}
    for workload, options in runs.items():
        said = one_or_several(plan(workload=workload, hosts=8, **options))
        figures = said.partition(": ")[2].partition(" (p50")[0].split("; ")
        columns.append([re.split(r" (?=[\d.]+ h, )", each) for each in figures])
    rows = [
        f"| {name} | {one} | {other} |" for (name, one), (_, other) in zip(*columns, strict=True)
    ]
    assert len(rows) == 5 and "\n".join(rows) in page, "\n".join(rows)


@pytest.mark.parametrize("more", [{"hosts": 3}, {"hosts": 2, "runs": 2}, {"hosts": 0}])
def test_fails_for_hosts_that_no_run_could_have(more: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"hosts is \d"):
        plan(**more)
