"""The verdict on a drill: how it ended, and which of its promises it broke."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from contract.keys import HEAD, RECEIPT
from rehearsal.demo.fleet import MachineLife, user_data_faults
from rehearsal.demo.interruptions import RehearsedRun
from rehearsal.demo.receipt import compare_runs, inequalities
from rehearsal.demo.run_files import Files, read_events, read_json
from rehearsal.drills.drill import EQUAL, FAILURE, Expectation


def judge(
    run: RehearsedRun,
    expect: Expectation,
    reference: Files,
    guard_errors: Sequence[str] = (),
    *,
    alive: Sequence[str] = (),
    processes_left: int = 0,
    unmet: Sequence[str] = (),
) -> list[str]:
    """List the differences from the expectation; empty after a drill that went as written.

    `reference` has the uninterrupted run's files.
    """
    files, lives = run.files, list(run.fleet.lives.values())
    head, events = read_json(files, HEAD) or {}, read_events(files)
    is_equal = expect.ends == EQUAL
    faults = _equality(files, reference, head) if is_equal else _failure(head, events)
    for pattern in expect.events:
        if not any(re.search(pattern, told(event)) for event in events):
            faults.append(f"no event matches {pattern!r}")
    markets = tuple(life.instance.market for life in lives)
    attempts = (read_json(files, RECEIPT) or {}).get("machines", [])
    ranks = tuple(attempt["ranks"] for attempt in attempts)
    # From the deploy to the last machine's end, also if no machine ever booted.
    hours = seconds_taken(lives, run.started) / 3600
    capacity, undone = run.fleet.target_capacity(), [*run.undone, *unmet]
    checks = {
        f"{len(lives)} machines booted, not {expect.machines}": expect.machines
        not in (None, len(lives)),
        f"the machines' markets were {', '.join(markets)}": bool(expect.markets)
        and markets != expect.markets,
        f"the attempts' ranks were {', '.join(map(str, ranks))}": bool(expect.ranks)
        and ranks != expect.ranks,
        f"it took {hours:.4f} hours, too long": expect.within_hours is not None
        and hours > expect.within_hours,
        f"the fleet's target is {capacity}, not 0": capacity > 0,
        f"still running: {', '.join(alive)}": bool(alive),
        f"{processes_left} processes were left behind": processes_left > 0,
        f"the Guard failed: {'; '.join(guard_errors[:1])}": bool(guard_errors),
        f"never happened: {', '.join(undone)}": bool(undone),
    }
    others = user_data_faults(lives)
    return [*faults, *others, *(text for text, broken in checks.items() if broken)]


def seconds_taken(lives: Iterable[MachineLife], deployed: float) -> float:
    """Return the seconds from the deploy to the last machine's end."""
    return max([deployed, *(life.ended or 0.0 for life in lives)]) - deployed


def why(run: Files) -> str:
    """Return the last failure, in the words of the head or of an event."""
    head = read_json(run, HEAD) or {}
    failures = [str(event["message"]) for event in read_events(run) if _is_failure(event, head)]
    return str(head.get("reason") or (failures[-1] if failures else ""))


def _is_failure(event: Mapping[str, Any], head: Mapping[str, Any]) -> bool:
    """Whether an event says that something failed or that the Guard stopped the run, and why."""
    is_stop = event.get("name") == "to-zero" and head.get("state") != "finished"
    is_bad = event.get("status") == "failed" or event.get("name") == "terminated" or is_stop
    return is_bad and bool(event.get("message"))


def told(event: Mapping[str, Any]) -> str:
    """Return an event's text for patterns: its name, its message, and quotes of other events."""
    return " ".join([f"{event.get('name')}: {event.get('message', '')}", *event.get("said", [])])


def _failure(head: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    faults = []
    if head.get("state") == "finished":
        faults.append(f"the run finished, but a {FAILURE} was expected")
    if not any(_is_failure(event, head) for event in events):
        faults.append("no event says that anything failed, or why")
    return faults


def _equality(run: Files, reference: Files, head: Mapping[str, Any]) -> list[str]:
    if head.get("state") != "finished":
        state = f"{head['state']}: {head.get('reason')}" if head else f"new: {why(run)}"
        return [f"the run did not finish ({state})"]
    ours, theirs = read_json(run, RECEIPT), read_json(reference, RECEIPT)
    if ours is None or theirs is None:
        return ["a finished run has no receipt.json"]
    return inequalities(compare_runs(run, reference, ours, theirs))
