"""The Guard's ledger: attempts with their markets and prices, waits, and files of older formats."""

import json
from dataclasses import replace

import pytest

from stacks.guard.fleet import StackInstance
from stacks.guard.ledger import Ledger, MachineAttempt, Note
from stacks.guard.settings import GuardSettings

HOUR = 3600.0
PRICES = {
    "g5.xlarge": {"spot": 0.5, "on-demand": 1.0},
    "g5.2xlarge": {"spot": 0.6, "on-demand": 1.2},
}
SETTINGS = GuardSettings(
    stack_name="TrainingStack",
    fleet_parameter="/TrainingStack/fleet-id",
    run_bucket="runs",
    run_prefix="runs/run-1",
    topic_arn="arn:aws:sns:us-east-1:123456789012:notifications",
    max_billed_hours=72,
    heartbeat_timeout_seconds=3600,
    max_barren_attempts=3,
    notice_seconds=120,
    prices=PRICES,
)


def _instance(name: str, launched: float = 0, **changes: object) -> StackInstance:
    known = {"size": "g5.xlarge", "market": "spot", "is_live": True, **changes}
    return StackInstance(id=name, run_id="run-1", fleet_id="sfr-1", launched=launched, **known)  # type: ignore[arg-type]


def test_dollars_are_counted_by_market() -> None:
    ledger = Ledger()
    ledger.observe(SETTINGS, [_instance("i-1")], 2 * HOUR)
    ended = _instance("i-1", is_live=False)
    on_demand = _instance("i-2", 2 * HOUR, size="g5.2xlarge", market="on-demand")
    ledger.observe(SETTINGS, [ended, on_demand], 3 * HOUR)
    ledger.observe(SETTINGS, [on_demand], 4 * HOUR)
    assert json.loads(ledger.to_json())["billed"] == {
        "spot": {"hours": 3.0, "usd": 1.5},
        "on-demand": {"hours": 2.0, "usd": 2.4},
    }
    assert (ledger.billed_hours(), ledger.billed_usd()) == (5, 3.9)


def test_a_price_is_kept_when_a_deploy_changes_it() -> None:
    ledger = Ledger()
    ledger.observe(SETTINGS, [_instance("i-1")], HOUR)
    dearer = replace(SETTINGS, prices={"g5.xlarge": {"spot": 0.9, "on-demand": 1.9}})
    ledger.observe(dearer, [_instance("i-1")], 2 * HOUR)
    assert ledger.billed_usd() == 1


def test_a_file_of_format_1_is_read_and_priced() -> None:
    old = {
        "format": 1,
        "stopped": 1.0,
        "committed": 2.0,
        "attempts": {
            "i-gone": {"launched": 0.0, "seen": HOUR, "is_live": False},
            "i-live": {"launched": 0.0, "seen": HOUR, "is_live": True},
        },
    }
    ledger = Ledger.from_json(json.dumps(old).encode())
    assert (ledger.stopped, ledger.committed) == (1, 2)
    ledger.observe(SETTINGS, [_instance("i-live", size="g5.2xlarge", market="on-demand")], 2 * HOUR)
    gone, live = ledger.attempts["i-gone"], ledger.attempts["i-live"]
    # EC2 no longer says what it was: as the stack's own size on Spot.
    assert (gone.market, gone.usd) == ("", 0.5)
    assert (live.market, live.usd) == ("on-demand", 2.4)


def test_a_file_comes_back_as_it_was() -> None:
    note = Note(
        key="k", time=1, name="to-zero", headline="h", lines=["l"], fields={"a": 1}, ways=["mail"]
    )
    attempt = MachineAttempt(
        launched=1, seen=2, is_live=True, size="g5.xlarge", market="spot", said="no"
    )
    ledger = Ledger(
        attempts={"i-1": attempt}, waiting=3, at_zero={"sfr-1": 4}, done={"k": 5}, notes=[note],
        market={"since": 6},
    )  # fmt: skip
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_names_of_a_newer_format_are_passed_over() -> None:
    document = json.loads(
        Ledger(attempts={"i-1": MachineAttempt(launched=1, seen=2, is_live=True)}).to_json()
    )
    document["attempts"]["i-1"]["zone"] = "us-east-1a"
    document["more"] = True
    assert Ledger.from_json(json.dumps(document).encode()).attempts["i-1"].seen == 2


def test_a_wait_begins_when_the_last_instance_ends() -> None:
    ledger = Ledger()
    for now, instances, waiting in (
        (10, [], 10.0),
        (20, [], 10.0),
        (30, [_instance("i-1", 25)], 0.0),
        (40, [_instance("i-1", 25, is_live=False)], 40.0),
        (50, [], 40.0),
        # One that came and went between two calls: still no machine, but a new wait.
        (60, [_instance("i-2", 55, is_live=False)], 60.0),
        (70, [], 60.0),
    ):
        ledger.observe(SETTINGS, instances, now)
        ledger.observe_fleets({"sfr-1": 1}, "sfr-1", now)
        assert ledger.waiting == waiting, now
    ledger.observe_fleets({}, "sfr-1", 80)
    assert ledger.waiting == 60, "its capacity could not be read"
    ledger.observe_fleets({"sfr-1": 0}, "sfr-1", 90)
    assert ledger.waiting == 0, "it wants no instance"


@pytest.mark.parametrize(("again_after", "second"), [(60, True), (600, False)])
def test_a_key_is_claimed_once(again_after: float, second: bool) -> None:
    ledger = Ledger()
    assert ledger.claim("to-zero", 1000, again_after=again_after)
    assert ledger.claim("to-zero", 1100, again_after=again_after) is second
    assert ledger.claim("terminated i-1", 1100)
    assert not ledger.claim("terminated i-1", 1e9)


def test_the_newest_words_of_a_machine_count() -> None:
    ledger = Ledger(attempts={"i-1": MachineAttempt(launched=0, seen=9, is_live=True)})
    ledger.hear([("i-1", 5, "second"), ("i-1", 3, "first"), ("i-unknown", 4, "?")], 10)
    attempt = ledger.attempts["i-1"]
    assert (attempt.failed, attempt.said, ledger.events_read) == (5, "second", 10)
