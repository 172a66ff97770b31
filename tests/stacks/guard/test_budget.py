"""One budget over several runs: what each Guard charges, when a run stops or does not begin."""

import json
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from stacks.guard import handler
from stacks.guard.budget import Budget
from stacks.guard.settings import quick_client
from tests.stacks.guard.scene import Scene
from tests.stacks.guard.shared_budget import EightGuards

TEAM = {"BUDGET_NAME": "team", "BUDGET_USD": "5", "BUDGET_PERIOD": "month"}


def _key(scene: Scene) -> str:
    return f"budgets/team/{datetime.now(UTC):%Y-%m}.json"


def _put(scene: Scene, data: bytes) -> None:
    quick_client("s3").put_object(Bucket="runs", Key=_key(scene), Body=data)


def _kept(scene: Scene) -> Any:
    return json.loads(quick_client("s3").get_object(Bucket="runs", Key=_key(scene))["Body"].read())


def _of_others(usd: float, **more: Any) -> bytes:
    run = {"usd": usd, "billed": usd, "ahead": 0.0}
    return json.dumps({"runs": {"run-2": run | more}, **more}).encode()


def test_a_charge_that_comes_twice_counts_once() -> None:
    budget = Budget()
    for billed in (1.0, 1.0, 2.5, 0.5, 1.5):  # its ledger begins anew in between
        budget.charge("run-1", billed=billed, ahead=0.25)
        again = Budget.from_json(budget.to_json())
        again.charge("run-1", billed=billed, ahead=0.25)
        assert again.to_json() == budget.to_json()
    assert (budget.usd, budget.ahead) == (3.5, 0.25)


@pytest.mark.parametrize("data", ["[]", "{", '{"runs": {"a": {}}}', '{"runs": 3}', "{}"])
def test_fails_to_read_what_is_no_budget(data: str) -> None:
    with pytest.raises(ValueError):
        Budget.from_json(data.encode())
    with pytest.raises(ValueError):
        Budget.from_json(b'{"runs": {"a": {"usd": -1, "billed": 0, "ahead": 0}}}')


def test_a_run_that_runs_is_stopped_with_a_mail_once_the_others_have_spent_it(
    scene: Scene,
) -> None:
    scene.head("running", "a")
    scene.tick(**TEAM)
    scene.maintain()
    assert scene.tick(hours_later=0.1, **TEAM)["action"] == "none"
    assert set(_kept(scene)["runs"]) == {"run-1"}
    # Of a run that was deleted, by a Guard that is newer.
    before = _kept(scene)
    before["runs"]["run-2"] = {"usd": 4.8, "billed": 1.0, "ahead": 0.0, "later": [1]}
    _put(scene, json.dumps({**before, "new": True}).encode())
    done = scene.tick(hours_later=0.2, **TEAM)
    assert done["action"] == "to-zero"
    assert done["reason"].startswith(f"the budget team is $5 for {datetime.now(UTC):%Y-%m}: ")
    assert scene.capacity() == 0
    (mail,) = scene.mails()
    assert "and a larger budget.usd, or wait for the next month." in mail
    assert [event["name"] for event in scene.events()] == ["to-zero"]
    kept = _kept(scene)
    assert (kept["new"], kept["runs"]["run-2"]["later"]) == (True, [1])


def test_a_run_does_not_begin_if_its_plan_would_break_the_budget(scene: Scene) -> None:
    _put(scene, _of_others(4.0))
    plan = json.dumps(
        {"stages": {"head": 7200.0}, "restart_seconds": 1, "save_seconds": 1, "interval_seconds": 1}
    )
    done = scene.tick(**TEAM, FORECAST=plan, USD_PER_HOUR='{"g5.xlarge": {"spot": 0.6}}')
    assert "this one needs $1.20" in done["reason"]
    # One that has begun may go on for as long as the others leave something.
    scene.set_capacity(1)
    scene.head("running")
    assert scene.tick(hours_later=0.1, **TEAM, FORECAST=plan)["action"] == "none"


def test_a_call_that_may_last_into_the_next_period_stops_nothing(scene: Scene) -> None:
    now = datetime.now(UTC)
    midnight = datetime.combine(now.date() + timedelta(days=1), time(), UTC)
    key = f"budgets/team/{now:%Y-%m-%d}.json"
    quick_client("s3").put_object(Bucket="runs", Key=key, Body=_of_others(5.0))
    scene.head("running")
    daily = TEAM | {"BUDGET_PERIOD": "day"}
    for seconds, action in (-300, "to-zero"), (-30, "none"), (30, "none"):
        hours = (midnight - now + timedelta(seconds=seconds)) / timedelta(hours=1)
        assert scene.tick(hours_later=hours, **daily)["action"] == action
        scene.set_capacity(1)


def test_a_damaged_budget_is_read_in_an_older_version_and_without_one_stops(scene: Scene) -> None:
    scene.head("running", "a")
    versioning = {"Status": "Enabled"}
    quick_client("s3").put_bucket_versioning(Bucket="runs", VersioningConfiguration=versioning)
    _put(scene, _of_others(4.0))
    _put(scene, b"{")
    assert scene.tick(**TEAM)["action"] == "none"
    assert _kept(scene)["runs"]["run-2"]["usd"] == 4.0
    for each in quick_client("s3").list_object_versions(Bucket="runs", Prefix="budgets/")[
        "Versions"
    ]:
        quick_client("s3").delete_object(
            Bucket="runs", Key=each["Key"], VersionId=each["VersionId"]
        )
    _put(scene, b"{")
    with pytest.raises(handler.GuardError, match="no version of s3://runs/budgets/team/"):
        scene.tick(hours_later=0.1, **TEAM)
    assert scene.capacity() == 0
    assert ".json can be read, so what has been spent is unknown" in scene.mails()[0]


def test_a_period_begins_anew_and_counts_what_was_billed_in_it(scene: Scene) -> None:
    scene.head("running", "a")
    variables = {**TEAM, "BUDGET_PERIOD": "day", "BUDGET_USD": "1000"}
    now = datetime.now(UTC)
    to_midnight = 24 - (now.hour + now.minute / 60)
    for hours in (0, to_midnight - 0.1, to_midnight + 0.1, to_midnight + 1.1):
        scene.tick(hours_later=hours, **variables, HEARTBEAT_TIMEOUT_SECONDS=10**6)
        scene.maintain()
    found = quick_client("s3").list_objects_v2(Bucket="runs", Prefix="budgets/team/")["Contents"]
    assert len(found) == 2
    last = quick_client("s3").get_object(Bucket="runs", Key=found[-1]["Key"])["Body"].read()
    assert 0.4 < json.loads(last)["runs"]["run-1"]["usd"] < 0.8


TestEightGuards = EightGuards.TestCase
TestEightGuards.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
