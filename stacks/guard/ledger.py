"""The Guard's ledger: what must outlive an instance and a call (billed hours, attempts, words).

Pure: stacks/guard/records.py keeps it as <run>/guard.json. Times are seconds since 1970.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from stacks.guard.fleet import ON_DEMAND, SPOT, StackInstance
from stacks.guard.settings import GuardSettings

# 2: sizes, markets and prices of attempts; what to do once and what to tell.
FORMAT = 2


@dataclass(kw_only=True, slots=True)
class MachineAttempt:
    """What the Guard saw of one instance of the run."""

    launched: float
    seen: float
    is_live: bool
    # Empty where format 1 did not write them and EC2 no longer lists the instance.
    size: str = ""
    market: str = ""
    usd_per_hour: float = 0.0
    # Its newest event machine-failed: when, and what it said.
    failed: float = 0.0
    said: str = ""
    # By Spot, or by the Guard for a machine of the other market: nothing that it did.
    is_taken_back: bool = False

    @property
    def hours(self) -> float:
        """From launch to end."""
        return max(0.0, self.seen - self.launched) / 3600

    @property
    def usd(self) -> float:
        """At the price of its size and market when it was first seen."""
        return self.hours * self.usd_per_hour


@dataclass(kw_only=True, slots=True)
class Note:
    """Something to tell as an event of the run, a mail, or both: `ways` are those still to go."""

    key: str
    time: float
    name: str
    headline: str
    lines: list[str]
    fields: dict[str, Any]
    ways: list[str]
    about: str = ""  # an instance, if it is about one


@dataclass(kw_only=True, slots=True)
class Ledger:
    """All attempts of the run, including instances that EC2 no longer lists (after an hour)."""

    attempts: dict[str, MachineAttempt] = field(default_factory=dict)
    # The start of the present series of attempts: the Guard's last stop, or the end of the run.
    stopped: float = 0.0
    # The newest commit so far: `reopen --from-checkpoint` leaves only older ones in the head.
    committed: float = 0.0
    # Since when the fleet has wanted an instance and had none; 0 while that is not so.
    waiting: float = 0.0
    # Since when each fleet has not been above zero.
    at_zero: dict[str, float] = field(default_factory=dict)
    # Since when an on-demand instance has not been wanted any more.
    unwanted: dict[str, float] = field(default_factory=dict)
    # Until when the run's events have been read.
    events_read: float = 0.0
    # What was done once, and when: of two calls at the same time, one finds it here.
    done: dict[str, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    # What the market decision keeps between calls.
    market: dict[str, Any] = field(default_factory=dict)

    def observe(
        self, settings: GuardSettings, instances: Iterable[StackInstance], now: float
    ) -> None:
        """Bring the attempts up to date with what EC2 says about the run's instances."""
        live = set()
        for instance in instances:
            known = self.attempts.get(instance.id)
            if known is None:
                known = MachineAttempt(launched=instance.launched, seen=now, is_live=True)
                self.attempts[instance.id] = known
            known.size, known.market = instance.size, instance.market
            known.is_taken_back |= instance.is_taken_back
            if instance.is_live:
                live.add(instance.id)
        for instance_id, attempt in self.attempts.items():
            # The end counts from when it is first seen, at most one schedule interval too late.
            if attempt.is_live:
                attempt.seen = now
            attempt.is_live = instance_id in live
            if not attempt.usd_per_hour:
                price = settings.usd_per_hour(attempt.size, attempt.market or SPOT)
                attempt.usd_per_hour = price

    def observe_fleets(self, capacity: Mapping[str, int], own: str | None, now: float) -> None:
        """Note since when fleets are at zero, and since when the run waits for an instance."""
        self.at_zero = {
            fleet_id: self.at_zero.get(fleet_id, now)
            for fleet_id in {*self.at_zero, *capacity}
            if capacity.get(fleet_id, 0) == 0
        }
        if own is None or own not in capacity:
            return
        if capacity[own] == 0 or any(each.is_live for each in self.attempts.values()):
            self.waiting = 0.0
            return
        ends = [each.seen for each in self.attempts.values() if each.launched > self.waiting]
        # An instance that came and went between two calls begins a new wait.
        self.waiting = max(ends) if self.waiting and ends else self.waiting or now

    def hear(self, failures: Iterable[tuple[str, float, str]], now: float) -> None:
        """Keep the newest words of machines that failed, from events read until now."""
        self.events_read = now
        for instance_id, when, said in failures:
            attempt = self.attempts.get(instance_id)
            if attempt is not None and when > attempt.failed:
                attempt.failed, attempt.said = when, said

    def take_back(self, instance_ids: Iterable[str]) -> None:
        """Note that the Guard ends these for machines of the other market."""
        for instance_id in instance_ids:
            if instance_id in self.attempts:
                self.attempts[instance_id].is_taken_back = True

    def billed_hours(self) -> float:
        """Hours from launch to end, over all attempts."""
        return sum(each.hours for each in self.attempts.values())

    def billed_usd(self) -> float:
        """Dollars of these hours."""
        return sum(each.usd for each in self.attempts.values())

    def barren_attempts(self) -> dict[str, MachineAttempt]:
        """Return the attempts since the last commit and the last stop that ended by themselves."""
        since = max(self.committed, self.stopped)
        return {
            name: each
            for name, each in self.attempts.items()
            if not (each.is_live or each.is_taken_back) and each.launched > since
        }

    def claim(self, key: str, now: float, *, again_after: float = math.inf) -> bool:
        """Return whether `key` is still to be done, and note that it is done now."""
        if now - self.done.get(key, -math.inf) < again_after:
            return False
        self.done[key] = now
        return True

    def to_json(self) -> bytes:
        """Return guard.json; `billed` is for readers and is not read back."""
        billed = {
            market: {
                "hours": round(sum(each.hours for each in attempts), 4),
                "usd": round(sum(each.usd for each in attempts), 4),
            }
            for market in (SPOT, ON_DEMAND)
            if (attempts := [each for each in self.attempts.values() if each.market == market])
        }
        return json.dumps({"format": FORMAT, "billed": billed, **asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Ledger":
        """Read guard.json of this or an older format; names of a newer one are passed over."""
        document = _known(cls, json.loads(data))
        attempts = document.pop("attempts", {})
        notes = document.pop("notes", [])
        return cls(
            attempts={
                name: MachineAttempt(**_known(MachineAttempt, each))
                for name, each in attempts.items()
            },
            notes=[Note(**_known(Note, each)) for each in notes],
            **document,
        )


def _known(kind: type, document: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in document.items() if name in names}
