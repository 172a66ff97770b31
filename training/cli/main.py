"""The command line: `python -m training COMMAND`. It alone reads the environment.

Exit codes: 0 finished, 75 interrupted and saved, 76 lost the lease, 2 the user's mistake, 1 failed,
3 no manifest came in time. Heavy imports wait until a command needs them.
"""

import argparse
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from training.cli import dataset as dataset_commands
from training.cli import history as history_commands
from training.cli import measure, run_options, sweep
from training.cli import weights as weights_commands
from training.cli.outputs import checked_file, checked_folder
from training.engine.exit_code import exit_code_of
from training.errors import EXIT_FINISHED
from training.interruption.supervisor import Supervisor
from training.ranks.launch import end_with_rank_0
from training.record.head import mark_failed, read_head
from training.record.run_config import read_run_config
from training.report.log import configure_logging
from training.report.receipt import conclude
from training.store.open import open_store
from training.store.protocol import Store

if TYPE_CHECKING:
    from training.preflight.admission import ResourceRequest

_EXIT_CODES = """exit codes: 0 finished · 75 interrupted and saved · 76 lost the lease to another
writer · 2 a mistake in what was asked for · 1 failed · 3 (data sync) no manifest came in time
· 130 stopped by Ctrl-C"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(arguments)
    configure_logging()
    options.arguments = list(sys.argv[1:] if arguments is None else arguments)
    return exit_code_of(lambda: int(options.act(options)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training",
        description="Train a workload so that losing the machine loses nothing but time.",
        epilog=_EXIT_CODES,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run", help="train to the end, or go on where a run is", epilog=_EXIT_CODES
    )
    run_options.add(run)
    run.set_defaults(act=_run)
    data = commands.add_parser("data", help="make, check, upload and sync datasets")
    dataset_commands.add(data.add_subparsers(required=True, metavar="COMMAND"))
    measure.add(commands.add_parser("measure", help="what each stage needs, without a GPU"))
    fail = commands.add_parser("fail", help="mark a run failed, whoever holds it")
    fail.add_argument("--run-uri", required=True, help="s3://bucket/runs/<run id>, or a folder")
    fail.add_argument("--reason", required=True, help="one sentence, kept in head.json")
    fail.add_argument("--writer", default=socket.gethostname(), help="who says so")
    fail.set_defaults(act=_fail)
    weights_commands.add_export(
        commands.add_parser("export", help="weights of a run or checkpoint, as a safetensors file")
    )
    weights_commands.add_evaluate(
        commands.add_parser("evaluate", help="metrics of a run's weights on a split")
    )
    weights_commands.add_predict(
        commands.add_parser("predict", help="what a run's weights say of each sample")
    )
    history_commands.add_report(
        commands.add_parser("report", help="a run on one page: curves, attempts, what was lost")
    )
    history_commands.add_tensorboard(
        commands.add_parser("tensorboard", help="a run's metrics as TensorBoard event files")
    )
    sweep.add(commands.add_parser("sweep", help="runs over a grid of overrides, a few at a time"))
    _add_check(commands.add_parser("check", help="does a workload of your own resume exactly?"))
    _add_torture(
        commands.add_parser("torture", help="kill a small run at random moments and compare")
    )
    return parser


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what is wrong with a workload's protocol; then run it small, once more, and "
        "interrupted at the first step, in epochs, in evaluations and between stages, each "
        "attempt in a process of its own, and compare. Exit code 1: it does not resume exactly."
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="a known workload, or your own as package.module:NAME")
    add("--recipe", help="default: the first by name")
    add("--override", action="append", default=[], metavar="NAME=VALUE", help="as of `run`")
    add("--dataset-uri", help="a folder (default: made by the workload's own generator)")
    add("--count", type=int, default=100, help="samples that are made (default: %(default)s)")
    add(
        "--steps",
        type=run_options.positive_int,
        help="of each Train stage, at least: with kills on the way (default: two epochs of four)",
    )
    add("--checkpoint-interval", default="1epochs", help="as of `run` (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=_check)


def _check(options: argparse.Namespace) -> int:
    _one_thread_before_numpy()
    from training.proof.check.command import check

    return check(options)


def _one_thread_before_numpy() -> None:
    # Read when numpy is imported; its thread would be one too many for a process that forks.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")


def _add_torture(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Kill small runs at random moments and at named points, with SIGKILL, SIGTERM, notices "
        "(with a time and without), stopped and rival attempts and a store that misbehaves, until "
        "they are done; compare each with the uninterrupted run. Exit code 1: something differed."
    )
    add = parser.add_argument
    add("--kills", type=int, default=30, help="in all (default: %(default)s)")
    add("--seed", type=int, default=0, help="what is done when (default: %(default)s)")
    add("--seeds", type=int, default=1, help="share the kills among seeds S, S+1, ...")
    add(
        "--workload",
        default="training.proof.torture.workload:SMALL",
        help="a known name, or your own as package.module:NAME (default: a built-in one)",
    )
    add("--recipe", help="or several: a,b (default: the first by name; the built-in one's, all)")
    add("--num-processes", help="ranks; 1,2 deals both (default: 1; the built-in one 1,1,2)")
    add("--override", action="append", default=[], metavar="NAME=VALUE", help="as of `run`")
    add("--dataset-uri", help="a folder (default: made by the workload's own generator)")
    add("--count", type=int, default=77, help="samples that are made (default: %(default)s)")
    add("--run-uri", help="runs go below it: s3://bucket/prefix or a folder (default: --out)")
    add("--out", type=Path, help="keep runs and logs there (default: only if something differed)")
    add(
        "--checkpoint-interval",
        default="5steps,1epochs,0.1s,auto",
        help="as of `run`; several are dealt to the runs in turn (default: %(default)s)",
    )
    add("--lease-ttl-seconds", type=run_options.positive, default=0.5, help="default: %(default)s")
    add(
        "--notice-budget-seconds",
        type=run_options.positive,
        default=20.0,
        help="default: %(default)s",
    )
    add("-x", "--exitfirst", action="store_true", help="end after the first run that differs")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=_torture)


def _torture(options: argparse.Namespace) -> int:
    _one_thread_before_numpy()
    from training.proof.torture.command import torture

    return torture(options)


def _run(options: argparse.Namespace) -> int:
    supervisor = Supervisor(
        budget_seconds=options.notice_budget_seconds,
        notice_file=options.notice_file,
        notice_policy=options.notice_policy,
        watchdog_seconds=options.watchdog_seconds,
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
    )
    # Before anything slow is imported: a signal that finds no handler would end the process.
    supervisor.begin()
    if os.environ.get("TRAINING_LEADER"):
        end_with_rank_0()
    if os.environ.get("RANK", "0") != "0":
        # Rank 0 tells what happens to the run.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="training-"))
    try:
        return _train(options, supervisor, scratch)
    finally:
        if options.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)
        supervisor.close()


def _train(options: argparse.Namespace, supervisor: Supervisor, scratch: Path) -> int:
    checked_folder(scratch)
    if options.metrics_file is not None:
        checked_file(options.metrics_file)
    store = open_store(options.run_uri)
    if _is_same_finished_run(options, store):
        print(f"[ok] {store.uri} is finished already", flush=True)
        return EXIT_FINISHED
    # Here, because it imports torch: seconds that the lines above do not need.
    from contract.grammar import parse_interval
    from training.config import parse_overrides
    from training.engine.attempt import run_attempt
    from training.engine.job import Options
    from training.preflight.preflight import gpu_mib, settle
    from training.ranks.world import RankEnvironment
    from training.record.retention import parse_retention
    from training.record.run_config import parse_prediction, planned_price

    interval = parse_interval(options.checkpoint_interval)
    overrides = parse_overrides(options.override)
    prediction = parse_prediction(options.prediction)
    place = RankEnvironment.from_environment(os.environ)
    num_ranks = place.ranks(options.num_processes)
    settled = settle(options, store, _run_id(options, store), overrides, num_ranks)
    attempt = Options(
        workload=settled.workload,
        origin=settled.origin,
        workload_name=options.workload,
        recipe=options.recipe,
        overrides=overrides,
        dataset_uri=options.dataset_uri,
        store=store,
        artifacts=open_store(options.artifacts_uri) if options.artifacts_uri else None,
        run_id=_run_id(options, store),
        interval=interval,
        retention=parse_retention(options.keep),
        lease_ttl_seconds=options.lease_ttl_seconds,
        metrics_file=options.metrics_file,
        writer=options.writer,
        bundle_uri=options.bundle_uri,
        prediction=prediction,
        scratch=scratch,
        usd_per_hour=options.usd_per_hour or planned_price(prediction),
        profile_steps=options.profile,
        place=place,
        num_processes=options.num_processes,
        arguments=options.arguments,
    )
    with _room(settled.need, gpu_mib()), settled.explaining():
        return run_attempt(attempt, supervisor)


def _room(need: "ResourceRequest", gpu_mib: Sequence[int]) -> AbstractContextManager[None]:
    """This run's place on the machine, beside others; the ranks of one run hold one together."""
    from training.preflight.admission import MachineCapacity, Reservations

    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    return Reservations(sweep.default_reservations()).reserved(need, MachineCapacity.here(gpu_mib))


def _run_id(options: argparse.Namespace, store: Store) -> str:
    return str(options.run_id or store.uri.rstrip("/").rpartition("/")[2])


def _is_same_finished_run(options: argparse.Namespace, store: Store) -> bool:
    """Whether there is nothing to do; anything unusual is left to the attempt's full checks."""
    head, record = read_head(store), read_run_config(store)
    if head is None or record is None or head.state != "finished":
        return False
    asked = sorted(options.override)
    done = sorted(f"{name}={value}" for name, value in record.overrides.items())
    names = (record.workload, record.recipe, done)
    return names == (options.workload, options.recipe, asked)


def _fail(options: argparse.Namespace) -> int:
    store = open_store(options.run_uri)
    run_id = store.uri.rstrip("/").rpartition("/")[2]
    head = mark_failed(store, run_id, options.writer, options.reason)
    record = read_run_config(store)
    if record is not None:
        conclude(store, record, head)
    text = f"[ok] {store.uri} is {head.state}" + (f": {head.reason}" if head.reason else "")
    print(text + ("" if head.generation else " (no attempt had begun)"))
    return EXIT_FINISHED
