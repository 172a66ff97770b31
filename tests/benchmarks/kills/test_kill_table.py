"""The kill table kills programs, and says when they do not come back."""

import random
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.kills import kill_table as command
from benchmarks.kills.kill_table import ROWS, WAYS, Row, is_damaged, measure, table_line
from training.proof.check.lives import Account, ExitKind, Lives


def given(out: Path, **more: object) -> Namespace:
    options = {"rows": [], "ways": [*WAYS], "kills": 1, "seed": 0, "hours": 3.0, "out": out}
    return Namespace(**{**options, "page": False, **more})


def test_each_exit_is_played_until_it_has_its_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row(name="in-place", words="habits.py in-place", answers=["a", "b"])
    monkeypatch.setattr(command, "ROWS", [row])
    account = Account(final="a", ids={1: [1]}, kills=2)
    monkeypatch.setattr(Lives, "uninterrupted", lambda lives: account)
    played = []

    def killed(lives: Lives, how: str, answers: Sequence[str], rng: random.Random) -> Account:
        played.append((how, *answers))
        assert (lives.folder / "source" / "habits.py").exists()
        return account

    monkeypatch.setattr(Lives, "killed", killed)
    (line,) = measure(given(tmp_path, ways=["alone"], kills=3))
    assert line["kills"] == 12 and line["bits equal"] == "6 of 6" and line["torn"] == "0"
    assert played == [one for how in Lives.EXITS for one in ((how, "a", "b", "a"), (how, "a"))]
    assert measure(given(tmp_path, hours=0.0)) == []


def test_a_line_says_which_exits_tore_and_what_is_beyond_the_bound() -> None:
    torn = Account(kills=2, torn=["a", "b"], lost=[1.0], lost_saves=[12.0])
    well = Account(kills=2, final="b", lost=[3.0])
    cells: dict[ExitKind, list[Account]] = {"kill": [well], "notice": [torn], "shutdown": [well]}
    rows = {row.name: row for row in ROWS}
    line = table_line(rows["mapped"], "s3", [Account(final="a")] * 2, cells)
    assert (line["torn"], line["mismatched"]) == ("2 (notice)", "0")
    assert is_damaged([line]) and not is_damaged([{**line, "torn": "0"}])
    assert not is_damaged([{**line, "way": "alone"}])
    beyond = table_line(rows["in-place"], "s3", [Account(final="a")] * 2, cells)
    assert is_damaged([{**beyond, "torn": "0"}])
    assert (line["bits equal"], line["s lost"]) == ("0 of 2", "2.3 (most 3)")
    assert is_damaged([])


def test_fails_rows_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown rows: caffe; known: huggingface"):
        measure(given(tmp_path, rows=["caffe"]))


def test_a_row_that_does_not_run_here_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "fails.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(command, "PROGRAMS", tmp_path / "programs")
    monkeypatch.setattr(command, "ROWS", [Row(name="fails", words="fails.py")])
    assert measure(given(tmp_path, rows=["habits"])) == []
    assert "fails is skipped: it ends with exit code 3 uninterrupted" in capsys.readouterr().err
