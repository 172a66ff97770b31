"""One AWS call fails, or another call of the Guard comes in between: the rest is done, once."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ConnectTimeoutError

from stacks.guard import handler, records
from stacks.guard.fleet import SpotFleet
from stacks.guard.handler import GuardError
from stacks.guard.ledger import Ledger, MachineAttempt
from stacks.guard.reasons import reason_to_stop
from stacks.guard.settings import quick_client
from stacks.guard.tick import Tick
from tests.stacks.guard.conftest import refuse, unreachable
from tests.stacks.guard.model import MAX_HOURS, SETTINGS
from tests.stacks.guard.scene import Scene

# Each call of a tick in which everything is to be done, and what cannot be done without it.
CALLS = {
    "DescribeInstances": {"terminate"},
    "GetParameter": set(),
    "DescribeSpotFleetRequests": {"terminate"},
    "GetObject head.json": {"to-zero"},
    "GetObject guard.json": {"terminate"},
    "ListObjectsV2 checkpoints/": set(),
    "ListObjectsV2 events/": set(),
    "PutObject guard.json": set(),
    "PutObject events/": set(),
    "Publish": set(),
    "ModifySpotFleetRequest": {"to-zero"},
    "TerminateInstances": {"terminate"},
}


@pytest.fixture
def leftover(scene: Scene) -> str:
    """A finished run, its fleet above zero, and an instance of a fleet that was cancelled."""
    config = quick_client("ec2").describe_spot_fleet_requests()["SpotFleetRequestConfigs"][0]
    spot_fleet = {
        name: config["SpotFleetRequestConfig"][name]
        for name in ("IamFleetRole", "LaunchTemplateConfigs")
    }
    other = quick_client("ec2").request_spot_fleet(
        SpotFleetRequestConfig={**spot_fleet, "TargetCapacity": 1}
    )["SpotFleetRequestId"]
    quick_client("ec2").cancel_spot_fleet_requests(
        SpotFleetRequestIds=[other], TerminateInstances=False
    )
    (left,) = [
        each["InstanceId"]
        for page in quick_client("ec2").describe_instances()["Reservations"]
        for each in page["Instances"]
        if other in str(each["Tags"])
    ]
    scene.head("running", "00000010-g0001-a", nonce="abc")
    scene.tick()
    scene.head("finished", "00000010-g0001-a", nonce="abc")
    return str(left)


def _done(scene: Scene, leftover: str) -> set[str]:
    ended = set() if leftover in scene.live() else {"terminate"}
    return ended | ({"to-zero"} if scene.capacity() == 0 else set())


_throttled = refuse("RequestLimitExceeded", 503)
_denied = refuse("UnauthorizedOperation", 403)


@pytest.mark.parametrize("call", CALLS)
def test_one_call_that_fails_stops_nothing_else(
    scene: Scene, leftover: str, call: str, before: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before(call, unreachable if call == "Publish" else _throttled)
    with pytest.raises(GuardError, match=r"calls failed: .*(RequestLimitExceeded|ConnectTimeout)"):
        scene.tick(hours_later=0.1)
    before("nothing", _throttled)
    assert _done(scene, leftover) == {"to-zero", "terminate"} - CALLS[call]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"]
    # And once it works again, the rest is done and reported.
    for hours_later in (0.2, 0.4):
        scene.tick(hours_later=hours_later)
    assert _done(scene, leftover) == {"to-zero", "terminate"}
    sent = [mail.splitlines()[0].partition(":")[0].partition(" i-")[0] for mail in scene.mails()]
    # Without its ledger, a call cannot know that the end of the run will be reported again.
    again = ["The run is finished"] if "guard.json" in call else []
    assert sorted(sent) == ["Fleet to zero", "Terminated", *again]
    assert sorted(each["name"] for each in scene.events()) == ["terminated", "to-zero"]


@pytest.mark.parametrize("call", CALLS)
def test_two_calls_at_once_do_it_once(scene: Scene, leftover: str, call: str, before: Any) -> None:
    others = iter([True])

    def another() -> None:
        if next(others, False):
            scene.tick(hours_later=0.1)

    before(call, another)
    scene.tick(hours_later=0.1)
    assert _done(scene, leftover) == {"to-zero", "terminate"}
    assert len(scene.mails()) == 2
    assert sorted(each["name"] for each in scene.events()) == ["terminated", "to-zero"]
    assert scene.read("guard.json")["notes"] == []


@pytest.mark.parametrize(("hours", "limits"), [(72.5, {}), (30, {"MAX_USD": 10})])
def test_limits_hold_while_ec2_says_nothing_of_the_machines(
    scene: Scene, before: Any, hours: float, limits: dict[str, Any]
) -> None:
    scene.head("running", "00000010-g0001-a", nonce="abc")
    scene.tick(**limits)
    before("DescribeInstances", _denied)
    for later, capacity in ((hours / 2, 1), (hours, 0)):
        scene.head("running", "00000010-g0001-a", nonce=str(later))
        with pytest.raises(GuardError, match=r"^1 calls failed: instances: "):
            scene.tick(hours_later=later, HEARTBEAT_TIMEOUT_SECONDS=1e9, **limits)
        assert scene.capacity() == capacity


def test_days_in_which_no_call_looked_are_not_billed_while_ec2_says_nothing(
    scene: Scene, before: Any
) -> None:
    """As after another run's deploy, if EC2 refuses the first call that looks again."""
    scene.head("released", nonce="abc")
    scene.tick()
    before("DescribeInstances", _denied)
    with pytest.raises(GuardError, match=r"^1 calls failed: instances: "):
        scene.tick(hours_later=100)
    assert scene.capacity() == 1


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "AccessDenied", "InvalidParameterValue"])
@pytest.mark.parametrize("hours", [0.1, 72.5])
def test_a_fleet_that_may_not_go_to_zero_is_cancelled_and_that_is_mailed_once(
    scene: Scene, before: Any, code: str, hours: float
) -> None:
    scene.head("running", "00000010-g0001-a", nonce="abc")
    scene.tick()
    if hours < 1:
        scene.head("finished", "00000010-g0001-a", nonce="abc")
    before("ModifySpotFleetRequest", refuse(code, 403))
    assert scene.tick(hours_later=hours)["action"] == "cancel"
    assert (scene.state(), scene.live()) == ("cancelled_terminating", [])
    for more in (0.2, 0.4, 1, 25):
        assert scene.tick(hours_later=hours + more)["action"] == "none"
    (mail,), (event,) = scene.mails(), scene.events()
    reason = "the run is finished" if hours < 1 else "72.5 hours billed; max_hours is 72"
    assert mail.startswith(f"Fleet cancelled, as it could not be sent to zero: {reason}\n")
    assert f"({code})" in mail
    # A cancelled fleet cannot be raised again.
    assert "runs resume" not in mail
    assert ("ends it and keeps the buckets: npx cdk destroy TrainingStack" in mail) == (hours < 1)
    assert ("stays cancelled: npx cdk destroy TrainingStack" in mail) == (hours > 1)
    assert (event["name"], event["message"]) == ("to-zero", reason)
    assert code in event["refused"][0]


@pytest.mark.parametrize("hours", [0.1, 72.5])
def test_machines_of_a_fleet_that_may_not_be_ended_are_and_that_is_mailed_once(
    scene: Scene, before: Any, hours: float
) -> None:
    scene.head("running", "00000010-g0001-a", nonce="abc")
    (machine,) = scene.live()
    scene.tick()
    if hours < 1:
        scene.head("finished", "00000010-g0001-a", nonce="abc")
    before("ModifySpotFleetRequest, CancelSpotFleetRequests", _denied)
    for more in (0, 0.2, 0.4, 1):
        with pytest.raises(GuardError, match=r"fleet to zero: .*\(UnauthorizedOperation\)"):
            scene.tick(hours_later=hours + more)
        assert machine not in scene.live()
        # A fleet of type maintain starts another; that one is ended, too.
        scene.maintain()
        (machine,) = scene.live()
    (mail,), (event,) = scene.mails(), scene.events()
    assert mail.startswith("The fleet could not be ended, its machines were: ")
    assert mail.count("(UnauthorizedOperation)") == 2
    assert (
        "aws ec2 cancel-spot-fleet-requests --terminate-instances "
        f"--spot-fleet-request-ids {scene.fleet_id}" in mail
    )
    assert (event["name"], len(event["refused"])) == ("stop-refused", 2)
    # Once it is allowed, it is done and reported; a later refusal is another.
    before("nothing", _denied)
    assert scene.tick(hours_later=hours + 2)["action"] == "to-zero"
    scene.set_capacity(1)
    before("ModifySpotFleetRequest, CancelSpotFleetRequests", _denied)
    with pytest.raises(GuardError):
        scene.tick(hours_later=hours + 3)
    stops = [each["name"] for each in scene.events() if each["name"] != "terminated"]
    assert stops == ["stop-refused", "to-zero", "stop-refused"]


@pytest.mark.parametrize(
    ("code", "status"), [("Throttling", 400), ("FleetNotInModifiableState", 400), ("Any", 500)]
)
def test_a_fleet_is_not_cancelled_for_what_passes(
    scene: Scene, before: Any, code: str, status: int
) -> None:
    scene.head("finished", nonce="abc")
    before("ModifySpotFleetRequest", refuse(code, status))
    with pytest.raises(GuardError, match=code):
        scene.tick()
    assert (scene.state(), scene.mails()) == ("active", [])
    before("nothing", _denied)
    assert scene.tick(hours_later=0.1)["action"] == "to-zero"


def test_a_fleet_that_ec2_does_not_cancel_though_it_may_be_loses_its_machines(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, before: Any
) -> None:
    """EC2 answers such a call with 200, and lists the fleet as unsuccessful."""
    scene.head("finished", nonce="abc")
    failed = {"Error": {"Code": "unexpectedError", "Message": "rehearsed"}}
    answer = {"UnsuccessfulFleetRequests": [{**failed, "SpotFleetRequestId": scene.fleet_id}]}
    monkeypatch.setattr(
        quick_client("ec2"), "cancel_spot_fleet_requests", lambda **_: answer, raising=False
    )
    before("ModifySpotFleetRequest", _denied)
    with pytest.raises(GuardError, match="unexpectedError"):
        scene.tick()
    assert scene.live() == []
    assert "unexpectedError" in scene.mails()[0]


def test_an_end_is_not_told_again_and_again_without_the_ledger(scene: Scene, before: Any) -> None:
    scene.set_capacity(0)
    scene.head("finished", nonce="abc")
    before("PutObject guard.json", _throttled)
    for hours_later in (0.1, 0.2):
        with pytest.raises(GuardError):
            scene.tick(hours_later=hours_later)
    assert scene.mails() == []
    before("nothing", _throttled)
    scene.tick(hours_later=0.3)
    assert len(scene.mails()) == 1


@pytest.mark.parametrize("unread", ["GetObject", "GetObject guard.json"])
def test_without_the_ledger_no_dollars_are_judged_by_the_price_of_now(
    scene: Scene, before: Any, unread: str
) -> None:
    scene.head("running")
    scene.start()
    scene.tick()
    before(unread, _throttled)
    with pytest.raises(GuardError, match=r"guard\.json"):
        scene.tick(hours_later=3, MAX_USD=1.5)
    assert scene.capacity() > 0
    before("nothing", _throttled)
    assert "max_usd is 1.5" in scene.tick(hours_later=3.1, MAX_USD=1.5)["reason"]


@pytest.mark.parametrize("is_read", [True, False])
def test_without_the_ledger_a_machine_that_has_ended_is_not_billed_until_now(is_read: bool) -> None:
    """Seed 111011: Spot tells no end, so it stopped a run within its limits, and told nobody."""
    ledger = Ledger()
    ended = MachineAttempt(launched=0.0, seen=0.0, is_live=True)
    ended.bill(3600 * (MAX_HOURS + 1), [(0.0, 0.1)])
    ended.is_live = False
    ledger.attempts["i-1"] = ended
    tick = Tick(settings=replace(SETTINGS, max_usd=0.0), now=1e5, ledger=ledger, is_read=is_read)
    assert (reason_to_stop(tick) is None) == (not is_read)


@pytest.mark.parametrize(
    ("unread", "said"),
    [
        ("GetObject guard.json, ListObjectsV2 checkpoints/", "commits"),
        ("GetObject head.json", "head"),
    ],
)
def test_attempts_are_not_counted_while_what_they_committed_is_not_known(
    scene: Scene, before: Any, unread: str, said: str
) -> None:
    """Seed 65352: S3 was slow, and told of the head alone. Seed 221266: of the ledger alone."""
    name = "00000063-g0001-60ebb5c690ba8503"
    machines = [scene.start() for _ in range(3)]
    scene.head("running", name)
    scene.write(f"checkpoints/{name}/state.json", {})
    scene.end(*machines)
    before(unread, _throttled)
    with pytest.raises(GuardError, match=said):
        scene.tick()
    assert scene.capacity() > 0
    before("nothing", _throttled)
    assert scene.tick()["action"] == "none"


def test_a_wait_is_not_judged_by_a_head_that_was_not_read(scene: Scene, before: Any) -> None:
    """A machine that has lost its tags still writes its heartbeats there."""
    known = {"MAX_WAIT_HOURS": 6, "HEARTBEAT_TIMEOUT_SECONDS": 36_000}
    scene.head("running")
    scene.end(*scene.live())
    scene.tick(**known)
    before("GetObject head.json", _throttled)
    with pytest.raises(GuardError, match="head"):
        scene.tick(hours_later=7, **known)
    assert scene.capacity() > 0
    before("nothing", _throttled)
    reason = scene.tick(hours_later=7.1, **known)["reason"]
    assert reason.startswith("no instance for 7.1 hours")


def test_a_wait_begins_anew_after_an_hour_without_a_look(scene: Scene) -> None:
    """A machine may have come, gone and been forgotten by EC2 while S3 took nothing."""
    scene.end(*scene.live())
    scene.tick(MAX_WAIT_HOURS=6)
    for hours in (5.0, 5.9, 6.8, 7.7, 8.6, 9.5, 10.4, 10.9):
        assert scene.tick(hours_later=hours, MAX_WAIT_HOURS=6)["action"] == "none"
    reason = scene.tick(hours_later=11.1, MAX_WAIT_HOURS=6)["reason"]
    assert reason.startswith("no instance for 6.1 hours")


def test_a_machine_ends_the_wait_while_ec2_says_nothing_of_its_fleet(
    scene: Scene, before: Any
) -> None:
    known = {"MAX_WAIT_HOURS": 6, "HEARTBEAT_TIMEOUT_SECONDS": 36_000}
    scene.end(*scene.live())
    scene.tick(**known)
    scene.start()
    before("DescribeSpotFleetRequests", _throttled)
    with pytest.raises(GuardError, match="fleet"):
        scene.tick(hours_later=7, **known)
    before("nothing", _throttled)
    assert scene.capacity() > 0
    assert scene.tick(hours_later=7.1, **known)["action"] == "none"


def test_what_the_ledger_did_not_take_it_takes_with_the_next_change(
    scene: Scene, before: Any
) -> None:
    """Else the first look after hours without S3 is forgotten, and the silence judged."""
    scene.head("running")
    scene.start()
    scene.tick()
    errors = [_throttled, _throttled]
    before("GetObject guard.json", lambda: errors.pop()() if errors else None)
    with pytest.raises(GuardError, match="ledger"):
        scene.tick(hours_later=5)
    assert (scene.capacity() > 0, errors) == (True, [])
    assert scene.tick(hours_later=5.1)["action"] == "none"


def test_a_head_that_was_deleted_was_heard_when_it_was_last_seen(scene: Scene, before: Any) -> None:
    """EC2 does not say either that a replacement boots; with its answer, the reason is the head."""
    scene.head("running")
    scene.start()
    for hours in (0.0, 1.0, 1.9):
        scene.tick(hours_later=hours, HEARTBEAT_TIMEOUT_SECONDS=7000)
    quick_client("s3").delete_object(Bucket="runs", Key="runs/run-1/head.json")
    before("DescribeInstances", _throttled)
    with pytest.raises(GuardError, match="instances"):
        scene.tick(hours_later=2.0, HEARTBEAT_TIMEOUT_SECONDS=7000)
    assert scene.capacity() > 0
    before("nothing", _throttled)
    assert "is missing" in scene.tick(hours_later=2.1, HEARTBEAT_TIMEOUT_SECONDS=7000)["reason"]


def test_a_wait_counts_from_when_a_deleted_head_was_last_seen(scene: Scene) -> None:
    """A machine that has lost its tags wrote it."""
    known = {"MAX_WAIT_HOURS": 6, "HEARTBEAT_TIMEOUT_SECONDS": 36_000}
    scene.tick(**known)
    scene.end(*scene.live())
    scene.head("running")
    for hours in (0.1, 5.0):
        scene.tick(hours_later=hours, **known)
    quick_client("s3").delete_object(Bucket="runs", Key="runs/run-1/head.json")
    assert scene.tick(hours_later=7, **known)["action"] == "none"
    reason = scene.tick(hours_later=11.5, **known)["reason"]
    assert reason.startswith("no instance for 6.5 hours")


def test_fails_when_others_always_write_first(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.tick()
    monkeypatch.setattr(records, "read_kept", lambda *_: (Ledger(), '"of another"'))
    with pytest.raises(GuardError, match=r"guard.json was changed by others 5 times in a row"):
        scene.tick(hours_later=0.1)


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("head.json", {"state": "running", "checkpoints": [{}]}),
        ("guard.json", {"attempts": {"i-1": {}}}),
        ("guard.json", {"market": {"evidence": {"hours": 1}}}),
        ("guard.json", ["torn"]),
    ],
)
def test_a_damaged_document_stops_nothing_that_does_without_it(
    scene: Scene, name: str, document: Any
) -> None:
    scene.head("finished", nonce="abc")
    (left,) = scene.live()
    scene.failed(left, "no GPU")
    scene.write(name, document)
    forecast = {"stages": {"head": 60}, "restart_seconds": 1, "save_seconds": 1}
    given = {"FORECAST": json.dumps({**forecast, "interval_seconds": 60}), "DEADLINE_HOURS": 9}
    for hours_later in (0.1, 0.2):
        try:
            scene.tick(hours_later=hours_later, **given)
        except GuardError as error:
            assert "calls failed" in str(error)
    assert scene.capacity() == 0 if name == "guard.json" else left not in scene.live()


class _TimeIsUp(BaseException):
    """Lambda ends a call at its time limit."""


Answers = Callable[..., None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return a function that has calls of the fleet done, or not, and their answer lost."""

    def lose(name: str, how: BaseException | None, *, is_done: bool = True) -> None:
        real = real_calls.setdefault(name, getattr(SpotFleet, name))

        def lost(self: SpotFleet, *given: Any) -> None:
            if is_done:
                real(self, *given)
            if how is not None:
                raise how

        monkeypatch.setattr(SpotFleet, name, lost)

    real_calls: dict[str, Any] = {}
    return lose


_NO_ANSWER = ConnectTimeoutError(endpoint_url="https://service")
_SILENT: Any = {"HEARTBEAT_TIMEOUT_SECONDS": 1e9}


@pytest.mark.parametrize("how", [_NO_ANSWER, _TimeIsUp()])
@pytest.mark.parametrize(("hours", "settings"), [(72.5, _SILENT), (1.1, {}), (30, {"MAX_USD": 10})])
def test_a_stop_is_told_though_its_call_did_not_hear_of_it(
    scene: Scene, answers: Answers, how: BaseException, hours: float, settings: dict[str, Any]
) -> None:
    """Also one whose reason is gone with the machine, as silence is."""
    scene.head("running", nonce="abc")
    for earlier in (0, hours / 2):
        scene.tick(hours_later=earlier, **settings)
    answers("send_to_zero", how)
    with pytest.raises((GuardError, _TimeIsUp)):
        scene.tick(hours_later=hours, **settings)
    assert (scene.capacity(), scene.mails()) == (0, [])
    answers("send_to_zero", None)
    for more in (0.02, 0.2, 1):
        assert scene.tick(hours_later=hours + more, **settings)["action"] == "none"
    (mail,), (event,) = scene.mails(), scene.events()
    assert mail.startswith("Fleet to zero: ")
    assert event["message"] == mail.partition("\n")[0].removeprefix("Fleet to zero: ")
    # The person who resumes it begins a new series, and a later stop is told again.
    assert scene.read("guard.json")["stopped"] > 0
    scene.set_capacity(1)
    assert scene.tick(hours_later=hours + 100, **settings)["action"] == "to-zero"
    assert len(scene.mails()) == 2


def _runs_for_half_an_hour(scene: Scene) -> None:
    scene.head("running", nonce="abc")
    for hours in (0, 0.5):
        scene.tick(hours_later=hours)


def test_a_stop_that_was_not_made_is_not_told_once_a_person_stops_the_run(
    scene: Scene, answers: Answers
) -> None:
    _runs_for_half_an_hour(scene)
    answers("send_to_zero", _NO_ANSWER, is_done=False)
    with pytest.raises(GuardError):
        scene.tick(hours_later=1.1)
    answers("send_to_zero", None)
    for later in (1.12, 1.3):
        assert scene.tick(hours_later=later, HEARTBEAT_TIMEOUT_SECONDS=1e9)["action"] == "none"
    scene.set_capacity(0)
    scene.tick(hours_later=1.5)
    assert (scene.mails(), scene.read("guard.json")["notes"]) == ([], [])


def test_a_refused_stop_is_not_told_as_one_once_a_person_ends_the_fleet(
    scene: Scene, before: Any
) -> None:
    _runs_for_half_an_hour(scene)
    before("ModifySpotFleetRequest, CancelSpotFleetRequests", _denied)
    with pytest.raises(GuardError):
        scene.tick(hours_later=1.1)
    before("nothing", _denied)
    scene.set_capacity(0)
    scene.tick(hours_later=1.2)
    (mail,) = scene.mails()
    assert mail.startswith("The fleet could not be ended")


def test_a_call_that_looked_earlier_takes_no_new_machine_for_one_that_ended(
    scene: Scene, before: Any
) -> None:
    scene.head("running", nonce="abc")
    scene.end(*[scene.start() for _ in range(2)], *scene.live())
    scene.tick(MAX_BARREN_ATTEMPTS=4)
    others = iter([True])

    def a_machine_starts() -> None:
        if next(others, False):
            scene.start()
            scene.tick(hours_later=0.11, MAX_BARREN_ATTEMPTS=4)

    before("GetObject head.json", a_machine_starts)
    assert scene.tick(hours_later=0.1, MAX_BARREN_ATTEMPTS=4)["action"] == "none"
    assert len(scene.live()) == scene.capacity() == 1


def test_what_gave_the_run_up_is_told_though_the_call_that_read_it_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.head("released")
    scene.failed(scene.live()[0], "head.json has format 6", name="head-not-marked")
    scene.set_capacity(0)

    def end(_: Tick) -> None:
        raise _TimeIsUp

    with monkeypatch.context() as patch, pytest.raises(_TimeIsUp):
        patch.setattr(handler, "DUTIES", (end,))
        scene.tick(hours_later=0.1)
    for later in (0.2, 0.4):
        scene.tick(hours_later=later)
    (mail,) = scene.mails()
    assert "could not mark it failed: head.json has format 6" in mail


def test_an_old_mail_is_not_sent_again_and_again_while_that_cannot_be_kept(
    scene: Scene, before: Any
) -> None:
    scene.head("finished", nonce="abc")
    before("Publish", _throttled)
    with pytest.raises(GuardError):
        scene.tick()
    before("PutObject guard.json", _throttled)
    for later in (0.2, 0.4):
        with pytest.raises(GuardError):
            scene.tick(hours_later=later)
    before("nothing", _throttled)
    for later in (0.6, 0.8):
        scene.tick(hours_later=later)
    assert len(scene.mails()) == 1
