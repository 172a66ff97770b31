"""Spot pools: what a run saw is shared, and those that lost machines in short order rest."""

import json
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError

from sizing import PoolHistory, PoolRecord
from stacks.guard.fleet import SpotFleet
from stacks.guard.handler import GuardError
from stacks.guard.pools import PATIENCE_SECONDS, REFUSED
from stacks.guard.settings import quick_client
from tests.stacks.guard.scene import SPOT, TAGS, Scene

SIZE, ZONES = "g5.xlarge", ("us-east-1a", "us-east-1b")


@pytest.fixture
def subnets(scene: Scene) -> dict[str, str]:
    """The fleet's pools: a size in two zones, by zone id."""
    ec2 = quick_client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.9.0.0/16")["Vpc"]["VpcId"]
    made = [ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.9.{index}.0/24", AvailabilityZone=zone)
            for index, zone in enumerate(ZONES)]  # fmt: skip
    found = {each["Subnet"]["AvailabilityZoneId"]: each["Subnet"]["SubnetId"] for each in made}
    scene.variables["SUBNETS"] = ",".join(found.values())
    scene.variables["HEARTBEAT_TIMEOUT_SECONDS"] = "36000"
    scene.variables["USD_PER_HOUR"] = json.dumps({SIZE: {"spot": 0.4, "on-demand": 1.0}})
    return found


def _shared() -> PoolHistory:
    found = quick_client("s3").get_object(Bucket="runs", Key="spot.json")
    return PoolHistory.from_json(found["Body"].read())


def _offered(scene: Scene) -> list[str]:
    """The subnets in which the fleet may start a machine; none: anywhere."""
    found = quick_client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=[scene.fleet_id])
    config = found["SpotFleetRequestConfigs"][0]["SpotFleetRequestConfig"]
    return [each["SubnetId"] for each in config["LaunchTemplateConfigs"][0].get("Overrides", [])]


def _lose(scene: Scene, subnet: str) -> None:
    taken = scene.start(TAGS, SubnetId=subnet, **SPOT)
    scene.tick()
    scene.take_back(taken)
    scene.tick()


def test_a_run_shares_what_spot_did_and_keeps_what_other_runs_shared(
    scene: Scene, subnets: dict[str, str]
) -> None:
    zone, subnet = next(iter(subnets.items()))
    pool = f"{SIZE} {ZONES[0]}"  # moto's instances name their zone, EC2's have its id, too
    theirs = {f"{SIZE} {zone}": PoolRecord(at=time.time() - 9e5, losses=3.0, up_hours=1.0)}
    body = PoolHistory({"run-0": theirs}).to_json().encode()
    quick_client("s3").put_object(Bucket="runs", Key="spot.json", Body=body)
    _lose(scene, subnet)
    assert _shared().runs["run-0"] == theirs
    assert _shared().runs["run-1"][pool].losses == pytest.approx(1, abs=1e-3)
    # Nothing came or went: nothing is written.
    before = quick_client("s3").head_object(Bucket="runs", Key="spot.json")["ETag"]
    scene.tick()
    assert quick_client("s3").head_object(Bucket="runs", Key="spot.json")["ETag"] == before


def test_a_pool_that_lost_two_machines_rests_and_comes_back_by_itself(
    scene: Scene, subnets: dict[str, str]
) -> None:
    first, second = subnets.values()
    _lose(scene, first)
    assert _offered(scene) == []
    _lose(scene, first)
    assert _offered(scene) == [second]
    scene.tick(hours_later=0.9)
    assert _offered(scene) == [second]
    assert scene.tick(hours_later=1.5)["reason"] == "resting: none"
    assert sorted(_offered(scene)) == sorted([first, second])


def test_what_another_run_lost_an_hour_ago_counts_for_the_first_machine(
    scene: Scene, subnets: dict[str, str]
) -> None:
    zone, subnet = next(iter(subnets.items()))
    lost = PoolRecord(at=time.time() - 600, losses=3.0, recent=3.0, up_hours=0.5)
    body = PoolHistory({"run-0": {f"{SIZE} {zone}": lost}}).to_json().encode()
    quick_client("s3").put_object(Bucket="runs", Key="spot.json", Body=body)
    scene.tick()
    assert subnet not in _offered(scene)


def test_a_run_that_waits_and_one_without_another_pool_may_have_every_pool(
    scene: Scene, subnets: dict[str, str]
) -> None:
    first, second = subnets.values()
    for _ in range(2):
        _lose(scene, first)
    assert _offered(scene) == [second]
    scene.end(*scene.live())
    scene.tick()
    scene.tick(hours_later=PATIENCE_SECONDS / 3600 + 0.01)
    assert sorted(_offered(scene)) == sorted([first, second])
    for _ in range(2):
        _lose(scene, second)
    assert sorted(_offered(scene)) == sorted([first, second])


def test_a_refusal_and_a_damaged_history_change_nothing_else(
    scene: Scene, subnets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_client("s3").put_object(Bucket="runs", Key="spot.json", Body=b"{")

    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"},
                           "ResponseMetadata": {"HTTPStatusCode": 403}}, "Modify")  # fmt: skip

    monkeypatch.setattr(quick_client("ec2"), "modify_spot_fleet_request", refuse)
    first = next(iter(subnets.values()))
    _lose(scene, first)
    _lose(scene, first)
    scene.tick()
    assert _offered(scene) == []
    kept = scene.read("guard.json")
    assert (REFUSED in kept["done"], kept["resting"]) == (True, [])


def test_a_group_keeps_a_zone_while_ec2_does_not_say_that_it_has_no_machine_there(
    scene: Scene, subnets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the machine (found by seed 10329 of tests/simulation)."""
    monkeypatch.setattr(SpotFleet, "ends_what_it_loses", True)
    first = next(iter(subnets.values()))
    scene.start(TAGS, SubnetId=first, **SPOT)
    _lose(scene, first)
    _lose(scene, first)
    assert _offered(scene) == []

    def refuse(_: str) -> None:
        raise ClientError({"Error": {"Code": "RequestLimitExceeded", "Message": "later"},
                           "ResponseMetadata": {"HTTPStatusCode": 503}}, "Describe")  # fmt: skip

    monkeypatch.setattr(quick_client("ec2"), "get_paginator", refuse)
    with pytest.raises(GuardError, match="instances"):
        scene.tick()
    assert _offered(scene) == []


def test_pools_come_back_though_the_call_that_took_them_did_not_hear_of_it(
    scene: Scene, subnets: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = subnets.values()
    _lose(scene, first)
    offer = SpotFleet.offer

    def lost(fleet: SpotFleet, pools: Any) -> None:
        offer(fleet, pools)
        raise ConnectTimeoutError(endpoint_url="https://service")

    with monkeypatch.context() as patch:
        patch.setattr(SpotFleet, "offer", lost)
        taken = scene.start(TAGS, SubnetId=first, **SPOT)
        scene.tick()
        scene.take_back(taken)
        with pytest.raises(GuardError):
            scene.tick()
    assert _offered(scene) == [second]
    assert scene.tick(hours_later=1.5)["reason"] == "resting: none"
    assert sorted(_offered(scene)) == sorted([first, second])
