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
    known = {"size": "g5.xlarge", "market": "spot", "is_live": True, "zone": "us-east-1a"}
    known |= {"run_id": "run-1", "fleet_id": "sfr-1", **changes}
    return StackInstance(id=name, launched=launched, **known)  # type: ignore[arg-type]


POOL = ("g5.xlarge", "us-east-1a")
SEEN = {POOL: [(0.0, 0.5)]}


def test_dollars_are_counted_by_market() -> None:
    ledger = Ledger()
    ledger.observe(SETTINGS, [_instance("i-1")], 2 * HOUR, SEEN)
    ended = _instance("i-1", is_live=False)
    on_demand = _instance("i-2", 2 * HOUR, size="g5.2xlarge", market="on-demand")
    # How long it ran on since the last call is not known: at most until this one.
    ledger.observe(SETTINGS, [ended, on_demand], 3 * HOUR, SEEN)
    ledger.observe(SETTINGS, [on_demand], 4 * HOUR)
    assert json.loads(ledger.to_json())["billed"] == {
        "spot": {"hours": 3.0, "usd": 1.5},
        "on-demand": {"hours": 2.0, "usd": 2.4},
    }
    assert (ledger.billed_hours(), ledger.billed_usd()) == (5, 3.9)
    # EC2 says when this one ended, whenever somebody asks: `runs cost` keeps no ledger.
    for later in (5, 9):
        asked = Ledger()
        asked.observe(SETTINGS, [_instance("i-1", is_live=False, ended=HOUR)], later * HOUR, SEEN)
        assert (asked.billed_hours(), asked.billed_usd()) == (1, 0.5)


def test_what_was_billed_while_no_limits_were_kept_is_within_them() -> None:
    """As after a Guard of 0.1.0, which forgets that a limit was once higher."""
    ledger = Ledger()
    ledger.note_limits(SETTINGS)
    ledger.observe(SETTINGS, [_instance("i-1")], 10 * HOUR, SEEN)
    ledger.limits = {}
    ledger.note_limits(replace(SETTINGS, max_billed_hours=5, max_usd=6))
    assert (ledger.limits["hours"], ledger.limits["usd"]) == (10, 6)
    ledger.note_limits(SETTINGS)
    assert (ledger.limits["hours"], ledger.limits["usd"]) == (72, 0)


def test_each_hour_counts_at_the_price_that_ec2_had_then_with_volumes() -> None:
    ledger, settings = Ledger(), replace(SETTINGS, storage_usd_per_hour=0.05)
    for hour, seen, usd_per_hour in (
        (1, SEEN, 0.55),
        (2, {POOL: [(0.0, 0.9)], ("g5.xlarge", "us-east-1b"): [(0.0, 0.2)]}, 0.95),
        # At most the list price, which is what counts where EC2 does not say.
        (3, {POOL: [(0.0, 1.3)]}, 1.05),
        (4, {}, 1.05),
    ):
        ledger.observe(settings, [_instance("i-1")], hour * HOUR, seen)
        assert ledger.usd_per_hour == pytest.approx(usd_per_hour)
    assert ledger.billed_usd() == pytest.approx(0.55 + 0.95 + 1.05 + 1.05)
    ledger.observe(settings, [_instance("i-1")], 3 * HOUR, SEEN)  # an older call that was late
    assert ledger.billed_usd() == pytest.approx(3.6)
    ledger.observe(settings, [_instance("i-1", is_live=False)], 4 * HOUR, SEEN)
    assert ledger.usd_per_hour == 0
    assert Ledger.from_json(ledger.to_json()).billed_usd() == pytest.approx(3.6)


def test_hours_without_a_call_count_at_the_prices_of_then() -> None:
    """After five hours without S3: neither the price before them nor that of now is theirs."""
    ledger = Ledger()
    ledger.observe(SETTINGS, [_instance("i-1")], HOUR, SEEN)
    prices = [(0.5 * HOUR, 0.5), (3 * HOUR, 0.1), (5 * HOUR, 1.3), (7 * HOUR, 0.9)]
    ledger.observe(SETTINGS, [_instance("i-1")], 6 * HOUR, {POOL: prices})
    assert ledger.billed_usd() == pytest.approx(0.5 + 2 * 0.5 + 2 * 0.1 + 1.0)
    assert ledger.usd_per_hour == 0.9


def test_the_first_files_of_format_2_have_a_price_and_no_sum() -> None:
    attempt = {"launched": 0.0, "seen": 2 * HOUR, "is_live": True, "usd_per_hour": 0.5}
    old = json.dumps({"format": 2, "attempts": {"i-1": attempt}}).encode()
    assert Ledger.from_json(old).billed_usd() == 1


@pytest.mark.parametrize(
    "last",
    [
        [_instance("i-1", is_live=False)],  # it has ended since
        [_instance("i-1", is_live=False, zone="")],
        [],  # so long ago that EC2 no longer lists it, or it has lost its tags
        [_instance("i-1")],  # and EC2 did not answer what Spot costs
    ],
)
def test_the_last_interval_of_a_spot_machine_is_billed_at_the_last_price_that_is_known(
    last: list[StackInstance],
) -> None:
    ledger = Ledger()
    ledger.observe(SETTINGS, [_instance("i-1")], HOUR, SEEN)
    ledger.note_look(2 * HOUR, 3 * HOUR, 0.2 * HOUR)  # while EC2 did not answer, calls went on
    ledger.observe(SETTINGS, last, 2 * HOUR)
    assert ledger.billed_usd() == pytest.approx(1.0)


@pytest.mark.parametrize(("hours", "is_barren"), [(0.5, True), (2.0, False)])
def test_a_machine_that_ec2_forgot_between_two_calls_is_held_against_nobody(
    hours: float, is_barren: bool
) -> None:
    """After an hour without S3 it may have been Spot; one without tags vanishes at once."""
    ledger = Ledger()
    ledger.observe(SETTINGS, [_instance("i-1", 60.0)], HOUR, SEEN)
    ledger.observe(SETTINGS, [], (1 + hours) * HOUR, SEEN)
    assert bool(ledger.barren_attempts()) == is_barren


@pytest.mark.parametrize(("launched", "is_barren"), [(2.5, False), (4.5, True)])
def test_an_attempt_that_began_while_no_call_read_the_head_is_not_barren(
    launched: float, is_barren: bool
) -> None:
    """S3 was away for hours, for the machine as well: its trainer could commit nothing."""
    ledger = Ledger()
    ledger.note_look(HOUR, HOUR, 0.2 * HOUR)
    ledger.observe(SETTINGS, [_instance("i-1", launched * HOUR)], 4.6 * HOUR, SEEN)
    ledger.note_look(4 * HOUR, HOUR, 0.2 * HOUR)
    ledger.observe(SETTINGS, [_instance("i-1", launched * HOUR, is_live=False)], 4.7 * HOUR, SEEN)
    assert bool(ledger.barren_attempts()) == is_barren


@pytest.mark.parametrize(("heard", "hours"), [({}, 1.25), ({"i-1": 3 * HOUR}, 3.25)])
@pytest.mark.parametrize("looks", [[], [168.9], [0.2 * each for each in range(5, 845)]])
def test_a_machine_that_ended_while_no_call_looked_is_billed_as_far_as_it_was_heard_of(
    heard: dict[str, float], hours: float, looks: list[float]
) -> None:
    """As after a week with another run's deploy; but while EC2 alone did not answer, it may run."""
    ledger = Ledger()
    ledger.observe(SETTINGS, [_instance("i-1")], HOUR, SEEN)
    for hour in (1, *looks):
        ledger.note_look(hour * HOUR, HOUR, 0.2 * HOUR)
    ledger.observe(SETTINGS, [], 169 * HOUR, SEEN, heard)
    assert ledger.billed_hours() == pytest.approx(169 if len(looks) > 1 else hours)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"attempts": 3}', b'{"attempts": {"i": {}}}'])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Ledger.from_json(data)


def test_ec2_says_why_a_machine_ended_that_said_nothing_itself() -> None:
    ledger = Ledger()
    why = "Client.InternalError: Client error on launch"
    ledger.observe(SETTINGS, [_instance("i-1", is_live=False, ended_by=why)], HOUR)
    assert ledger.attempts["i-1"].said == f"no event machine-failed; EC2 says: {why}"
    ledger.record_failures([("i-1", HOUR, "no disk named sdf")], HOUR)
    assert ledger.attempts["i-1"].said == "no disk named sdf"


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
    # EC2 no longer says what it was: the list price of the stack's own size.
    assert (gone.market, gone.usd) == ("", 1.0)
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
        # EC2 had not said that it was there when this wait began.
        (80, [_instance("i-3", 58, is_live=False, ended=75.0)], 75.0),
    ):
        ledger.observe(SETTINGS, instances, now)
        ledger.observe_fleets({"sfr-1": 1}, "sfr-1", now)
        assert ledger.waiting == waiting, now
    ledger.observe_fleets({}, "sfr-1", 90)
    assert ledger.waiting == 75, "its capacity could not be read"
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
    ledger.record_failures([("i-1", 5, "second"), ("i-1", 3, "first"), ("i-unknown", 4, "?")], 10)
    attempt = ledger.attempts["i-1"]
    assert (attempt.failed, attempt.said, ledger.events_read) == (5, "second", 10)
