"""The Guard's ledger: what must outlive an instance and a call (billed hours, attempts, notes).

Pure: stacks/guard/records.py keeps it as <run>/guard.json. Times are seconds since 1970.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from stacks.guard.fleet import ON_DEMAND, SPOT, SpotPrices, StackInstance
from stacks.guard.settings import GuardSettings

# 2: sizes, markets and prices of attempts; what was done once, and notes to send.
FORMAT = 2
# EC2 lists an instance at least this long after its end.
LISTED_SECONDS = 3600.0


@dataclass(kw_only=True, slots=True)
class MachineAttempt:
    """The Guard's observations of one instance of the run."""

    launched: float
    seen: float
    is_live: bool
    # Empty where format 1 did not write them and EC2 no longer lists the instance.
    size: str = ""
    market: str = ""
    usd_per_hour: float = 0.0  # at the last call, with volumes and address
    usd: float = 0.0
    # Its newest event machine-failed: when, and its message.
    failed: float = 0.0
    said: str = ""
    # The most that each step of its boot has got done, and when a call last saw it grow.
    progress: dict[str, int] = field(default_factory=dict)
    advanced: float = 0.0
    # By Spot, or by the Guard for a machine of the other market: not its own fault.
    is_taken_back: bool = False
    is_lost: bool = False  # by Spot
    zone: str = ""
    waited: float = 0.0  # seconds for which the run had wanted a machine

    @property
    def hours(self) -> float:
        """Hours from launch to end."""
        return max(0.0, self.seen - self.launched) / 3600

    def bill(self, until: float, prices: Sequence[tuple[float, float]]) -> None:
        """Bill the time since it was last seen, each hour at its price; the first is the oldest."""
        self.usd_per_hour = prices[-1][1]
        until = max(self.seen, until)
        whens = (min(max(when, self.seen), until) for when, _ in prices[1:])
        for (start, end), (_, usd) in zip(
            pairwise([self.seen, *whens, until]), prices, strict=True
        ):
            self.usd += (end - start) / 3600 * usd
        self.seen = until


@dataclass(kw_only=True, slots=True)
class Note:
    """A message to send as an event of the run, a mail or both; `ways` are those still to send."""

    key: str
    time: float
    name: str
    headline: str
    lines: list[str]
    fields: dict[str, Any]
    ways: list[str]
    about: str = ""  # an instance, if it is about one
    awaits: str = ""  # a fleet: it is sent once that is seen at zero


@dataclass(kw_only=True, slots=True)
class Ledger:
    """All attempts of the run, including instances that EC2 no longer lists (after an hour)."""

    attempts: dict[str, MachineAttempt] = field(default_factory=dict)
    # The start of the present series of attempts: the Guard's last stop, the end of the run, of a
    # time in which no call read the head (what kept S3 from the Guard may have failed them), or of
    # one at zero: a stop may not have been kept.
    stopped: float = 0.0
    # The newest commit so far: `reopen --from-checkpoint` leaves only older ones in the head.
    committed: float = 0.0
    # When the head was last seen: a machine launched before that had a head to lose.
    head_seen: float = 0.0
    # When a call last read the head, and the first that did after a time too long to call silence.
    looked: float = 0.0
    blind_until: float = 0.0
    # Since when the fleet has wanted an instance and had none; otherwise 0.
    waiting: float = 0.0
    # Since when each fleet has not been above zero.
    at_zero: dict[str, float] = field(default_factory=dict)
    # Since when each on-demand instance has been unwanted.
    unwanted: dict[str, float] = field(default_factory=dict)
    # Until when the run's events have been read.
    events_read: float = 0.0
    # What was done once, and when: the later of two concurrent calls finds it here.
    done: dict[str, float] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    # What the market decision keeps between calls.
    market: dict[str, Any] = field(default_factory=dict)
    # The pools that rest, in which the fleet requests no machine.
    resting: list[str] = field(default_factory=list)
    # Dollars by the day, in UTC, of the call that billed them: what a budget of several runs asks.
    by_day: dict[str, float] = field(default_factory=dict)
    # The most generous so far, for `runs verify`: dollars and hours (0: none), seconds of a tick.
    limits: dict[str, float] = field(default_factory=dict)

    def observe(
        self,
        settings: GuardSettings,
        instances: Iterable[StackInstance],
        now: float,
        spot_prices: SpotPrices = MappingProxyType({}),
        heard: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Bring the attempts up to date with what EC2 says about the run's instances.

        `spot_prices` are those of the last day. Where one is unknown, the machine's last one
        counts, or else the on-demand list price, which Spot never exceeds. `heard` says when a
        machine last wrote the head.
        """
        before, day = self.billed_usd(), datetime.fromtimestamp(now, UTC).date().isoformat()
        found = {instance.id: instance for instance in instances}
        for instance in found.values():
            if instance.id not in self.attempts:
                self.attempts[instance.id] = MachineAttempt(
                    launched=instance.launched, seen=instance.launched, is_live=True,
                    waited=max(0.0, instance.launched - (self.waiting or instance.launched)),
                )  # fmt: skip
            known = self.attempts[instance.id]
            known.size, known.market, known.zone = instance.size, instance.market, instance.zone_id
            known.is_taken_back |= instance.is_taken_back
            known.is_lost |= instance.is_taken_back
            if not known.said and instance.ended_by:
                known.said = f"no event machine-failed; EC2 says: {instance.ended_by}"
        for instance_id, attempt in self.attempts.items():
            if attempt.seen > now:
                continue  # a call that began later has looked, and may know more
            one = found.get(instance_id)
            if not attempt.usd_per_hour and attempt.hours:  # format 1 had no prices
                attempt.usd = attempt.hours * settings.usd_per_hour(attempt.size, ON_DEMAND)
            # Without a time of EC2's, the end counts from when it is first seen.
            until = min(now, one.ended) if one is not None and one.ended else now
            if one is None:
                until = self.may_run_until(instance_id, settings, now, heard)
            if attempt.is_live:
                # EC2 has forgotten it since the last call that could keep anything: why it ended
                # is not known, so it is held against nobody.
                attempt.is_taken_back |= one is None and now - attempt.seen > LISTED_SECONDS
                more = settings.storage_usd_per_hour
                most = settings.usd_per_hour(attempt.size, ON_DEMAND) + more
                prices = [(0.0, most)]
                if attempt.market == SPOT:
                    pool = spot_prices.get((one.size, one.zone), ()) if one is not None else ()
                    prices = [(when, min(most, usd + more)) for when, usd in pool]
                attempt.bill(until, prices or [(0.0, attempt.usd_per_hour or most)])
            attempt.is_live = one is not None and one.is_live
        if more_usd := self.billed_usd() - before:
            self.by_day[day] = self.by_day.get(day, 0.0) + more_usd

    def may_run_until(
        self, name: str, settings: GuardSettings, now: float, heard: Mapping[str, float]
    ) -> float:
        """Return until when a machine may have run of which EC2 says nothing.

        After a time in which no call looked, its stack was gone or another run's: what was heard of
        it counts.
        """
        seen = self.attempts[name].seen
        looked = 0.0 if seen < self.blind_until else self.looked
        return min(now, max(seen, looked, heard.get(name, 0.0)) + settings.tick_seconds)

    def note_progress(self, found: Mapping[str, tuple[str, int] | None], now: float) -> None:
        """Note which machines have got further than ever since an earlier call.

        Times are those of calls: no clock of a machine counts.
        """
        for instance_id, (step, done) in ((name, each) for name, each in found.items() if each):
            if (attempt := self.attempts.get(instance_id)) is None:
                continue
            if done > attempt.progress.get(step, 0):
                attempt.progress[step], attempt.advanced = done, max(attempt.advanced, now)

    def unheard(self, instance_id: str, now: float) -> float:
        """Return for how long a machine of the run has lived without a word from its boot."""
        attempt = self.attempts.get(instance_id)
        if attempt is None or attempt.progress or attempt.failed:
            return 0.0
        return now - max(attempt.launched, self.blind_until, self.stopped)

    def note_limits(self, settings: GuardSettings) -> None:
        """Keep the limits beside the run: its stack may be gone when somebody asks."""
        hours, seconds = settings.max_billed_hours, settings.tick_seconds
        # What was billed while no Guard kept limits, they allowed.
        billed = {"usd": self.billed_usd(), "hours": self.billed_hours(), "seconds": 0.0}
        for name, value in {"usd": settings.max_usd, "hours": hours, "seconds": seconds}.items():
            known = self.limits.get(name, max(value, billed[name]))
            self.limits[name] = max(known, value) if known and value else 0.0

    def note_look(self, now: float, patience_seconds: float, tick_seconds: float) -> None:
        """Note that the head was read; until a first look, or one after long, none was missed."""
        missed = now - self.looked
        if missed > patience_seconds:
            self.blind_until = now
        if self.looked and missed > 2 * tick_seconds:
            self.stopped = now  # a stop may have been made, and not kept
        self.looked = now

    def observe_fleets(self, capacity: Mapping[str, int], own: str | None, now: float) -> None:
        """Note since when fleets have been at zero and the run has waited for an instance."""
        self.at_zero = {
            fleet_id: self.at_zero.get(fleet_id, now)
            for fleet_id in sorted({*self.at_zero, *capacity})
            if capacity.get(fleet_id, 0) == 0
        }
        is_at_zero = capacity.get(own or "") == 0
        if is_at_zero:
            self.stopped = now
        # A machine ends the wait, also in a call in which EC2 says nothing of the fleet.
        if is_at_zero or any(each.is_live for each in self.attempts.values()):
            self.waiting = 0.0
            return
        if own not in capacity:
            return
        ends = [each.seen for each in self.attempts.values() if each.seen > self.waiting]
        # An instance that came and went between two calls, or while EC2 did not answer, begins a
        # new wait.
        self.waiting = max(ends) if self.waiting and ends else self.waiting or now

    def record_failures(self, failures: Iterable[tuple[str, float, str]], now: float) -> None:
        """Keep the newest message of each failed machine, from events read until now."""
        self.events_read = now
        for instance_id, when, message in failures:
            attempt = self.attempts.get(instance_id)
            if attempt is not None and when > attempt.failed:
                attempt.failed, attempt.said = when, message

    def explain(self, instance_id: str, why: str) -> None:
        """Note why the Guard ended a machine that has not said why it failed."""
        attempt = self.attempts.get(instance_id)
        if attempt is not None and not attempt.said:
            attempt.said = why

    def take_back(self, instance_ids: Iterable[str]) -> None:
        """Note that the Guard ends these for machines of the other market."""
        for instance_id in instance_ids:
            if instance_id in self.attempts:
                self.attempts[instance_id].is_taken_back = True

    def billed_hours(self) -> float:
        """Return the hours from launch to end, over all attempts."""
        return sum(each.hours for each in self.attempts.values())

    def billed_usd(self) -> float:
        """Return the dollars billed for these hours."""
        return sum(each.usd for each in self.attempts.values())

    def billed_in(self, period: str) -> float:
        """Return the dollars billed in a day, month or year, such as 2026-11."""
        return sum(usd for day, usd in self.by_day.items() if day.startswith(period))

    def barren_attempts(self) -> dict[str, MachineAttempt]:
        """Return the attempts since the last commit and the last stop that ended by themselves."""
        since = max(self.committed, self.stopped)
        return {
            name: each
            for name, each in self.attempts.items()
            if not (each.is_live or each.is_taken_back) and each.launched > since
        }

    def is_barren_on_spot(self, settings: GuardSettings) -> bool:
        """Return whether a run with a deadline should try on demand after barren Spot attempts."""
        barren, most = self.barren_attempts().values(), settings.max_barren_attempts
        is_spot = all(each.market == SPOT for each in barren)
        return settings.deadline_hours > 0 and is_spot and most <= len(barren) < 2 * most

    def claim(self, key: str, now: float, *, again_after: float = math.inf) -> bool:
        """Return whether `key` is still to be done, and note that it is done now."""
        if now - self.done.get(key, -math.inf) < again_after:
            return False
        self.done[key] = now
        return True

    def to_json(self) -> bytes:
        """Return guard.json."""
        return json.dumps(self.document(), default=_shallow).encode()

    def document(self) -> dict[str, Any]:
        """Return what guard.json has; `billed` is for readers and is not read back."""
        billed = {
            market: {
                "hours": round(sum(each.hours for each in attempts), 4),
                "usd": round(sum(each.usd for each in attempts), 4),
            }
            for market in (SPOT, ON_DEMAND)
            if (attempts := [each for each in self.attempts.values() if each.market == market])
        }
        return {"format": FORMAT, "billed": billed, **_shallow(self)}

    @property
    def usd_per_hour(self) -> float:
        """The hourly cost of its live instances at the last call."""
        return sum(each.usd_per_hour for each in self.attempts.values() if each.is_live)

    @classmethod
    def from_json(cls, data: bytes) -> "Ledger":
        """Read guard.json of this or an older format; names of a newer one are ignored.

        ValueError for anything else.
        """
        try:
            document = _known(cls, json.loads(data))
            attempts = document.pop("attempts", {})
            notes = document.pop("notes", [])
            return cls(
                attempts={name: _attempt(each) for name, each in attempts.items()},
                notes=[Note(**_known(Note, each)) for each in notes],
                **document,
            )
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"not a ledger of the Guard: {error}") from error


def _attempt(document: dict[str, Any]) -> MachineAttempt:
    attempt = MachineAttempt(**_known(MachineAttempt, document))
    if "usd" not in document:  # before the Guard read EC2's prices
        attempt.usd = attempt.hours * attempt.usd_per_hour
    return attempt


def _shallow(kept: Any) -> dict[str, Any]:
    return {name: getattr(kept, name) for name in kept.__slots__}


def _known(kind: Any, document: dict[str, Any]) -> dict[str, Any]:
    names = {*kind.__slots__}
    return {name: value for name, value in document.items() if name in names}
