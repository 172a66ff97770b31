"""`check --program`: what interruptions change in a program that knows nothing of this project.

It runs two times to its end and then once more: killed before its first snapshot and on the way,
and with a notice inside a save. Each attempt is a new process with a new root, and has nothing but
the run's store.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from training.errors import EXIT_FAILED, EXIT_FINISHED, UserError
from training.proof.check.program_runs import ProgramRuns
from training.proof.compare import Difference, ProgramRun, difference

_SHOWN_STEPS = 12
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60


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
        _show(whole, interrupted, own, found)
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


def _show(whole: ProgramRun, interrupted: ProgramRun, own: Difference, found: Difference) -> None:
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
    for name, run in (("uninterrupted", whole), ("interrupted", interrupted)):
        if run.losses:
            print(f"  {name:<14}{_curve(list(run.losses.values()))}")
    for step in _shown(whole, found):
        a, b = whole.losses.get(step), interrupted.losses.get(step)
        mark = "" if step not in found.steps else "  differs"
        print(f"  step {step:>8}  {_number(a):>10}  {_number(b):>10}{mark}")
    if found.is_none:
        _print_cost(interrupted.interruptions)
        return
    print(f"[failed] interrupted, it ends differently: {_compared(found)}")
    if own.is_none:
        print("  Uninterrupted it ends the same each time: its checkpoint lacks something, such as")
        print("  random states or the place in the epoch. docs/port.md: what a workload does.")
    else:
        print("  Two uninterrupted runs differ as well: seed it first, then check again.")


def _print_cost(interruptions: Sequence[Mapping[str, Any]]) -> None:
    """What an interruption costs where it changes nothing else."""
    late = [one for one in interruptions if one["is_late"]]
    lost = [one for one in late if one["costs_all"]]
    if lost:
        print(
            f"[failed] bit for bit, but an interruption costs all: {len(lost)} of {len(late)} "
            f"kills found no snapshot to resume from ({lost[0]['why']})"
        )
        print("  Call commit() after each save, save to new files and rename them, or lower")
        print("  --quiet-seconds. docs/your-script.md says when a snapshot is taken.")
        return
    most = max(one["seconds_lost"] for one in late)
    print(
        f"[ok] {len(interruptions)} interruptions change nothing: bit for bit; a kill after the "
        f"first snapshot costs up to {most:.1f} s"
    )


def _shown(whole: ProgramRun, found: Difference) -> list[int]:
    """Steps spread over the run, and the first that differs."""
    steps = sorted(whole.losses)
    every = max(1, math.ceil(len(steps) / _SHOWN_STEPS))
    return sorted({*steps[::every], *steps[-1:], *found.steps[:1]})


def _curve(losses: Sequence[float]) -> str:
    """The losses as bars of text, means of equal shares of them."""
    every = max(1, math.ceil(len(losses) / _CURVE_WIDTH))
    shares = [losses[at : at + every] for at in range(0, len(losses), every)]
    means = [sum(share) / len(share) for share in shares]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        _BARS[round((mean - low) / span * (len(_BARS) - 1))] if math.isfinite(mean) else "!"
        for mean in means
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
