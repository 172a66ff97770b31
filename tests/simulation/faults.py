"""Faults of this project's own history that lay between parts, each planted by one patch.

    python -m tests.simulation.faults 1..60 [WORD...]      # how many of the seeds find each

CHANGELOG.md and the logs tell of each, or of its kind; those of the Guard alone are planted in its
model, too (tests/stacks/guard/test_planted_faults.py).
"""

import inspect
import json
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, fields, replace
from types import FunctionType
from typing import Any, TypeAlias
from unittest import mock

from contract import auto_interval, verify
from contract.errors import UserError
from contract.keys import HEAD
from stacks.guard import fleet, handler, reasons, records
from stacks.guard import ledger as ledger_file
from stacks.guard.budget import Budget
from stacks.guard.ledger import Ledger
from stacks.guard.tick import Tick
from tests.simulation import machine
from tests.simulation.clock import CLOCK
from tests.simulation.life import live_through, simulated
from tests.simulation.plan import draw
from training.durable.attempt import notice as notice_file
from training.durable.attempt import resume_point
from training.durable.attempt import supervisor as supervisor_file
from training.durable.attempt.attempt import AttemptOptions
from training.durable.attempt.notice import ExtraTime, Interruption
from training.durable.attempt.ranks import OtherRanks
from training.durable.attempt.supervisor import Supervisor, _LastResort
from training.durable.attempt.world import World, _Consensus
from training.durable.record import head as head_file
from training.durable.record import lease as lease_file
from training.durable.record import metrics as metrics_file
from training.durable.record.head import Retention
from training.durable.record.lease import Lease
from training.durable.record.metrics import Metrics
from training.durable.save.publish import CheckpointPublisher, FailedSaves
from training.durable.save.snapshots import mirror, restore
from training.durable.save.snapshots.capture import Capture, Moment
from training.durable.save.snapshots.folder_saves import Blobs
from training.durable.save.snapshots.mirror import Mirror
from training.durable.save.snapshots.quiet import GrowingFiles, QuietTime
from training.durable.save.snapshots.watcher import Watcher
from training.durable.save.tensors import policy as policy_file
from training.durable.save.tensors.checkpointer import Checkpointer
from training.durable.save.tensors.sharded_saves import ShardedFollower
from training.durable.store import protocol
from training.durable.store.protocol import Store
from training.engine.attempt import _WorkloadJob


@dataclass(frozen=True)
class Fault:
    """A patch, and the word of the promise that it breaks; empty: any."""

    plant: Callable[[], AbstractContextManager[Any]]
    promise: str = ""
    is_of_programs: bool = False

    def is_found(self, broken: Sequence[str]) -> bool:
        return any(self.promise in each for each in broken)


def _fault(owner: Any, name: str, value: Any, promise: str = "") -> Fault:
    return Fault(lambda: mock.patch.object(owner, name, value), promise)


def _text(owner: Any, name: str, old: str, new: str, promise: str = "") -> Fault:
    """A function with one passage of its text replaced."""

    def plant() -> Any:
        function: FunctionType = inspect.unwrap(vars(owner)[name])
        text = textwrap.dedent(inspect.getsource(function))
        assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times"
        found: dict[str, Any] = {}
        exec(compile(text.replace(old, new), name, "exec"), function.__globals__, found)
        return mock.patch.object(owner, name, found[name])

    return Fault(plant, promise)


def _nothing(*_: object, **__: object) -> None:
    return


def _unheard(self: Checkpointer, write: Any, *, may_leave: bool = False) -> bool:
    del self, may_leave
    return bool(write.wait())


def _delete_first(publish: Callable[..., None]) -> Callable[..., None]:
    """Delete what the retention drops before the head forgets it."""

    def wrong(self: Lease, entry: Any, *, retention: Retention, release: bool = False) -> None:
        kept = {each.name for each in retention.kept((*self.head.checkpoints, entry))}
        self._delete({each.name for each in self.head.checkpoints} - kept)
        publish(self, entry, retention=retention, release=release)

    return wrong


def _told_at_receipt(trace: Any, lacks: list[str]) -> Any:
    """Judge an answer by what was left when it began."""
    for life in verify._lives(trace):
        for notice in (each for each in life if each["name"] == "notice"):
            for each in life:
                if each.get("notice_to_commit_seconds", 0.0) > max(notice["seconds_left"], 1.0):
                    yield "an answer after its notice"


def _without_steps(settings: Any, since: float, read: Any = records.machine_events) -> Any:
    return read(settings, since)._replace(steps={})


def _without(name: str) -> tuple[Any, ...]:
    return tuple(each for each in handler.DUTIES if each.__name__ != name)


def _hears_nothing(self: Supervisor, store: Store) -> Store:
    del self
    return store


def _charge_alone(self: Budget, run_id: str, *, billed: float, ahead: float) -> None:
    self.runs = {each: run for each, run in self.runs.items() if each == run_id}
    _CHARGE(self, run_id, billed=billed, ahead=ahead)


def _read_once(settings: Any) -> str:
    """As if Lambda's memory kept it."""
    if _FLEETS.get("life") is not CLOCK.luck:
        _FLEETS.clear()
        _FLEETS["life"] = CLOCK.luck
    if settings.stack_name not in _FLEETS:
        _FLEETS[settings.stack_name] = _OWN_FLEET_ID(settings)
    return str(_FLEETS[settings.stack_name])


def _complete(kind: type, document: dict[str, Any]) -> dict[str, Any]:
    if lacks := {each.name for each in fields(kind)} - document.keys():
        raise KeyError(*lacks)
    return _KNOWN(kind, document)


def _newest_only(name: str, data: bytes, newest: int, build: Any) -> Any:
    if name.endswith(HEAD) and json.loads(data).get("format") != head_file._FORMAT:
        raise UserError(f"{name} has another format")
    return _READ_RECORD(name, data, newest, build)


def _blindly() -> Any:
    """Neither what is captured nor when it was told to be is compared with the folder."""
    found = ExitStack()
    found.enter_context(mock.patch.object(Capture, "refuse_changed", _nothing))
    found.enter_context(mock.patch.object(Moment, "refuse_other", _nothing))
    return found


def _uncleared() -> Any:
    """A restore deletes nothing, and does not ask either what a file is that it does not know."""
    found = ExitStack()
    for owner, name, old, new in (
        (restore, "_clear", "(root / path).unlink()", "pass"),
        (mirror, "fill", "if not listing", "if path in contents and not listing"),
    ):
        found.enter_context(_text(owner, name, old, new).plant())
    return found


_FLEETS: dict[str, Any] = {}
_CHARGE, _OWN_FLEET_ID, _KNOWN = Budget.charge, fleet.own_fleet_id, ledger_file._known
_READ_RECORD = head_file.read_json_record
_READ_HEAD = records.read_head

# The Guard's.
_OF_GUARD: Mapping[str, Fault] = {
    "a sync is silence": _fault(Ledger, "note_progress", _nothing, "ends finished"),
    "steps of a boot ignored": _fault(records, "machine_events", _without_steps, "ends finished"),
    "heartbeats ignored": _fault(
        records, "read_head", lambda settings: (_READ_HEAD(settings)[0], 0.0), "hangs"
    ),
    "silence counted while S3 was down": _fault(Ledger, "note_look", _nothing, "stopped"),
    "a bucket that refuses is waited for": _fault(Tick, "refusal", "", "S3 refuses"),
    "takebacks counted as barren": _fault(fleet, "TAKEN_BACK", frozenset()),
    "the market's price ignored": _fault(fleet, "spot_prices", lambda *_: {}),
    "versions of guard.json ignored": _fault(records, "_versions", lambda *_: [], "holds"),
    "no reserve before max_usd": _fault(Tick, "usd_ahead", 0.0, "max_usd"),
    "a machine is awaited that never spoke": _fault(
        Ledger, "unheard", lambda *_: 0.0, "a healthy run was stopped"
    ),
    "silence ignored": _fault(reasons, "_silent", _nothing),
    "the deadline ignored": _fault(handler, "DUTIES", _without("choose_market"), "deadline"),
    "on demand beside Spot for ever": _fault(Tick, "unwanted", lambda _: [], "one machine"),
    "machines left alone at the end": _fault(handler, "DUTIES", _without("end_instances")),
    "a new group left empty": _fault(fleet.ScalingGroups, "is_new", lambda _: False),
    "an ended group started again": _fault(fleet.ScalingGroups, "is_new", lambda _: True),
    "only Spot to zero": _text(
        fleet.ScalingGroups, "send_to_zero", "in self.groups", "in self.groups[:1]", "max_hours"
    ),
}  # fmt: skip
# The trainer's.
_OF_TRAINER: Mapping[str, Fault] = {
    "a save is a hang": _fault(Checkpointer, "_await", _unheard, "for a cause"),
    "a long restore is a hang": _fault(Supervisor, "hearing", _hears_nothing, "for a cause"),
    "deleted before the head forgets": _fault(
        Lease, "publish", _delete_first(Lease.publish), "deleted that the head names"
    ),
    "the newest commit not kept": _text(
        Retention, "kept", "if entry.name in names)",
        "if entry.name in names and entry is not entries[-1])",
    ),
    "a sweep of what the head names": _text(Lease, "sweep", "- named", "- set()", "names"),
    "a lost answer is a lost lease": _text(
        Lease, "_change", "self._unanswered.add(after.nonce)", "self._unanswered.clear()"
    ),
    "S3's trouble outlasts patience": _fault(protocol, "_WINDOW_SECONDS", 2.0),
    "a head from nothing": _text(lease_file, "_first_head", "store.sizes(CHECKPOINTS)", "False"),
    "no witness is enough": _fault(lease_file, "_WITNESSES", 99, "finished"),
    "metrics sent after the head": _text(
        CheckpointPublisher, "publish", "[self.metrics.flush]", "[]", "samples"
    ),
    "metrics counted twice": _fault(
        metrics_file, "_parts_of_merged", lambda _: set(), "kept once"
    ),
    "a commit before each long step": _fault(policy_file, "_SHARE", 1e9),
    "a blocking save is due at once": _text(
        Checkpointer, "_run", "self.schedule.start_other()", "pass"
    ),
    "auto waits longer than a life": _fault(auto_interval, "MAX_SECONDS", 1e9, "interruption"),
    "the notice's time not read": _fault(
        notice_file, "_seconds_in", lambda _: (0.0, 0.0), "a notice"
    ),
    "notices unheard": _fault(Interruption, "record", _nothing, "loses no step"),
    "extra time without end": _fault(ExtraTime, "would_allow", lambda *_: True),
    "no save at a notice": _fault(Checkpointer, "_save_within", lambda *_, **__: False, "step"),
    "a damaged one ends the resume": _text(
        resume_point, "_first_valid", "continue\n        ret", "break\n        ret", "is intact"
    ),
    "no early retry after a failed save": _fault(
        FailedSaves, "is_retry_due", property(lambda _: False), "repeated soon"
    ),
    "an answer judged from its boundary": Fault(
        lambda: mock.patch.dict(verify.RULES, {"notices-answered": _told_at_receipt})  # type: ignore[arg-type]
    ),
    "evaluations before the first left out": _fault(
        AttemptOptions, "planned_evaluations", 0.0, "deadline"
    ),
    "a lost lease is not tried again": Fault(
        lambda: mock.patch.object(
            machine, "UNIT", replace(machine.UNIT, success_statuses=frozenset([75, 76]))
        ),
        "paid for nothing",
    ),
    "lines lost at an attempt's end": _fault(Metrics, "flush", _nothing, "samples"),
}  # fmt: skip
# Of runs beside each other, and of deploys.
_OF_OTHERS: Mapping[str, Fault] = {
    "a budget that no one judges": _fault(reasons, "_over_budget", _nothing, "the budget holds"),
    "the dearest run is the budget's": _fault(
        Budget, "usd", property(lambda own: max(run["usd"] for run in own.runs.values())), "budget"
    ),
    "a charge forgets the others": _fault(Budget, "charge", _charge_alone, "the budget holds"),
    "a run's dollars count in each period": _fault(
        Ledger, "billed_in", lambda own, period: own.billed_usd(), "stopped"
    ),
    "machines of all stacks are its own": _text(
        fleet, "instances_of_stack", "Filters=mine", "Filters=[]", "the others"
    ),
    "groups leave the pool of their machine": _fault(
        fleet.ScalingGroups, "ends_what_it_loses", False, "may rest"
    ),
    "the fleet's id read once": _fault(fleet, "own_fleet_id", _read_once),
    "a head from nothing after a wait": _text(
        supervisor_file, "acquire", "_first_head(store, run_id, writer)",
        "(_first_head(store, run_id, writer) if seen is None else "
        "Head(run_id=run_id, generation=0, writer=writer, nonce=''))",
    ),
    "a generation is used again": _text(
        lease_file, "_first_head", "generation=used", "generation=0", "one-writer"
    ),
    "what ended while nobody looked is billed for ever": _fault(
        Ledger, "may_run_until", lambda own, name, settings, now, heard: now, "stopped"
    ),
    "a run given up in silence": _fault(
        handler, "DUTIES", _without("tell_given_up"), "within its limits ends"
    ),
    "limits forgotten by an older Guard": _text(
        Ledger, "note_limits", "max(value, billed[name])", "value", "within-limits"
    ),
    "an older ledger is none": _fault(ledger_file, "_known", _complete, "stopped"),
    "an older head is refused": _fault(head_file, "read_json_record", _newest_only, "for a cause"),
}  # fmt: skip
# Of several ranks.
_OF_RANKS: Mapping[str, Fault] = {
    "a vote that asks no other rank": _text(World, "begin_sum", "if self.size > 1", "if False"),
    "a rank's end that nobody watches": _fault(OtherRanks, "watch", _nothing, "a lost rank"),
    "a recommendation to another rank lost": _text(
        _Consensus, "begin_vote", "interruption.take_rebalance()", "False", "recommendation"
    ),
    "ranks that follow watch for hangs": _text(
        Supervisor, "follow", "self.watchdog.close()", "pass", "for a cause"
    ),
    "ranks that follow end before they are told": _text(
        Supervisor, "follow", "self.last_resort.follows = ", "", "step"
    ),
    "rank 0 alone ends while all wait for the lease": _text(
        _WorkloadJob, "lead", "self._world.share((Exit.INTERRUPTED, None))", "pass", "alike"
    ),
    "dropped shares waited for": _text(
        ShardedFollower, "obey", "write.cancel()", "write.cancel(), write.wait()", "notices"
    ),
}  # fmt: skip
# Of steps that diverge.
_OF_DIVERGENCE: Mapping[str, Fault] = {
    "steps that diverge are counted alike": _text(
        _WorkloadJob, "_train", "count + 1 if divergence.step <= furthest_step else 1",
        "count + 1", "for a cause",
    ),
    "a step that diverges is not left out": _text(
        _WorkloadJob, "_begin_generation", "if is_skipped:", "if False:", "for a cause"
    ),
    "no rank is told of a divergence": _text(
        _Consensus, "begin_vote", "is_lost, has_diverged", "is_lost, False", "for a cause"
    ),
    "training goes back as the same generation": _text(
        Lease, "begin_generation", "head.generation + 1", "head.generation", "verify"
    ),
    "training goes back while its copy is saved": _text(
        _LastResort, "forget_staged", "with self._lock:", "if True:", "one-writer"
    ),
}  # fmt: skip
# Of a program's snapshots.
_OF_PROGRAMS: Mapping[str, Fault] = {
    "an open file is a whole one": _fault(QuietTime, "is_closed", lambda _: True, "whole saves"),
    "no pause is waited for": _fault(Watcher, "_is_end", lambda *_: True, "whole saves"),
    "what died in a save counts": _text(
        Watcher, "last_moment", "if exit_code == 0 and not after_notice:", "if True:", "whole saves"
    ),
    "what may be torn is not marked": _text(
        Mirror, "_prepared", "moment.is_tentative or", "False and", "whole"
    ),
    "a folder that changes is captured": Fault(_blindly, "at one moment"),
    "blobs that the head needs are swept": _text(
        Blobs, "delete_unneeded", "self._there - needed", "self._there", "head names"
    ),
    "blobs stay for ever": _fault(Blobs, "_delete", _nothing, "for nothing"),
    "growth is no state": _fault(GrowingFiles, "are_state", lambda *_: False, "last save"),
    "a save that took long is a log": _text(
        GrowingFiles, "_is_log", "seen.is_stream", "any(count - seen.others[name] >= 2 and "
        "self._sizes[name] > seen.state.bytes for name, count in self.saves.items())", "whole",
    ),
    "no last snapshot at a notice": _fault(Mirror, "_commit_last", lambda *_: False, "steps"),
    "a restore leaves what was there": Fault(_uncleared, "restored"),
}  # fmt: skip
_OF_PROGRAMS = {name: replace(each, is_of_programs=True) for name, each in _OF_PROGRAMS.items()}
FAULTS: Mapping[str, Fault] = {
    **_OF_GUARD,
    **_OF_TRAINER,
    **_OF_OTHERS,
    **_OF_RANKS,
    **_OF_DIVERGENCE,
    **_OF_PROGRAMS,
}


def main() -> None:
    """Print each fault's rate."""

    def live(seed: int, fault: Fault) -> Sequence[str] | None:
        plan = draw(seed)
        if fault.is_of_programs and not plan.program:
            return None
        return live_through(plan, until_broken=True).broken

    with simulated():
        print_rates(FAULTS, live)


# Returns which promises a seed breaks with a fault; None if it cannot have it.
Live: TypeAlias = Callable[[int, Fault], Sequence[str] | None]


def print_rates(faults: Mapping[str, Fault], live: Live) -> None:
    """Print each fault's rate; it is tried on no more seeds once three have found it."""
    first, _, last = sys.argv[1].partition("..")
    for name, fault in faults.items():
        if not sys.argv[2:] or any(word in name for word in sys.argv[2:]):
            rate = _rate(fault, range(int(first), int(last) + 1), live)
            print(f"| {name} | {rate} |", flush=True)


def _rate(fault: Fault, seeds: range, live: Live) -> str:
    began, found, promises, tried = time.process_time(), list[int](), set[str](), 0
    with fault.plant():
        for seed in seeds:
            if (broken := live(seed, fault)) is None:
                continue
            tried += 1
            if fault.is_found(broken):
                found.append(seed)
                promises |= {each.partition(":")[0] for each in broken[:1]}
            if len(found) == 3:
                break
    seconds = time.process_time() - began
    return f"{len(found)} of {tried} | {found} | {', '.join(sorted(promises))} | {seconds:.0f} s"


if __name__ == "__main__":
    main()
