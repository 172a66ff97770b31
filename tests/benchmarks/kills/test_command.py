"""The kill table kills scripts, and says when they do not come back."""

import json
import random
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.kills import command
from benchmarks.kills.command import is_damaged, measure, summary, table
from benchmarks.kills.judge import Account
from benchmarks.kills.lives import WAYS, Killed, Row, Series

# It writes half of its file, says so, and then waits for its death.
TEARS = """
import json, os, pathlib, time
path = pathlib.Path(os.environ["SM_CHECKPOINT_DIR"], "state")
def say(**what): print(json.dumps({"at": time.time(), **what}), flush=True)
if path.exists() and path.read_text() != "whole":
    say(restored=None, torn="state")
    raise SystemExit(1)
say(restored=0)
say(step=1, ids=[1])
path.write_text("ha")
say(saving=1)
time.sleep(20 if os.environ["ANSWER"] == "slow" else 0)
path.write_text("whole")
say(final="a")
"""


def given(out: Path, **more: object) -> Namespace:
    told = {"rows": [], "ways": WAYS, "kills": 1, "seed": 0, "hours": 3.0, "out": out}
    return Namespace(**{**told, "keep": False, "page": False, **more})


def test_a_torn_restore_on_a_local_disk_never_comes_back(tmp_path: Path) -> None:
    script = tmp_path / "tears.py"
    script.write_text(TEARS)
    row = Row(name="tears", files=[script], arguments=(), answers=["slow"], span_seconds=0.5)
    series = Series(row=row, python=Path(sys.executable), folder=tmp_path, rng=random.Random(0))
    whole = series.uninterrupted(0)
    assert whole.final == "a"
    found = summary(series.killed("alone", "kill", 0, range(1)), whole)
    assert found["kills"] == 1 and found["finished"] == 0
    assert len(found["torn"]) == 4 and "kill-0/log-1" in found["torn"][0]
    assert len(found["never_back"]) == 1


def test_what_is_there_is_not_played_again_and_more_kills_go_on_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "ends.py"
    script.write_text('print(\'{"at": 1, "final": "a"}\')')
    row = Row(name="ends", files=[script], arguments=())
    monkeypatch.setattr(command, "ROWS", [row])
    account = Account(final="a", ids={1: [1]})
    monkeypatch.setattr(Series, "uninterrupted", lambda self, number: account)
    played = []

    def killed(self: Series, way: str, how: str, number: int, kills: range) -> Killed:
        played.append((how, number, [*kills]))
        return Killed(kills=1, run=account)

    monkeypatch.setattr(Series, "killed", killed)
    (line,) = measure(given(tmp_path, ways=["alone"]))
    assert line["kills"] == 3 and line["bits equal"] == "3 of 3" and line["torn"] == "0"
    assert played == [(how, 0, [0]) for how in ("kill", "notice", "shutdown")]
    played.clear()
    measure(given(tmp_path, ways=["alone"]))
    assert played == []
    (line,) = measure(given(tmp_path, ways=["alone"], kills=3, rows=["habits"]))
    assert line["kills"] == 9 and line["bits equal"] == "9 of 9"
    assert played[:2] == [("kill", 1, [1, 2]), ("kill", 2, [2])]
    with pytest.raises(ValueError, match="has seed 0; use another --out"):
        measure(given(tmp_path, seed=1))
    assert measure(given(tmp_path / "none", hours=0.0)) == []


def test_a_line_says_which_exits_tore_and_what_is_beyond_the_bound() -> None:
    torn = Account(torn=["a", "b"], lost=[1.0], lost_saves=[12.0])
    cell = summary(Killed(kills=2, run=torn), Account())
    well = summary(Killed(kills=2, run=Account(final="b", lost=[3.0])), Account())
    cells = {"s3 kill": well, "s3 notice": cell, "s3 shutdown": well}
    record = json.loads(json.dumps({"row": "one", "is_repeatable": True, "cells": cells}))
    (line,) = table(record, 120.0)
    assert (line["torn"], line["mismatched"]) == ("2 (notice)", "0")
    assert is_damaged([line]) and not is_damaged([{**line, "torn": "0"}])
    assert not is_damaged([{**line, "way": "alone"}])
    (beyond,) = table(record, 10.0)
    assert is_damaged([{**beyond, "torn": "0"}])
    assert (line["bits equal"], line["s lost per kill"], line["most"]) == ("0 of 2", 2.3, 3.0)


def test_fails_rows_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown rows: caffe; known: nanogpt"):
        measure(given(tmp_path, rows=["caffe"]))


def test_a_row_that_does_not_run_here_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(command, "ROWS", [Row(name="fails", files=[script], arguments=())])
    assert measure(given(tmp_path)) == [] and is_damaged([])
    assert "fails is skipped: it ends with exit code 3 uninterrupted" in capsys.readouterr().err
