"""The Guard against a model: no healthy run is ended, nothing runs on for nothing, no limit passed.

Hypothesis draws machines that hang, die or idle, takebacks, prices, denied and failing calls, a
ledger that is deleted or garbage, and shrinks what breaks a promise to its shortest form.
"""

import io
from contextlib import redirect_stdout, suppress
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from contract.keys import GUARD
from stacks.guard import handler
from stacks.guard import settings as guard_settings
from stacks.guard.settings import GuardSettings
from tests.stacks.guard.world import HOUR, MINUTE, ON_DEMAND_USD, PREFIX, VOLUME_USD, World

PERIOD = 10 * MINUTE
MAX_USD, MAX_HOURS, MAX_WAIT_HOURS, MAX_BARREN = 4.0, 12.0, 6.0, 3
SILENCE = HOUR
# From the moment that a reason stands: the next call, a notice twice, the call after it.
GRACE = 2 * PERIOD + 10 * MINUTE
WAYS_TO_END = ("modify_spot_fleet_request", "cancel_spot_fleet_requests", "terminate_instances")
SETTINGS = GuardSettings(
    stack_name="TrainingStack",
    fleet_parameter="/TrainingStack/fleet-id",
    run_bucket="runs",
    run_prefix=PREFIX.rstrip("/"),
    topic_arn="arn:aws:sns:us-east-1:123456789012:notifications",
    max_billed_hours=MAX_HOURS,
    max_usd=MAX_USD,
    max_wait_hours=MAX_WAIT_HOURS,
    heartbeat_timeout_seconds=SILENCE,
    max_barren_attempts=MAX_BARREN,
    notice_seconds=120,
    prices={"g5.xlarge": {"spot": 0.4, "on-demand": ON_DEMAND_USD}},
    storage_usd_per_hour=VOLUME_USD,
)
TICK = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
HABITS = st.lists(st.sampled_from(["works", "works", "hangs", "dies", "idles"]), min_size=1)


class GuardMachine(RuleBasedStateMachine):
    """One run from its deploy on."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        guard_settings.client.cache_clear()
        self.patch = mock.patch("boto3.client", self.world.client)
        self.patch.start()
        self.began = self.next_call = self.world.now
        self.reason_since: float | None = None
        self.was_denied = False

    def teardown(self) -> None:
        self.patch.stop()
        guard_settings.client.cache_clear()

    # -- what happens

    @rule(habits=HABITS)
    def machines_will(self, habits: list[str]) -> None:
        self.world.habits = habits  # type: ignore[assignment]

    @rule(minutes=st.sampled_from([1, 30, 120, 300]))
    def time_passes(self, minutes: int) -> None:
        end = self.world.now + minutes * MINUTE
        while self.world.now < end:
            self.world.advance(min(end, max(self.next_call, self.world.now + 1)) - self.world.now)
            if self.world.now >= self.next_call:
                self.call()

    @rule()
    def spot_takes_back(self) -> None:
        for machine in self.world.live:
            if machine.market == "spot":
                self.world.end(machine, "Server.SpotInstanceTermination")

    @rule(is_there=st.booleans())
    def capacity(self, is_there: bool) -> None:
        self.world.has_capacity = is_there

    @rule(usd=st.sampled_from([0.2, 0.4, 0.9]))
    def price(self, usd: float) -> None:
        self.world.spot_usd = usd

    @precondition(lambda self: self.world.get("head.json"))
    @rule(state=st.sampled_from(["finished", "failed"]))
    def run_ends(self, state: str) -> None:
        self.world.state = state
        self.world.write_head()

    @rule(operations=st.sets(st.sampled_from(WAYS_TO_END)))
    def deny(self, operations: set[str]) -> None:
        self.world.denied = operations
        self.reason_since = None  # the time to act counts from here
        self.was_denied |= bool(operations)

    @rule(
        operation=st.sampled_from(
            ["describe_instances", "get_object", "put_object", "describe_spot_fleet_requests",
             "modify_spot_fleet_request", "publish", "list_objects_v2", "get_parameter"]
        ),
        count=st.integers(1, 3),
    )  # fmt: skip
    def fail(self, operation: str, count: int) -> None:
        self.world.failing[operation] = count

    @precondition(lambda self: self.world.get(GUARD))
    @rule(data=st.sampled_from([None, b"", b"{", b"[]", b'{"attempts": 3}']))
    def ledger_is_damaged(self, data: bytes | None) -> None:
        self.world.put(GUARD, data)

    @rule()
    def called_out_of_turn(self) -> None:
        self.call()

    def call(self) -> None:
        """One call of the Guard; what it did must have had a reason."""
        world = self.world
        live = {each.id: each for each in world.live}
        reasons, was_at_zero = self.reasons(), world.is_cancelled or world.target == 0
        self.next_call = max(self.next_call, world.now + PERIOD)
        # What failed is reported, and Lambda calls again; here the next rule may.
        with suppress(handler.GuardError), redirect_stdout(io.StringIO()):
            handler.respond(SETTINGS, TICK, world.now)
        if not was_at_zero and (world.is_cancelled or world.target == 0):
            assert reasons, f"the fleet was stopped without a reason; mails: {world.mails[-1:]}"
        for each in world.live:
            live.pop(each.id, None)
        if live:
            assert reasons or was_at_zero, f"{[*live]} were ended without a reason"

    def reasons(self) -> list[str]:
        """Why the run may be stopped now, as the world knows."""
        world, found = self.world, []
        if world.state in ("finished", "failed"):
            found.append(world.state)
        # Before the bound, not after it: what is spent until the next call is reckoned with.
        # An end is seen at the next call, and counts until then.
        num_ended = sum(not each.is_live for each in world.machines)
        reserve = (2 + num_ended) * PERIOD / HOUR * (ON_DEMAND_USD + VOLUME_USD)
        if world.spent > MAX_USD - reserve:
            found.append("dollars")
        hours = sum((each.ended or world.now) - each.launched for each in world.machines) / HOUR
        if hours + num_ended * PERIOD / HOUR > MAX_HOURS:
            found.append("hours")
        silent_since = max([world.head_written, *(each.launched for each in world.live)])
        if world.live and world.now - silent_since > SILENCE:
            found.append("silence")
        commits = [each.committed for each in world.machines]
        barren = [
            each
            for each in world.machines
            if not each.is_live
            and each.launched > max([0.0, *commits])
            and not each.why.startswith("Server.Spot")
        ]
        if len(barren) >= MAX_BARREN:
            found.append("barren")
        ends = [each.ended or 0.0 for each in world.machines]
        waits = world.now - max([self.began, *ends]) if not world.live else 0.0
        if waits > MAX_WAIT_HOURS * HOUR:
            found.append("waits")
        return found

    # -- promises

    @invariant()
    def nothing_runs_for_nothing(self) -> None:
        """An hour after a reason began to stand, nothing runs, or a mail says who refuses."""
        world = self.world
        is_over = bool(self.reasons()) and bool(world.live)
        if not is_over:
            self.reason_since = None
            return
        self.reason_since = self.reason_since or world.now
        if world.now - self.reason_since <= HOUR + GRACE or world.denied:
            return
        raise AssertionError(f"{self.reasons()} for over an hour, and {world.live} live")

    @invariant()
    def the_bound_holds(self) -> None:
        if not self.was_denied and not any(self.world.failing.values()):
            assert self.world.spent <= 1.05 * MAX_USD, f"${self.world.spent:.2f} spent"

    @invariant()
    def who_is_refused_says_so(self) -> None:
        world = self.world
        since = self.reason_since
        if set(WAYS_TO_END) <= world.denied and since and world.now - since > HOUR:
            assert any("may not be ended" in mail for mail in world.mails)


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestGuard = GuardMachine.TestCase
TestGuard.settings = _settings(100)


@pytest.mark.slow
def test_the_guard_for_an_hour() -> None:
    run_state_machine_as_test(GuardMachine, settings=_settings(40_000))
