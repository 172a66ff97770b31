"""`python -m training check` and `torture`: does a workload resume exactly?"""

import argparse
import os
from pathlib import Path

from training.cli.run_options import positive, positive_int


def add_check(parser: argparse.ArgumentParser) -> None:
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
        type=positive_int,
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


def add_torture(parser: argparse.ArgumentParser) -> None:
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
    add("--lease-ttl-seconds", type=positive, default=0.5, help="default: %(default)s")
    add(
        "--notice-budget-seconds",
        type=positive,
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
