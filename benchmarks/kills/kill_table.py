"""The effects of interruptions on save habits and public trainers, alone and under our trainer.

Each row is a program. It runs twice to its end, and is then killed at seeded moments, most of them
inside a save, in three ways: all processes at once; a notice, with the end some seconds later; a
shutdown. Alone, it starts again on its local disk; under our trainer, each life is a new machine,
and the store, a folder or S3, has faults. --page writes each line to docs/kill-table.md as soon as
it was played; with --hours 0, it writes the page without any new run. Exit code 1: under our
trainer, a restore was torn or mismatched, a run never came back, or more was lost than the row's
bound allows.
"""

import argparse
import json
import logging
import os
import random
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import distributions, version
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import boto3
from werkzeug.serving import make_server

from benchmarks import REPOSITORY
from benchmarks.kills import QUIET_SECONDS, RATE
from benchmarks.kills.programs.habits import HABITS
from embedded_aws import Front
from sizing import markdown_table
from training.proof import Account, ExitKind, Lives, StatusFile

PROGRAMS = Path(__file__).with_name("programs")
# How each row is played, in the page's words.
WAYS = {"alone": "alone", "folder": "ours, folder", "s3": "ours, S3"}
_RESTLESS = ("sqlite", "mapped")  # their files never stop changing
_METADATA = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A program of programs/: how it is started and killed, and in which environment.

    A trainer declares what it requires, and what its users must do, in its inline metadata (PEP
    723).
    """

    name: str
    words: str  # its file and its arguments
    requirements: Sequence[str] = ()  # for its own environment; empty: use this one
    answers: Sequence[str] = ("its own",)  # to SIGTERM
    bound_seconds: float = 10.0  # the most lost work that a finished save had held
    users_must: str = ""  # what users must do for an exact resume


def _habit(name: str, *, commits: bool) -> Row:
    return Row(
        name=f"{name}, commit()" if commits else name,
        words=f"habits.py {name}{' --commit' * commits}",
        answers=("ignored", "exit 0", "exit 143", "works 200 s"),
        bound_seconds=120.0 if name in _RESTLESS and not commits else 10.0,
    )


def _trainer(path: Path) -> Row:
    found = _METADATA.search(path.read_text())
    assert found is not None, f"{path} has no inline metadata"
    declared = tomllib.loads(found[1].replace("# ", ""))
    return Row(
        name=path.stem.removeprefix("train_"),
        words=path.name,
        requirements=declared["dependencies"],
        users_must=declared.get("tool", {}).get("kills", {}).get("users_must", ""),
    )


ROWS: Sequence[Row] = (
    *map(_trainer, sorted(PROGRAMS.glob("train_*.py"))),
    *(_habit(name, commits=commits) for commits in (False, True) for name in HABITS),
)


RESULTS = Path(__file__).with_name("results.json")
PAGE = REPOSITORY / "docs" / "kill-table.md"
_HIDDEN = ("way", "faults", "versions", "users_must")
_FIRST = "## Public trainers"


def page_text(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page: its text as it is, up to the tables, and these lines as tables."""
    parts = [PAGE.read_text().partition(_FIRST)[0]]
    for title, is_trainer in ((_FIRST, True), ("## Save habits", False)):
        chosen = [line for line in lines if bool(line["versions"]) == is_trainer]
        rows = [
            {
                "script": "",
                "": WAYS[one["way"]],
                **{k: v for k, v in one.items() if k not in _HIDDEN},
            }
            for one in chosen
        ]
        said = {
            one["script"]: f"- **{one['script']}** ({one['versions']}): {one['users_must']}"
            for one in chosen
            if one["users_must"]
        }
        notes = [
            textwrap.fill(text, width=100, subsequent_indent="  ", break_on_hyphens=False)
            for text in said.values()
        ]
        parts += [title, "", markdown_table(rows), "", *notes, *[""] * bool(notes)]
    return parts[0] + "\n".join(parts[1:]).rstrip() + "\n"


def write_page(lines: Sequence[Mapping[str, Any]]) -> None:
    """Add these lines to the kept ones, or replace them, and write the page."""
    known = {(line["script"], line["way"]): line for line in [*read_results(), *lines]}
    order = product(dict.fromkeys(script for script, _ in known), WAYS)
    kept = [known[key] for key in order if key in known]
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page_text(kept))


def read_results() -> list[dict[str, Any]]:
    """Return the kept lines."""
    found: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return found


_HABITS = "habits"  # stands for all rows that need no environment of their own
_MOST_NEVER_BACK = 3  # after which an exit is given up
_UV = Path(sys.executable).with_name("uv")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `kill_table`."""
    add = command.add_argument
    add("--rows", nargs="+", default=[], metavar="NAME", help="rows, or habits; default: all")
    add("--ways", nargs="+", default=[*WAYS], choices=WAYS, help="default: all")
    add("--kills", type=int, default=8, help="per exit, default: %(default)s")
    add("--seed", type=int, default=0, help="for the moments, default: %(default)s")
    add("--hours", type=float, default=3.0, help="start no line after this, default: %(default)s")
    add(
        "--out",
        type=Path,
        default=Path("out/kills"),
        help="for logs; default: %(default)s",
    )
    add("--page", action="store_true", help="write the results to docs/kill-table.md")


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Play the requested lines; return them, or without any, those of the page."""
    names = [*(row.name for row in ROWS), _HABITS]
    if unknown := sorted(set(given.rows) - set(names)):
        raise ValueError(f"unknown rows: {', '.join(unknown)}; known: {', '.join(names)}")
    if given.kills < 1:
        raise ValueError(f"--kills must be at least 1, got {given.kills}")
    ends, lines = time.monotonic() + 3600 * given.hours, list[dict[str, Any]]()
    for row in ROWS:
        if given.rows and not {row.name, *[_HABITS] * (not row.requirements)} & {*given.rows}:
            continue
        try:
            for line in _lines(row, given, ends):
                lines.append(line)
                if given.page:
                    write_page([{**line, "users_must": row.users_must}])
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"[kills] {row.name} is skipped: {error}", file=sys.stderr)
    if given.page:
        write_page([])
    return lines or read_results() * given.page


def is_damaged(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether nothing was run, or our trainer damaged, lost or did not bring back something."""
    bounds = {row.name: row.bound_seconds for row in ROWS}
    return not lines or any(
        float(line["saves lost"]) > bounds[line["script"]]
        or any(line[name] != "0" for name in ("torn", "mismatched", "never back"))
        for line in lines
        if line["way"] != "alone"
    )


def _lines(row: Row, given: argparse.Namespace, ends: float) -> Iterator[dict[str, Any]]:
    """Play the row's lines for which there is time."""
    if time.monotonic() > ends:
        return
    environment = (given.out / "environments" / row.name).absolute()
    python, versions = _installed(row, environment)
    logs, whole = (given.out / "logs" / row.name).absolute(), []
    for number in range(2):
        with _placed(row, python, "alone", logs / f"whole-{number}") as (lives, _):
            whole.append(lives.uninterrupted())
    for way in given.ways:
        if time.monotonic() > ends:
            break
        cells, num_faults = {how: list[Account]() for how in Lives.EXITS}, 0
        for how, runs in cells.items():
            while (kills := sum(one.kills for one in runs)) < given.kills:
                if sum(len(one.never_back) for one in runs) >= _MOST_NEVER_BACK:
                    break
                what = f"{row.name} {way} {how} {len(runs)}"
                answers = [*islice(cycle(row.answers), kills, given.kills)]
                rng = random.Random(f"{given.seed} {what}")
                with _placed(row, python, way, logs / way / f"{how}-{len(runs)}") as (lives, met):
                    runs.append(lives.killed(how, answers=answers, rng=rng))
                    num_faults += met()
                bad = "; ".join([*runs[-1].torn, *runs[-1].mismatched, *runs[-1].never_back])
                print(f"[kills] {what}: {runs[-1].kills} kills; {bad or 'ok'}", file=sys.stderr)
        yield {**table_line(row, way, whole, cells), "faults": num_faults, "versions": versions}
    if row.requirements:
        shutil.rmtree(environment)


def table_line(
    row: Row, way: str, whole: Sequence[Account], cells: Mapping[ExitKind, Sequence[Account]]
) -> dict[str, Any]:
    """Return the row's line of one way, from its runs by exit."""
    runs = [run for runs in cells.values() for run in runs]
    finished = [run for run in runs if run.final is not None]
    lost = [seconds for run in runs for seconds in run.lost] or [0.0]
    lost_saves = [seconds for run in runs for seconds in run.lost_saves] or [0.0]
    more = [run.samples(whole[0]) for run in finished]
    samples = [sum(pair) for pair in zip((0, 0), *more, strict=True)]

    def by_exit(found: Callable[[Account], Sequence[str]]) -> str:
        counts = {how: sum(len(found(one)) for one in runs) for how, runs in cells.items()}
        return ", ".join(f"{number} ({how})" for how, number in counts.items() if number) or "0"

    is_repeatable = len({one.final for one in whole}) == 1
    equal = sum(run.final == whole[0].final for run in finished)
    return {
        "script": row.name,
        "way": way,
        "kills": sum(run.kills for run in runs),
        "bits equal": f"{equal} of {len(finished)}" if is_repeatable else "not repeatable",
        "samples": " / ".join(map(str, samples)),
        "torn": by_exit(lambda run: run.torn),
        "mismatched": by_exit(lambda run: run.mismatched),
        "s lost": f"{round(statistics.mean(lost), 1):g} (most {round(max(lost), 1):g})",
        "saves lost": f"{round(max(lost_saves), 1):g}",
        "never back": by_exit(lambda run: run.never_back),
    }


@contextmanager
def _placed(
    row: Row, python: Path, way: str, folder: Path
) -> Iterator[tuple[Lives, Callable[[], int]]]:
    """Prepare a run's folder; yield its lives, and how many faults its store has had.

    Of what the run leaves, its logs are kept.
    """
    shutil.rmtree(folder, ignore_errors=True)
    source, faults = folder / "source", folder / "faults"
    shutil.copytree(PROGRAMS, source, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    more = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    more |= {"FAULTS": str(faults), "FAULT_RATE": str(RATE)}
    ours = [f"--program=python {row.words}", f"--source={source}", f"--interpreter={python}"]
    times = [f"--quiet-seconds={QUIET_SECONDS}", f"--notice-budget-seconds={Lives.NOTICE_SECONDS}"]
    lives = Lives(folder=folder, options=[*ours, *times], environment=environment | more)
    if way == "alone":
        file, *arguments = row.words.split()
        lives.alone = [str(python), str(source / file), *arguments]
        yield lives, lambda: 0
    else:
        lives.trainer = "training.proof.check.faulty_folder"
        with _on_s3(lives) if way == "s3" else nullcontext():
            yield lives, lambda: StatusFile(faults).num_faults
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


@contextmanager
def _on_s3(lives: Lives) -> Iterator[None]:
    """Serve S3, where the run is in a new bucket."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # kills break connections
    server = make_server("127.0.0.1", 0, Front({}), threaded=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    endpoint, bucket = f"http://127.0.0.1:{server.server_port}", f"kills-{secrets.token_hex(6)}"
    keys = {"aws_access_key_id": "nobody", "aws_secret_access_key": "nothing"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket=bucket)
    lives.run_uri = f"s3://{bucket}/runs/one"
    lives.environment |= {name.upper(): value for name, value in keys.items()}
    lives.environment |= {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
    lives.environment |= {"AWS_DEFAULT_REGION": "us-east-1"}
    yield
    server.shutdown()
    server.server_close()


def _installed(row: Row, environment: Path) -> tuple[Path, str]:
    """Return the interpreter of the row's environment, made if it is missing, and its versions."""
    if not row.requirements:
        return Path(sys.executable).absolute(), ""
    python, uv = environment / "bin" / "python", [str(_UV), "--quiet"]
    if not python.exists():
        subprocess.run([*uv, "venv", "--python", sys.executable, str(environment)], check=True)
    # The project's torch is in uv's cache; another one would take five gigabytes.
    torch = f"torch=={version('torch')}"
    install = [*uv, "pip", "install", "--python", str(python), torch, *row.requirements]
    subprocess.run(install, check=True)
    sites = [str(folder) for folder in environment.glob("lib/*/site-packages")]
    names = [*row.requirements, "torch"]
    found = [(name, one) for name in names for one in distributions(name=name, path=sites)]
    return python, ", ".join(f"{name} {one.version}" for name, one in found)
