"""Where a life goes on, as its log shows it, and what a certificate says of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.proof.check.lives import Account
from training.proof.check.program import _Course, _Findings
from training.proof.experiment import Difference, ProgramRun

WHOLE = ["hello", "device: cpu", *(f"saved {n}" for n in range(1, 41)), "bye", "twice", "twice"]


def life(folder: Path, *lines: str) -> Path:
    """The log of a life; the uninterrupted one took a second for each line."""
    ended = {"kind": "ended", "exit_code": 0, "seconds": 43.0}
    (folder / "metrics.jsonl").write_text(json.dumps(ended) + "\n")
    log = folder / f"log-{len(lines)}"
    log.write_text("\n".join(["hello", "[program] started as process 7", *lines, ""]))
    return log


@pytest.mark.parametrize(
    ("lines", "redone"),
    [
        # From line 20: what each start prints, and what only this one prints, does not count.
        (["hello", "device: cpu", "from 20", *(f"saved {n}" for n in range(21, 40))], 10),
        # From the start, though a line is missing of it.
        (["hello", *(f"saved {n}" for n in range(1, 30) if n != 9)], 32),
        # It went on from where it was.
        ([f"saved {n}" for n in range(31, 40)], 0),
    ],
)
def test_the_lines_that_it_prints_again_show_what_a_kill_cost(
    lines: list[str], redone: int, tmp_path: Path
) -> None:
    course, account = _Course(life(tmp_path, *WHOLE)), Account()
    for printed in (WHOLE[:32], lines):
        account.live(course.reports(life(tmp_path, *printed)), "")
    assert account.redone == [redone] and account.lost == [pytest.approx(redone, abs=1.1)]


def test_steps_count_before_lines(tmp_path: Path) -> None:
    log = life(tmp_path, "a", "b", "c")
    with log.with_name("metrics.jsonl").open("a") as metrics:
        for step in (1, 2, 3, 4, 1, 2):
            metrics.write(json.dumps({"kind": "metrics", "at": step}) + "\n")
    assert [one["step"] for one in _Course(log).reports(log)] == [1, 2, 3, 4, 1, 2]


def test_a_life_that_only_began_shows_nothing_yet(tmp_path: Path) -> None:
    assert _Course(life(tmp_path, *WHOLE)).reports(life(tmp_path, "hello", "device: cpu")) == []
    assert not _Course(life(tmp_path, "a", "b", "b")).last


def commit(reason: str, at: int, written: float) -> dict[str, Any]:
    time = f"2026-11-29T00:00:{at:02d}.000Z"
    known = {"time": time, "seconds": 0.0, "written_at": 1795910400.0 + written}
    return {"reason": reason, "instance_id": "machine-1", **known}


NONE = Difference(steps=(), largest=0.0, files=())
RUN = ProgramRun(losses={}, files={"a": "b"}, interruptions=(), seconds=60.0, num_snapshots=9)
FOUND = _Findings(
    whole=RUN,
    own=NONE,
    interrupted=RUN,
    found=NONE,
    hows=["kill"],
    num_planned=1,
    accounts=[Account(lost=[4.0], redone=[9])],
    commits=[commit("quiet", 12, 2.0)],
    exposure=7.0,
    ages=[3.0],
    num_faults=3,
)
PROGRAM = {"command": "python train.py", "quiet_seconds": 10.0}
CONFIG = {"source_sha256": "abc", **PROGRAM}
STOPS = [commit("crash-consistent", at, 0.0) for at in (10, 20, 30)]


@pytest.mark.parametrize(
    ("changes", "row", "words"),
    [
        ({}, "lost at most", "9 s of work, with saves as far apart as here"),
        ({}, "on average", "4.0 s, in 1 interruptions"),
        ({}, "bits", "equal in 1 files; it reports no losses"),
        (
            {
                "whole": replace(RUN, files={}, losses={1: 0.5, 2: 0.25}),
                "interrupted": replace(RUN, files={}, losses={1: 0.5}),
            },
            "bits",
            "not compared, as it leaves no file; 1 losses equal, as printed",
        ),
        ({}, "habit", "it pauses after its saves: a snapshot after 10 s without a change"),
        ({"commits": [commit("quiet", 5, 2.0)]}, "habit", "its saves write the same files"),
        ({"commits": STOPS}, "habit", "it replaces complete files"),
        ({"commits": STOPS[:1]}, "habit", "it pauses too rarely"),
        ({"commits": [commit("exit", 59, 0.0)]}, "habit", "none was recognized"),
        ({}, "would lose less", "commit() after each save"),
        ({"commits": [commit("commit", 5, 2.0)]}, "would lose less", "saving more often"),
        (
            {"accounts": [Account()], "ages": []},
            "not tried",
            "what a restart reads, as it prints nothing",
        ),
        ({"num_planned": 7}, "not tried", "6 of 7 interruptions, as it ended before; "),
        (
            {"accounts": [Account(lost=[4.0], redone=[9], torn=["state"])]},
            "interruptions",
            "1 kills, most in a save; 3 faults of its store, 1 starts that failed before one",
        ),
    ],
)
def test_the_table_says(changes: dict[str, Any], row: str, words: str) -> None:
    found = replace(FOUND, **changes).certificate(CONFIG)
    assert words in found.rows[row], found.rows[row]
    assert (found.code_sha256, found.program) == ("abc", PROGRAM)


BACK = Account(lost=[30.0], redone=[60])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"accounts": [BACK]}, "it goes on from less than it has saved: 60 of its steps or lines"),
        # A start that failed may have fallen back to an older snapshot.
        ({"accounts": [replace(BACK, torn=["state"])]}, ""),
        ({"found": replace(NONE, files=tuple("abcdefg"))}, "other files: a, b, c, d, e and 2 more"),
        ({"commits": [commit("exit", 5, 2.0)]}, "an interruption costs all, as no snapshot was"),
    ],
)
def test_what_stands_against_a_certificate(changes: dict[str, Any], words: str) -> None:
    found = replace(FOUND, **changes).certificate(CONFIG)
    assert found.is_good == (not words) and words in found.summary
