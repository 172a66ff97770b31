"""A run's state, its cost so far and to come, and what it waits for. It only reads."""

import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from contract.errors import UserError
from contract.goodput import Goodput
from contract.keys import CONFIG, EVENTS, GUARD, HEAD, METRICS
from contract.metrics import LineReader, metrics_objects
from contract.readable import duration, shown
from contract.stack_names import training_id
from operate.runs import OperatedRun, account_runs, committed_step, runs_at
from sizing import table_cell, table_heading
from stacks import Ledger, StackFleet, StackInstance, instances_of_stack, spot_prices
from training.durable import Head, History, RunConfig, get_each, open_store, read_goodput

# Compressed 60,000 steps or more, which take seconds to read, as do these events, one by one.
_MOST_METRICS_BYTES, _MOST_EVENTS = 4_000_000, 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """A run, and what EC2 and the Guard say about it; without a stack, what the Guard recorded."""

    run: OperatedRun
    now: float
    head: Head | None
    ledger: Ledger
    machines: Sequence[StackInstance] = ()  # also those that have ended, the newest last
    capacity: int = 0  # the fleet's target

    @property
    def live(self) -> Sequence[StackInstance]:
        """Its machines that run, the newest last."""
        return [one for one in self.machines if one.is_live]

    @property
    def is_saving(self) -> bool:
        """Whether a machine that has been told to end may still be saving."""
        is_held = self.head is not None and self.head.state == "running"
        return is_held and any(not one.is_gone for one in self.machines)

    @property
    def state(self) -> str:
        """The run's state in one word."""
        head, is_held = self.head, bool(self.head and self.head.state == "running")
        if head is not None and head.is_ended:
            return head.state
        if not self.run.stack:
            # A trainer renews its lease every ten seconds.
            path = self.run.folder and self.run.folder / HEAD
            is_silent = path is not None and self.now - path.stat().st_mtime > 120.0
            return ("silent" if is_silent else "running") if is_held else "interrupted"
        if not self.live or not self.capacity:
            is_ending = self.live or (self.is_saving and not self.capacity)
            return "stopping" if is_ending else "waiting" if self.capacity else "stopped"
        is_its = head is not None and head.writer in {one.id for one in self.live}
        return "running" if is_held and is_its else "starting"


def look(run: OperatedRun) -> Sight:
    """Look at the run and its machines; the ledger is updated in memory only."""
    found, now, head = run.store.get(GUARD), time.time(), run.head
    ledger = _read_ledger(run, found.data if found else None)
    if not run.stack:  # no Guard looks at it any more: what ran at the last look has ended since
        for each in ledger.attempts.values():
            each.is_live = False
        ledger.waiting = 0.0
        return Sight(run=run, now=now, head=head, ledger=ledger)
    every, fleet_id = instances_of_stack(run.settings), run.outputs["FleetIdOutput"]
    own = sorted((one for one in every if one.run_id == run.id), key=lambda one: one.launched)
    capacity, _ = StackFleet.of(fleet_id).read_capacity()
    ledger.observe(run.settings, own, now, spot_prices(own))
    ledger.observe_fleets({fleet_id: capacity}, fleet_id, now)
    return Sight(run=run, now=now, head=head, ledger=ledger, machines=own, capacity=capacity)


def _read_ledger(run: OperatedRun, found: bytes | None) -> Ledger:
    try:
        return Ledger.from_json(found) if found else Ledger()
    except ValueError as error:
        raise UserError(
            f"{run.uri}/{GUARD} is damaged or was edited ({error}); restore its last good version"
        ) from error


def read_status(run: OperatedRun, bought: str | None = None) -> dict[str, Any]:
    """Return the current status of the run.

    `bought` repeats what an earlier call said of its goodput, for which it reads all of it.
    """
    sight, config = look(run), RunConfig.read(run.store)
    head, ledger, state = sight.head, sight.ledger, sight.state
    keys = sorted(run.store.sizes(EVENTS))
    age = next((sight.now - _time(k) for k in reversed(keys) if "-committed." in k), None)
    left, basis = _left(sight)
    if left and age and state == "running":
        left = max(0.0, left - age)
    line, one = next(_steps(run), {}), sight.live[-1] if sight.live else None
    is_short = bought is None and len(keys) <= _MOST_EVENTS
    if is_short and sum(run.store.sizes(METRICS).values()) <= _MOST_METRICS_BYTES:
        bought = read_goodput(run.store, json.loads(ledger.to_json()), sight.now).sentence()
    holder = head.writer if head and state == "running" else None
    hourly = 0.0
    if run.stack:
        hourly = ledger.usd_per_hour or run.settings.planned_usd_per_hour
    return {
        "run": run.id,
        "state": state,
        "waits_for": _waits_for(sight, keys),
        "trains": f"{config.workload} / {config.recipe}" if config else None,
        **{name: line.get(name) for name in ("stage", "step", "loss")},
        "committed_step": committed_step(head),
        "seconds_since_commit": None if age is None else round(age, 1),
        "warning": _warning(run, keys),
        "attempts": head.generation if head else 0,
        "machine": one.id if one else holder,
        **{name: getattr(one, name, None) for name in ("size", "market", "zone")},
        "seconds_left": None if left is None else round(left, 1),
        "seconds_left_basis": basis,
        "hours_billed": round(ledger.billed_hours(), 4) if ledger.attempts else None,
        "usd_spent": round(ledger.billed_usd(), 4) if ledger.attempts else None,
        "usd_to_come": None if left is None or not hourly else round(left / 3600 * hourly, 4),
        "usd_limit": (run.settings.max_usd or None) if run.stack else None,
        "goodput": bought or f"`runs cost {run.folder or run.id}` reads its many steps and events",
        "stack": run.stack or None,
        "kept_in": run.uri,
    }


def _warning(run: OperatedRun, keys: Sequence[str]) -> Any:
    """Return what a program was warned of since it last saved, if ever."""
    is_about = re.compile(r"-(committed|no-snapshot)\.")
    last = next(filter(is_about.search, reversed(keys)), "")
    found = run.store.get(last) if "-no-snapshot." in last else None
    return (History.event(found.data) or {}).get("message") if found else None


def _time(key: str) -> float:
    """Return an event's time by its machine's clock, with which its key begins."""
    when = datetime.strptime(key.removeprefix(EVENTS)[:15], "%Y%m%dT%H%M%S")
    return when.replace(tzinfo=UTC).timestamp()


def _steps(run: OperatedRun) -> Iterator[Mapping[str, Any]]:
    """Yield the last step's line of each of the eight newest metrics objects."""
    for one in metrics_objects(run.store.sizes(METRICS))[:-9:-1]:
        data = [found.data if found else None for found in get_each(run.store, [one.key])]
        lines = list(LineReader(lambda: [one.key], lambda _: data).new())  # noqa: B023 read here
        if steps := [line for line in lines if line["kind"] == "step"]:
            yield max(steps, key=lambda line: int(line["step"]))


def _left(sight: Sight) -> tuple[float | None, str | None]:
    """Return the seconds of work left at the last commit, and the basis of the figure."""
    head, run = sight.head, sight.run
    if head is not None and head.is_ended:
        return None, None
    if run.stack and run.settings.forecast is not None:
        from stacks import work_left

        work = work_left(asdict(head) if head else {}, run.settings.forecast)
        restart = 0.0 if sight.live else run.settings.forecast.restart_seconds
        return work.left + restart, work.basis
    newest = head.checkpoints[-1] if head and head.checkpoints else None
    if newest is None or newest.seconds_left is None:
        return None, None
    return newest.seconds_left, f"measured, of stage {newest.stage!r} alone"


def _waits_for(sight: Sight, keys: Sequence[str]) -> str | None:
    """Return what must happen next; None while it trains, or nothing is left to do."""
    state, run, head = sight.state, sight.run, sight.head
    ends = ("-to-zero.json", "-stopped.json") if state == "stopped" else (".json",)
    key = next((key for key in reversed(keys) if key.endswith(ends)), None)
    found = run.store.get(key) if key else None
    event = (History.event(found.data) if found else None) or {}
    last = ": ".join(str(event[name]) for name in ("name", "message") if event.get(name))
    # What the Guard stopped for a reason it would stop again.
    repaired = ", once repaired" if str(event.get("name")).endswith("to-zero") else ""
    waiting = duration(sight.now - (sight.ledger.waiting or sight.now))
    return {
        "failed": f"`runs resume {run.folder or run.id}`, once repaired: {head and head.reason}",
        "stopped": f"`runs resume {run.id}`{repaired} ({last or 'its fleet is at zero'})",
        "waiting": f"a machine, for {waiting} so far",
        "starting": f"its machine to start training (last event: {last or 'none'})",
        "stopping": "its machine to save and end",
        "interrupted": "another attempt: start the same command again, or deploy its stack",
        "finished": run.stack
        and f"`npx cdk destroy {training_id(run.stack)}`: idle, it still costs; the run stays",
        "silent": "another attempt: its machine has written nothing for two minutes",
    }.get(state) or None


def cost_of(run: OperatedRun) -> tuple[list[dict[str, Any]], Goodput]:
    """Return the run's machines with their hours, dollars and ends so far; what they bought."""
    names = ("size", "market", "usd_per_hour", "hours", "usd", "is_live")
    sight = look(run)
    attempts = sorted(sight.ledger.attempts.items(), key=lambda pair: pair[1].launched)
    bought = read_goodput(run.store, json.loads(sight.ledger.to_json()), sight.now)
    why = {end.machine: end.why for end in bought.ends}
    rows = [
        {"machine": machine}
        | {name: getattr(each, name) for name in names}
        | {"ended_by": why.get(machine)}
        for machine, each in attempts
    ]
    return rows, bought


def list_runs(place: str | None) -> list[dict[str, Any]]:
    """Return a record of each run in the account, in s3://bucket/runs or in a folder of runs."""
    found = account_runs() if place is None else runs_at(place.rstrip("/"))
    rows = []
    for parent, group in groupby(found, key=lambda run: run.uri.rpartition("/")[0]):
        runs = list(group)
        keys = [f"{run.id}/{key}" for run in runs for key in (HEAD, CONFIG, GUARD)]
        contents = [one.data if one else None for one in get_each(open_store(parent), keys)]
        for number, run in enumerate(runs):
            head, config, guard = contents[3 * number : 3 * number + 3]
            if head or guard or run.stack:  # one that never began may have cost, too
                rows.append(_row(run, head, config, guard))
    return rows


def _row(
    run: OperatedRun, found: bytes | None, config: bytes | None, guard: bytes | None
) -> dict[str, Any]:
    """Return what is known of a run; one that cannot be read must not hide the others."""
    names = ("committed_step", "attempts", "trains", "hours", "usd")
    row = {"run": run.id, "state": "unreadable", **dict.fromkeys(names), "stack": run.stack or None}
    try:
        head = Head.from_bytes(found, f"{run.uri}/{HEAD}") if found else None
        record = RunConfig.from_bytes(config, f"{run.uri}/{CONFIG}") if config else None
        ledger = _read_ledger(run, guard)
        state = head.state.replace("released", "interrupted") if head else "interrupted"
        if run.stack and not (head and head.is_ended):
            state = look(run).state
    except UserError as error:
        print(f"[warning] {error}", file=sys.stderr)
        return row
    return row | {
        "state": state,
        "committed_step": committed_step(head),
        "attempts": head.generation if head else 0,
        "trains": f"{record.workload} / {record.recipe}" if record else None,
        "hours": round(ledger.billed_hours(), 2) if ledger.attempts else None,
        "usd": round(ledger.billed_usd(), 2) if ledger.attempts else None,
    }


def as_text(status: Mapping[str, Any]) -> str:
    """Return the known parts of the status as readable lines."""
    lines = []
    for name, value in status.items():
        if value is not None:
            is_time = name.startswith("seconds") and isinstance(value, float)
            text = duration(value) if is_time else table_cell(value)
            lines.append(f"{table_heading(name).removeprefix('seconds '):<14} {text}")
    return shown("\n".join(lines))
