"""`python -m training check | torture`: does a workload resume exactly?

Both need training/proof, which is left out of the bundle that instances run.
"""

import argparse
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.errors import UserError
from training.cli.run import add_override, add_program, is_program, positive, positive_int

_PROOF = "training.proof"


def add_check(parser: argparse.ArgumentParser) -> None:
    """Add the options of `check`."""
    parser.description = (
        "Report what is wrong with a workload's protocol; then run a small version twice without "
        "interruptions and once interrupted at the first step, in epochs, in evaluations and "
        "between stages, each attempt in its own process, and compare. Exit code 1: it does not "
        "resume exactly. A --program runs twice to its end, and then on a store with faults with "
        "kills, notices and shutdowns, at drawn moments and in its saves. One table says what an "
        "interruption costs it, whether its bits are equal, and what could not be tried. It is "
        "kept in its folder as the code's certificate, which synth, the review and each run's "
        "report name."
    )
    add = parser.add_argument
    add(
        "name",
        nargs="?",
        metavar="NAME",
        help="a known workload, or your own as package.module:NAME; or pass --program",
    )
    add("--recipe", help="default: the first")
    add_override(parser, "as for `run`")
    add("--dataset-uri", help="a folder (default: made by the workload's own generator)")
    add("--count", type=int, default=100, help="samples to generate (default: %(default)s)")
    add(
        "--steps",
        type=positive_int,
        help="at least this many steps per Train stage, with kills (default: two epochs of four)",
    )
    add("--checkpoint-interval", default="1epochs", help="as for `run` (default: %(default)s)")
    add("--num-processes", type=positive_int, default=1, help="ranks (default: 1)")
    add("--json", action="store_true", help="print the result as JSON")
    add(
        "--kills",
        type=positive_int,
        default=2,
        help="of a program: how often to end it in each way: killed, noticed, shut down "
        "(default: %(default)s)",
    )
    add_program(parser)
    parser.set_defaults(act=_check)


def add_torture(parser: argparse.ArgumentParser) -> None:
    """Add the options of `torture`."""
    parser.description = (
        "Kill small runs at random moments and at named points, with SIGKILL, SIGTERM, notices "
        "(with a time and without), suspended and rival attempts and a faulty store, until they "
        "are done; compare each with the uninterrupted run. Exit code 1: something differed."
    )
    add = parser.add_argument
    add("--kills", type=int, default=30, help="in total (default: %(default)s)")
    add("--seed", type=int, default=0, help="decides what happens when (default: %(default)s)")
    add("--seeds", type=int, default=1, help="spread the kills over seeds S, S+1, ...")
    add(
        "--workload",
        default="training.proof.torture.small_workload:SMALL",
        help="a known name, or your own as package.module:NAME (default: a built-in one)",
    )
    add("--recipe", help="or several: a,b (default: the first; all of the built-in one's)")
    add(
        "--num-processes",
        help="ranks, drawn for each attempt: 1,2, or 4x2 for four hosts of two (default: 1; "
        "built-in workload: 1,2,4)",
    )
    add_override(parser, "as for `run`")
    add("--dataset-uri", help="a folder (default: made by the workload's own generator)")
    add("--count", type=int, help="samples to generate (default: 100; built-in workload: 77)")
    add("--run-uri", help="runs go below it: s3://bucket/prefix or a folder (default: --out)")
    add("--out", type=Path, help="keep runs and logs there (default: only if something differed)")
    add(
        "--checkpoint-interval",
        default="5steps,1epochs,0.1s,auto",
        help="as for `run`; several are assigned to the runs in turn (default: %(default)s)",
    )
    add("--lease-ttl-seconds", type=positive, default=0.5, help="default: %(default)s")
    add("--notice-budget-seconds", type=positive, default=20.0, help="default: %(default)s")
    add("-x", "--exitfirst", action="store_true", help="stop after the first run that differs")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=lambda options: _command("torture")(options))


def _check(options: argparse.Namespace) -> int:
    if is_program(options):
        return _command("check", "program", "check_program")(options)
    if options.name is None:
        raise UserError("nothing to check: name a workload, or pass --program and --source")
    return _command("check")(options)


def _command(name: str, file: str = "command", function: str = "") -> Callable[[Any], int]:
    # numpy reads these when imported; its thread would be one too many for a process that forks.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    # torch then counts GPUs without CUDA, which a fork of the process that called it cannot use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        module = importlib.import_module(f"{_PROOF}.{name}.{file}")
    except ModuleNotFoundError as error:
        if error.name != _PROOF:
            raise
        raise UserError(
            f"`{name}` is not part of the bundle that instances run, which has no {_PROOF}; "
            "run it from a checkout of the repository"
        ) from error
    command: Callable[[Any], int] = getattr(module, function or name)
    return command
