"""A run's stack: its fleet on the market, and the Guard's calls by its schedule and by events.

The fleet, EC2 and their answers are those of the Guard's model (tests/stacks/guard/world.py); here
its machines run, its objects lie in a bucket with troubles, and the Guard's calls take time.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from contract.stack_names import ON_DEMAND_GROUP
from stacks.guard import handler
from tests.simulation.clock import CLOCK, Process, sleep
from tests.simulation.machine import Attempt, Host
from tests.simulation.pools import open_pools
from tests.simulation.programs import ProgramAttempt
from tests.simulation.promises import CALL_EVERY, Promised
from tests.simulation.ranks import RankedHost
from tests.simulation.versions import OLDER
from tests.stacks.guard.model import TICK
from tests.stacks.guard.world import (
    FLEETS,
    MINUTE,
    Machine,
    Market,
)

CALL_LIMIT, CALL_RETRIES = 180.0, (60.0, 120.0)
_BUGS = ("TypeError", "KeyError", "AttributeError", "IndexError", "AssertionError", "NameError")


def fleet_of(machine: Machine) -> str:
    """Return the fleet that a machine's tags name."""
    tags = (value for name, value in machine.tags.items() if name.startswith("aws:"))
    return next(tags, "").removesuffix(ON_DEMAND_GROUP)


@dataclass(kw_only=True)
class Stack(Promised):
    """A world whose machines run the project's code, and whose Guard is called."""

    fleets: dict[str, str] = field(default_factory=dict)  # of machines

    @property
    def fleet_id(self) -> str:
        number = self.run_id.removeprefix("run-")
        return f"sfr-{number}" if self.kind == "spot" else f"{self.stack_name}-{self.run_id}"

    def owns(self, name: str) -> bool:
        """Whether a fleet, a group, a machine or a parameter is this stack's."""
        is_fleet = name.removesuffix(ON_DEMAND_GROUP) == self.fleet_id
        is_parameter = name == f"/{self.stack_name}/fleet-id"
        return is_fleet or is_parameter or any(each.id == name for each in self.machines)

    # -- the market and the fleet

    def launch(self, market: Any) -> Machine:
        if self.stopped_at < CLOCK.now < self.stopped_until - MINUTE:
            self.breaks("a person's stop lasts", "a machine starts")
        machine = super().launch(market)
        number = self.account.worlds.index(self)
        machine.id = f"i-{number:014x}{len(self.machines) - 1:03x}"
        machine.tags["Stack"] = self.stack_name
        for tag, fleet in machine.tags.items():
            if tag.startswith("aws:"):
                own = FLEETS[self.kind][0]
                machine.tags[tag] = fleet.replace(own, self.fleet_id)
        self.fleets[machine.id] = fleet_of(machine)
        self.tell(f"{machine.id[-4:]} starts on {market}")
        if self.has_pools:
            self.zones[machine.id] = CLOCK.luck.choice(open_pools(self, market))
        kind = RankedHost if self.plan.has_engine else Host
        self.hosts[machine.id] = host = kind(self, machine)  # type: ignore[arg-type]
        host.attempt = ProgramAttempt if self.plan.program else Attempt
        host.start()
        self._state_change(machine, "running")
        return machine

    def end(self, machine: Machine, why: str, *, saves: bool = False) -> None:
        if machine.ended is not None:
            return
        machine.ended, machine.why = CLOCK.now, why
        self.tell(f"{machine.id[-4:]} ends: {why}")
        self.facts["ended in trouble"] += self.was_troubled()
        host = self.hosts[machine.id]
        had_time = host.owed > 0 and CLOCK.now >= host.owed_until - 1.0
        if had_time and machine.id not in self.ill and not self.was_troubled():
            head = self.head_now
            is_spoilt = self.record and self.record.spoilt & self.named.keys()
            if self.committed_step < host.owed and not is_spoilt:
                step = f"{host.owed} after {self.committed_step}"
                self.breaks("a notice loses no step", step)
            # By a wrong clock a notice's end is known as late as a poll heard of it.
            is_on_time = abs(host.process.clock_off) < MINUTE
            is_held = head.get("state") == "running" and head["writer"] == machine.id
            if is_on_time and is_held:
                self.breaks("a notice ends with the lease released", machine.id)
        if saves:
            host.shut_down()
        else:
            host.power_off()
        self._state_change(machine, "terminated")

    def settle(self) -> None:
        """Give a notice to what the fleet no longer wants."""
        for machine in self.paid:
            if machine.ends is not None and "notice" not in machine.reported:
                machine.reported["notice"] = 1
                self._take(machine, machine.ends - CLOCK.now, machine.why)

    def _take(self, machine: Machine, seconds: float, why: str) -> None:
        host = self.hosts[machine.id]
        if host.is_noticed:  # a notice keeps its time
            return
        host.is_noticed, host.told_seconds = True, seconds
        # Without a head there is nothing that a commit could be written to.
        has_time = seconds > self.plan.answer_seconds and not host.seems_to_save
        if host.step is not None and self.head_now and has_time:
            host.owed, host.owed_until = host.step, CLOCK.now + seconds
        if seconds:
            host.notice(seconds)
            self._state_change(machine, "notice")
        end = lambda: self.end(machine, why, saves=True)  # noqa: E731
        CLOCK.start(self.process, end, at=CLOCK.now + seconds)

    def _fleet(self) -> None:
        """Keep each market's share of the capacity, a while after it lacks a machine."""
        missing: dict[Market, float] = {}
        while True:
            sleep(20)
            self.now, self.has_capacity = CLOCK.now, CLOCK.now >= self.no_capacity_until
            wanted: dict[Market, int] = {
                "on-demand": self.on_demand, "spot": self.target - self.on_demand
            }  # fmt: skip
            live = self.live
            for market, count in wanted.items():
                have = [m for m in live if m.ends is None and m.market == market]
                if self.is_cancelled or len(have) >= count or not self._has_room(market):
                    missing.pop(market, None)
                elif CLOCK.now - missing.setdefault(market, CLOCK.now) >= self.plan.slow_seconds:
                    del missing[market]
                    self.launch(market)
            self._judge(20.0)

    def _has_room(self, market: Market) -> bool:
        is_there = self.has_capacity or market == "on-demand"
        return is_there and (not self.has_pools or bool(open_pools(self, market)))

    # -- the Guard, its schedule and its events

    def _schedule(self) -> None:
        while True:
            sleep(CALL_EVERY + CLOCK.luck.uniform(0, MINUTE) - MINUTE / 2)
            if CLOCK.now >= self.guard_off_until:
                self.called(TICK)

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
            for world in self.account.worlds:  # each rule hears of all of the account's machines
                call = lambda world=world: world.called(event)  # noqa: E731
                CLOCK.start(world.process, call, at=CLOCK.now + delay)

    def called(self, event: dict[str, Any], retry: int = 0) -> None:
        if self.is_away:
            return
        clock_off, version = CLOCK.luck.uniform(-2, 2), self.guard_version
        process = Process(name="guard", clock_off=clock_off, supervisor=self, version=version)

        def act() -> None:
            before = (self.target, self.is_cancelled, CLOCK.now)
            self.facts["guard calls"] += 1
            try:
                done = handler.respond(self.guard, event, CLOCK.now + process.clock_off)
                self._heard(done, before)
            except handler.GuardError as failure:
                for action, reason in json.loads(process.said)["done"]:
                    self._heard({"action": action, "reason": reason}, before)
                self._failed(str(failure))
                if retry < len(CALL_RETRIES):
                    again = lambda: self.called(event, retry + 1)  # noqa: E731
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

    def _heard(self, done: dict[str, str], before: tuple[int, bool, float]) -> None:
        if done["action"] in ("none",):
            return
        self.tell(f"the Guard: {done['action']}: {done['reason']}")
        if "to-zero" in done["action"] or "cancel" in done["action"]:
            self.stops.append((CLOCK.now, done["reason"]))
            # The older one had faults of its own, but reads what the newer one keeps.
            if CLOCK.process.version != OLDER or "can be read" in done["reason"]:
                self._judge_stop(done["reason"], before[2])
