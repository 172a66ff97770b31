"""`python -m training sweep`: one run for each combination of some overrides, a few at a time.

The runs are recorded first, in sweep.json next to them, which is never changed. Each is a process
with a memory limit, and all share the mapped files of one dataset folder. More parallel runs than
the machine can take are refused before the first one starts.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.errors import Exit, UserError
from contract.file_names import MOST_NAME_BYTES
from contract.keys import ARTIFACTS, RECEIPT, SWEEP
from contract.readable import table
from contract.sweep import Sweep, drawn_runs
from training.cli.run import add_override, count, positive_int
from training.durable import Head, StoredDataset, open_store, parse_receipt, put_unless_changed

_POLL_SECONDS = 0.2
# Started together, all would load and map data at the same time.
_STAGGER_SECONDS = 1.0


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sweep`."""
    parser.description = (
        "Train one run for each combination of the values given with --vary, or for some that are "
        "drawn, at most --parallel at a time, and print a table. Called again, an interrupted "
        "sweep resumes its runs."
    )
    add = parser.add_argument
    add("--workload", required=True, help="a known name, or your own as package.module:NAME")
    add("--recipe", required=True, help="a named config of the workload")
    add("--dataset-uri", required=True, help="a folder, or s3://bucket/prefix (synced once)")
    add("--runs-uri", required=True, help="parent of all runs: s3://bucket/prefix, or a folder")
    add(
        "--vary",
        action="append",
        required=True,
        metavar="NAME=V1,V2,...",
        help="values of one field of the config; several make a grid; with --random also 0.01..1",
    )
    add("--random", type=positive_int, metavar="N", help="draw this many runs instead of a grid")
    add("--seed", type=count, default=0, help="for --random, recorded (default: %(default)s)")
    add("--write-only", action="store_true", help="only write sweep.json, for others to train")
    add_override(parser, "for every run")
    add("--parallel", type=positive_int, default=1, help="runs at once (default: %(default)s)")
    add("--memory-limit-mib", type=int, help="of each run, as for `run` (default: its GPU's share)")
    add("--logs", type=Path, help="default: sweep-logs/ and the last part of --runs-uri")
    add("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(act=_sweep)


@dataclass(kw_only=True, slots=True)
class _SweepRun:
    """One run of the sweep."""

    name: str
    overrides: list[str]
    uri: str
    code: int | None = None
    process: subprocess.Popen[bytes] | None = None
    seconds: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)


def _sweep(options: argparse.Namespace) -> int:
    asked = _asked(options)
    # Sweeps over the same values have runs of the same names.
    options.logs = options.logs or Path("sweep-logs", Path(options.runs_uri).name)
    if options.write_only:
        runs = _kept(options, asked)
        print(f"[ok] {options.runs_uri.rstrip('/')}/{SWEEP} has {len(runs)} runs")
        return Exit.FINISHED
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        dataset = StoredDataset(open_store(options.dataset_uri)).fetched(Path(scratch)).folder
        options.memory_limit_mib = _refuse_or_share(options, dataset)
        runs = _kept(options, asked)
        _run_all(options, runs, dataset)
    for one in runs:
        one.row = _row(one)
    if options.json:
        print(json.dumps([one.row for one in runs], indent=1))
    else:
        names = list(dict.fromkeys(n for one in runs for n in list(one.row["metrics"])[:3]))
        print("\n".join(table([_columns(one.row, names) for one in runs])))
    codes = {one.code for one in runs}
    if codes & {Exit.INTERRUPTED, None}:
        return Exit.INTERRUPTED
    return Exit.FINISHED if codes == {Exit.FINISHED} else Exit.FAILED


def _asked(options: argparse.Namespace) -> Sweep:
    """The sweep that the options describe."""
    from training.registry import load_workload, parse_overrides, resolve_config
    from training.settings import recorded

    runs = drawn_runs(options.vary, options.override, options.random, options.seed)
    workload = load_workload(options.workload)
    first = dict[str, str]()
    for run in runs:
        # Refuse invalid values now, not in the last run after hours, and equal ones: 0.1,0.10.
        config = resolve_config(workload, options.recipe, parse_overrides(run.overrides))
        size = len(f"{run.name}.log".encode())
        if size > MOST_NAME_BYTES and not options.write_only:
            raise UserError(
                f"the log {run.name[:60]}... has {size} bytes in its name, more than the "
                f"{MOST_NAME_BYTES} of a disk; vary fewer fields, or give shorter values"
            )
        if (same := first.setdefault(json.dumps(recorded(config)), run.name)) != run.name:
            raise UserError(f"the runs {same} and {run.name} are the same; give each value once")
    drawn = "grid" if options.random is None else f"{options.random} at random, seed {options.seed}"
    return Sweep(workload=options.workload, recipe=options.recipe, drawn=drawn, runs=runs)


def _kept(options: argparse.Namespace, asked: Sweep) -> list[_SweepRun]:
    """Record the runs next to them, and return them; UserError if another sweep is kept there."""
    store = open_store(options.runs_uri)
    put_unless_changed(store, SWEEP, asked.to_bytes(), None)
    kept = store.get(SWEEP)
    assert kept is not None
    if Sweep.from_bytes(kept.data, f"{store.uri}/{SWEEP}") != asked:
        raise UserError(
            f"{store.uri} has another sweep, which cannot be changed; pass the same options, or "
            "another --runs-uri"
        )
    uri = options.runs_uri.rstrip("/")
    return [
        _SweepRun(name=r.name, overrides=[*r.overrides], uri=f"{uri}/{r.name}") for r in asked.runs
    ]


def _refuse_or_share(options: argparse.Namespace, dataset: Path) -> int | None:
    """Refuse what the machine cannot take; return each run's memory limit if there is a GPU."""
    from training.preflight.admission import (
        MachineCapacity,
        Reservations,
        refuse_oversubscription,
        too_many_threads,
    )
    from training.preflight.preflight import gpu_mib, resource_request
    from training.registry import load_workload, parse_overrides, resolve_config

    workload = load_workload(options.workload)
    config = resolve_config(workload, options.recipe, parse_overrides(options.override))
    machine = MachineCapacity.here(gpu_mib())
    limit: int | None = options.memory_limit_mib
    if limit is None and machine.gpu_mib and options.parallel > 1:
        limit = machine.gpu_mib[0] // options.parallel
    request = resource_request("sweep", workload, config, str(dataset), limit)
    requests = [request] * options.parallel
    others = list(Reservations().others())
    refuse_oversubscription(requests, others, machine)
    if warning := too_many_threads(requests, others, machine):
        print(f"[room] {warning}", file=sys.stderr, flush=True)
    return limit


def _run_all(options: argparse.Namespace, runs: Sequence[_SweepRun], dataset: Path) -> None:
    options.logs.mkdir(parents=True, exist_ok=True)
    waiting, running, last_start = list(runs), list[_SweepRun](), -_STAGGER_SECONDS
    is_stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        for one in running:
            if one.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(one.process.pid, signal.SIGTERM)

    before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not is_stopping):
            now = time.monotonic()
            is_time = len(running) < options.parallel and now - last_start >= _STAGGER_SECONDS
            if waiting and not is_stopping and is_time:
                running.append(_start(options, waiting.pop(0), dataset))
                last_start = now
            for one in list(running):
                if one.process is not None and one.process.poll() is not None:
                    running.remove(one)
                    _report_end(one, options.logs)
            time.sleep(_POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(options: argparse.Namespace, one: _SweepRun, dataset: Path) -> _SweepRun:
    command = [sys.executable, "-m", "training", "run"]
    command += [f"--workload={options.workload}", f"--recipe={options.recipe}"]
    command += [f"--dataset-uri={dataset}", f"--run-uri={one.uri}"]
    command += [f"--artifacts-uri={options.runs_uri.rstrip('/')}/{ARTIFACTS.rstrip('/')}"]
    command += [f"--override={override}" for override in one.overrides]
    if options.memory_limit_mib is not None:
        command.append(f"--memory-limit-mib={options.memory_limit_mib}")
    with (options.logs / f"{one.name}.log").open("ab") as log:
        # Its own session: Ctrl-C reaches only the sweep, which signals each run once.
        one.process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    one.seconds = -time.monotonic()
    print(f"[started] {one.name}", file=sys.stderr, flush=True)
    return one


def _report_end(one: _SweepRun, logs: Path) -> None:
    assert one.process is not None
    one.code = one.process.returncode
    one.seconds += time.monotonic()
    how = "ok" if one.code == Exit.FINISHED else f"exit {one.code}"
    print(f"[{how}] {one.name}: {logs / f'{one.name}.log'}", file=sys.stderr, flush=True)


def _row(one: _SweepRun) -> dict[str, Any]:
    store = open_store(one.uri)
    head, receipt = Head.read(store), parse_receipt(store.get(RECEIPT))
    stages: Mapping[str, Mapping[str, float]] = receipt.get("stages", {})
    last = next(reversed(list(stages.values())), {})
    return {
        "run": one.name,
        "state": head.state if head else "not started",
        "exit_code": one.code,
        "steps": receipt.get("steps"),
        "seconds": round(one.seconds, 1),
        "metrics": dict(last),
        "uri": one.uri,
    }


def _columns(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the columns of a run that people read: its state, and these metrics."""
    metrics = {name: row["metrics"].get(name) for name in names}
    return {
        **{name: "-" if row[name] is None else row[name] for name in ("run", "state", "steps")},
        "seconds": row["seconds"],
        **{name: "-" if value is None else f"{value:.4g}" for name, value in metrics.items()},
    }
