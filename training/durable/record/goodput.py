"""The one computation of a run's goodput: every paid second of every machine gets one cause.

From what the run keeps anyway: the Guard's ledger says when machines were paid for and what they
cost, their events what they did when, metrics lines what took how long. No clock is trusted with
more than the order within a machine: an event only divides the time that its machine was paid for.
"""

import itertools
import json
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from contract.goodput import CAUSES, PLANNED, USEFUL, WAITING, Goodput, MachineEnd
from contract.keys import GUARD
from contract.lineage import Line
from contract.program import WORKLOAD as PROGRAM
from training.durable.record.history import AttemptSummary, History
from training.durable.record.run import RunConfig
from training.durable.store.protocol import Store

_log = logging.getLogger(__name__)

_OVER = ("finished", "failed")
_STOPS = ("stopped", "to-zero")
_EVIDENCE_CHARACTERS = 300
# What ended a machine, by what it said, or EC2 of it; the first that matches.
_SAID: Mapping[str, str] = {
    "gpu": r"GPU( \S+)? of this machine failed",
    "store": r"exit status 74|boot failed at (dataset|run-state|keep-bundle|older-bundle)",
    "host": r"exit status 4\b|boot failed at (?!program)|Server\.|Client\.Internal",
    "script": r"training failed|boot failed at program",
}


@dataclass(slots=True)
class _Machine:
    """A machine as the Guard's ledger has it, and for how much of its time a cause was found."""

    id: str
    kept: Mapping[str, Any]
    attempts: Sequence[AttemptSummary]
    events: Sequence[tuple[float, Line]]
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def ended(self) -> float:
        """When its paid time ended, in seconds since 1970."""
        return float(self.kept["seen"])

    @property
    def at(self) -> float:
        """Until when its time has a cause."""
        return float(self.kept["launched"]) + sum(self.seconds.values())

    def until(self, when: float | None, cause: str) -> None:
        """Give what passed until then this cause."""
        self.seconds[cause] += max(0.0, min(when or 0.0, self.ended) - self.at)

    def first(self, name: str, since: float = 0.0, until: float = math.inf) -> float | None:
        """Return when the first event of this name came; None without any."""
        found = (at for at, event in self.events if event["name"] == name and since <= at <= until)
        return min(found, default=None)


def read_goodput(store: Store, guard: Mapping[str, Any], now: float) -> Goodput:
    """Return what a run's money had bought at `now`, when this ledger was brought up to date."""
    return goodput_of(History.read(store), RunConfig.read(store), guard, now=now)


def goodput_of(
    history: History,
    record: RunConfig | None,
    guard: Mapping[str, Any],
    usd_per_hour: float | None = None,
    *,
    now: float | None = None,
) -> Goodput:
    """Return what a run's money has bought so far, or until `now`, in seconds since 1970.

    `guard` is guard.json; without a Guard each attempt is a machine, perhaps at `usd_per_hour`. Of
    a program only what no snapshot had at an interruption is known: nobody times its steps.
    """
    now, prediction = now or time.time(), (record and record.prediction) or {}
    unsaved = history.unsaved() if record and record.workload == PROGRAM else None
    machines = _machines(history, guard.get("attempts") or {}, now, usd_per_hour)
    over = max((_at(e) for e in history.events if e["name"] in _OVER), default=math.inf)
    if any(each.began.timestamp() > over for each in history.attempts):
        over = math.inf  # it was reopened
    usd: dict[str, float] = defaultdict(float)
    for one in machines:
        paid = one.ended - one.at
        _account(one, over, unsaved)
        for cause, each in one.seconds.items():
            usd[cause] += each / (paid or 1.0) * (one.kept.get("usd") or 0.0)
    seconds = {cause: sum(one.seconds[cause] for one in machines) for cause in CAUSES}
    since = guard.get("waiting") if over == math.inf else None
    seconds[WAITING] = sum(one.kept.get("waited", 0.0) for one in machines)
    seconds[WAITING] += max(0.0, now - since) if since else 0.0
    planned = {cause: prediction.get(PLANNED + cause) for cause in CAUSES}
    return Goodput(
        seconds={cause: each for cause, each in seconds.items() if each},
        usd={cause: each for cause, each in usd.items() if each},
        planned={cause: each for cause, each in planned.items() if isinstance(each, float | int)},
        ends=[_end(one, history.events, over) for one in machines if not one.kept["is_live"]],
    )


def read_guard(store: Store) -> dict[str, Any]:
    """Return guard.json; {} if there is none, or it is damaged: nothing in a run depends on it."""
    found = store.get(GUARD)
    try:
        document: dict[str, Any] = json.loads(found.data) if found else {}
        for each in (document.get("attempts") or {}).values():
            (each["launched"] + each["seen"], each["is_live"])
    except (ValueError, TypeError, KeyError, AttributeError):
        _log.warning(f"{GUARD} does not say what was spent; the receipt leaves it out")
        return {}
    return document


def _machines(
    history: History, paid: Mapping[str, Any], now: float, usd_per_hour: float | None
) -> list[_Machine]:
    events = [(_at(event), event) for event in history.events]
    found = []
    for name, kept in paid.items():
        if kept["is_live"]:  # since the Guard's last call
            more = max(0.0, now - kept["seen"])
            usd = kept.get("usd", 0.0) + more / 3600 * kept.get("usd_per_hour", 0.0)
            kept = {**kept, "seen": kept["seen"] + more, "usd": usd}
        attempts = [one for one in history.attempts if one.writer == name]
        own = [each for each in events if name in (each[1]["instance_id"], each[1].get("about"))]
        found.append(_Machine(name, kept, attempts, own))
    for one in () if paid else history.attempts:
        price = usd_per_hour if one.usd_per_hour is None else one.usd_per_hour
        began, ended = one.began.timestamp(), one.last_heard.timestamp()
        kept = {"launched": began, "seen": ended, "is_live": False}
        own = [e for e in events if e[1]["instance_id"] == one.writer and began <= e[0] <= ended]
        usd = None if price is None else one.seconds / 3600 * price
        found.append(_Machine(one.writer, {**kept, "usd": usd}, [one], own))
    return found


def _account(one: _Machine, over: float, unsaved: Mapping[int, float | None] | None) -> None:
    """Give each paid second of a machine its cause."""
    failed = one.first("machine-failed") or one.first("run-given-up") or one.ended
    one.until(one.ended if one.at >= over else None, "idle")
    _boot(one, one.attempts[0].began.timestamp() if one.attempts else min(failed, over))
    for attempt, following in itertools.zip_longest(one.attempts, one.attempts[1:]):
        limit = following.began.timestamp() if following else failed
        one.until(attempt.began.timestamp(), "boot")  # the same machine's trainer, started again
        is_noticed = _attempt(one, attempt, limit, unsaved)
        # A fleet that goes to zero after the end gives a notice, too.
        if following is None and attempt.ended not in _OVER and is_noticed:
            one.until(one.ended, "notice")
        elif following is None and attempt.ended == "silent":
            one.until(limit, "repeated")
    one.until(one.ended, "idle")


def _boot(one: _Machine, until: float) -> None:
    """Account for the time until the trainer has the run; what only the dataset takes is apart."""
    steps = {e["name"]: at for at, e in one.events if str(e["name"]).startswith("boot-")}
    took = sum(e.get("seconds", 0.0) for _, e in one.events if e["name"] == "boot-training")
    begun, _ = steps.pop("boot-training", until) - took, steps.pop("boot-dataset", None)
    if "boot-torch" in steps:
        one.until(min(until, max(steps.values())), "boot")
        one.until(min(until, begun), "sync")
    one.until(until, "boot")


def _attempt(
    one: _Machine, attempt: AttemptSummary, limit: float, unsaved: Mapping[int, float | None] | None
) -> bool:
    """Give each second of an attempt its cause; return whether there was a notice by `limit`."""
    began, measured = attempt.began.timestamp(), dict(attempt.seconds_by)
    resumed, noticed = (one.first(each, began, limit) for each in ("resumed", "notice"))
    one.until(resumed, "restore")
    if one.first("dataset-synced") is None:  # the loader's own start
        measured["data_wait"] = measured.get("data_wait", 0.0) + measured.pop("sync", 0.0)
    end = attempt.last_heard.timestamp()
    if attempt.ended == "silent":
        end = one.ended if one.kept["is_live"] else max(end, one.at + sum(measured.values()))
    begin, seconds = one.at, max(0.0, min(end, limit, one.ended) - one.at)
    if unsaved is not None:
        lost = 0.0 if one.kept["is_live"] else min(seconds, unsaved.get(attempt.generation) or 0.0)
        measured = {USEFUL: seconds - lost, "repeated": lost}
    # Clocks and sums differ by little; what nothing measured comes last.
    factor = min(1.0, seconds / (sum(measured.values()) or 1.0))
    for cause, value in measured.items():
        one.until(one.at + factor * value, cause)
    one.until(min(noticed or limit, begin + seconds), "other")
    one.until(begin + seconds, "notice")
    return noticed is not None


def _end(one: _Machine, events: Sequence[Line], over: float) -> MachineEnd:
    """Return why a machine ended; a restart of what a script itself does wrong fails again."""
    own = sorted((event for _, event in one.events), key=lambda event: "message" in event)
    said = {e["name"]: str(e.get("message") or e.get("cause") or "") for e in own}
    began, stops = float(one.kept["launched"]), (e for e in events if e["name"] in _STOPS)
    stop = next((str(e.get("message")) for e in stops if began <= int(_at(e)) <= one.ended), None)
    is_over = one.ended > over or any(each.ended in _OVER for each in one.attempts[-1:])
    last_words = said.get("machine-failed") or one.kept.get("said") or "nobody says"
    matching = (why for why, pattern in _SAID.items() if re.search(pattern, last_words))
    why_said, back = next(matching, "unknown"), one.kept.get("is_taken_back")
    found: list[tuple[str, str | None]] = [
        ("script", said.get("run-given-up")),
        (why_said, said.get("machine-failed")),
        ("over", "the run had ended" if is_over else None),
        ("stopped", stop),
        ("market", said.get("notice", "EC2 took it back" if back else None)),
        ("host", said.get("terminated")),
        (why_said, last_words),
    ]
    why, evidence = next((why, text) for why, text in found if text is not None)
    pays = None if why in ("over", "stopped") else why != "script"
    return MachineEnd(one.id, why, evidence[:_EVIDENCE_CHARACTERS], pays)


def _at(event: Line) -> float:
    return datetime.fromisoformat(str(event["time"])).timestamp()
