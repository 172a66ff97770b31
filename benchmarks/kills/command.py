"""The effects of interruptions on save habits and public trainers, alone and under our trainer.

Each row is a script. It runs twice to its end, and is then killed at seeded moments, most of them
inside a save, in three ways: all processes at once; a notice, with the end some seconds later; a
shutdown. Alone, it starts again on its local disk; under our trainer, each life is a new machine,
and the store, a folder or S3, has faults. Results are kept in --out after each run: the command
continues where it stopped, also with more --kills. --page writes them to docs/kill-table.md; with
--hours 0, without any new run. Exit code 1: under our trainer, a restore was torn or mismatched, a
run never came back, or more was lost than the row's bound allows.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.kills import page
from benchmarks.kills.judge import Account
from benchmarks.kills.lives import EXITS, WAYS, Exit, Killed, Row, Series, Way
from benchmarks.kills.rows import ROWS

_HABITS = "habits"  # stands for all rows that need no environment of their own
_MOST_NEVER_BACK = 3  # after which a cell is given up
_UV = Path(sys.executable).with_name("uv")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `kill_table`."""
    add = command.add_argument
    add("--rows", nargs="+", default=[], metavar="NAME", help="rows, or habits; default: all")
    add("--ways", nargs="+", default=WAYS, choices=WAYS, help="default: all")
    add("--kills", type=int, default=8, help="per exit, default: %(default)s")
    add("--seed", type=int, default=0, help="for the moments, default: %(default)s")
    add("--hours", type=float, default=3.0, help="start no run after this, default: %(default)s")
    add("--out", type=Path, default=Path("out/kills"), help="default: %(default)s")
    add("--keep", action="store_true", help="keep the trainers' environments")
    add("--page", action="store_true", help="write the results to docs/kill-table.md")


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the requested cells whose results are missing; return the table."""
    names = [*(row.name for row in ROWS), _HABITS]
    if unknown := sorted(set(given.rows) - set(names)):
        raise ValueError(f"unknown rows: {', '.join(unknown)}; known: {', '.join(names)}")
    if given.kills < 1:
        raise ValueError(f"--kills must be at least 1, got {given.kills}")
    chosen = [
        row
        for row in ROWS
        if not given.rows
        or row.name in given.rows
        or (_HABITS in given.rows and not row.requirements)
    ]
    progress = _Progress(len(chosen) * len(given.ways) * len(EXITS), given.hours)
    results = []
    for row in chosen:
        try:
            record = _Result(row, given).filled(progress)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"[kills] {row.name} is skipped: {error}", file=sys.stderr)
            continue
        if lines := [*table(record, row.bound_seconds)]:
            kept = {name: record[name] for name in ("row", "seed", "versions", "steps")}
            results.append({**kept, "lines": lines})
    if given.page:
        page.write(results)
    return [line for result in results for line in result["lines"]]


def is_damaged(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing was run, or our trainer damaged, lost or did not bring back something."""
    names = ("torn", "mismatched", "never came back")
    ours = [line for line in lines if line["way"] != "alone"]
    return not lines or any(
        line["finished saves lost, s"] > line["of at most"]
        or any(line[name] != "0" for name in names)
        for line in ours
    )


class _Progress:
    """The progress: what is done, how long the rest takes, and whether time is left."""

    def __init__(self, num_cells: int, hours: float) -> None:
        self._left, self._played = num_cells, 0
        self._began = time.monotonic()
        self._seconds = 3600 * hours

    @property
    def is_over(self) -> bool:
        """Whether the time for starting cells is over."""
        return time.monotonic() - self._began >= self._seconds

    def tell(self, what: str, *, was_played: bool) -> None:
        """Print what is done now, and how long the rest may take."""
        self._left -= 1
        self._played += was_played
        spent = time.monotonic() - self._began
        minutes = spent / max(1, self._played) * self._left / 60
        rest = f", about {minutes:.0f} min left" if self._played else ""
        print(f"[kills] {what}; {self._left} cells to go{rest}", file=sys.stderr, flush=True)


class _Result:
    """A row's results file, to which missing runs are added."""

    def __init__(self, row: Row, given: argparse.Namespace) -> None:
        self._row, self._given = row, given
        self._file = given.out / f"{row.name}.json"

    def filled(self, progress: _Progress) -> dict[str, Any]:
        """Return the row's record, after all runs for which there was time."""
        seed = self._given.seed
        record: dict[str, Any] = {"row": self._row.name, "seed": seed, "cells": {}}
        if self._file.exists():
            record = json.loads(self._file.read_text())
            if record["seed"] != seed:
                raise ValueError(f"{self._file} has seed {record['seed']}; use another --out")
        wanted = [(way, how) for way in self._given.ways for how in EXITS]
        missing = [one for one in wanted if self._num_missing(record, *one)]
        for _ in range(len(wanted) - len(missing)):
            progress.tell(f"{self._row.name}: done before", was_played=False)
        if missing and not progress.is_over:
            python = _python(self._row, self._given.out)
            record.setdefault("versions", _versions(self._row, python))
            self._play(record, missing, python, progress)
            if self._row.requirements and not self._given.keep:
                shutil.rmtree(_environment(self._row, self._given.out))
        return record

    def _num_missing(self, record: Mapping[str, Any], way: Way, how: Exit) -> int:
        """Return how many kills the cell lacks, 0 if its runs do not come back."""
        cell = record["cells"].get(f"{way} {how}", _NOTHING)
        is_hopeless = len(cell["never_back"]) >= _MOST_NEVER_BACK
        return 0 if is_hopeless else max(0, self._given.kills - cell["kills"])

    def _play(
        self,
        record: dict[str, Any],
        missing: Sequence[tuple[Way, Exit]],
        python: Path,
        progress: _Progress,
    ) -> None:
        def series(what: str) -> Series:
            rng = random.Random(f"{self._given.seed} {self._row.name} {what}")
            folder = (self._given.out / "logs" / self._row.name).absolute()
            return Series(row=self._row, python=python, folder=folder, rng=rng)

        if "whole" not in record:
            whole = [series("whole").uninterrupted(number) for number in range(2)]
            record["is_repeatable"] = whole[0].final == whole[1].final
            record["whole"] = {"final": whole[0].final, "ids": [*whole[0].ids.values()]}
            record["steps"] = len(whole[0].ids)
            self._keep(record)
        ids = dict(enumerate(record["whole"]["ids"]))
        reference = Account(final=record["whole"]["final"], ids=ids)
        for way, how in missing:
            while num_missing := self._num_missing(record, way, how):
                if progress.is_over:
                    return
                what = f"{way} {how}"
                cell = record["cells"].get(what, _NOTHING)
                killed = series(f"{what} {cell['runs']}").killed(
                    way, how, cell["runs"], range(cell["kills"], cell["kills"] + num_missing)
                )
                record["cells"][what] = _with(cell, summary(killed, reference))
                self._keep(record)
            progress.tell(f"{self._row.name}: {way}, {how}", was_played=True)

    def _keep(self, record: Mapping[str, Any]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n")
        new.replace(self._file)


def summary(killed: Killed, whole: Account) -> dict[str, Any]:
    """Summarize a run's lives."""
    run = killed.run
    more, less = run.samples(whole) if run.final is not None else (0, 0)
    return {
        "runs": 1,
        "kills": killed.kills,
        "finished": int(run.final is not None),
        "equal": int(run.final is not None and run.final == whole.final),
        "repeated": more,
        "skipped": less,
        "steps_redone": run.redone,
        "torn": run.torn,
        "mismatched": run.mismatched,
        "lost": [round(seconds, 2) for seconds in run.lost],
        "lost_saves": [round(seconds, 2) for seconds in run.lost_saves],
        "never_back": killed.never_back,
        "faults": killed.faults,
    }


def _with(cell: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell with one more run."""
    return {name: cell[name] + more[name] for name in more}


_NOTHING = {**summary(Killed(), Account(final="")), "runs": 0}


def table(record: Mapping[str, Any], bound_seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the row's lines, one for each way that was run."""
    for way in WAYS:
        cells: dict[str, Any] = {how: record["cells"].get(f"{way} {how}") for how in EXITS}
        if not all(cells.values()):
            continue
        lost, lost_saves = (
            [s for c in cells.values() for s in c[n]] for n in ("lost", "lost_saves")
        )
        finished = _sum(cells, "finished")
        yield {
            "script": record["row"],
            "way": way,
            "kills": _sum(cells, "kills"),
            "bits equal": f"{_sum(cells, 'equal')} of {finished}"
            if record["is_repeatable"]
            else "not repeatable",
            "samples repeated": _sum(cells, "repeated"),
            "skipped": _sum(cells, "skipped"),
            "torn": _by_exit(cells, "torn"),
            "mismatched": _by_exit(cells, "mismatched"),
            "s lost per kill": round(statistics.mean(lost), 1) if lost else 0.0,
            "most": round(max(lost, default=0.0), 1),
            "finished saves lost, s": round(max(lost_saves, default=0.0), 1),
            "of at most": bound_seconds,
            "never came back": _by_exit(cells, "never_back"),
            "faults": _sum(cells, "faults"),
        }


def _sum(cells: Mapping[str, Mapping[str, Any]], name: str) -> int:
    return sum(cell[name] for cell in cells.values())


def _by_exit(cells: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Return how many there were, by exit."""
    found = {how: len(cell[name]) for how, cell in cells.items() if cell[name]}
    return ", ".join(f"{number} ({how})" for how, number in found.items()) or "0"


def _environment(row: Row, out: Path) -> Path:
    return (out / "environments" / row.name).absolute()


def _python(row: Row, out: Path) -> Path:
    """Return the interpreter of the row's own environment, which is created if it is missing."""
    if not row.requirements:
        return Path(sys.executable).absolute()
    folder = _environment(row, out)
    python = folder / "bin" / "python"
    quiet = [str(_UV), "--quiet"]
    if not python.exists():
        subprocess.run([*quiet, "venv", "--python", sys.executable, str(folder)], check=True)
    # The project's torch is in uv's cache; another one would take five gigabytes.
    torch = f"torch=={version('torch')}"
    install = [*quiet, "pip", "install", "--python", str(python), torch, *row.requirements]
    subprocess.run(install, check=True)
    return python


def _versions(row: Row, python: Path) -> dict[str, str]:
    """Return the versions of the row's requirements."""
    names = [*row.requirements, *["torch"] * bool(row.requirements)]
    code = "import importlib.metadata as m, json, sys; print(json.dumps("
    code += "{n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", code, *names], check=True, stdout=subprocess.PIPE)
    found: dict[str, str] = json.loads(done.stdout)
    return found
