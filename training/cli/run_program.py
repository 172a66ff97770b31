"""`python -m training run --program`: a program that knows nothing of this project."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.errors import Exit, UserError
from contract.program import NOTICE_SIGNALS, PLACEMENT, WORKLOAD, Program
from contract.source import source_sha256
from training.durable import Head, RunConfig, Store, Supervisor
from training.registry import parse_overrides

# Options of `run` that a program has no use for, with their defaults.
_OF_WORKLOADS: dict[str, object] = {
    "workload": None,
    "recipe": None,
    "override": [],
    "init_from": None,
    "extend_to": None,
    "memory_limit_mib": None,
    "no_adapt": False,
    "num_processes": None,
    "profile": None,
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of a program."""
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


def run(arguments: argparse.Namespace, supervisor: Supervisor, common: Mapping[str, Any]) -> int:
    """Run one attempt of the program; `common` has the options of every attempt."""
    program = _program(arguments)
    source = _source(arguments)
    store: Store = common["store"]
    from training.durable import ProgramOptions, run_program

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
    told = {
        "command": arguments.program,
        "hyperparameters": parse_overrides(arguments.hyperparameter, "--hyperparameter"),
        "environment": parse_overrides(arguments.env, "--env"),
        "channels": tuple(arguments.channel),
        "working_folder": arguments.working_folder,
        "notice_signal": arguments.notice_signal,
        "quiet_seconds": arguments.quiet_seconds,
        "metric_definitions": tuple(parse_overrides(arguments.metric, "--metric").items()),
    }
    given = {name: value for name, value in told.items() if value not in (None, {}, ())}
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
