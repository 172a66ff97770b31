"""One AWS call fails, or another call of the Guard comes in between: the rest is done, once."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError, ConnectTimeoutError

from stacks.guard import records
from stacks.guard.handler import GuardError
from stacks.guard.ledger import Ledger
from stacks.guard.settings import client
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
Make = Callable[[BaseClient, str, dict[str, Any]], Any]


def _is(call: str, operation: str, parameters: dict[str, Any]) -> bool:
    name, _, what = call.partition(" ")
    return name == operation and what in str(parameters.get("Key", parameters.get("Prefix", "")))


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Return a function that has something done before each API call of a kind."""
    make: Make = BaseClient._make_api_call

    def do(call: str, what: Callable[[], None]) -> None:
        def made(self: BaseClient, operation: str, parameters: dict[str, Any]) -> Any:
            if _is(call, operation, parameters):
                what()
            return make(self, operation, parameters)

        monkeypatch.setattr(BaseClient, "_make_api_call", made)

    return do


@pytest.fixture
def leftover(scene: Scene) -> str:
    """A finished run, its fleet above zero, and an instance of a fleet that was cancelled."""
    config = client("ec2").describe_spot_fleet_requests()["SpotFleetRequestConfigs"][0]
    spot_fleet = {
        name: config["SpotFleetRequestConfig"][name]
        for name in ("IamFleetRole", "LaunchTemplateConfigs")
    }
    other = client("ec2").request_spot_fleet(
        SpotFleetRequestConfig={**spot_fleet, "TargetCapacity": 1}
    )["SpotFleetRequestId"]
    client("ec2").cancel_spot_fleet_requests(SpotFleetRequestIds=[other], TerminateInstances=False)
    (left,) = [
        each["InstanceId"]
        for page in client("ec2").describe_instances()["Reservations"]
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


def _throttled() -> None:
    answer: Any = {
        "Error": {"Code": "RequestLimitExceeded", "Message": "slow down"},
        "ResponseMetadata": {"HTTPStatusCode": 503},
    }
    raise ClientError(answer, "Any")


def _unreachable() -> None:
    raise ConnectTimeoutError(endpoint_url="https://service")


@pytest.mark.parametrize("call", CALLS)
def test_one_call_that_fails_stops_nothing_else(
    scene: Scene, leftover: str, call: str, before: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before(call, _unreachable if call == "Publish" else _throttled)
    with pytest.raises(GuardError, match=r"calls failed: .*(RequestLimitExceeded|ConnectTimeout)"):
        scene.tick(hours_later=0.1)
    before("nothing", _throttled)
    assert _done(scene, leftover) == {"to-zero", "terminate"} - CALLS[call]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["failed"]
    # And once it works again, the rest is done and told.
    for hours_later in (0.2, 0.4):
        scene.tick(hours_later=hours_later)
    assert _done(scene, leftover) == {"to-zero", "terminate"}
    told = [mail.splitlines()[0].partition(":")[0].partition(" i-")[0] for mail in scene.mails()]
    # Without its ledger, a call cannot know that the end of the run will be told again.
    again = ["The run is finished"] if "guard.json" in call else []
    assert sorted(told) == ["Fleet to zero", "Terminated", *again]
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


def test_fails_when_others_always_write_first(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.tick()
    monkeypatch.setattr(records, "read_ledger", lambda settings: (Ledger(), '"of another"'))
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
