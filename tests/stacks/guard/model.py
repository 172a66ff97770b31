"""The Guard against a model: no healthy run is ended, nothing runs on for nothing, no limit passed.

Hypothesis draws lives as wide as users' work (syncs of ten hours, compilers, evaluations), machines
that hang, die, fail, idle, stall in a sync or lose their tags, clocks that jump, hours of trouble
with S3, takebacks, prices, calls that are denied, fail, are done without an answer or come twice at
once, a head that is deleted and a ledger that is deleted or garbage, and shrinks what breaks a
promise to its shortest form.
"""

import io
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from typing import Literal
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from contract.keys import GUARD
from stacks import StackParameters
from stacks.guard import handler
from stacks.guard import settings as guard_settings
from stacks.guard.duties import UNHEARD_SECONDS
from stacks.guard.ledger import LISTED_SECONDS
from stacks.guard.settings import Forecast, GuardSettings
from tests.stacks.guard.answers import Service
from tests.stacks.guard.world import (
    HOUR,
    MINUTE,
    ON_DEMAND_USD,
    PREFIX,
    SPOTS,
    VOLUME_USD,
    Life,
    Machine,
    World,
)

PERIOD = 10 * MINUTE
MAX_USD, MAX_HOURS, MAX_WAIT_HOURS, MAX_BARREN = 3.0, 12.0, 6.0, 3
SILENCE = float(StackParameters.for_size("g5.xlarge").guard.heartbeat_timeout_seconds)
# From the moment that a reason stands: the next call, a notice twice, the call after it.
GRACE = 2 * PERIOD + 10 * MINUTE
WAYS_TO_END = ("modify_spot_fleet_request", "cancel_spot_fleet_requests", "terminate_instances")
CALLS = (
    "describe_instances", "get_object", "put_object", "describe_spot_fleet_requests",
    "modify_spot_fleet_request", "publish", "list_objects_v2", "get_parameter",
)  # fmt: skip
# A Spot fleet's calls, as groups have them.
OF_GROUPS = {
    "describe_spot_fleet_requests": "describe_auto_scaling_groups",
    "modify_spot_fleet_request": "update_auto_scaling_group",
    "cancel_spot_fleet_requests": "delete_auto_scaling_group",
}
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
HABITS = st.lists(
    st.sampled_from(["works", "works", "hangs", "dies", "fails", "idles", "stalls"]), min_size=1
)


def _minutes(*choices: float) -> st.SearchStrategy[float]:
    return st.sampled_from([each * MINUTE for each in choices])


LIVES = st.builds(
    Life,
    boot=_minutes(5, 1, 40),
    wait=_minutes(0, 29),
    build=_minutes(0, 60),
    sync=_minutes(0, 0.1, 40, 600),
    first_step=_minutes(0, 25),
    commit_every=_minutes(15, 5, 60),
    step=_minutes(0, 1, 30),
    save=_minutes(0.1, 20),
    evaluation=_minutes(0, 120),
)
# How many times the limits: of work that is as wide.
SCALES = st.sampled_from([1, 10])


class RunMachine(RuleBasedStateMachine):
    """One run from its deploy on, with its Guard; `examples` counts them."""

    settings = SETTINGS
    period = PERIOD
    kind: Literal["spot", "asg"] = "spot"
    examples = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.world = World(kind=self.kind)
        guard_settings.quick_client.cache_clear()
        world = self.world
        self.patch = mock.patch("boto3.client", lambda service, **_: Service(world, service))
        self.patch.start()
        self.head_seen = 0.0  # when the Guard saw it, and when it may have, whatever else failed
        self.head_may_be_seen = 0.0
        self.began = self.next_call = self.heard = self.world.now
        self.longest_gap = self.period

    @initialize(life=LIVES, scale=SCALES)
    def work(self, life: Life, scale: int) -> None:
        self.world.life = life
        self.settings = replace(
            self.settings,
            max_usd=scale * self.settings.max_usd,
            max_billed_hours=scale * self.settings.max_billed_hours,
        )

    def teardown(self) -> None:
        self.patch.stop()
        guard_settings.quick_client.cache_clear()

    def named(self, operation: str) -> str:
        """The call of this kind of fleet."""
        return OF_GROUPS.get(operation, operation) if self.kind == "asg" else operation

    def let_pass(self, minutes: float) -> None:
        end = self.world.now + minutes * MINUTE
        while self.world.now < end:
            self.world.advance(min(end, max(self.next_call, self.world.now + 1)) - self.world.now)
            self.promises_hold()
            if self.world.now >= self.next_call:
                self.call()

    @rule()
    def call(self) -> None:
        """One call of the Guard, also out of turn; what it did must have had a reason."""
        world = self.world
        live = {each.id: each for each in world.live}
        reasons, was_at_zero = self.permits(), world.is_cancelled or world.target == 0
        self.next_call = max(self.next_call, world.now + self.period)
        self.respond()
        if not was_at_zero and (world.is_cancelled or world.target == 0):
            assert reasons, f"the fleet was stopped without a reason: {self.said}"
        for each in world.live:
            live.pop(each.id, None)
        if live and not self.may_end([*live]):
            assert reasons or was_at_zero, f"{[*live]} were ended without a reason"

    def respond(self) -> None:
        # What failed is reported, and Lambda calls again; here the next rule may.
        now = self.world.now
        self.longest_gap = max(self.longest_gap, now - self.heard)
        said = io.StringIO()
        self.head_may_be_seen = self.head_may_be_seen if self.world.is_headless else now
        with suppress(handler.GuardError), redirect_stdout(said):
            print(handler.respond(self.settings, TICK, now))
            self.heard = now
            self.head_seen = self.head_seen if self.world.is_headless else now
        self.said = said.getvalue()

    def permits(self) -> list[str]:
        """Why the run may be stopped now, as the world knows."""
        return [] if self.world.state == "running" else [self.world.state]

    @invariant()
    def promises_hold(self) -> None:
        """Check what must never be."""

    def may_end(self, machines: list[str]) -> bool:
        """Whether these may be ended while the run goes on."""
        return all(self.is_mute(each) for each in self.world.machines if each.id in machines)

    def is_mute(self, machine: Machine) -> bool:
        """Whether S3 kept it from saying its first word."""
        return not machine.has_spoken and self.world.now - machine.launched > UNHEARD_SECONDS

    @rule(has_notice=st.booleans(), times=st.sampled_from([1, 1, 6]))
    def spot_takes_back(self, has_notice: bool, times: int) -> None:
        """Also those that come in its place, in their boot."""
        for _ in range(times):
            for machine in self.world.live:
                if machine.market == "spot":
                    self.world.end(machine, SPOTS, saves=has_notice)
            if times > 1:
                self.let_pass(2)

    @rule(is_there=st.booleans())
    def capacity(self, is_there: bool) -> None:
        self.world.has_capacity = is_there


class GuardMachine(RunMachine):
    """Without a deadline: limits, silence, attempts that commit nothing, calls that go wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.reason_since: float | None = None
        self.was_denied = self.was_untagged = self.has_failed = False
        self.blind: list[tuple[float, float]] = []  # when the Guard could keep nothing

    @rule(minutes=st.sampled_from([1, 30, 120, 300]))
    def time_passes(self, minutes: int) -> None:
        self.let_pass(minutes)

    @rule(habits=HABITS)
    def machines_will(self, habits: list[str]) -> None:
        self.world.habits = habits  # type: ignore[assignment]

    @rule(hours=st.sampled_from([-25.0, -2.0, 0.0, 2.0, 25.0]))
    def clocks_jump(self, hours: float) -> None:
        self.world.clock_off = hours * HOUR

    @precondition(lambda self: self.world.now > self.world.trouble_ends + 2 * HOUR)
    @rule(minutes=st.sampled_from([5, 60]), guard_hours=st.sampled_from([0, 0, 1, 5]))
    def s3_is_in_trouble(self, minutes: int, guard_hours: int) -> None:
        """For the machines, an hour at most, or for the Guard as well, which is back first."""
        world = self.world
        world.trouble_ends = world.now + minutes * MINUTE
        if guard_hours:
            world.guard_trouble_ends = world.now + guard_hours * HOUR
            ends = world.guard_trouble_ends + self.period
            self.blind.append((world.now - self.period, ends))
            world.trouble_ends = world.guard_trouble_ends + 5 * MINUTE
            self.has_failed = True

    @rule(usd=st.sampled_from([0.2, 0.4, 0.9]))
    def price(self, usd: float) -> None:
        self.world.spot_prices.append((self.world.now, usd))

    @precondition(lambda self: self.world.get("head.json"))
    @rule(state=st.sampled_from(["finished", "failed"]))
    def run_ends(self, state: str) -> None:
        self.world.state = state
        self.world.write_head()

    @precondition(lambda self: self.world.get("head.json") and self.world.state == "running")
    @rule()
    def head_is_deleted(self) -> None:
        self.world.delete_head()

    @rule(operations=st.sets(st.sampled_from(WAYS_TO_END)))
    def deny(self, operations: set[str]) -> None:
        self.world.denied = {self.named(each) for each in operations}
        self.reason_since = None  # the time to act counts from here
        self.was_denied |= bool(operations)

    @rule(operation=st.sampled_from(CALLS), count=st.integers(1, 3), is_done=st.booleans())
    def fail(self, operation: str, count: int, is_done: bool) -> None:
        kind = self.world.losing if is_done else self.world.failing
        kind[self.named(operation)] = count
        self.has_failed = True

    @rule(operation=st.sampled_from(CALLS))
    def twice_at_once(self, operation: str) -> None:
        self.world.between[self.named(operation)] = self.respond

    @precondition(lambda self: self.world.live)
    @rule()
    def tags_are_lost(self) -> None:
        self.world.live[0].tags.clear()
        self.was_untagged = True

    @precondition(lambda self: self.world.get(GUARD))
    @rule(data=st.sampled_from([None, b"", b"{", b"[]", b'{"attempts": 3}']))
    def ledger_is_damaged(self, data: bytes | None) -> None:
        self.world.put(GUARD, data)

    # -- reasons

    def permits(self) -> list[str]:
        world, found = self.world, self.duties()
        # Before the bound, not after it: what is spent until the next call is reckoned with.
        # An end is seen at the next call that EC2 answers, and counts until then; so does one that
        # lost its tags, at the last price known of it.
        num_gone = sum(not (each.is_live and each.is_seen) for each in world.machines)
        late = num_gone * self.longest_gap / HOUR
        reserve = (2 * PERIOD / HOUR + late) * (ON_DEMAND_USD + VOLUME_USD)
        if world.spent > self.settings.max_usd - reserve:
            found.append("dollars soon")
        if self.hours() + late > self.settings.max_billed_hours:
            found.append("hours soon")
        if self.num_barren(sees_tags=True) >= MAX_BARREN:
            found.append("barren")
        # What ended since the last call in which everything was read may still seem to run.
        ended = [each for each in world.machines if each.ended and each.ended >= self.heard]
        if self.is_silent([each for each in (*world.live, *ended) if each.is_seen]):
            found.append("silence")
        if self.is_headless(self.head_may_be_seen):
            found.append("headless")
        # What was said after the last look at a head that is gone, nobody knows.
        if world.is_headless and self.is_waiting(self.head_seen):
            found.append("waits")
        return found

    def duties(self) -> list[str]:
        """Why the run must be stopped now."""
        world, found = self.world, super().permits()
        if self.is_headless(self.head_seen):
            found.append("headless")
        if world.spent > self.settings.max_usd:
            found.append("dollars")
        if self.hours() > self.settings.max_billed_hours:
            found.append("hours")
        seen = [each for each in world.live if each.is_seen]
        # Heartbeats of a time in which the Guard could not read do not count.
        if self.is_silent(seen, world.guard_trouble_ends):
            found.append("silence")
        if self.num_barren() >= MAX_BARREN:
            found.append("barren")
        if self.is_waiting(max(world.head_written, world.guard_trouble_ends + self.period)):
            found.append("waits")
        return found

    def is_headless(self, seen: float) -> bool:
        """Whether a run that has begun has no head, by what was seen until then."""
        world = self.world
        has_begun = world.has_checkpoints or any(each.launched < seen for each in world.live)
        return world.is_headless and bool(world.head_written) and has_begun

    def is_waiting(self, word: float) -> bool:
        """Whether no machine has been there for long; of one without tags, heartbeats show it."""
        world = self.world
        ends = [each.ended for each in world.machines if each.is_seen and each.ended]
        is_there = any(each.is_seen for each in world.live)
        return not is_there and world.now - max([self.began, word, *ends]) > MAX_WAIT_HOURS * HOUR

    def num_barren(self, *, sees_tags: bool = False) -> int:
        """How many machines in a row committed nothing, through no fault of Spot."""
        machines = self.world.machines
        committed = max([0.0, *(each.committed for each in machines)])
        ended = [each for each in machines if not (each.is_live and each.is_seen)]
        # Of one that has lost its tags, the Guard does not hear why it ended.
        own = [each for each in ended if each.why != SPOTS or (sees_tags and not each.is_seen)]
        if not sees_tags:
            own = [each for each in own if not self.is_forgotten(each)]
        return sum(each.launched > committed for each in own)

    def is_forgotten(self, machine: Machine) -> bool:
        """Whether EC2 lists it no longer in the first call that can keep anything."""
        ended = machine.ended or self.world.now
        return any(began <= ended < end - LISTED_SECONDS for began, end in self.blind)

    def is_silent(self, seen: list[Machine], since: float = 0.0) -> bool:
        """Whether none of these is healthy, and the last word of the run is old."""
        world = self.world
        words = [max(each.launched, each.progressed) for each in seen]
        since = max([since, world.head_written, *words])
        is_well = any(map(world.is_healthy, seen))
        return bool(seen) and world.now - since > SILENCE and not is_well

    def hours(self) -> float:
        machines = self.world.machines
        return sum((each.ended or self.world.now) - each.launched for each in machines) / HOUR

    # -- promises

    @invariant()
    def promises_hold(self) -> None:
        self.nothing_runs_for_nothing()
        if not (self.was_denied or self.was_untagged or self.has_failed):
            assert self.world.spent <= 1.05 * self.settings.max_usd, (
                f"${self.world.spent:.2f} spent"
            )
            for each in self.world.live:
                since = self.world.now - each.failed
                assert not each.failed or since <= self.settings.notice_seconds + GRACE, (
                    f"{each} failed {since / 60:.0f} min ago"
                )

    def may_end(self, machines: list[str]) -> bool:
        """Machines that failed, and have had a notice's time to end themselves."""
        named = [each for each in self.world.machines if each.id in machines]
        return all(each.failed or self.is_mute(each) for each in named)

    def nothing_runs_for_nothing(self) -> None:
        """Soon after a reason began to stand nothing runs; an hour where calls failed."""
        world, now, refused = self.world, self.world.now, self.world.denied
        # What EC2 does not list as the stack's is billed by nobody, and ends with its fleet.
        duties = super().permits() if self.was_untagged else self.duties()
        if not duties or not world.live or now < world.guard_trouble_ends:
            self.reason_since = None
            return
        self.reason_since = self.reason_since or now
        bound = HOUR if self.has_failed or self.was_denied else 0.0
        if now - self.reason_since <= bound + GRACE:
            return
        ways = [self.named(each) for each in WAYS_TO_END]
        if set(ways) <= refused:
            is_mailed = any("could not be ended" in mail for mail in world.mails)
            assert is_mailed, "nobody knows that the Guard may end nothing"
        elif set(ways[:2]) <= refused:
            # The fleet starts others, and each is ended at the next call.
            old = [each for each in world.live if each.is_seen and now - each.launched > GRACE]
            assert not old, f"{old} live on"
        else:
            raise AssertionError(f"{duties} for long, and {world.live} live")


class BudgetMachine(GuardMachine):
    """Nothing goes wrong but Spot, its price and the ledger: the bound holds to the cent."""

    fail = deny = tags_are_lost = head_is_deleted = run_ends = machines_will = None  # type: ignore
    s3_is_in_trouble = None  # type: ignore


WORK_HOURS = 2.0
# A day at most for two hours of work: in a model, each two minutes are a call.
SHORTER_LIVES = LIVES.map(lambda life: replace(life, wait=0.0, sync=min(life.sync, 2400.0)))


class DeadlineMachine(RunMachine):
    """With a deadline, on Spot machines that may all fail and on-demand ones that do not."""

    period = 2 * MINUTE
    settings = replace(
        SETTINGS,
        max_usd=0.0,
        max_wait_hours=0.0,
        max_billed_hours=1000.0,
        call_every_seconds=3 * MINUTE,
    )

    def __init__(self) -> None:
        super().__init__()
        self.world.stages = {"head": WORK_HOURS * HOUR}

    @initialize(life=SHORTER_LIVES)
    def work(self, life: Life) -> None:
        """Plan as the construct does, with time for six restarts and three losses of work."""
        restart = 1.5 * (life.ready + life.first_step)
        seconds = WORK_HOURS * HOUR + 6 * restart + 3 * life.between_commits
        self.world.life = life
        self.settings = replace(
            self.settings,
            deadline_hours=seconds / HOUR,
            forecast=Forecast(
                stages={"head": WORK_HOURS * HOUR},
                restart_seconds=restart,
                save_seconds=life.save,
                interval_seconds=life.commit_every,
            ),
        )

    @rule(num_failing=st.integers(0, 8))
    def spot_machines_die(self, num_failing: int) -> None:
        self.world.habits = ["dies"] * num_failing + ["works"]

    @precondition(lambda self: self.world.state == "running")
    @rule(minutes=st.sampled_from([1, 10, 60, 240]))
    def time_passes(self, minutes: int) -> None:
        self.let_pass(minutes)

    @rule(operation=st.sampled_from(CALLS))
    def twice_at_once(self, operation: str) -> None:
        self.world.between[self.named(operation)] = self.respond

    def may_end(self, machines: list[str]) -> bool:
        """A machine of one market, once one of the other runs; on demand also while Spot is asked.

        Waiting costs nothing: the policy may prefer it where the deadline leaves the time.
        """
        world = self.world
        if super().may_end(machines):
            return True
        of_spot = any(each.market == "spot" for each in world.machines if each.id in machines)
        return bool(world.live) or (world.target > world.on_demand and not of_spot)

    @invariant()
    def promises_hold(self) -> None:
        late = self.world.now - self.began - self.settings.deadline_hours * HOUR
        assert late <= MINUTE or self.world.state == "finished", f"{late / 60:.0f} min late"


class GroupsGuardMachine(GuardMachine):
    kind = "asg"


class GroupsBudgetMachine(BudgetMachine):
    kind = "asg"


class GroupsDeadlineMachine(DeadlineMachine):
    kind = "asg"


# The same promises, for each kind of fleet.
WITH_GROUPS: dict[type[RunMachine], type[RunMachine]] = {
    GuardMachine: GroupsGuardMachine,
    BudgetMachine: GroupsBudgetMachine,
    DeadlineMachine: GroupsDeadlineMachine,
}
