"""`python -m training sweep`: one run for each combination of some overrides, a few at a time.

Each is a process of its own with a limit on its memory, over one dataset folder whose mapped files
they share. More at once than the machine has room for is refused before the first one starts.
"""

import argparse
import itertools
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

from contract.keys import ARTIFACTS, RECEIPT
from training.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_INTERRUPTED, UserError
from training.record.head import read_head
from training.store.open import open_store

_POLL_SECONDS = 0.2
# Started together they would all load and map at the same moment.
_STAGGER_SECONDS = 1.0


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sweep`."""
    parser.description = (
        "Train one run for each combination of the values given with --vary, at most --parallel "
        "at a time, and print a table. A sweep that was interrupted goes on where its runs are "
        "when it is called again."
    )
    add = parser.add_argument
    add("--workload", required=True, help="a known name, or your own as package.module:NAME")
    add("--recipe", required=True, help="a named config of the workload")
    add("--dataset-uri", required=True, help="a folder, or s3://bucket/prefix (synced once)")
    add("--runs-uri", required=True, help="runs go below it: s3://bucket/prefix, or a folder")
    add(
        "--vary",
        action="append",
        required=True,
        metavar="NAME=V1,V2,...",
        help="values of one field of the config; several make a grid",
    )
    add("--override", action="append", default=[], metavar="NAME=VALUE", help="for every run")
    add("--parallel", type=int, default=1, help="runs at once (default: %(default)s)")
    add("--memory-limit-mib", type=int, help="of each run, as of `run` (default: its GPU's share)")
    add("--logs", type=Path, default=Path("sweep-logs"), help="default: %(default)s")
    add("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(act=_sweep)


@dataclass(kw_only=True, slots=True)
class _One:
    """One run of the sweep."""

    name: str
    overrides: list[str]
    uri: str
    code: int | None = None
    process: subprocess.Popen[bytes] | None = None
    seconds: float = 0.0
    row: dict[str, Any] = field(default_factory=dict)


def _sweep(options: argparse.Namespace) -> int:
    runs = _grid(options)
    if options.parallel < 1:
        raise UserError(f"--parallel is {options.parallel}; give at least 1")
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        dataset = _dataset(options.dataset_uri, Path(scratch))
        options.memory_limit_mib = _refuse_or_share(options, dataset)
        _go(options, runs, dataset)
    for one in runs:
        one.row = _row(one)
    if options.json:
        print(json.dumps([one.row for one in runs], indent=1))
    else:
        print("\n".join(_table([one.row for one in runs])))
    codes = {one.code for one in runs}
    if codes & {EXIT_INTERRUPTED, None}:
        return EXIT_INTERRUPTED
    return EXIT_FINISHED if codes == {EXIT_FINISHED} else EXIT_FAILED


def _grid(options: argparse.Namespace) -> list[_One]:
    from training.config import parse_overrides, resolve_config
    from training.workloads import load_workload

    axes = []
    for text in options.vary:
        name, separator, values = text.partition("=")
        if not separator or not all(values.split(",")):
            raise UserError(f"--vary {text!r} cannot be read; write name=value,value")
        axes.append([(name, value) for value in values.split(",")])
    workload, runs = load_workload(options.workload), []
    for chosen in itertools.product(*axes):
        own = [f"{name}={value}" for name, value in chosen]
        # Now, and not by the last run after hours: whatever cannot be is said at once.
        resolve_config(workload, options.recipe, parse_overrides([*options.override, *own]))
        name = "_".join(f"{name}-{value}" for name, value in chosen)
        uri = f"{options.runs_uri.rstrip('/')}/{name}"
        runs.append(_One(name=name, overrides=[*options.override, *own], uri=uri))
    return runs


def _dataset(uri: str, scratch: Path) -> Path:
    from training.store.dataset import open_dataset, sync_dataset

    folder = Path(uri)
    if uri.startswith("s3://"):
        folder = scratch / "dataset"
        sync_dataset(open_store(uri), folder, lambda done, total, size: None)
    open_dataset(folder)
    return folder


def _refuse_or_share(options: argparse.Namespace, dataset: Path) -> int | None:
    """Refuse what the machine has no room for; the limit of each run, where there is a GPU."""
    from training.config import parse_overrides, resolve_config
    from training.preflight.admission import (
        MachineCapacity,
        Reservations,
        refuse_oversubscription,
        too_many_threads,
    )
    from training.preflight.preflight import gpu_mib, resource_request
    from training.workloads import load_workload

    workload = load_workload(options.workload)
    config = resolve_config(workload, options.recipe, parse_overrides(options.override))
    machine = MachineCapacity.here(gpu_mib())
    limit: int | None = options.memory_limit_mib
    if limit is None and machine.gpu_mib and options.parallel > 1:
        limit = machine.gpu_mib[0] // options.parallel
    need = resource_request("sweep", workload, config, str(dataset), limit)
    needs, others = [need] * options.parallel, list(Reservations(default_reservations()).others())
    refuse_oversubscription(needs, others, machine)
    warning = too_many_threads(needs, others, machine)
    if warning:
        print(f"[room] {warning}", file=sys.stderr, flush=True)
    return limit


def default_reservations() -> Path:
    """Where the runs of this machine say what they reserve."""
    return Path(tempfile.gettempdir()) / "training-reservations"


def _go(options: argparse.Namespace, runs: Sequence[_One], dataset: Path) -> None:
    options.logs.mkdir(parents=True, exist_ok=True)
    waiting, going, last_start = list(runs), list[_One](), -_STAGGER_SECONDS
    is_ending = False

    def end(number: int, frame: object) -> None:
        nonlocal is_ending
        is_ending = True
        for one in going:
            if one.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(one.process.pid, signal.SIGTERM)

    before = {n: signal.signal(n, end) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        while going or (waiting and not is_ending):
            now = time.monotonic()
            is_time = len(going) < options.parallel and now - last_start >= _STAGGER_SECONDS
            if waiting and not is_ending and is_time:
                going.append(_start(options, waiting.pop(0), dataset))
                last_start = now
            for one in list(going):
                if one.process is not None and one.process.poll() is not None:
                    going.remove(one)
                    _say_ended(one, options.logs)
            time.sleep(_POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(options: argparse.Namespace, one: _One, dataset: Path) -> _One:
    command = [sys.executable, "-m", "training", "run"]
    command += [f"--workload={options.workload}", f"--recipe={options.recipe}"]
    command += [f"--dataset-uri={dataset}", f"--run-uri={one.uri}"]
    command += [f"--artifacts-uri={options.runs_uri.rstrip('/')}/{ARTIFACTS.rstrip('/')}"]
    command += [f"--override={override}" for override in one.overrides]
    if options.memory_limit_mib is not None:
        command.append(f"--memory-limit-mib={options.memory_limit_mib}")
    with (options.logs / f"{one.name}.log").open("ab") as log:
        # Its own group: Ctrl-C reaches the sweep alone, which tells each run once.
        one.process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    one.seconds = -time.monotonic()
    print(f"[started] {one.name}", file=sys.stderr, flush=True)
    return one


def _say_ended(one: _One, logs: Path) -> None:
    assert one.process is not None
    one.code = one.process.returncode
    one.seconds += time.monotonic()
    how = "ok" if one.code == EXIT_FINISHED else f"exit {one.code}"
    print(f"[{how}] {one.name}: {logs / f'{one.name}.log'}", file=sys.stderr, flush=True)


def _row(one: _One) -> dict[str, Any]:
    store = open_store(one.uri)
    head, found = read_head(store), store.get(RECEIPT)
    receipt: Mapping[str, Any] = json.loads(found.data) if found else {}
    stages: Mapping[str, Mapping[str, float]] = receipt.get("stages", {})
    last = next(reversed(list(stages.values())), {})
    return {
        "run": one.name,
        "state": head.state if head else "not begun",
        "exit_code": one.code,
        "steps": receipt.get("steps"),
        "seconds": round(one.seconds, 1),
        "metrics": dict(last),
        "uri": one.uri,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(n for row in rows for n in list(row["metrics"])[:3]))
    width = max(len(row["run"]) for row in rows)
    lines = [
        f"{'run':{width}} {'state':9} {'steps':>7} {'seconds':>8} "
        + " ".join(f"{name:>12}" for name in names)
    ]
    for row in rows:
        values = [row["metrics"].get(name) for name in names]
        cells = " ".join(f"{'-' if value is None else f'{value:.4g}':>12}" for value in values)
        steps = "-" if row["steps"] is None else row["steps"]
        lines.append(
            f"{row['run']:{width}} {row['state']:9} {steps:>7} {row['seconds']:>8.1f} {cells}"
        )
    return lines
