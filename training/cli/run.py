"""`python -m training run | fail`, and the options' types and checks that commands share.

Imports no torch, so a machine that boots into a finished run says so at once.
"""

import argparse
import errno
import math
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import Exit, UserError
from contract.grammar import (
    argument_type,
    parse_count,
    parse_positive,
    parse_positive_count,
    parse_writer,
)
from contract.notice import MAX_SECONDS
from contract.program import NOTICE_SIGNALS, PLACEMENT, WORKLOAD, Program
from contract.readable import shown
from contract.source import source_sha256
from contract.trainer_options import OPTIONS
from training.durable import Hosts, MachineError, Store, open_store
from training.registry import parse_overrides

if TYPE_CHECKING:
    from training.durable import Supervisor
    from training.engine.job import RunOptions
    from training.preflight.admission import ResourceRequest


def _refuse_missing(arguments: argparse.Namespace) -> None:
    """Raise UserError unless the options say what to train, and on what."""
    for name in ("workload", "recipe", "dataset_uri"):
        if getattr(arguments, name) is None:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{option} is missing; pass --workload, --recipe and --dataset-uri, "
                "or --program and --source for a program of your own"
            )


def import_from(source: Path | None) -> None:
    """Let this process, and those that it starts, import a user's own workload from a folder."""
    if source is None:
        return
    if not source.is_dir():
        raise UserError(f"the source folder {source} does not exist; check --source")
    folder = str(source.resolve())
    # Not first: anything called `training` in the folder must not hide the trainer.
    sys.path.insert(1, folder)
    others = filter(None, [os.environ.get("PYTHONPATH"), folder])
    os.environ["PYTHONPATH"] = os.pathsep.join(others)


def _attempt_options(arguments: argparse.Namespace, store: Store, scratch: Path) -> dict[str, Any]:
    """Return the options of every attempt (`AttemptOptions`), by name."""
    from training.durable import AttemptOptions, Retention

    hosts, (newest, every) = arguments.hosts, arguments.keep
    price = arguments.usd_per_hour or _planned_price(arguments.prediction)
    return {
        **_by_name(arguments, AttemptOptions),
        "store": store,
        "run_id": arguments.run_id or store.uri.rstrip("/").rpartition("/")[2],
        "retention": Retention(newest=newest, every=every),
        "scratch": scratch,
        "usd_per_hour": price and price * (len(hosts.names) if hosts else 1),
    }


def _parse(
    arguments: argparse.Namespace, store: Store, scratch: Path, environ: Mapping[str, str]
) -> "RunOptions":
    """Return the options of one attempt: argparse's values by name, and those with a grammar."""
    from training.durable import RankEnvironment
    from training.engine.job import RunOptions

    parsed = {
        "overrides": parse_overrides(arguments.override),
        "artifacts": open_store(arguments.artifacts_uri) if arguments.artifacts_uri else None,
        "interval": arguments.checkpoint_interval,
        "profile_steps": arguments.profile,
        "environment": replace(RankEnvironment.from_environment(environ), hosts=arguments.hosts),
    }
    common = _attempt_options(arguments, store, scratch)
    return RunOptions(**{**_by_name(arguments, RunOptions), **common, **parsed})


def _by_name(arguments: argparse.Namespace, options: type[Any]) -> dict[str, Any]:
    """Return argparse's values for the fields of a dataclass."""
    names = {field.name for field in fields(options)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _add_what(parser: argparse.ArgumentParser) -> None:
    """Add the options for what is trained, on what, and where it is kept."""
    add = parser.add_argument
    add("--workload", help="a known name, or your own as package.module:NAME")
    add("--recipe", help="a named config of the workload")
    add_override(parser, "set one field of the config; may be repeated")
    add("--dataset-uri", help="a folder, or s3://bucket/prefix (synced first)")
    add("--run-uri", required=True, help="where the run is kept: s3://bucket/prefix, or a folder")
    add(
        "--artifacts-uri",
        metavar="URI",
        help="a folder or prefix where runs share derived data; they need write access",
    )
    add(
        "--init-from",
        metavar="URI",
        help="start with the weights of a finished run or of a .safetensors file; a program: with "
        "another run's newest snapshot, to train longer with other arguments",
    )
    add(
        "--extend-to",
        metavar="8epochs|4000steps",
        help="with --init-from RUN: a new run that continues where that one finished, optimizer "
        "state included, until its last stage has trained that long",
    )
    add("--run-id", help="default: the last part of the run URI")


def _add_trainer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that a stack may set too (contract/trainer_options.py)."""
    for option in OPTIONS.values():
        shown = "" if option.default is None else " (default: %(default)s)"
        parser.add_argument(
            "--" + option.name.replace("_", "-"),
            type=argument_type(option.read),
            default=option.default,
            metavar=option.form,
            help=option.means + shown,
        )


def _add_notice(parser: argparse.ArgumentParser) -> None:
    """Add the options for how the machine announces its end."""
    add = parser.add_argument
    add(
        "--notice-budget-seconds",
        type=positive,
        default=float(MAX_SECONDS),
        help="time from a notice to the end of the machine (default: %(default)s)",
    )
    add("--notice-file", type=Path, help="JSON with the notice's time, written by the handler")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the limits on what the run takes from its machine."""
    add = parser.add_argument
    add(
        "--memory-limit-mib",
        type=positive_int,
        help="the most GPU memory that this run may use; without a GPU, what its process may use "
        "beyond what it starts with (default: no limit)",
    )
    add(
        "--no-adapt",
        action="store_true",
        help="do not test at the start whether memory suffices, and change nothing to make it fit",
    )
    add(
        "--num-processes",
        type=_count_or_auto,
        metavar="N|auto",
        help="processes that train together on this machine: 1, 2, 4 or 8 (default: auto, one per "
        "GPU, as far as a step's micro-batches suffice)",
    )
    add(
        "--hosts",
        type=argument_type(Hosts.parse),
        metavar="OWN@FIRST:PORT,SECOND,...",
        help="machines that train together, each with the same number of processes, 1, 2, 4 or 8 "
        "in total: this one's name, then all names; the first leads, and the others connect to it "
        f"at PORT (default: {Hosts.PORT})",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    """Add what is kept besides checkpoints, and what goes into the run's record."""
    add = parser.add_argument
    add(
        "--usd-per-hour",
        type=positive,
        help="a machine's price, for the attempt's cost so far and in the report "
        "(default: usd_spot_per_hour of --prediction, if given)",
    )
    add("--metrics-file", type=Path, help="also append the metrics to this local file")
    add_writer(parser, "this machine's name (an instance id)")
    add("--bundle-uri", help="the code bundle, for config.json")
    add(
        "--prediction",
        type=argument_type(parse_prediction),
        default="",
        help="NAME=VALUE words of the plan, for config.json",
    )
    add("--scratch", type=Path, help="local folder for downloads (default: a temporary one)")


def add_override(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --override; `text` is its help."""
    parser.add_argument("--override", action="append", default=[], metavar="NAME=VALUE", help=text)


def add_writer(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --writer; `text` says who that is."""
    name = socket.gethostname()
    parser.add_argument("--writer", type=argument_type(parse_writer), default=name, help=text)


RUN_URI = "s3://bucket/runs/<run id>, or a folder"
positive = argument_type(parse_positive)
positive_int = argument_type(parse_positive_count)
count = argument_type(parse_count)


def parse_prediction(text: str) -> dict[str, float | str] | None:
    """Read `hours_p50=0.2 size=g5.xlarge`; None for an empty text."""
    found: dict[str, float | str] = {}
    for word in text.split():
        name, separator, value = word.partition("=")
        if not separator or not name or not value:
            raise UserError(f"the prediction {word!r} cannot be read; write name=value")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = value
        else:
            if not 0 <= float(value) < math.inf:
                raise UserError(f"the prediction {word!r} is not a number of at least 0")
    return found or None


def _planned_price(prediction: Mapping[str, float | str] | None) -> float | None:
    """Return the plan's Spot price per hour in dollars, for its own size, not an alternate one."""
    price = (prediction or {}).get("usd_spot_per_hour")
    return price if isinstance(price, float) and price > 0 else None


def _count_or_auto(text: str) -> int | None:
    """Parse a whole number above 0; None for "auto"."""
    return None if text == "auto" else positive_int(text)


def checked_file(path: Path) -> Path:
    """Check that a file can be written, creating its folder; UserError says why not."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file to write")
    checked_folder(path.parent)
    return path


def checked_folder(path: Path) -> Path:
    """Check that a folder can be written to, creating it; UserError says why not."""
    if path.is_file():
        raise UserError(f"{path} is a file; name a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Not os.access: root may write anywhere except on a read-only file system.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        why = error.strerror or os.strerror(error.errno or 0)
        raise (MachineError if error.errno == errno.ENOSPC else UserError)(
            f"cannot write to {path}: {why}; use another path"
        ) from error
    return path


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`, in the order in which --help shows them."""
    _add_what(parser)
    _add_trainer_options(parser)
    _add_notice(parser)
    _add_limits(parser)
    _add_records(parser)
    add_program(parser)
    parser.set_defaults(act=_run)


def add_fail(parser: argparse.ArgumentParser) -> None:
    """Add the options of `fail`."""
    parser.add_argument("--run-uri", required=True, help=RUN_URI)
    parser.add_argument("--reason", required=True, help="one sentence, kept in head.json")
    add_writer(parser, "who says so")
    parser.set_defaults(act=_fail)


def _run(arguments: argparse.Namespace) -> int:
    from training.durable import Supervisor

    supervisor = Supervisor(
        budget_seconds=arguments.notice_budget_seconds,
        notice_file=arguments.notice_file,
        notice_policy=arguments.notice_policy,
        watchdog_seconds=arguments.watchdog_seconds,
        notify_socket=os.environ.get("NOTIFY_SOCKET"),
    )
    # Before anything slow is imported: a signal without a handler would end the process.
    supervisor.begin()
    if not is_program(arguments):
        _set_up_torch()
    if os.environ.get("TRAINING_LEADER"):
        supervisor.end_with_rank_0()
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


def _set_up_torch() -> None:
    """Set what torch reads from the environment, here and in all that inherit it; the user's wins.

    Waiting threads sleep: by spinning they would take time from threads on the same cores. And the
    GPU allocator's segments may grow: fixed ones, with batches of several shapes, leave gaps that
    no later tensor fits.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The second is torch's older name, which it still reads, and before the first.
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _train(arguments: argparse.Namespace, supervisor: "Supervisor", scratch: Path) -> int:
    checked_folder(scratch)
    if arguments.metrics_file is not None:
        checked_file(arguments.metrics_file)
    store: Store = arguments.open_store(arguments.run_uri)
    store.patience.deadline = supervisor.interruption.deadline
    if is_program(arguments):
        common = _attempt_options(arguments, store, scratch)
        return _run_program(arguments, supervisor, common)
    _refuse_missing(arguments)
    import_from(arguments.source)
    if _is_same_finished_run(arguments, store):
        print(f"[ok] {store.uri} is finished already", flush=True)
        return Exit.FINISHED
    # Here, because they import torch: seconds that the lines above do not need.
    from training.engine.attempt import run_workload
    from training.preflight.preflight import gpu_mib, preflight

    options = _parse(arguments, store, scratch, os.environ)
    checked = preflight(options)
    options = replace(options, num_processes=checked.request.num_processes)
    with _reserved(checked.request, gpu_mib()), checked.explaining_out_of_memory():
        return run_workload(options, checked.job, supervisor)


def _reserved(request: "ResourceRequest", gpu_mib: Sequence[int]) -> AbstractContextManager[None]:
    """Reserve this run's share of the machine, next to other runs; its ranks hold one together."""
    from training.preflight.admission import MachineCapacity, Reservations

    if os.environ.get("RANK", "0") != "0":
        return nullcontext()
    return Reservations().reserved(request, MachineCapacity.here(gpu_mib))


def _is_same_finished_run(arguments: argparse.Namespace, store: Store) -> bool:
    """Whether there is nothing to do; anything unusual is left to the full checks."""
    from training.durable import Head, RunConfig

    head, record = Head.read(store), RunConfig.read(store)
    if head is None or record is None or head.state != "finished":
        return False
    asked = sorted(arguments.override)
    done = sorted(f"{name}={value}" for name, value in record.overrides.items())
    source = source_sha256(arguments.source) if arguments.source else None
    names = (record.workload, record.recipe, done, record.config.get("source_sha256"))
    return names == (arguments.workload, arguments.recipe, asked, source)


def _fail(arguments: argparse.Namespace) -> int:
    from training.durable import fail_run

    store = open_store(arguments.run_uri)
    head = fail_run(store, arguments.writer, arguments.reason)
    text = f"[ok] {store.uri} is {head.state}" + (f": {head.reason}" if head.reason else "")
    print(shown(text) + ("" if head.generation else " (no attempt had started)"))
    return Exit.FINISHED


# Options of `run` that a program has no use for, with their defaults.
_OF_WORKLOADS: dict[str, object] = {
    "workload": None,
    "recipe": None,
    "override": [],
    "extend_to": None,
    "memory_limit_mib": None,
    "no_adapt": False,
    "num_processes": None,
    "profile": None,
}


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the options of a program that knows nothing of this project."""
    add = parser.add_argument_group(
        "a program of your own", "docs/container-contract.md says what it finds"
    ).add_argument
    add("--program", metavar="COMMAND", help="its command line, such as 'python train.py'")
    add("--program-file", type=Path, metavar="FILE", help="a program.json with all of these")
    add("--source", type=Path, metavar="FOLDER", help="its source folder, or a workload's")
    add("--hyperparameter", action="append", default=[], metavar="NAME=VALUE")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable")
    add("--channel", action="append", default=[], metavar="NAME", help="default: training")
    add("--working-folder", metavar="FOLDER", help="within the source folder (default: itself)")
    add("--interpreter", default="", help="what `python` stands for (default: this one)")
    add("--notice-signal", choices=NOTICE_SIGNALS, help="at a notice (default: SIGTERM)")
    add(
        "--quiet-seconds",
        type=float,
        help="seconds without a write before the folder is snapshotted (default: 10)",
    )
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=REGEX",
        help="a metric definition as in SageMaker: the group in the expression is the number",
    )
    add("--ml-root", type=Path, help="default: /opt/ml if it exists, else in --scratch")
    add("--instance-type", default="local", help="what SM_CURRENT_INSTANCE_TYPE says")


def is_program(arguments: argparse.Namespace) -> bool:
    """Whether a program is to be run rather than a workload."""
    return arguments.program is not None or arguments.program_file is not None


def _run_program(
    arguments: argparse.Namespace, supervisor: "Supervisor", common: Mapping[str, Any]
) -> int:
    """Run one attempt of the program; `common` has the options of every attempt."""
    from training.durable import Head, ProgramOptions, RunConfig, run_program

    program = _program(arguments)
    source = _source(arguments)
    store: Store = common["store"]

    options = ProgramOptions(
        **common,
        program=program,
        source=source,
        dataset_uri=arguments.dataset_uri,
        root=(arguments.ml_root or ProgramOptions.usual_root(common["scratch"])).absolute(),
        interpreter=arguments.interpreter,
        instance_type=arguments.instance_type,
        hosts=arguments.hosts,
    )
    head, record = Head.read(store), RunConfig.read(store)
    if head and record and head.state == "finished" and record.workload == WORKLOAD:
        mine, theirs = options.identity(source_sha256(source)), dict(record.config)
        if all(mine[name] == theirs.get(name) for name in mine.keys() - PLACEMENT):
            print(f"[ok] {store.uri} is finished already", flush=True)
            return Exit.FINISHED
    print(f"[program] {program.command}: below {options.root}, from {source}", flush=True)
    return run_program(options, supervisor)


def _source(arguments: argparse.Namespace) -> Path:
    source: Path | None = arguments.source
    if source is None:
        raise UserError("--source is missing; name the folder of the program")
    if not source.is_dir():
        raise UserError(f"the source folder {source} does not exist; check --source")
    return source


def _program(arguments: argparse.Namespace) -> Program:
    """Return the program of --program-file, or of the options; refuse a workload's options."""
    for name, default in _OF_WORKLOADS.items():
        if getattr(arguments, name) != default:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} is for workloads; a program takes hyperparameters instead")
    path: Path | None = arguments.program_file
    options = {
        "command": arguments.program,
        "hyperparameters": parse_overrides(arguments.hyperparameter, "--hyperparameter"),
        "environment": parse_overrides(arguments.env, "--env"),
        "channels": tuple(arguments.channel),
        "working_folder": arguments.working_folder,
        "notice_signal": arguments.notice_signal,
        "quiet_seconds": arguments.quiet_seconds,
        "metric_definitions": tuple(parse_overrides(arguments.metric, "--metric").items()),
        "init_from": arguments.init_from,
    }
    given = {name: value for name, value in options.items() if value not in (None, {}, ())}
    if path is None:
        return Program(**given)
    if given:
        raise UserError(
            f"--program-file and {', '.join(sorted(given))} are both given; "
            "put everything into the file"
        )
    try:
        return Program.from_json(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); check --program-file") from error
