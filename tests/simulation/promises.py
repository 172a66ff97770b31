"""What a run's world keeps of it, and the promises that are judged, on the way and at the end."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from contract.keys import (
    BLOBS,
    CHECKPOINTS,
    EVENTS,
    GUARD,
    HEAD,
    METRICS,
    checkpoint_prefix,
)
from contract.metrics import metrics_objects
from contract.verify import broken_rules
from stacks.guard.settings import Forecast
from tests.simulation.account import Account, settings_of
from tests.simulation.bucket import Bucket
from tests.simulation.clock import CLOCK, Process
from tests.simulation.machine import UNIT, Host
from tests.simulation.plan import DAY, SLOWEST, Happening, Plan
from tests.simulation.pools import ZONES
from tests.simulation.program_promises import ProgramRecord
from tests.simulation.record import trace_of
from tests.stacks.guard.model import SETTINGS
from tests.stacks.guard.world import (
    HOUR,
    MINUTE,
    ON_DEMAND_USD,
    VOLUME_USD,
    Machine,
    World,
)

CALL_EVERY = 10 * MINUTE
SILENCE = SETTINGS.heartbeat_timeout_seconds


@dataclass(kw_only=True)
class Promised(World):
    """A world that knows why what happens may happen."""

    plan: Plan
    folder: Path
    sees_all: bool = False  # without the shortcuts
    account: Account = field(default_factory=Account)
    process: Process = field(default_factory=lambda: Process(name="world"))
    hosts: dict[str, Host] = field(default_factory=dict)
    story: list[tuple[float, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    facts: Counter[str] = field(default_factory=Counter)
    troubles: list[Happening] = field(default_factory=list)
    slow_boots: list[float] = field(default_factory=list)
    dead_boots: list[str] = field(default_factory=list)
    mute: set[str] = field(default_factory=set)  # machines whose user data never runs
    guard_off_until: float = 0.0
    is_twice: bool = False
    no_capacity_until: float = 0.0
    limits: float = 1.0  # how many times the plan's, since a deploy
    stopped_at: float = math.inf
    stopped_until: float = 0.0
    away_until: float = 0.0  # a person has stopped the run until then
    committed_step: int = 0
    named: dict[str, Any] = field(default_factory=dict)  # the head's checkpoints
    moved: float = 0.0  # when the run last got further
    committed_at: float = 0.0  # when it last committed, also what it had done before
    diverged_at: float = -math.inf  # when a step last diverged
    restored_at: float = math.inf  # when a person last restored the head
    last_bad_step: int = 0
    bad_steps: dict[int, str] = field(default_factory=dict)  # that will, "once" or for their "data"
    idle: float = 0.0  # live seconds of machines since then
    crowded: float = 0.0  # seconds with more than one machine
    ill: set[str] = field(default_factory=set)  # machines that hung, were paused, or died at fault
    ended_at: float = 0.0
    stops: list[tuple[float, str]] = field(default_factory=list)
    resumes: int = 0
    guard_version: str = ""  # of the code that its next calls run
    trainer_version: str = ""
    offered: tuple[str, ...] = tuple(ZONES)  # the subnets in which the fleet may look
    zones: dict[str, str] = field(default_factory=dict)  # of machines
    is_away: bool = False  # the stack has another run_id
    record: Any = None  # of a program: a ProgramRecord
    deployed_at: float = 0.0  # when a deploy last set the fleet's capacity
    resumed_at: float = 0.0  # when a person last did
    damaged: set[str] = field(default_factory=set)  # checkpoints
    hung: dict[str, float] = field(default_factory=dict)  # machines for good: since when, alone
    refused: dict[str, float] = field(default_factory=dict)  # by machine: when a save failed

    def __post_init__(self) -> None:
        self.now = self.began = self.moved = CLOCK.now
        super().__post_init__()
        self.process.supervisor = self
        self.account.worlds.append(self)
        if self.plan.program:
            self.record = ProgramRecord(self, self.plan.program)
        self.story = self.account.worlds[0].story

    @cached_property
    def run_id(self) -> str:
        return self.prefix.split("/")[1]

    @property
    def paid(self) -> list[Machine]:
        """The machines that cost something now, of whichever fleet."""
        return [each for each in self.machines if each.ended is None]

    @property
    def has_pools(self) -> bool:
        """Whether the account's runs choose between zones."""
        return self.account.has_pools

    @property
    def bucket(self) -> Bucket:
        return self.account.bucket

    @cached_property
    def stack_name(self) -> str:
        number = self.run_id.removeprefix("run-")
        return "TrainingStack" if number == "1" else f"Training-{number}"

    def tell(self, what: str) -> None:
        whose = "" if self is self.account.worlds[0] else f"{self.run_id}: "
        self.story.append((CLOCK.now - self.began, f"{whose}{what}"))

    def breaks(self, promise: str, how: str) -> None:
        whose = f" ({self.run_id})" if len(self.account.worlds) > 1 else ""
        line = f"{promise}: {how}{whose}"
        if sum(each.startswith(promise) for each in self.broken) < 3 and line not in self.broken:
            self.broken.append(line)
            self.tell(f"*** {line}")

    @property
    def spent_now(self) -> float:
        return self.spent_since(0.0)

    def spent_since(self, when: float) -> float:
        return sum(self._usd_of(each, when) for each in self.machines)

    def _usd_of(self, machine: Machine, since: float) -> float:
        end = machine.ended or CLOCK.now
        start = min(end, max(since, machine.launched))
        if machine.market == "on-demand":
            return (end - start) / HOUR * (ON_DEMAND_USD + VOLUME_USD)
        usd, prices = 0.0, [*self.spot_prices, (math.inf, 0.0)]
        for (begins, price), (until, _) in pairwise(prices):
            seconds = max(0.0, min(end, until) - max(start, begins))
            usd += seconds / HOUR * (price + VOLUME_USD)
        return usd

    @property
    def guard(self) -> Any:
        plan = self.plan
        return replace(
            SETTINGS,
            **settings_of(self),
            max_usd=plan.max_usd * self.limits,
            max_billed_hours=plan.max_hours * self.limits,
            max_wait_hours=24.0 if not plan.deadline_hours else 0.0,
            call_every_seconds=660.0,
            deadline_hours=0.0 if self.facts["deploy"] else plan.deadline_hours,
            forecast=Forecast(
                stages={"train": plan.forecast_share * plan.work_seconds},
                restart_seconds=plan.restart_seconds,
                save_seconds=plan.save_seconds,
                interval_seconds=max(600.0, 2 * plan.save_seconds, 7 * plan.step_seconds),
            ) if plan.deadline_hours or self.account.budget_usd else None,
        )  # fmt: skip

    def trouble(self, who: str) -> Happening | None:
        for each in self.troubles:
            is_its = each.whose in ("all", "guard" if who == "guard" else "machines")
            begins = self.began + each.at
            if is_its and begins <= CLOCK.now < begins + each.seconds:
                return each
        return None

    def is_troubled(self, who: str) -> bool:
        found = self.trouble(who)
        return found is not None and found.how == "outage" and found.share == 1.0

    @property
    def is_denied(self) -> bool:
        found = self.trouble("")
        return found is not None and found.how == "denied"

    @property
    def head_now(self) -> dict[str, Any]:
        found = self.bucket.found(self.prefix + HEAD)
        return json.loads(found.data) if found and found.data else {}

    @property
    def state_now(self) -> str:
        return str(self.head_now.get("state", ""))

    def has_progressed(self, machine: Machine, what: str) -> None:
        machine.progressed = CLOCK.now

    def hear(self, key: str, data: bytes | None) -> None:
        """Each change of an object, as S3 has it."""
        name = key[len(self.prefix) :]
        if name == HEAD:
            if data is None:
                return
            found = self.bucket.objects[key]
            if self._num_heads != len(found):
                self._num_heads = len(found)
                self._new_head(json.loads(data))
        elif data and name.startswith(EVENTS) and name.endswith("-save-failed.json"):
            self._hear_refused(json.loads(data))
        elif data is None and name.startswith(BLOBS) and self.record:
            self.record.deleted(name)
        elif data is None and name.startswith(CHECKPOINTS):
            checkpoint = name[len(CHECKPOINTS) :].partition("/")[0]
            if checkpoint in self.named:
                self.breaks("a file was deleted that the head names", name)

    def _hear_refused(self, event: dict[str, Any]) -> None:
        """A trainer says that S3 has refused a save, by its own clock and perhaps late."""
        if self.plan.program or self.facts["clock"]:
            return
        name, when = event["instance_id"], datetime.fromisoformat(event["time"]).timestamp()
        self.refused[name] = when - self.hosts[name].process.clock_off

    _num_heads: int = 0

    def _new_head(self, head: dict[str, Any]) -> None:
        if {each["name"] for each in head["checkpoints"]} - self.named.keys():
            self.committed_at = CLOCK.now
        self.named = {each["name"]: each for each in head["checkpoints"]}
        if self.record:
            step = self.record.read(head)
        else:
            step = max((each["step"] for each in head["checkpoints"]), default=0)
        for name, entry in self.named.items():
            for file in entry["files"]:
                where = self.prefix + checkpoint_prefix(name) + file["name"]
                if self.bucket.found(where) is None:
                    self.breaks("the head names a file that is not there", where)
        if step < self.committed_step and self.facts["checkpoints damaged"]:
            self.committed_step = step  # what is lost now has a reason
        if step < self.committed_step and self.record:
            self.committed_step = step  # of what a crash would have left
        if step < self.committed_step:
            self.breaks("a commit was lost", f"step {step} after {self.committed_step}")
        if step > self.committed_step:
            self.committed_step, self.moved, self.idle = step, CLOCK.now, 0.0
            self.facts["commits"] += 1
        if head["state"] in ("finished", "failed") and not self.ended_at:
            self.ended_at = CLOCK.now
            self.tell(f"the run is {head['state']}")

    def judge_shutdown(self, machine: Machine, step: int) -> None:
        """A machine that somebody ends, a deploy, too, saves what it has trained.

        One that had a notice has done by then what that left time for.
        """
        told = self.hosts[machine.id].told_seconds
        has_time = self.plan.answer_seconds < min(told, UNIT.stop_timeout_seconds - 30.0)
        is_excused = machine.id in self.ill or self.was_troubled()
        if has_time and self.committed_step < step and not is_excused:
            self.breaks("a shutdown loses no step", f"{step} after {self.committed_step}")

    def judge_resume(self, machine: Machine, named: Sequence[Any], found: str) -> None:
        """An attempt goes on from `found`: the newest checkpoint that nobody has damaged."""
        intact = [
            each.name for each in named if each.name not in self.damaged and not each.is_left_behind
        ]
        if intact and found != intact[-1] and not (found in self.damaged or self.was_troubled()):
            text = f"{machine.id} began with {found or 'none'}, and {intact[-1]} is there"
            self.breaks("what is intact is resumed from", text)

    def _judge(self, seconds: float) -> None:
        """What must never be, looked at all the time."""
        live = self.paid
        self.idle += seconds * bool(live)
        self.crowded = self.crowded + seconds if len(live) > 1 and not self.was_unguarded else 0.0
        if self.crowded > 2 * HOUR:
            self.breaks("one machine is enough", f"{len(live)} for two hours")
        if self.idle > DAY and self.idle > self._most_idle:
            self.breaks("no livelock", "a day of machines without a commit")
            self.idle = 0.0
        if not live:
            return
        if self.is_denied:
            self._judge_denied()
        ended = max(self.ended_at, self.deployed_at)
        if (
            self.ended_at
            and CLOCK.now - max(ended, self.guard_off_until, self._guard_blind_until) > HOUR
        ):
            self.breaks("nothing is paid an hour after the end", f"{live[0].id} lives")
        for one in live:
            self._judge_repeat(one)
            self._judge_hung(one, is_alone=len(live) == 1)
            idles = self.hosts[one.id].idles_since
            since = max(idles, self.guard_off_until)
            if CLOCK.now - since > HOUR and CLOCK.now - max(since, self._guard_blind_until) > HOUR:
                self.breaks("no machine is paid for nothing", f"{one.id} has nothing to do")

    def _judge_denied(self) -> None:
        """Machines that can do nothing are not replaced for ever: EC2 lists them for an hour."""
        since = max(CLOCK.now - 50 * MINUTE, self.guard_off_until)
        since = max([since, *(when for when, _ in self.stops)])
        ended = [m for m in self.machines if m.launched > since and m.why.startswith("Client.User")]
        if len(ended) > 8 + self.facts["guard call fails"] and not self.guard_version:
            self.breaks("a fleet that S3 refuses is stopped", f"{len(ended)} have ended themselves")

    def _judge_hung(self, machine: Machine, *, is_alone: bool) -> None:
        """A machine that hangs is ended after the Guard's patience, unless another one trains."""
        if machine.id not in self.hung:
            return
        is_unseen = CLOCK.now < max(self.guard_off_until, self._guard_blind_until)
        # What the older Guard keeps does not say when it looked: silence counts from the newer one.
        if not is_alone or is_unseen or self.guard_version:
            self.hung[machine.id] = CLOCK.now
        restored = self.restored_at if self.restored_at < math.inf else 0.0  # heard of, then
        hours = (CLOCK.now - max(self.hung[machine.id], restored)) / HOUR
        if hours > SILENCE / HOUR + 1.0 + self.facts["guard call fails"]:
            self.breaks("a machine that hangs is ended", machine.id)

    def _judge_repeat(self, machine: Machine) -> None:
        """A save that failed does not wait for the interval, once S3 is well."""
        since = self.refused.get(machine.id, math.inf)
        is_over = self.hosts[machine.id].step is None or machine.ends is not None
        is_other = machine.id in self.ill or self.diverged_at > since
        if is_over or is_other or self.committed_at > since:
            self.refused.pop(machine.id, None)
            return
        plan = self.plan
        working = 2 * SLOWEST * plan.step_seconds + plan.life.first_step + plan.evaluation_seconds
        most = working + 2 * plan.save_seconds + 7 * MINUTE  # two of them until the last retry
        if CLOCK.now - since > most and not self.was_troubled(within=most):
            text = f"{machine.id} has waited {(CLOCK.now - since) / MINUTE:.0f} minutes"
            self.breaks("a failed save is repeated soon", text)
            del self.refused[machine.id]

    @property
    def _most_idle(self) -> float:
        """What came since the last commit has booted, which is no fault."""
        boots = self.plan.life.ready * sum(m.launched > self.moved for m in self.machines)
        return DAY + boots + self.plan.work_seconds / self.plan.steps * 2

    @property
    def _guard_blind_until(self) -> float:
        ends = [
            self.began + each.at + each.seconds
            for each in self.troubles
            if each.whose in ("all", "guard") and self.began + each.at <= CLOCK.now
        ]
        return max(ends, default=0.0)

    def _judge_stop(self, reason: str, since: float) -> None:
        """Whether the world knows why; a stop that began then has ended what ended since."""
        settings = self.guard
        live = [one for one in self.machines if one.is_live or (one.ended or 0.0) >= since]
        slack = 0.35 + 2 * len(self.machines) / 60
        healthy = [
            each.id for each in live
            if each.id not in self.ill and self._silence(each) < SILENCE - 11 * MINUTE
            and each.progressed
        ]  # fmt: skip
        known = {
            "can be read": self.facts["ledger damaged"] > 0
            or any(each.facts["budget damaged"] for each in self.account.worlds),
            "no heartbeat": not healthy and not self._are_mute(live),
            "the run is": self.state_now in ("finished", "failed"),
            # What ends unseen is billed until EC2 has forgotten it.
            "hours billed": self._hours > settings.max_billed_hours - slack or self.was_unguarded,
            "max_usd": self.spent_now > settings.max_usd - slack * 2 * ON_DEMAND_USD
            or self.was_unguarded,
            "the budget": self.account.is_spent(self.needs_usd),
            "no instance for": CLOCK.now - self.moved > 23 * HOUR,
            "attempts in a row": sum(
                m.why == "Client.UserInitiatedShutdown" for m in self.machines[-3:]
            ) >= 2 or len(self.ill) >= 2 or self.always_crashes,
        }  # fmt: skip
        for words, is_known in known.items():
            if words in reason:
                if not is_known:
                    self.breaks("a healthy run was stopped", reason)
                return

    def is_mute(self, machine: Machine) -> bool:
        """Whether a machine that boots now never says a word."""
        if "silent" not in self.dead_boots:
            return False
        self.dead_boots.remove("silent")
        self.tell(f"{machine.id[-4:]} runs no user data")
        self.mute.add(machine.id)
        self.ill.add(machine.id)
        return True

    def _are_mute(self, machines: list[Machine]) -> bool:
        """Whether none has ever said a word, where nothing kept the Guard from ending it."""
        names = {each.id for each in machines if each.is_live}
        is_kept = self.facts["guard call fails"] or self.facts["guard off"]
        is_excused = is_kept or self.was_troubled(within=SILENCE)
        return bool(names) and names <= self.mute and not is_excused

    def _silence(self, machine: Machine) -> float:
        """For how long it has done nothing, but for times in which nobody could have heard of it.

        No call reads the head in an outage as long as a silence: the Guard's patience begins anew.
        """
        heard, dark = machine.progressed, 0.0
        for each in self.troubles:
            is_total = each.how == "outage" and each.share == 1.0 and each.whose == "all"
            if is_total and each.seconds > SILENCE:
                begins = max(heard, self.began + each.at)
                dark += max(0.0, min(CLOCK.now, self.began + each.at + each.seconds) - begins)
        return CLOCK.now - heard - dark

    @property
    def needs_usd(self) -> float:
        """What a run that has not begun must find left in the budget."""
        forecast = self.guard.forecast
        if self.head_now or forecast is None:
            return 0.0
        return float(forecast.seconds / HOUR * self.guard.planned_usd_per_hour)

    @property
    def is_at_a_limit(self) -> bool:
        """Whether it was stopped for what does not pass by itself."""
        if not self.stops or "max_" in self.stops[-1][1] or self.always_crashes:
            return bool(self.stops)
        account, (when, reason) = self.account, self.stops[-1]
        is_for_long = account.is_long_until_more(when) and not account.raises
        return "the budget" in reason and is_for_long and account.raised < when

    @property
    def always_crashes(self) -> bool:
        """Whether its program does, which nobody mends."""
        return self.plan.program is not None and self.plan.program.crash != ""

    @property
    def is_alone(self) -> bool:
        """Whether the runs beside it have brought it no trouble of S3's, nor spent its budget."""
        return not self.troubles and not any("the budget" in reason for _, reason in self.stops)

    def judge_end(self) -> None:
        """What must hold once all is over."""
        head = self.head_now
        state, stopped = head.get("state", ""), self.is_at_a_limit
        # A machine that found no head gives the run up, and a person has just restored it.
        is_given_up = "exit status 2" in str(head.get("reason"))
        is_given_up &= 0 <= self.ended_at - self.restored_at < 10 * MINUTE
        stopped |= state == "failed" and (self.always_crashes or is_given_up)
        if state != "finished" and not stopped:
            why = head.get("reason") or f"at step {self.committed_step} of {self.plan.steps}"
            self.breaks("a run within its limits ends finished", f"{state or 'no head'}, {why}")
        is_unread = bool(self.record and self.facts["checkpoints damaged"])  # a shared blob is
        if state == "finished" and self.committed_step != self.plan.steps and not is_unread:
            self.breaks("all steps are done", f"{self.committed_step} of {self.plan.steps}")
        if self.paid:
            self.breaks("nothing runs in the end", ", ".join(each.id for each in self.paid))
        if head:
            excused = ("within-limits", "nothing-after-the-end") * self.was_unguarded
            # A request that S3 has answered again may end a second after the notice.
            excused += ("notices-answered",) * (self.facts["ended in trouble"] > 0)
            # Rank 0, with its last resort, hears of it at the next vote, which may be as late.
            excused += ("notices-answered",) * (self.plan.hears == "other")
            trace = trace_of(self.bucket, self.prefix)
            if "limits" in trace.ledger:  # a call that is refused is one tick longer
                trace.ledger["limits"]["seconds"] *= 1 + self.facts["guard errors"]
            for line in broken_rules(trace)[:4]:
                if not line.startswith(excused):
                    self.breaks("verify", line)
        self._judge_bill()
        self._judge_limits()
        if state == "finished":
            self._judge_costs()
            self._judge_lines()

    def _judge_limits(self) -> None:
        """What a run may cost, whatever happens to it."""
        if self.was_unguarded or self.facts["deploy"]:
            return
        most = self.plan.max_usd * self.limits + self.facts["new version"] * self.account.tick_usd
        if self.plan.max_usd and self.spent_now > 1.02 * most + 0.05:
            self.breaks("max_usd holds", f"${self.spent_now:.2f} of ${most:.2f}")
        # No hour is kept in reserve: a machine runs until a call, and who starts one more, too.
        ticks = 1 + self.resumes + self.facts["new version"] + self.facts["guard call fails"]
        most = self.plan.max_hours * self.limits + ticks * self.guard.tick_seconds / HOUR
        if self._hours > most + 0.1:
            self.breaks("max_hours holds", f"{self._hours:.1f} h of {most:.1f}")

    def _judge_costs(self) -> None:
        """What Spot may cost a run that has finished."""
        most = self.plan.most_hours(len(self.machines))
        if self.plan.is_calm and self.is_alone and self._hours > most:
            costs = f"{self._hours:.1f} h of {most:.1f}"
            self.breaks("an interruption costs what was planned", costs)
        first = min((each.launched for each in self.machines), default=0.0)
        hours = (self.ended_at - first) / HOUR
        is_fair = self.plan.is_deadline_fair and self.is_alone
        if is_fair and hours > self.plan.deadline_hours:
            late = f"{hours:.1f} h of {self.plan.deadline_hours:.1f}"
            self.breaks("a deadline is kept", late)

    def _judge_lines(self) -> None:
        """Metrics are merged, and kept once, unless whoever merged them was stopped in it."""
        below, last = self.prefix + METRICS, dict[str, int]()
        if self.troubles or self.ill:
            return
        keys = [key[len(self.prefix) :] for key, _ in self.bucket.below(below)]
        for one in metrics_objects(keys):
            stored = self.bucket.found(self.prefix + one.key)
            is_of_the_end = stored and abs(stored.when - self.ended_at) < MINUTE  # two merge then
            if one.first <= last.get(one.writer, 0) and not is_of_the_end:
                self.breaks("a line is kept once", one.key)
            last[one.writer] = max(one.last, last.get(one.writer, 0))

    @property
    def _hours(self) -> float:
        """Those of all its machines."""
        return sum((m.ended or CLOCK.now) - m.launched for m in self.machines) / HOUR

    def was_troubled(self, seconds: float = 0.0, within: float = 20 * MINUTE) -> bool:
        """Whether S3 is, or shortly was, in trouble for machines, for longer than `seconds`."""
        now = CLOCK.now - self.began
        since = [
            now - each.at - each.seconds
            for each in self.troubles
            if each.seconds > seconds and each.whose != "guard" and each.at <= now
        ]
        return min(since, default=math.inf) < within

    @property
    def was_unguarded(self) -> bool:
        """Whether the Guard was not called, or could not read, for a while."""
        of_guard = any(each.whose in ("all", "guard") for each in self.troubles)
        return of_guard or self.facts["guard off"] > 0

    def _judge_bill(self) -> None:
        found = self.bucket.found(self.prefix + GUARD)
        if not found or not found.data or self.facts["ledger damaged"] or self.was_unguarded:
            return  # a machine may have come and gone unseen
        if self.facts["head deleted"] and self.facts["other run"]:
            return  # a person's copy of the head dates it anew, while nobody looks
        attempts = json.loads(found.data).get("attempts", {})
        billed, spent = sum(each["usd"] for each in attempts.values()), self.spent_now
        # EC2's model says no time of an end: it counts from when it is seen.
        most = len(self.machines) * (CALL_EVERY + 5 * MINUTE) / HOUR * (ON_DEMAND_USD + VOLUME_USD)
        # Of another run's deploy, one may have come and gone between two calls.
        least = spent * 0.99 - 0.02 - self.facts["other run"] * self.account.tick_usd
        if not least <= billed <= spent * 1.01 + most:
            self.breaks("the ledger bills what was spent", f"${billed:.2f} of ${spent:.2f}")
