"""`check --program`: what interruptions change in a program that knows nothing of this project.

It runs two times to its end and then once more: killed before its first snapshot and on the way,
and with a notice inside a save. Each attempt is a new process with a new root, and has nothing but
the run's store.
"""

import argparse
import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.errors import EXIT_FAILED, EXIT_FINISHED, UserError
from training.proof.check.program_runs import ProgramRuns
from training.proof.compare import Difference, ProgramRun, difference


def check_program(options: argparse.Namespace) -> int:
    """Run the program three times and compare; exit code 1: an interruption changes the result."""
    if options.name is not None:
        raise UserError(f"got both {options.name!r} and a program; check one at a time")
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        runs = ProgramRuns(options, Path(folder))
        whole = runs.run("whole")
        _refuse_untestable(whole)
        _say(options, f"[ok] uninterrupted: {_described(whole)}")
        own = difference(runs.run("again"), whole)
        _say(options, f"{'[ok]' if own.is_none else '[note]'} once more: {_compared(own)}")
        interrupted = runs.interrupted("killed", whole, options.kills)
    late = [one for one in interrupted.interruptions if one["is_late"]]
    if not late:
        raise UserError(
            "the program ended each time before it could be killed after a snapshot, so nothing "
            "was tested; let it save sooner, train longer, or lower --quiet-seconds"
        )
    found = difference(interrupted, whole)
    if options.json:
        print(json.dumps(_record(whole, interrupted, own, found), indent=1))
    else:
        _show(interrupted, own, found)
    costs_all = any(one["costs_all"] for one in late)
    return EXIT_FINISHED if found.is_none and not costs_all else EXIT_FAILED


def _refuse_untestable(whole: ProgramRun) -> None:
    """UserError where a comparison could show nothing."""
    if not whole.num_snapshots:
        raise UserError(
            "the program saved nothing to its checkpoint folder, so any interruption starts it "
            "from scratch; save to $SM_CHECKPOINT_DIR, and load from there at the start"
        )
    if not whole.files and not any(map(math.isfinite, whole.losses.values())):
        raise UserError(
            "the program shows nothing to compare; name its loss with --metric, as in "
            "--metric 'step=step ([0-9]+)' --metric 'loss=loss ([0-9.]+)', or write its model to "
            "$SM_MODEL_DIR"
        )


def _record(
    whole: ProgramRun, interrupted: ProgramRun, own: Difference, found: Difference
) -> dict[str, Any]:
    return {
        "is_equal": found.is_none,
        "costs_all": any(one["costs_all"] for one in interrupted.interruptions),
        "uninterrupted": asdict(whole),
        "interrupted": asdict(interrupted),
        "difference_of_two_uninterrupted": asdict(own),
        "difference": asdict(found),
    }


def _say(options: argparse.Namespace, line: str) -> None:
    if not options.json:
        print(line, flush=True)


def _described(run: ProgramRun) -> str:
    return (
        f"{len(run.losses)} losses, {run.num_snapshots} snapshots, {len(run.files)} final files, "
        f"{run.seconds:.0f} s"
    )


def _compared(found: Difference) -> str:
    if found.is_none:
        return "the same losses and final files"
    words = []
    if found.steps:
        words.append(
            f"{len(found.steps)} losses differ, from step {found.steps[0]} on, "
            f"by up to {found.largest:.4g}"
        )
    if found.files:
        words.append(f"other files: {', '.join(found.files)}")
    return "; ".join(words)


def _show(interrupted: ProgramRun, own: Difference, found: Difference) -> None:
    for one in interrupted.interruptions:
        redone = "steps redone: unknown, as its metrics name no step"
        if one["steps_redone"] is not None:
            redone = f"{one['steps_redone']} steps redone"
        lost = "?" if one["seconds_lost"] is None else f"{one['seconds_lost']:.1f}"
        print(f"  {one['what']}: {lost} s lost, {redone}")
    if found.missing:
        print(
            f"  losses known of one run only: {len(found.missing)}, from step {found.missing[0]} on"
        )
    if not found.is_none:
        print(f"[failed] interrupted, it ends differently: {_compared(found)}")
        if own.is_none:
            print("  Uninterrupted it ends the same each time: its checkpoint lacks something, as")
            print("  random states or the place in the epoch. docs/port.md: what a workload does.")
        else:
            print("  Two uninterrupted runs differ as well: seed it first, then check again.")
    late = [one for one in interrupted.interruptions if one["is_late"]]
    if in_vain := [one for one in late if one["costs_all"]]:
        print(
            f"[failed] {'bit for bit, but ' if found.is_none else ''}an interruption costs all: "
            f"{len(in_vain)} of {len(late)} kills found no snapshot to resume from "
            f"({in_vain[0]['why']})"
        )
        print("  Call commit() after each save, save to new files and rename them, or lower")
        print("  --quiet-seconds. docs/your-script.md says when a snapshot is taken.")
    elif found.is_none:
        print(
            f"[ok] {len(interrupted.interruptions)} interruptions change nothing: bit for bit; "
            f"a kill after the first snapshot costs up to "
            f"{max(one['seconds_lost'] for one in late):.1f} s"
        )
