"""The one computation of a run's goodput: every paid second of every machine gets one cause.

From what the run keeps anyway: the Guard's ledger says when machines were paid for and what they
cost, their events what they did when, metrics lines what took how long. Machines' clocks name no
second twice: each event only moves within the time that its machine was paid for.
"""

import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from contract.goodput import USEFUL, WAITING, Goodput, MachineEnd, planned_shares
from contract.keys import GUARD
from contract.lineage import Line
from training.durable.record.history import AttemptSummary, History
from training.durable.store.protocol import Store

_log = logging.getLogger(__name__)

# They end a wait: nobody wanted a machine then.
_STOPS = ("stopped", "to-zero", "fleet-to-zero", "finished", "failed")
_OVER = ("finished", "failed")
# Of a boot's steps, those that end last; while only the dataset's runs, training waits for it.
_LAST_STEPS = ("boot-dataset", "boot-training")
_EVIDENCE_CHARACTERS = 300
# What ended a machine, by what it said, or EC2 of it; the first that matches. A restart of what the
# script itself does wrong fails again.
_SAID: Mapping[str, re.Pattern[str]] = {
    "gpu": re.compile(r"GPU( \S+)? of this machine failed"),
    "store": re.compile(r"exit status 74|boot failed at (dataset|run-state|keep-bundle|older-bun)"),
    "host": re.compile(r"exit status 4\b|boot failed at (?!program)|Server\.|Client\.Internal"),
    "script": re.compile(r"training failed|boot failed at program|out of memory"),
}


@dataclass(kw_only=True, slots=True)
class _Machine:
    """A machine's paid time and how far a cause was found for it; seconds since 1970."""

    id: str
    began: float
    ended: float
    usd: float | None = None
    is_live: bool = False
    is_taken_back: bool = False
    said: str = ""
    attempts: Sequence[AttemptSummary] = ()
    events: Sequence[Line] = ()
    at: float = field(init=False)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = self.began

    def until(self, when: float | None, cause: str) -> None:
        """Give what passed until then this cause."""
        if when is not None and (more := min(when, self.ended) - self.at) > 0:
            self.seconds[cause] = self.seconds.get(cause, 0.0) + more
            self.at += more

    def first(self, *names: str, since: float = 0.0) -> float | None:
        """Return when the first event of these names came; None without any."""
        found = (_at(e) for e in self.events if e["name"] in names and _at(e) >= since)
        return min(found, default=None)


def goodput_of(
    history: History,
    guard: Mapping[str, Any],
    *,
    prediction: Mapping[str, Any] | None = None,
    is_of_program: bool = False,
    usd_per_hour: float | None = None,
) -> Goodput:
    """Return what a run's money has bought so far.

    `guard` is guard.json; without a Guard each attempt is a machine, perhaps at `usd_per_hour`. Of
    a program only what no snapshot had at an interruption is known: nobody times its steps.
    """
    now, unsaved = time.time(), history.unsaved() if is_of_program else None
    machines = list(_paid(guard, now))
    for one in machines:
        one.attempts = [each for each in history.attempts if each.writer == one.id]
    if not machines:
        machines = list(_unpaid(history, usd_per_hour))
        for one, attempt in zip(machines, history.attempts, strict=True):
            one.attempts = [attempt]
    for one in machines:
        one.events = [
            event
            for event in history.events
            if one.id in (event["instance_id"], event.get("about"))
            and (guard or one.began <= _at(event) <= one.ended)
        ]
    machines.sort(key=lambda one: one.began)
    over = max((_at(e) for e in history.events if e["name"] in _OVER), default=None)
    if over is not None and any(each.began.timestamp() > over for each in history.attempts):
        over = None  # it was reopened
    for machine in machines:
        _account(machine, over, unsaved)
    seconds: dict[str, float] = {}
    usd: dict[str, float] = {}
    for one in machines:
        for cause, value in one.seconds.items():
            seconds[cause] = seconds.get(cause, 0.0) + value
            if one.usd is not None:
                usd[cause] = usd.get(cause, 0.0) + one.usd * value / (one.ended - one.began)
    is_waiting = over is None and bool(guard.get("waiting"))
    if waited := _waited(machines, history.events, guard, now if is_waiting else None):
        seconds[WAITING] = waited
    return Goodput(
        seconds=seconds,
        usd=usd,
        planned=planned_shares(prediction),
        ends=list(_ends(machines, history.events, over)),
    )


def read_guard(store: Store) -> dict[str, Any]:
    """Return guard.json; {} if there is none, or it is damaged: nothing in a run depends on it."""
    if (found := store.get(GUARD)) is None:
        return {}
    try:
        document: dict[str, Any] = json.loads(found.data)
        list(_paid(document, 0.0))
    except (ValueError, TypeError, KeyError, AttributeError):
        _log.warning(f"{GUARD} does not say what was spent; the receipt leaves it out")
        return {}
    return document


def _paid(guard: Mapping[str, Any], now: float) -> Iterator[_Machine]:
    """Yield the machines of the Guard's ledger."""
    for name, each in (guard.get("attempts") or {}).items():
        ended, is_live = float(each["seen"]), bool(each["is_live"])
        usd = float(each.get("usd", 0.0))
        if is_live and now > ended:  # since the Guard's last call
            usd += (now - ended) / 3600 * float(each.get("usd_per_hour", 0.0))
            ended = now
        yield _Machine(
            id=str(name),
            began=float(each["launched"]),
            ended=ended,
            usd=usd,
            is_live=is_live,
            is_taken_back=bool(each.get("is_taken_back")),
            said=str(each.get("said", "")),
        )


def _unpaid(history: History, usd_per_hour: float | None) -> Iterator[_Machine]:
    """Yield each attempt of a run without a Guard as a machine."""
    for one in history.attempts:
        price = usd_per_hour if one.usd_per_hour is None else one.usd_per_hour
        yield _Machine(
            id=one.writer,
            began=one.began.timestamp(),
            ended=one.last_heard.timestamp(),
            usd=None if price is None else one.seconds / 3600 * price,
        )


def _account(one: _Machine, over: float | None, unsaved: Mapping[int, float | None] | None) -> None:
    """Give each paid second of a machine its cause."""
    failed = one.first("machine-failed", "run-given-up")
    if over is not None and one.began >= over:
        one.until(one.ended, "idle")
    ends = [when for when in (failed, over, one.ended) if when is not None]
    _boot(one, one.attempts[0].began.timestamp() if one.attempts else min(ends))
    for number, attempt in enumerate(one.attempts):
        began, is_silent = attempt.began.timestamp(), attempt.ended == "silent"
        following = one.attempts[number + 1 :]
        limit = following[0].began.timestamp() if following else failed or one.ended
        one.until(began, "boot")  # the trainer of the same machine, started again
        one.until(one.first("resumed", since=began), "restore")
        measured = dict(attempt.seconds_by)
        if one.first("dataset-synced") is None:
            measured["data_wait"] = measured.get("data_wait", 0.0) + measured.pop("sync", 0.0)
        end = attempt.last_heard.timestamp()
        if is_silent:
            end = one.ended if one.is_live else max(end, one.at + sum(measured.values()))
        end = max(0.0, min(end, limit) - one.at)
        if unsaved is not None:
            lost = 0.0 if one.is_live else min(end, unsaved.get(attempt.generation) or 0.0)
            measured = {USEFUL: end - lost, "repeated": lost}
        # Clocks and sums differ by little; time that nothing measured is left.
        factor = min(1.0, end / (sum(measured.values()) or 1.0))
        begin = one.at
        for cause, value in measured.items():
            one.until(one.at + factor * value, cause)
        noticed = one.first("notice", since=began)
        if noticed is not None:
            one.until(min(noticed, begin + end), "other")
        one.until(begin + end, "other" if noticed is None else "notice")
        if not following:
            one.until(one.ended if noticed else limit if is_silent else None,
                      "notice" if noticed else "repeated")  # fmt: skip
    one.until(one.ended, "idle")


def _boot(one: _Machine, until: float) -> None:
    """Account for the time until the trainer has the run, waiting for the dataset apart."""
    steps = [e for e in one.events if str(e["name"]).startswith("boot-")]
    others = [_at(e) for e in steps if e["name"] not in _LAST_STEPS]
    if others and one.first("boot-torch") is not None:
        last = {str(e["name"]): e for e in steps}
        training = last.get("boot-training")
        begun = _at(training) - float(training.get("seconds", 0.0)) if training else until
        one.until(min(max(others), until), "boot")
        one.until(min(begun, until), "sync")
    one.until(until, "boot")


def _waited(
    machines: Sequence[_Machine],
    events: Sequence[Line],
    guard: Mapping[str, Any],
    now: float | None,
) -> float:
    """Return the seconds without a machine in which the run wanted one; `now` if it goes on."""
    if not guard:
        return 0.0
    stops = [_at(event) for event in events if event["name"] in _STOPS]
    times = [(one.began, one.ended) for one in machines] + ([(now, now)] if now else [])
    if not times:
        return 0.0
    # Before the first machine only the Guard has seen that one was wanted.
    first = guard["attempts"][machines[0].id].get("waited") if machines else None
    end = times[0][0] - float(first or 0.0) if machines else float(guard["waiting"])
    waited, since = 0.0, 0.0
    for start, ended in times:
        if start > end and not any(since <= stop <= start for stop in stops):
            waited += start - end
        since, end = start, max(end, ended)
    return waited


def _ends(
    machines: Sequence[_Machine], events: Sequence[Line], over: float | None
) -> Iterator[MachineEnd]:
    """Yield why each machine that has ended did, with the evidence."""
    for one in machines:
        if not one.is_live:
            why, evidence = _end(one, events, over)
            pays = None if why in ("over", "stopped") else why != "script"
            yield MachineEnd(
                machine=one.id,
                why=why,
                evidence=evidence[:_EVIDENCE_CHARACTERS],
                restart_pays=pays,
            )


def _end(one: _Machine, events: Sequence[Line], over: float | None) -> tuple[str, str]:
    by_name = {str(event["name"]): event for event in one.events}
    for name, why in (("run-given-up", "script"), ("machine-failed", "")):
        if event := by_name.get(name):
            said = str(event.get("message", ""))
            return why or _why(said) or "unknown", said
    has_ended_it = bool(one.attempts) and one.attempts[-1].ended in _OVER
    if has_ended_it or (over is not None and one.ended > over):
        return "over", "the run had ended"
    for event in events:
        if event["name"] in _STOPS and one.began <= _at(event) <= one.ended:
            return "stopped", f"{event['name']}: {event.get('message', '')}"
    if event := by_name.get("terminated"):
        return "host", str(event.get("message", ""))
    if one.is_taken_back or "notice" in by_name:
        notice = by_name.get("notice", {})
        return "market", str(notice.get("message") or notice.get("cause") or "EC2 took it back")
    return _why(one.said) or "unknown", one.said or "neither an event nor EC2 says"


def _why(said: str) -> str | None:
    return next((why for why, pattern in _SAID.items() if pattern.search(said)), None)


def _at(event: Line) -> float:
    return datetime.fromisoformat(str(event["time"])).timestamp()
