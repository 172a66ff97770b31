"""One run's whole life: stack, fleet, machines, Guard, schedule, market, persons, and its promises.

The fleet, EC2 and their answers are those of the Guard's model (tests/stacks/guard/world.py); here
its machines run, its objects lie in a bucket with troubles, and the Guard's calls take time.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from contract.keys import CHECKPOINTS, GUARD, HEAD, checkpoint_prefix
from contract.verify import broken_rules
from stacks.guard import handler
from stacks.guard.fleet import StackFleet, instances_of_stack
from stacks.guard.settings import Forecast
from tests.simulation.bucket import Bucket
from tests.simulation.clock import CLOCK, Process, sleep
from tests.simulation.machine import Host
from tests.simulation.plan import DAY, Happening, Plan
from tests.simulation.record import trace_of
from tests.stacks.guard.model import SETTINGS, TICK
from tests.stacks.guard.world import (
    HOUR,
    MINUTE,
    ON_DEMAND_USD,
    SPOTS,
    VOLUME_USD,
    Machine,
    Market,
    World,
)

BEGIN = datetime(2026, 11, 2, tzinfo=UTC).timestamp()
CALL_EVERY, CALL_LIMIT, CALL_RETRIES = 10 * MINUTE, 180.0, (60.0, 120.0)
SILENCE = SETTINGS.heartbeat_timeout_seconds
# A person reads the mail and resumes the run, if nothing but their doing is left.
PERSON_SECONDS = 4 * HOUR
# How long a run whose troubles are over may take, besides its work.
PATIENCE = 12 * HOUR
_BUGS = ("TypeError", "KeyError", "AttributeError", "IndexError", "AssertionError", "NameError")


@dataclass(kw_only=True)
class Universe(World):
    """A world whose machines run the project's code."""

    plan: Plan
    folder: Path
    sees_all: bool = False  # without the shortcuts
    until_broken: bool = False
    bucket: Bucket = field(default_factory=Bucket)
    process: Process = field(default_factory=lambda: Process(name="world"))
    hosts: dict[str, Host] = field(default_factory=dict)
    story: list[tuple[float, str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    facts: Counter[str] = field(default_factory=Counter)
    troubles: list[Happening] = field(default_factory=list)
    slow_boots: list[float] = field(default_factory=list)
    dead_boots: int = 0
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
    idle: float = 0.0  # live seconds of machines since then
    crowded: float = 0.0  # seconds with more than one machine
    ill: set[str] = field(default_factory=set)  # machines that hung, were paused, or died at fault
    ended_at: float = 0.0
    stops: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = self.began = self.moved = BEGIN
        super().__post_init__()
        self.bucket.watch = self._watch

    @property
    def run_id(self) -> str:
        return self.prefix.split("/")[1]

    def tell(self, what: str) -> None:
        self.story.append((CLOCK.now - self.began, what))

    def breaks(self, promise: str, how: str) -> None:
        line = f"{promise}: {how}"
        if sum(each.startswith(promise) for each in self.broken) < 3 and line not in self.broken:
            self.broken.append(line)
            self.tell(f"*** {line}")

    # -- the market and the fleet

    def launch(self, market: Any) -> Machine:
        if self.stopped_at < CLOCK.now < self.stopped_until - MINUTE:
            self.breaks("a person's stop lasts", "a machine starts")
        machine = super().launch(market)
        self.tell(f"{machine.id[-4:]} starts on {market}")
        self.hosts[machine.id] = host = Host(self, machine)
        host.start()
        self._state_change(machine, "running")
        return machine

    def end(self, machine: Machine, why: str, *, saves: bool = False) -> None:
        if machine.ended is not None:
            return
        machine.ended, machine.why = CLOCK.now, why
        self.tell(f"{machine.id[-4:]} ends: {why}")
        host = self.hosts[machine.id]
        had_time = host.owed > 0 and CLOCK.now >= host.owed_until - 1.0
        if had_time and machine.id not in self.ill and not self.was_troubled():
            head = self.head_now
            if self.committed_step < host.owed:
                step = f"{host.owed} after {self.committed_step}"
                self.breaks("a notice loses no step", step)
            if head.get("state") == "running" and head["writer"] == machine.id:
                self.breaks("a notice ends with the lease released", machine.id)
        if saves:
            host.shut_down()
        else:
            host.power_off()
        self._state_change(machine, "terminated")

    def settle(self) -> None:
        """Give a notice to what the fleet no longer wants."""
        for machine in self.live:
            if machine.ends is not None and "notice" not in machine.reported:
                machine.reported["notice"] = 1
                self._take(machine, machine.ends - CLOCK.now, machine.why)

    def _take(self, machine: Machine, seconds: float, why: str) -> None:
        host = self.hosts[machine.id]
        if host.step is not None and seconds > self.plan.answer_seconds:
            host.owed, host.owed_until = host.step, CLOCK.now + seconds
        if seconds:
            host.notice(seconds)
            self._state_change(machine, "notice")
        end = lambda: self.end(machine, why, saves=True)  # noqa: E731
        CLOCK.start(self.process, end, at=CLOCK.now + seconds)

    @property
    def spent_now(self) -> float:
        return sum(map(self._usd_of, self.machines))

    def _usd_of(self, machine: Machine) -> float:
        start, end = machine.launched, machine.ended or CLOCK.now
        if machine.market == "on-demand":
            return (end - start) / HOUR * (ON_DEMAND_USD + VOLUME_USD)
        usd, prices = 0.0, [*self.spot_prices, (math.inf, 0.0)]
        for (since, price), (until, _) in pairwise(prices):
            seconds = max(0.0, min(end, until) - max(start, since))
            usd += seconds / HOUR * (price + VOLUME_USD)
        return usd

    def _fleet(self) -> None:
        """Keep each market's share of the capacity, a while after it lacks a machine."""
        missing: dict[Market, float] = {}
        while True:
            sleep(20)
            self.now, self.has_capacity = CLOCK.now, CLOCK.now >= self.no_capacity_until
            wanted: dict[Market, int] = {
                "on-demand": self.on_demand, "spot": self.target - self.on_demand
            }  # fmt: skip
            for market, count in wanted.items():
                have = [m for m in self.live if m.ends is None and m.market == market]
                is_there = self.has_capacity or market == "on-demand"
                if self.is_cancelled or len(have) >= count or not is_there:
                    missing.pop(market, None)
                elif CLOCK.now - missing.setdefault(market, CLOCK.now) >= self.plan.slow_seconds:
                    del missing[market]
                    self.launch(market)
            self._judge(20.0)

    # -- the Guard, its schedule and its events

    def _schedule(self) -> None:
        while True:
            sleep(CALL_EVERY + CLOCK.luck.uniform(0, MINUTE) - MINUTE / 2)
            if CLOCK.now >= self.guard_off_until:
                self._call(TICK)

    def _state_change(self, machine: Machine, what: str) -> None:
        """EventBridge: mostly within seconds, sometimes late or twice, sometimes never."""
        luck = CLOCK.luck
        chance = luck.random()
        if chance < 0.05 or CLOCK.now < self.guard_off_until:
            return
        delay = luck.uniform(1, 10) if chance < 0.9 else luck.uniform(10, 20 * MINUTE)
        event = {
            "source": "aws.ec2",
            "detail-type": what,
            "detail": {"instance-id": machine.id},
        }
        for _ in range(2 if self.is_twice or luck.random() < 0.05 else 1):
            CLOCK.start(self.process, lambda: self._call(event), at=CLOCK.now + delay)

    def _call(self, event: dict[str, Any], retry: int = 0) -> None:
        process = Process(name="guard", clock_off=CLOCK.luck.uniform(-2, 2))

        def act() -> None:
            before = (self.target, self.is_cancelled)
            self.facts["guard calls"] += 1
            try:
                done = handler.respond(self.guard, event, CLOCK.now + process.clock_off)
                self._heard(done, before)
            except handler.GuardError as failure:
                for action, reason in json.loads(process.said)["done"]:
                    self._heard({"action": action, "reason": reason}, before)
                self._failed(str(failure))
                if retry < len(CALL_RETRIES):
                    again = lambda: self._call(event, retry + 1)  # noqa: E731
                    CLOCK.start(self.process, again, at=CLOCK.now + CALL_RETRIES[retry])
            except (ClientError, BotoCoreError) as failure:
                self.breaks("a call of the Guard raised", f"{type(failure).__name__}: {failure}")
            process.end(0)

        CLOCK.start(process, act)
        CLOCK.start(self.process, process.end, at=CLOCK.now + CALL_LIMIT)

    def _failed(self, why: str) -> None:
        self.facts["guard errors"] += 1
        if any(f": {bug}" in why for bug in _BUGS):
            self.breaks("a bug in the Guard", why)

    def _heard(self, done: dict[str, str], before: tuple[int, bool]) -> None:
        if done["action"] in ("none",):
            return
        self.tell(f"the Guard: {done['action']}: {done['reason']}")
        if "to-zero" in done["action"] or "cancel" in done["action"]:
            self.stops.append((CLOCK.now, done["reason"]))
            self._judge_stop(done["reason"])

    @property
    def guard(self) -> Any:
        plan = self.plan
        return replace(
            SETTINGS,
            fleet_parameter="/TrainingStack/fleet-id",
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
            ) if plan.deadline_hours else None,
        )  # fmt: skip

    # -- what happens to them

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

    def happen(self, each: Happening) -> None:
        live = [one for one in self.live if one.ends is None]
        self.tell(str(each))
        self.facts[each.what] += 1
        act: dict[str, Callable[[], Any]] = {
            "takeback": lambda: [
                self._take(one, each.seconds, SPOTS) for one in live if one.market == "spot"
            ],
            "power off": lambda: [self.end(one, SPOTS) for one in live if one.market == "spot"],
            "no capacity": lambda: self._lose_capacity(each.seconds),
            "price": lambda: self.spot_prices.append((CLOCK.now, each.share * ON_DEMAND_USD)),
            "pause": lambda: [self._pause(one, each.seconds) for one in live],
            "hang": lambda: [self._hang(one, each.share) for one in live],
            "crash": lambda: [self._crash(one) for one in live],
            "failed start": lambda: [self._crash(one, "failed start") for one in live],
            "gpu fault": lambda: [self._crash(one, "gpu fault") for one in live],
            "dead boot": lambda: setattr(self, "dead_boots", self.dead_boots + 1),
            "slow boot": lambda: self.slow_boots.append(each.seconds),
            "guard off": lambda: setattr(self, "guard_off_until", CLOCK.now + each.seconds),
            "guard twice": lambda: setattr(self, "is_twice", True),
            "guard call fails": lambda: self.failing.update({each.how: int(each.share)}),
            "clock": lambda: self._jump(each.share * HOUR),
            "rebalance": lambda: [self.hosts[one.id].recommend_rebalance() for one in live],
            "ledger damaged": lambda: (
                self.bucket.found(self.prefix + GUARD)
                and self.bucket.write(self.prefix + GUARD, b"{")
            ),
            "person stops": lambda: self._stop_and_resume(each.seconds),
            "checkpoints damaged": lambda: self._damage(each.share),
            "head deleted": lambda: self._delete_head(each.seconds),
            "deploy": lambda: setattr(self, "limits", self.limits * each.share),
            "s3": lambda: None,
        }
        act[each.what]()

    def _lose_capacity(self, seconds: float) -> None:
        self.no_capacity_until = CLOCK.now + seconds
        for one in self.live:
            if one.market == "spot" and one.ends is None:
                self._take(one, 120.0, SPOTS)

    def _pause(self, machine: Machine, seconds: float) -> None:
        self.ill.add(machine.id)
        self.hosts[machine.id].is_excused = True
        self.hosts[machine.id].pause(seconds)

    def _hang(self, machine: Machine, share: float) -> None:
        self.ill.add(machine.id)
        self.hosts[machine.id].is_excused = True
        if share < 0.5:
            self.hosts[machine.id].hangs = True
        else:
            self.hosts[machine.id].pause(10 * DAY)

    def _crash(self, machine: Machine, fault: str = "") -> None:
        host = self.hosts[machine.id]
        host.fault, host.is_excused = fault, True
        if host.trainer is not None:
            host.trainer.end(1)

    def _jump(self, seconds: float) -> None:
        self.clock_off = seconds
        for host in self.hosts.values():
            host.process.clock_off = seconds
            if host.trainer is not None:
                host.trainer.clock_off = seconds

    def _damage(self, share: float) -> None:
        """Garbage in the newest of the run's checkpoints, or in all."""
        names = sorted(self.named)
        for name in names[len(names) - math.ceil(share * len(names)) :]:
            for file in self.named[name]["files"]:
                self.bucket.write(
                    self.prefix + checkpoint_prefix(name) + file["name"], b"?" * file["bytes"]
                )

    def _delete_head(self, seconds: float) -> None:
        """A person deletes head.json, and restores its last version later."""
        key = self.prefix + HEAD
        if self.state_now in ("", "finished", "failed"):
            return
        self.bucket.write(key, None)
        for one in self.live:
            self.hosts[one.id].is_excused = True

        def restore() -> None:
            if self.bucket.found(key) is None:
                last = next(v.data for v in reversed(self.bucket.objects[key]) if v.data)
                self.bucket.write(key, last)
                self.tell("a person restores the head")
            self._act(self._resume)

        self.away_until = CLOCK.now + seconds
        CLOCK.start(self.process, restore, at=self.away_until)

    def _act(self, act: Callable[[], None]) -> None:
        """What a person does at a command line of theirs, again until it succeeds."""
        while True:
            try:
                return act()
            except (ClientError, BotoCoreError):
                sleep(MINUTE)

    def _stop_and_resume(self, seconds: float) -> None:
        """As `runs stop` and `runs resume` do (operate/control.py)."""
        if self.state_now in ("finished", "failed") or self.is_cancelled:
            return
        self.away_until = self.stopped_until = CLOCK.now + seconds
        fleet = StackFleet.of(self.fleet_id)

        def stop() -> None:
            fleet.send_to_zero()
            for one in instances_of_stack(self.guard):
                if one.is_live and one.is_on_demand:
                    one.terminate()

        self._act(stop)
        self.stopped_at = CLOCK.now
        sleep(max(0.0, self.away_until - CLOCK.now))
        self._act(self._resume)

    def _resume(self) -> None:
        fleet = StackFleet.of(self.fleet_id)
        is_over = self.state_now in ("finished", "failed") or self.is_cancelled
        if not is_over and not fleet.read_capacity()[0]:
            fleet.set_capacity(1, 0)
            self.stopped_until = 0.0
            self.tell("a person resumes the run")

    def _person(self) -> None:
        """Resume a run that was stopped for what has passed, within its limits."""
        while True:
            sleep(PERSON_SECONDS)
            is_at_zero = self.target == 0 and CLOCK.now > self.away_until
            if is_at_zero and self.stops and "max_" not in self.stops[-1][1]:
                self._act(self._resume)

    # -- the promises

    @property
    def head_now(self) -> dict[str, Any]:
        found = self.bucket.found(self.prefix + HEAD)
        return json.loads(found.data) if found and found.data else {}

    @property
    def state_now(self) -> str:
        return str(self.head_now.get("state", ""))

    def has_progressed(self, machine: Machine, what: str) -> None:
        machine.progressed = CLOCK.now

    def _watch(self, key: str, data: bytes | None) -> None:
        """Each change of an object, as S3 has it."""
        name = key[len(self.prefix) :]
        if name == HEAD:
            if data is None:
                return
            found = self.bucket.objects[key]
            if self._num_heads != len(found):
                self._num_heads = len(found)
                self._new_head(json.loads(data))
        elif data is None and name.startswith(CHECKPOINTS):
            checkpoint = name[len(CHECKPOINTS) :].partition("/")[0]
            if checkpoint in self.named:
                self.breaks("a file was deleted that the head names", name)

    _num_heads: int = 0

    def _new_head(self, head: dict[str, Any]) -> None:
        self.named = {each["name"]: each for each in head["checkpoints"]}
        step = max((each["step"] for each in head["checkpoints"]), default=0)
        for name, entry in self.named.items():
            for file in entry["files"]:
                where = self.prefix + checkpoint_prefix(name) + file["name"]
                if self.bucket.found(where) is None:
                    self.breaks("the head names a file that is not there", where)
        if step < self.committed_step and self.facts["checkpoints damaged"]:
            self.committed_step = step  # what is lost now has a reason
        if step < self.committed_step:
            self.breaks("a commit was lost", f"step {step} after {self.committed_step}")
        if step > self.committed_step:
            self.committed_step, self.moved, self.idle = step, CLOCK.now, 0.0
            self.facts["commits"] += 1
        if head["state"] in ("finished", "failed") and not self.ended_at:
            self.ended_at = CLOCK.now
            self.tell(f"the run is {head['state']}")

    def _judge(self, seconds: float) -> None:
        """What must never be, looked at all the time."""
        live = self.live
        self.idle += seconds * bool(live)
        self.crowded = self.crowded + seconds if len(live) > 1 and not self.was_unguarded else 0.0
        if self.crowded > 2 * HOUR:
            self.breaks("one machine is enough", f"{len(live)} for two hours")
        if self.idle > DAY + self.plan.work_seconds / self.plan.steps * 2:
            self.breaks("no livelock", "a day of machines without a commit")
            self.idle = 0.0
        if (
            live
            and self.ended_at
            and CLOCK.now - max(self.ended_at, self.guard_off_until, self._guard_blind_until) > HOUR
        ):
            self.breaks("nothing is paid an hour after the end", f"{live[0].id} lives")

    @property
    def _guard_blind_until(self) -> float:
        ends = [
            self.began + each.at + each.seconds
            for each in self.troubles
            if each.whose in ("all", "guard") and self.began + each.at <= CLOCK.now
        ]
        return max(ends, default=0.0)

    def _judge_stop(self, reason: str) -> None:
        """Whether the world knows why."""
        settings, live = (
            self.guard,
            [
                each
                for each in self.machines
                if each.is_live or (each.ended and CLOCK.now - each.ended < 5 * MINUTE)
            ],
        )
        hours = sum((m.ended or CLOCK.now) - m.launched for m in self.machines) / HOUR
        slack = 0.35 + 2 * len(self.machines) / 60
        healthy = [
            each.id for each in live
            if each.id not in self.ill and CLOCK.now - each.progressed < SILENCE - 11 * MINUTE
            and each.progressed
        ]  # fmt: skip
        known = {
            "no heartbeat": not healthy,
            "the run is": self.state_now in ("finished", "failed"),
            "hours billed": hours > settings.max_billed_hours - slack or self.was_unguarded,
            "max_usd": self.spent_now > settings.max_usd - slack * 2 * ON_DEMAND_USD,
            "no instance for": CLOCK.now - self.moved > 23 * HOUR,
            "attempts in a row": sum(
                m.why == "Client.UserInitiatedShutdown" for m in self.machines[-3:]
            ) >= 2 or len(self.ill) >= 2,
        }  # fmt: skip
        for words, is_known in known.items():
            if words in reason:
                if not is_known:
                    self.breaks("a healthy run was stopped", reason)
                return

    def judge_end(self) -> None:
        """What must hold once all is over."""
        head = self.head_now
        state, stopped = head.get("state", ""), bool(self.stops) and "max_" in self.stops[-1][1]
        if state != "finished" and not stopped:
            why = head.get("reason") or f"at step {self.committed_step} of {self.plan.steps}"
            self.breaks("a run within its limits ends finished", f"{state or 'no head'}, {why}")
        if state == "finished" and self.committed_step != self.plan.steps:
            self.breaks("all steps are done", f"{self.committed_step} of {self.plan.steps}")
        if self.live:
            self.breaks("nothing runs in the end", ", ".join(each.id for each in self.live))
        if head:
            unguarded = ("within-limits", "nothing-after-the-end") * self.was_unguarded
            for line in broken_rules(trace_of(self.bucket, self.prefix))[:4]:
                if not line.startswith(unguarded):
                    self.breaks("verify", line)
        self._judge_bill()
        most = self.plan.max_usd * self.limits
        is_known = not (self.was_unguarded or self.facts["deploy"])
        if most and is_known and self.spent_now > 1.02 * most + 0.05:
            self.breaks("max_usd holds", f"${self.spent_now:.2f} of ${most:.2f}")
        if state == "finished" and self.plan.is_calm:
            hours = sum((m.ended or CLOCK.now) - m.launched for m in self.machines) / HOUR
            most = self.plan.most_hours(len(self.machines))
            if hours > most:
                self.breaks(
                    "an interruption costs what was planned", f"{hours:.1f} h of {most:.1f}"
                )
        first = min((each.launched for each in self.machines), default=0.0)
        hours = (self.ended_at - first) / HOUR
        if self.plan.is_deadline_fair and state == "finished" and hours > self.plan.deadline_hours:
            late = f"{hours:.1f} h of {self.plan.deadline_hours:.1f}"
            self.breaks("a deadline is kept", late)

    def was_troubled(self, seconds: float = 0.0) -> bool:
        """Whether S3 is, or shortly was, in trouble for machines, for longer than `seconds`."""
        now = CLOCK.now - self.began
        since = [
            now - each.at - each.seconds
            for each in self.troubles
            if each.seconds > seconds and each.whose != "guard" and each.at <= now
        ]
        return min(since, default=math.inf) < 20 * MINUTE

    @property
    def was_unguarded(self) -> bool:
        """Whether the Guard was not called, or could not read, for a while."""
        of_guard = any(each.whose in ("all", "guard") for each in self.troubles)
        return of_guard or self.facts["guard off"] > 0

    def _judge_bill(self) -> None:
        found = self.bucket.found(self.prefix + GUARD)
        if not found or not found.data or self.facts["ledger damaged"] or self.was_unguarded:
            return  # a machine may have come and gone unseen
        attempts = json.loads(found.data).get("attempts", {})
        billed, spent = sum(each["usd"] for each in attempts.values()), self.spent_now
        # EC2's model says no time of an end: it counts from when it is seen.
        most = len(self.machines) * (CALL_EVERY + 5 * MINUTE) / HOUR * (ON_DEMAND_USD + VOLUME_USD)
        if not spent * 0.99 - 0.02 <= billed <= spent * 1.01 + most:
            self.breaks("the ledger bills what was spent", f"${billed:.2f} of ${spent:.2f}")

    # -- a life

    def live_on(self, limit: float) -> None:
        """From the deploy to the end of all."""
        for act in (self._fleet, self._schedule, self._person):
            CLOCK.start(self.process, act)
        for each in self.plan.happenings:
            CLOCK.start(self.process, lambda each=each: self.happen(each), at=self.began + each.at)
        while CLOCK.now < limit and not (self.until_broken and self.broken):
            CLOCK.run(min(limit, CLOCK.now + HOUR))
            self.now = CLOCK.now
            if self.ended_at and not self.live and CLOCK.now > self.ended_at + HOUR:
                return
            is_stopped = bool(self.stops) and "max_" in self.stops[-1][1] and not self.live
            if is_stopped and CLOCK.now > self.stops[-1][0] + HOUR:
                return
