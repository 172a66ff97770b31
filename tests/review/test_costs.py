"""What the review says of dollars: of which region and day, and of the market that is bought."""

from dataclasses import replace
from datetime import date

from review.assembly import Side
from review.comment import write_comment
from review.verdict import Review, judge
from sizing.catalogue import hourly_price, spot_price


def cost(review: Review, name: str) -> tuple[str, str]:
    (row,) = [row for row in review.costs if name in row.name]
    return row.before, row.after


def test_prices_are_those_of_the_region_and_their_day_is_named(base: Side) -> None:
    there = replace(base, region="eu-west-1")
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
    review = judge(base, replace(base, region="sa-east-1"), [])
    assert "sa-east-1: assumed of " in review.prices
    assert float(cost(review, "instance, on demand")[1]) > 1.212
