"""Capacity: where an instance starts, what is taken back, what replaces it, and what stays."""

from collections.abc import Iterator
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from embedded_aws.capacity import ON_DEMAND, SPOT, Capacity, Course, Pool
from tests.embedded_aws.fleets import Fleets

NOTICE = 120.0
A, B = "us-east-1a", "us-east-1b"


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ec2:
    """The account's capacity with a clock of its own, and one fleet."""

    def __init__(self, aws: EmbeddedAws, fleets: Fleets) -> None:
        self.aws, self.fleets, self.clock = aws, fleets, Clock()
        self.capacity = aws.capacity
        self.capacity.clock, self.capacity.notice_seconds = self.clock, NOTICE
        self.fleet = ""

    def request(self, target: int = 1, **more: Any) -> None:
        self.fleet = self.fleets.request(target, **more)

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.aws.maintain_fleets()

    def running(self) -> list[tuple[str, str]]:
        """Zone and market of each running instance."""
        return [
            (each["Placement"]["AvailabilityZone"], each.get("InstanceLifecycle", ON_DEMAND))
            for each in self.fleets.instances(self.fleet)
        ]

    def ids(self) -> list[str]:
        return [each["InstanceId"] for each in self.fleets.instances(self.fleet)]


@pytest.fixture
def ec2(aws: EmbeddedAws, fleets: Fleets) -> Iterator[Ec2]:
    world = Ec2(aws, fleets)
    yield world
    world.capacity.reset()
    world.capacity.notice_seconds = 0.0
    if world.fleet:
        fleets.ec2.cancel_spot_fleet_requests(
            SpotFleetRequestIds=[world.fleet], TerminateInstances=True
        )


def test_an_instance_starts_in_the_cheapest_pool_that_has_a_machine(ec2: Ec2) -> None:
    ec2.capacity.follow(
        [
            Course(zone=A, steps=((0, 5),), usd_per_hour=0.6),
            Course(zone=B, steps=((0, 1),), usd_per_hour=0.4),
        ]
    )
    ec2.request(target=2)
    assert ec2.running() == [(B, SPOT), (A, SPOT)]


def test_a_pool_without_machines_starts_none_until_it_has_one(ec2: Ec2) -> None:
    ec2.capacity.follow([Course(steps=((0, 0), (60, 1)))])
    ec2.request()
    assert ec2.running() == []
    ec2.wait(59)
    assert ec2.running() == []
    ec2.wait(1)
    assert ec2.running() == [(A, SPOT)]


def test_a_pool_that_goes_to_zero_takes_its_instance_when_the_notice_is_over(ec2: Ec2) -> None:
    ec2.request()
    (lost,) = ec2.ids()
    ec2.capacity.follow([Course(zone=A, steps=((0, 0),))])
    ec2.wait(0)
    assert ec2.capacity.endings[lost].has_notice
    ec2.wait(NOTICE - 1)
    assert ec2.ids() == [lost], "EC2 replaces what is gone, not what will be"
    ec2.wait(1)
    assert ec2.running() == [(B, SPOT)]
    described = ec2.fleets.ec2.describe_instances(InstanceIds=[lost])
    ended = described["Reservations"][0]["Instances"][0]
    assert ended["StateReason"]["Code"] == "Server.SpotInstanceTermination"


def test_a_course_may_take_instances_without_a_notice(ec2: Ec2) -> None:
    ec2.request()
    ec2.capacity.follow([Course(steps=((0, 0),), has_notice=False)])
    ec2.wait(0)
    assert ec2.running() == []


def test_a_decrease_gives_spot_instances_a_notice_and_leaves_on_demand_alone(ec2: Ec2) -> None:
    ec2.request(target=2, OnDemandTargetCapacity=1)
    assert sorted(market for _, market in ec2.running()) == [ON_DEMAND, SPOT]
    ec2.fleets.modify(ec2.fleet, TargetCapacity=0, OnDemandTargetCapacity=0)
    assert len(ec2.running()) == 2
    ec2.wait(NOTICE)
    assert [market for _, market in ec2.running()] == [ON_DEMAND]
    ec2.wait(1e6)
    assert [market for _, market in ec2.running()] == [ON_DEMAND]


def test_going_on_demand_and_back_overlaps_and_loses_no_capacity(ec2: Ec2) -> None:
    """The Guard's lever: the fleet's own on-demand target."""
    ec2.request()
    ec2.fleets.modify(ec2.fleet, TargetCapacity=1, OnDemandTargetCapacity=1)
    assert [market for _, market in ec2.running()] == [SPOT, ON_DEMAND]
    ec2.wait(NOTICE)
    assert [market for _, market in ec2.running()] == [ON_DEMAND]
    ec2.capacity.follow([Course(steps=((0, 0), (300, 1)))])
    ec2.fleets.modify(ec2.fleet, TargetCapacity=1, OnDemandTargetCapacity=0)
    assert [market for _, market in ec2.running()] == [ON_DEMAND]
    ec2.wait(300)
    assert [market for _, market in ec2.running()] == [ON_DEMAND, SPOT]
    ec2.fleets.ec2.terminate_instances(InstanceIds=ec2.ids()[:1])
    ec2.wait(600)
    assert [market for _, market in ec2.running()] == [SPOT]


def test_on_demand_capacity_is_its_own(ec2: Ec2) -> None:
    ec2.capacity.follow([Course(market=ON_DEMAND, steps=((0, 0),))])
    ec2.request(target=2, OnDemandTargetCapacity=1)
    assert [market for _, market in ec2.running()] == [SPOT]


def test_what_somebody_terminates_is_replaced(ec2: Ec2) -> None:
    ec2.request()
    (lost,) = ec2.ids()
    ec2.fleets.ec2.terminate_instances(InstanceIds=[lost])
    ec2.wait(0)
    assert len(ec2.ids()) == 1
    assert ec2.ids() != [lost]


def test_a_fleet_cancelled_without_termination_keeps_its_instance_and_replaces_none(
    ec2: Ec2,
) -> None:
    ec2.request()
    (kept,) = ec2.ids()
    ec2.fleets.ec2.cancel_spot_fleet_requests(
        SpotFleetRequestIds=[ec2.fleet], TerminateInstances=False
    )
    ec2.wait(1e6)
    assert ec2.ids() == [kept]
    ec2.fleets.ec2.terminate_instances(InstanceIds=[kept])
    ec2.wait(1)
    assert ec2.ids() == []


def test_the_later_course_outranks_the_earlier_for_the_pools_of_both() -> None:
    clock = Clock()
    capacity = Capacity(clock=clock)
    here = Pool(market=SPOT, size="g5.xlarge", zone=A)
    there = Pool(market=SPOT, size="g5.xlarge", zone=B)
    capacity.follow([Course(steps=((0, 2),)), Course(zone="*b", steps=((10, 0), (20, 3)))])
    assert (capacity.machines(here), capacity.machines(there)) == (2, float("inf"))
    clock.now += 15
    assert (capacity.machines(here), capacity.machines(there)) == (2, 0)
    clock.now += 5
    assert capacity.machines(there) == 3


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"market": "auction"}, "market is 'auction'; use spot or on-demand"),
        ({"steps": ((10, 1), (0, 0))}, "in order of time"),
        ({"steps": ((0, -1),)}, "0 or more"),
    ],
)
def test_fails_an_impossible_course(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Course(**fields)
