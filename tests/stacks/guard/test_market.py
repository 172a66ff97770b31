"""The market of a run with a deadline, on the embedded AWS's fleets: fall back, bridge, return."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason

from embedded_aws.capacity import Capacity, Course
from embedded_aws.fleet import maintain_fleets
from embedded_aws.spot_fleet import TemplateFleet
from stacks.guard import market
from stacks.guard.market import work_left
from stacks.guard.settings import Forecast, quick_client
from tests.stacks.guard.scene import ACCOUNT, REGION, SPOT, Scene

Call = Callable[..., dict[str, str]]
FORECAST = Forecast(
    stages={"features": 600.0, "head": 3000.0},
    restart_seconds=180.0,
    save_seconds=15.0,
    interval_seconds=300.0,
)


def test_work_left_is_measured_of_its_stage_and_planned_of_later_ones() -> None:
    def left(**newest: object) -> tuple[float, str]:
        head = {"checkpoints": [{"name": "00000001-g0001-a", **newest}]}
        work = work_left(head, FORECAST)
        return work.left, work.basis

    nothing = work_left({}, FORECAST)
    assert (nothing.left, nothing.basis) == (3600, "planned, nothing is committed yet")
    assert left(stage="head", seconds_left=1234.5) == (1234.5, "measured")
    assert left(stage="features", seconds_left=50) == (3050, "measured, later stages planned")
    assert left(stage="head", seconds_left=None) == (3000, "planned, no pace measured yet")
    # A trainer of before, and a stage that the plan does not know.
    assert left(stage="features") == (3600, "planned, no pace measured yet")
    assert left(stage="tail", seconds_left=5)[0] == 3600


def test_a_stage_that_has_not_begun_counts_as_slow_as_one_run_in_ten() -> None:
    forecast = replace(FORECAST, slow_stages={"features": 800.0, "head": 4200.0})
    newest = {"name": "00000001-g0001-a", "stage": "features", "seconds_left": 50}
    assert work_left({"checkpoints": [newest]}, forecast).left == 4250
    assert work_left({}, forecast).left == 5000


@pytest.fixture
def run(scene: Scene) -> Call:
    """One call of the Guard of a run with a deadline, so many hours after its start."""
    fleet(scene).capacity = Capacity()
    given = {
        "DEADLINE_HOURS": 1.5,
        "CALL_EVERY_SECONDS": 180,
        "FORECAST": json.dumps(asdict(FORECAST)),
        # A machine that a move ends, or that Spot takes back, is no barren attempt.
        "MAX_BARREN_ATTEMPTS": 1,
    }
    return lambda hours, **more: scene.tick(hours_later=hours, **{**given, **more})


def fleet(scene: Scene) -> TemplateFleet:
    found = ec2_backends[ACCOUNT][REGION].spot_fleet_requests[scene.fleet_id]
    assert isinstance(found, TemplateFleet)
    return found


def let_spot_have(scene: Scene, machines: int) -> None:
    """EC2 has so many Spot machines from now on; the fleet follows."""
    fleet(scene).capacity.follow([Course(steps=((0, machines),))])
    maintain_fleets(ec2_backends[ACCOUNT][REGION])


def markets(scene: Scene) -> list[str]:
    """The markets of the live instances, oldest first."""
    pages = quick_client("ec2").describe_instances()["Reservations"]
    live = [each for page in pages for each in page["Instances"]
            if each["State"]["Name"] == "running"]  # fmt: skip
    return [each.get("InstanceLifecycle", "on-demand") for each in live]


def on_demand(scene: Scene) -> int:
    return int(fleet(scene).config["OnDemandTargetCapacity"])


def commit(scene: Scene, *, seconds_left: float) -> None:
    newest = {"name": "00000010-g0001-a", "stage": "head", "seconds_left": seconds_left}
    scene.write("head.json", {"state": "running", "checkpoints": [newest]})


def test_without_a_deadline_the_fleet_is_left_alone(scene: Scene, run: Call) -> None:
    let_spot_have(scene, 0)
    assert run(1.4, DEADLINE_HOURS=0)["action"] == "none"
    assert (on_demand(scene), markets(scene)) == (0, [])


def test_it_falls_back_trains_until_spot_comes_and_returns(scene: Scene, run: Call) -> None:
    commit(scene, seconds_left=3600)
    assert run(0.01)["action"] == "none"
    let_spot_have(scene, 0)
    assert run(0.02)["action"] == "none"  # an hour of work, 88 minutes: time to wait
    assert markets(scene) == []
    assert run(0.2)["action"] == "market"
    assert (on_demand(scene), markets(scene)) == (1, ["on-demand"])
    # Once it runs, its share asks for Spot; the fleet leaves it alone.
    run(0.21)
    assert (on_demand(scene), markets(scene)) == (0, ["on-demand"])
    assert run(0.32)["action"] == "none"
    commit(scene, seconds_left=2600)
    let_spot_have(scene, 1)
    assert markets(scene) == ["on-demand", "spot"]
    assert run(0.33)["action"] == "market"
    assert markets(scene) == ["spot"]
    assert run(0.34)["action"] == "none"
    assert on_demand(scene) == 0
    moves = [event for event in scene.events() if event["name"] == "market"]
    assert [event["market"] for event in moves] == ["bridge", "spot"]
    assert moves[0]["message"].startswith(
        "on demand until Spot comes: expected until the end: spot"
    )
    assert moves[1]["message"].endswith("work left: measured")
    assert 0 < moves[1]["usd_spot"] < moves[1]["usd_on_demand"]
    # Of what is not committed, as much as one commit holds is probably done.
    assert moves[1]["slack_hours"] == pytest.approx(1.5 - 0.33 - 2300 / 3600, abs=0.01)
    ledger = scene.read("guard.json")
    assert ledger["market"]["moves"] == 2
    assert set(ledger["billed"]) == {"spot", "on-demand"}


def let_on_demand_have(scene: Scene, machines: int) -> None:
    fleet(scene).capacity.follow([Course(market="on-demand", steps=((0, machines),))])
    maintain_fleets(ec2_backends[ACCOUNT][REGION])


@pytest.mark.parametrize("code", ["Server.SpotInstanceTermination", "Client.UserInitiatedShutdown"])
def test_in_danger_spot_trains_until_on_demand_runs_and_on_demand_stays(
    scene: Scene, run: Call, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    # Nothing public says which reason EC2 gives where a lower capacity ends a Spot machine.
    monkeypatch.setattr("embedded_aws.fleet.StateReason", lambda text, _: StateReason(text, code))
    commit(scene, seconds_left=3600)
    assert run(0.45)["action"] == "market"
    assert (on_demand(scene), markets(scene)) == (1, ["spot", "on-demand"])
    assert run(0.451)["action"] == "market"
    assert (on_demand(scene), scene.capacity(), markets(scene)) == (1, 1, ["on-demand"])
    assert "the deadline is in danger" in scene.events()[0]["message"]
    commit(scene, seconds_left=3000)
    assert run(0.55)["action"] == "none"
    assert len(scene.events()) == 1


def test_one_decision_is_told_once_however_often_it_is_carried_out(scene: Scene, run: Call) -> None:
    commit(scene, seconds_left=3600)
    run(0.45)
    run(0.451)
    # A deploy sets the template's capacity again.
    quick_client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=scene.fleet_id, TargetCapacity=1, OnDemandTargetCapacity=0
    )
    assert run(0.46)["action"] == "market"
    assert on_demand(scene) == 1
    assert len(scene.events()) == 1


def test_where_ec2_has_none_on_demand_spot_trains_on(scene: Scene, run: Call) -> None:
    let_on_demand_have(scene, 0)
    commit(scene, seconds_left=3600)
    run(0.45)
    assert run(0.46)["action"] == "none"
    assert markets(scene) == ["spot"]
    # Also one that comes later, and only until there is one on demand.
    let_spot_have(scene, 0)
    run(0.47)
    assert markets(scene) == []
    let_spot_have(scene, 1)
    run(0.48)
    assert markets(scene) == ["spot"]
    let_on_demand_have(scene, 1)
    run(0.49)
    assert (scene.capacity(), markets(scene)) == (1, ["on-demand"])


def test_barren_on_spot_means_on_demand_and_barren_there_too_ends_the_run(
    scene: Scene, run: Call
) -> None:
    def fail_on(market: str) -> None:
        (machine,) = scene.live()
        assert markets(scene) == [market]
        scene.take_back(machine, code="Client.InstanceInitiatedShutdown")
        scene.maintain()

    limit = {"MAX_BARREN_ATTEMPTS": 2, "DEADLINE_HOURS": 9}
    for _ in range(2):
        assert run(0.01, **limit)["action"] == "none"
        fail_on("spot")
    assert run(0.02, **limit) == {
        "action": "market", "reason": "on demand: 2 attempts in a row on Spot committed nothing"
    }  # fmt: skip
    run(0.03, **limit)
    fail_on("on-demand")
    assert run(0.04, **limit)["reason"] == "3 attempts in a row committed nothing"
    assert scene.capacity() == 0


def test_what_commits_on_demand_may_go_back_to_spot(scene: Scene, run: Call) -> None:
    let_spot_have(scene, 0)
    scene.end(*(scene.start(**SPOT) for _ in range(2)))
    limit = {"MAX_BARREN_ATTEMPTS": 2, "DEADLINE_HOURS": 9}
    for hours in (0.01, 0.02):  # until one runs on demand, Spot is asked for as well
        assert run(hours, **limit)["action"] == "market"
    let_spot_have(scene, 1)
    assert markets(scene) == ["on-demand"]
    scene.write("checkpoints/00000010-g0001-a/state.safetensors", {})
    commit(scene, seconds_left=1000)
    for hours in (0.03, 0.04):
        run(hours, **limit)
    assert markets(scene) == ["spot"]


@pytest.mark.parametrize("base", [0, 1])
def test_a_deploy_that_drops_the_deadline_takes_the_move_back(
    scene: Scene, run: Call, base: int
) -> None:
    commit(scene, seconds_left=3600)
    run(0.45)
    run(0.451)
    without = {"DEADLINE_HOURS": 0, "ON_DEMAND_BASE": base, "MAX_BARREN_ATTEMPTS": 9}
    run(0.46, **without)
    assert (scene.capacity(), on_demand(scene)) == (1, base)
    assert scene.events()[-1]["message"].endswith("the run no longer has a deadline")
    # What runs on demand trains until Spot is there.
    assert markets(scene) == (["on-demand"] if base else ["on-demand", "spot"])
    run(0.47, **without)
    run(0.6, **without)
    assert markets(scene) == (["on-demand"] if base else ["spot"])
    # From then on the fleet is nobody's but the template's.
    quick_client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=scene.fleet_id, TargetCapacity=1, OnDemandTargetCapacity=1 - base
    )
    run(0.61, **without)
    assert on_demand(scene) == 1 - base


def test_a_person_who_stops_the_run_while_a_call_decides_is_not_overruled(
    scene: Scene, run: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(scene, seconds_left=3600)
    run(0.01)
    let_spot_have(scene, 0)
    decide = market.decide_market

    def stops(*given: Any) -> Any:
        scene.set_capacity(0)
        return decide(*given)

    monkeypatch.setattr(market, "decide_market", stops)
    assert run(0.2)["action"] == "none"
    assert (scene.capacity(), markets(scene)) == (0, [])
