"""`python -m training run | fail`. It alone reads the environment.

Imports no torch: a machine that boots into a finished run says so at once.
"""

import argparse
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from contract.source import source_sha256
from training.attempt.launch import end_with_rank_0
from training.attempt.supervisor import Supervisor
from training.cli import run_options, run_program, sweep
from training.cli.outputs import checked_file, checked_folder
from training.errors import EXIT_FINISHED
from training.record.head import mark_failed, read_head
from training.record.reopen import with_way_back
from training.record.run_config import read_run_config
from training.report.receipt import conclude
from training.store.open import open_store
from training.store.protocol import Store

if TYPE_CHECKING:
    from training.preflight.admission import ResourceRequest


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    run_options.add(parser)
    parser.set_defaults(act=_run)


def add_fail(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fail`."""
    parser.add_argument("--run-uri", required=True, help="s3://bucket/runs/<run id>, or a folder")
    parser.add_argument("--reason", required=True, help="one sentence, kept in head.json")
    parser.add_argument("--writer", default=socket.gethostname(), help="who says so")
    parser.set_defaults(act=_fail)


def _run(arguments: argparse.Namespace) -> int:
    supervisor = Supervisor(
        budget_seconds=arguments.notice_budget_seconds,
        notice_file=arguments.notice_file,
        notice_policy=arguments.notice_policy,
        watchdog_seconds=arguments.watchdog_seconds,
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
    )
    # Before anything slow is imported: a signal without a handler would end the process.
    supervisor.begin()
    if not run_program.is_program(arguments):
        _wait_without_spinning()
        _let_segments_grow()
    if os.environ.get("TRAINING_LEADER"):
        end_with_rank_0()
    if os.environ.get("RANK", "0") != "0":
        # Rank 0 prints what happens to the run.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    scratch = arguments.scratch or Path(tempfile.mkdtemp(prefix="training-"))
    try:
        return _train(arguments, supervisor, scratch)
    finally:
        if arguments.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)
        supervisor.close()


def _wait_without_spinning() -> None:
    """Let threads that wait for others sleep: where cores are shared, they would take their time.

    OpenMP reads it when torch is imported; loader workers and ranks inherit it; a user's own wins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _let_segments_grow() -> None:
    """Set how torch allocates on a GPU, for this process, its ranks and trials; a user's own wins.

    With fixed segments, batches of several shapes leave gaps that no later tensor fits.
    """
    # The second name is torch's older one, which it still reads, and first.
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _train(arguments: argparse.Namespace, supervisor: Supervisor, scratch: Path) -> int:
    checked_folder(scratch)
    if arguments.metrics_file is not None:
        checked_file(arguments.metrics_file)
    store = open_store(arguments.run_uri)
    if run_program.is_program(arguments):
        common = run_options.attempt_options(arguments, store, scratch)
        return run_program.run(arguments, supervisor, common)
    run_options.refuse_missing(arguments)
    run_options.import_from(arguments.source)
    if _is_same_finished_run(arguments, store):
        print(f"[ok] {store.uri} is finished already", flush=True)
        return EXIT_FINISHED
    # Here, because they import torch: seconds that the lines above do not need.
    from training.engine.attempt import run_workload
    from training.preflight.preflight import gpu_mib, preflight

    options = run_options.parse(arguments, store, scratch, os.environ)
    checked = preflight(options)
    options = replace(options, num_processes=checked.request.num_processes)
    with _reserved(checked.request, gpu_mib()), checked.explaining_out_of_memory():
        return run_workload(options, checked.job, supervisor)


def _reserved(request: "ResourceRequest", gpu_mib: Sequence[int]) -> AbstractContextManager[None]:
    """This run's share of the machine, next to other runs; all its ranks hold one together."""
    from training.preflight.admission import MachineCapacity, Reservations

    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    reservations = Reservations(sweep.default_reservations())
    return reservations.reserved(request, MachineCapacity.here(gpu_mib))


def _is_same_finished_run(arguments: argparse.Namespace, store: Store) -> bool:
    """Whether there is nothing to do; anything unusual is left to the full checks."""
    head, record = read_head(store), read_run_config(store)
    if head is None or record is None or head.state != "finished":
        return False
    asked = sorted(arguments.override)
    done = sorted(f"{name}={value}" for name, value in record.overrides.items())
    source = source_sha256(arguments.source) if arguments.source else None
    names = (record.workload, record.recipe, done, record.config.get("source_sha256"))
    return names == (arguments.workload, arguments.recipe, asked, source)


def _fail(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.run_uri)
    run_id = store.uri.rstrip("/").rpartition("/")[2]
    reason = with_way_back(arguments.reason, store.uri)
    head = mark_failed(store, run_id, arguments.writer, reason)
    record = read_run_config(store)
    if record is not None:
        conclude(store, record, head)
    text = f"[ok] {store.uri} is {head.state}" + (f": {head.reason}" if head.reason else "")
    print(text + ("" if head.generation else " (no attempt had started)"))
    return EXIT_FINISHED
