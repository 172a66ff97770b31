"""A run's whole life: what happens to its stack and machines, and what persons do about it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from contract.keys import GUARD, HEAD, blob_key, checkpoint_prefix
from stacks.guard.fleet import StackFleet, instances_of_stack
from tests.simulation.clock import CLOCK, sleep
from tests.simulation.deploys import Deployed
from tests.simulation.plan import DAY, Happening
from tests.simulation.ranks import diverge, happen_to_rank
from tests.stacks.guard.world import (
    HOUR,
    MINUTE,
    ON_DEMAND_USD,
    SPOTS,
    Machine,
)

# A person reads the mail and resumes the run, if nothing but their doing is left.
PERSON_SECONDS = 4 * HOUR
# How long a run whose troubles are over may take, besides its work.
PATIENCE = 12 * HOUR


@dataclass(kw_only=True)
class Universe(Deployed):
    """A stack to which things happen."""

    heeded: int = 0  # mails of machines that gave the run up

    # -- what happens to them

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
            "dead boot": lambda: self.dead_boots.append(each.how),
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
            "budget damaged": self.account.damage,
            "new version": lambda: self.deploy(each),
            "s3": lambda: None,
            "diverge": lambda: [diverge(self.hosts[one.id], each) for one in live],
            "rank": lambda: [happen_to_rank(self.hosts[one.id], each) for one in live],
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
            self.hung[machine.id] = CLOCK.now
            self.hosts[machine.id].pause(10 * DAY)

    def _crash(self, machine: Machine, fault: str = "") -> None:
        host = self.hosts[machine.id]
        host.fault, host.is_excused, host.owed = fault, True, 0  # nobody is left to answer a notice
        if host.trainer is not None:
            program = host.trainer.program
            if program is not None and not fault and CLOCK.luck.random() < 0.5:
                program.kill()
            else:
                host.trainer.end(1)

    def _jump(self, seconds: float) -> None:
        self.clock_off = seconds
        for host in self.hosts.values():
            for process in host.processes:
                process.clock_off = seconds

    def _damage(self, share: float) -> None:
        """Garbage in the newest of the run's checkpoints, or in all."""
        names = sorted(self.named)
        for name in names[len(names) - math.ceil(share * len(names)) :]:
            prefix = checkpoint_prefix(name)
            keys = [prefix + file["name"] for file in self.named[name]["files"]]
            if self.record and CLOCK.luck.random() < 0.5:  # some of what it names
                blobs = sorted(self.record.needs.get(name, ()))
                keys = [blob_key(blob) for blob in blobs if CLOCK.luck.random() < 0.5]
            for key in (self.prefix + key for key in keys):
                if found := self.bucket.found(key):
                    self.damaged.add(name)
                    self.bucket.write(key, b"?" * len(found.data or b""))

    def _delete_head(self, seconds: float) -> None:
        """A person deletes head.json, and later deletes its delete marker, as the Guard advises."""
        key = self.prefix + HEAD
        if self.state_now in ("", "finished", "failed"):
            return
        self.bucket.write(key, None)
        for one in self.paid:
            self.hosts[one.id].is_excused, self.hosts[one.id].owed = True, 0

        def restore() -> None:
            if self.bucket.found(key) is None:
                versions = self.bucket.objects[key]
                while versions[-1].data is None:
                    del versions[-1]
                self.bucket.watch(key, versions[-1].data)
                self.tell("a person restores the head")
                self.restored_at = CLOCK.now
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
        self.away_until = CLOCK.now + seconds
        fleet = StackFleet.of(self.fleet_id)

        def stop() -> None:
            fleet.send_to_zero()
            for one in instances_of_stack(self.guard):
                if one.is_live and one.is_on_demand:
                    one.terminate()

        began = CLOCK.now
        self._act(stop)
        # Else a deploy, or somebody who resumes it, has started it anew meanwhile.
        if max(self.deployed_at, self.resumed_at) < began:
            self.stopped_at, self.stopped_until = CLOCK.now, self.away_until
        sleep(max(0.0, self.away_until - CLOCK.now))
        self._act(self._resume)

    def _resume(self) -> None:
        fleet = StackFleet.of(self.fleet_id)
        is_over = self.state_now in ("finished", "failed") or self.is_cancelled
        if not is_over and not fleet.read_capacity()[0]:
            fleet.set_capacity(1, 0)
            self.stopped_until, self.resumed_at = 0.0, CLOCK.now
            self.resumes += 1
            self.tell("a person resumes the run")

    def _person(self) -> None:
        """Resume a run that was stopped for what has passed, within its limits."""
        while True:
            sleep(PERSON_SECONDS)
            if self.always_crashes:
                return
            is_at_zero = self.target == 0 and CLOCK.now > self.away_until
            given_up = sum("gave the run up" in mail for mail in self.mails)
            if is_at_zero and given_up > self.heeded and not self.trainer_version:
                self.heeded = given_up
                self._act(self._resume)
            known = {reason for _, reason in self.stops}
            for mail in self.mails:  # of a call that ended before it could return this
                how, _, reason = mail.partition("\n")[0].partition(": ")
                if how == "Fleet to zero" and not any(reason in each for each in known):
                    self.stops.append((CLOCK.now, reason))
            if is_at_zero and self.stops and not self.is_at_a_limit:
                when, reason = self.stops[-1]
                if "the budget" not in reason or self.account.has_room_since(when):
                    self._act(self._resume)

    # -- a life

    def begin(self) -> None:
        """Deploy it."""
        for act in (self._fleet, self._schedule, self._person):
            CLOCK.start(self.process, act)
        for each in self.plan.happenings:
            CLOCK.start(self.process, lambda each=each: self.happen(each), at=self.began + each.at)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to come, for an hour."""
        last = self.stops[-1][0] if self.is_at_a_limit else math.inf
        return not self.paid and CLOCK.now > min(self.ended_at or math.inf, last) + HOUR
