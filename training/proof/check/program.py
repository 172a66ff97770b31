"""`check --program`: what interruptions change in a program that knows nothing of this project.

It runs two times to its end and then once more, killed on the way: each attempt is a new process
with a new root, and has nothing but the run's store.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from contract.keys import RECEIPT
from training.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_USER, UserError
from training.proof.compare import Difference, ProgramRun, difference, losses_by_step
from training.proof.machine import live, recorded, run_command
from training.record.history import read_history
from training.store.open import open_store

_SHOWN_STEPS = 12
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60


def check_program(options: argparse.Namespace) -> int:
    """Run the program three times and compare; exit code 1: an interruption changes the result."""
    if options.name is not None:
        raise UserError(f"got both {options.name!r} and a program; check one at a time")
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        runs = _Runs(options, Path(folder))
        whole = runs.run("whole")
        _refuse_untestable(whole)
        _say(options, f"[ok] uninterrupted: {_described(whole)}")
        own = difference(runs.run("again"), whole)
        _say(options, f"{'[ok]' if own.is_none else '[note]'} once more: {_compared(own)}")
        interrupted = runs.run("killed", whole, options.kills)
    if not interrupted.interruptions:
        raise UserError(
            "the program ended each time before it could be killed after a snapshot, so nothing "
            "was tested; let it save sooner, train longer, or lower --quiet-seconds"
        )
    found = difference(interrupted, whole)
    if options.json:
        print(json.dumps(_record(whole, interrupted, own, found), indent=1))
    else:
        _show(whole, interrupted, own, found)
    return EXIT_FINISHED if found.is_none else EXIT_FAILED


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


class _Runs:
    """Starts `python -m training run` as often as a run needs it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._folder = folder
        self._given = list(_given(options))

    def run(self, name: str, whole: ProgramRun | None = None, num_kills: int = 0) -> ProgramRun:
        """A run that is killed each time it has done another equal share, then finished."""
        began = time.monotonic()
        for kill in range(1, num_kills + 1):
            assert whole is not None
            step = max(whole.losses, default=0) * kill / (num_kills + 1)
            moment = self._moment(name, step, whole.seconds / (num_kills + 1))
            self._attempt(name, kill, moment)
        code = self._attempt(name, num_kills + 1)
        if code != EXIT_FINISHED:
            self._fail(name, code)
        return self._read(name, time.monotonic() - began)

    def _moment(self, name: str, step: float, seconds: float) -> Callable[[], bool]:
        """When a machine is lost: at a step, or after seconds if the program names no steps."""
        end = time.monotonic() + seconds

        def is_lost() -> bool:
            done, has_commit = self._progress(name)
            return has_commit and (done >= step if step else time.monotonic() >= end)

        return is_lost

    def _attempt(self, name: str, number: int, is_lost: Callable[[], bool] = lambda: False) -> int:
        machine = self._folder / name / f"machine-{number}"
        machine.mkdir(parents=True)
        more = [f"--metrics-file={self._metrics_file(name)}", f"--writer=machine-{number}"]
        command = run_command(machine, str(self._folder / name / "run"), [*self._given, *more])
        return live(command, self._log(name), is_lost=is_lost)

    def _fail(self, name: str, code: int) -> NoReturn:
        lines = self._log(name).read_text(errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        said = (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")
        if code == EXIT_USER:
            raise UserError(said)
        raise UserError(f"the program failed without any interruption (exit code {code}): {said}")

    def _progress(self, name: str) -> tuple[int, bool]:
        """The last step and whether this run has a snapshot that the next attempt can restore."""
        step, has_commit = 0, False
        for record in recorded(self._metrics_file(name)):
            if record["kind"] == "step":
                step = int(record["step"])
            # A resumed attempt shall lose something too: a commit of its own counts.
            has_commit = record["kind"] == "commit" or (has_commit and record["kind"] != "resume")
        return step, has_commit

    def _read(self, name: str, seconds: float) -> ProgramRun:
        store = open_store(str(self._folder / name / "run"))
        found = store.get(RECEIPT)
        assert found is not None, "a finished run has a receipt"
        receipt = json.loads(found.data)
        return ProgramRun(
            losses=losses_by_step(read_history(store).lines),
            files=receipt["final_files"],
            interruptions=receipt["interruptions"],
            seconds=seconds,
            num_snapshots=receipt["snapshots"],
        )

    def _metrics_file(self, name: str) -> Path:
        return self._folder / name / "metrics.jsonl"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _given(options: argparse.Namespace) -> list[str]:
    """The options of `run` among those of `check`, as they were given."""
    single = ("program", "program_file", "source", "dataset_uri", "working_folder", "interpreter")
    given = []
    for name in (*single, "notice_signal", "quiet_seconds"):
        if (value := getattr(options, name)) not in (None, ""):
            given.append(f"--{name.replace('_', '-')}={value}")
    for name in ("hyperparameter", "env", "channel", "metric"):
        given += [f"--{name}={value}" for value in getattr(options, name)]
    return given


def _record(
    whole: ProgramRun, interrupted: ProgramRun, own: Difference, found: Difference
) -> dict[str, Any]:
    return {
        "is_equal": found.is_none,
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
        lost = one["seconds_lost"]
        print(f"  killed: {redone}, {'?' if lost is None else f'{lost:.1f}'} s since the snapshot")
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
        print(f"[ok] {len(interrupted.interruptions)} interruptions change nothing: bit for bit")
        return
    print(f"[failed] interrupted, it ends differently: {_compared(found)}")
    if own.is_none:
        print("  Uninterrupted it ends the same each time: its checkpoint lacks something, such as")
        print("  random states or the place in the epoch. docs/port.md: what a workload does.")
    else:
        print("  Two uninterrupted runs differ as well: seed it first, then check again.")


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
