"""Events of other people's instances: how many calls they cost, and whose notices come through."""

import random
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.endpoint import Endpoint
from botocore.exceptions import ClientError

from stacks.guard import handler
from stacks.guard.settings import GuardSettings
from tests.stacks.guard.scene import TICK, Scene

HOUR, EVENTS_AN_HOUR, MOST_CALLS = 3600.0, 5_000, 60
# Of an environment of Lambda: its start, an event without a call, one call; when an idle one ends.
START_SECONDS, EVENT_SECONDS, CALL_SECONDS, IDLE_SECONDS = 1.5, 0.005, 0.15, 600.0
NOTICE = "EC2 Spot Instance Interruption Warning"
UNKNOWN = "is not known as an instance of this stack"


class Lambda:
    """The Guard in execution environments: a call takes an idle one, or starts one that is new."""

    def __init__(self, settings: GuardSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = settings
        self.idle: list[tuple[float, handler.WarmMemory]] = []  # from when on
        self.started = self.calls = 0
        send = Endpoint._get_response  # of each attempt

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return send(*arguments)

        monkeypatch.setattr(Endpoint, "_get_response", counted)
        monkeypatch.setattr(handler, "warm_memory", lambda _: self.memory)

    def invoke(self, event: dict[str, Any], at: float, start: float) -> tuple[dict[str, str], int]:
        """Return what the Guard did, and in how many API calls."""
        self.idle = [each for each in self.idle if at - each[0] < IDLE_SECONDS]
        free = [each for each in self.idle if each[0] <= at]
        seconds, self.memory, before = EVENT_SECONDS, handler.WarmMemory(), self.calls
        if free:
            self.idle.remove(free[-1])
            self.memory = free[-1][1]
        else:
            self.started, seconds = self.started + 1, seconds + START_SECONDS
        done = handler.respond(self.settings, event, start + at)
        calls = self.calls - before
        self.idle.append((at + seconds + CALL_SECONDS * calls, self.memory))
        self.idle.sort(key=lambda each: each[0])
        return done, calls


def _notice(instance_id: str) -> dict[str, Any]:
    detail = {"instance-id": instance_id, "instance-action": "terminate"}
    return {"source": "aws.ec2", "detail-type": NOTICE, "detail": detail}


@pytest.mark.parametrize("burst", [0, 20])
def test_foreign_events_cost_less_than_a_call_a_minute_and_own_notices_are_acted_on_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    variables = {**scene.variables, "HEARTBEAT_TIMEOUT_SECONDS": "9000"}
    function = Lambda(GuardSettings.from_environment(variables), monkeypatch)
    (own,), luck, start = scene.live(), random.Random(7), datetime.now(UTC).timestamp()
    foreign = [luck.uniform(0, HOUR) for _ in range(EVENTS_AN_HOUR - burst)]
    foreign += [luck.uniform(1800, 1801) for _ in range(burst)]
    events = [(at, "foreign", _notice(f"i-{number:017x}")) for number, at in enumerate(foreign)]
    events += [(600.0 * number, "tick", TICK) for number in range(6)]
    events += [(700.0 * number + 60, "own", _notice(own)) for number in range(5)]
    calls: Counter[str] = Counter()
    for at, kind, event in sorted(events, key=lambda each: each[0]):
        done, num_calls = function.invoke(event, at, start)
        assert (UNKNOWN in done["reason"]) == (kind == "foreign"), (kind, done)
        calls[kind] += num_calls
    assert calls["foreign"] < MOST_CALLS, f"{calls}, in {function.started} environments"
    assert calls["own"] >= 5 * 5, "each is a whole call of the Guard"


def test_whose_an_instance_is_is_asked_once_for_all_that_are_unknown(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cold start in the moment of a notice: one call says it, and the next notice needs none."""
    function = Lambda(GuardSettings.from_environment(scene.variables), monkeypatch)
    second, start = scene.start(), datetime.now(UTC).timestamp()
    calls = []
    for number, instance_id in enumerate((scene.live()[0], second)):
        done, num_calls = function.invoke(_notice(instance_id), 10.0 * number, start)
        assert done == {"action": "none", "reason": "no reason to stop"}
        calls.append(num_calls)
    assert calls[0] > calls[1]


@pytest.mark.parametrize("code", ["RequestLimitExceeded", "UnauthorizedOperation"])
def test_a_look_up_that_fails_waits_for_the_next_tick_and_reports_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """An error would be an alarm's mail, and two more calls by Lambda's retries."""
    scene.head("finished")
    (own,) = scene.live()

    def refused(_: GuardSettings) -> Any:
        answer: Any = {"Error": {"Code": code, "Message": "rehearsed"}}
        raise ClientError(answer, "DescribeInstances")

    with monkeypatch.context() as patch:
        patch.setattr(handler, "instances_of_stack", refused)
        done = scene.tick(event=_notice(own))
    assert done["action"] == "none"
    assert code in done["reason"]
    assert (scene.capacity(), scene.mails()) == (1, [])
    assert scene.tick()["action"] == "to-zero"
