"""The dollars in a review: of which region and day, and of the market that is bought."""

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from review.assembly import Side, StackSide
from review.comment import write_comment
from review.costs import idle_usd_per_month
from review.verdict import Review, judge
from sizing.catalogue import hourly_price, spot_price
from tests.review.conftest import changed, cost, edited
from tests.stack_names import TRAINING


def test_prices_are_those_of_the_region_and_their_day_is_named(base: Side) -> None:
    there = changed(base, region="eu-west-1")
    review = judge(base, there, [])
    listed, seen = hourly_price("g5.2xlarge", "eu-west-1"), spot_price("g5.2xlarge", "eu-west-1")
    assert listed.usd_per_hour > 1.212 and isinstance(listed.day, date)
    assert cost(review, "instance, on demand")[1] == f"{listed.usd_per_hour:.4f}"
    assert cost(review, "instance, Spot")[1] == f"{seen.usd_per_hour:.4f}"
    # What the Guard counts with: volumes by the instance's price, the address as it is.
    volumes = 24 / 730 * listed.usd_per_hour / 1.212
    total = listed.usd_per_hour + volumes + 0.005
    assert cost(review, "an hour of training, on demand")[1] == f"{total:.4f}"
    assert f"eu-west-1: snapshot of {seen.day}, list price of {listed.day}" in write_comment(review)
    assert "list price of 2026-07-20" in review.prices


def test_a_region_without_prices_counts_with_the_dearest(base: Side) -> None:
    review = judge(base, changed(base, region="sa-east-1"), [])
    assert "sa-east-1: assumed of " in review.prices
    assert float(cost(review, "instance, on demand")[1]) > 1.212


def test_each_of_several_stacks_is_priced_against_itself(
    base: Side, make_side: Callable[..., Side]
) -> None:
    def with_another(size: str, **plan: object) -> Side:
        other = make_side(size=size).stacks[TRAINING]
        return replace(base, stacks={**base.stacks, "Another": replace(other, plan=plan)})

    before, warned = with_another("g5.2xlarge"), {"warnings": ["too slow"]}
    for review in (
        judge(before, with_another("p5.48xlarge", **warned), []),
        judge(base, with_another("p5.48xlarge", **warned), []),
    ):
        assert cost(review, "Another: instance, on demand")[1] == "55.0400"
        assert cost(review, f"{TRAINING}: instance, on demand") == ("1.2120", "1.2120")
        told = write_comment(review)
        assert "| Another: **an hour of training, on demand**, $/h | " in told
        assert f"| {TRAINING}: " not in told, "what does not change would hide what does"
        assert review.warnings == ["Another: too slow"]
    same = judge(before, before, [])
    assert "None of this changes." in write_comment(same) and not same.warnings


def test_a_stack_under_another_name_is_compared_with_itself(base: Side) -> None:
    stacks = dict(base.stacks)
    renamed = replace(base, stacks={"Another": stacks.pop(TRAINING), **stacks})
    assert cost(judge(base, renamed, []), "instance, on demand") == ("1.2120", "1.2120")


def test_a_fleet_without_spot_shows_what_it_costs(review_of: Callable[..., Review]) -> None:
    review = review_of(on_demand_base=1)
    assert cost(review, "as the fleet buys it") == ("0.6312", "1.2499")
    assert "| an hour as the fleet buys it, $ | 0.6312 | 1.2499 | +98.0% |" in write_comment(review)


STAT = {"MetricStat": {"Period": 300}}


@pytest.mark.parametrize(
    ("kind", "properties", "usd"),
    [
        ("CloudWatch::Alarm", {"Period": 60}, 0.1),
        ("CloudWatch::Alarm", {"Period": 10}, 0.3),
        ("CloudWatch::Alarm", {"Metrics": [STAT, STAT, {"Expression": "a + b"}]}, 0.2),
        ("EC2::NatGateway", {}, 32.85),
        ("EC2::VPCEndpoint", {"VpcEndpointType": "Interface", "SubnetIds": ["a", "b"]}, 14.6),
        ("EC2::VPCEndpoint", {"VpcEndpointType": "Gateway"}, 0.0),
        ("EC2::Volume", {"Size": 100, "Iops": 4000, "VolumeType": "gp3"}, 13.0),
        ("EC2::Volume", {"Size": 100, "Iops": 4000, "VolumeType": "io2"}, 272.5),
        ("EC2::Volume", {"Size": 100, "VolumeType": "sc1"}, 1.5),
        ("EC2::EIP", {}, 3.65),
        # 4,380 calls of two seconds.
        ("Lambda::Function", {"MemorySize": 256}, 0.03),
    ],
)
def test_an_idle_month_has_the_price_of_each_resource(
    kind: str, properties: dict[str, Any], usd: float
) -> None:
    resources = {"It": {"Type": f"AWS::{kind}", "Properties": properties}}
    side = Side(name="it", stacks={"It": StackSide(template={"Resources": resources})})
    assert idle_usd_per_month(side).get(kind, 0.0) == pytest.approx(usd, abs=1e-3)


def test_what_has_no_price_is_named(base: Side) -> None:
    def with_more(**properties: Any) -> Side:
        more = {"Pool": {"Type": "AWS::EC2::Instance", "Properties": properties}}
        return edited(base, lambda resources: resources.update(more))

    one, other = with_more(InstanceType="t3.micro"), with_more(InstanceType="p5.48xlarge")
    for side, counts in ((base, ("0", "1")), (one, ("1", "1"))):
        review = judge(side, other, [])
        assert cost(review, "idle: EC2::Instance, for which there is **no price**") == counts
        assert "None of this changes." not in write_comment(review)
    assert not [row for row in judge(one, one, []).costs if "no price" in row.name]


def test_a_deadline_shows_what_it_costs(base: Side) -> None:
    fallback = {"usd_mean": 0.08, "usd_p90": 0.12, "on_demand_share": 0.37}
    with_one = changed(base, plan={"usd_spot_p50": 0.05, "with_fallback": fallback})
    without = changed(base, plan={"usd_spot_p50": 0.05, "with_fallback": None})
    review = judge(without, with_one, [])
    assert cost(review, "with its deadline, mean") == ("-", "0.08")
    assert cost(review, "with its deadline, p90") == ("-", "0.12")
    assert cost(review, "share of its hours on demand") == ("-", "0.37")
    assert "deadline" not in write_comment(judge(without, without, []))
