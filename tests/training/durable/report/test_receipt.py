"""What a run's interruptions and its machines have cost, as far as anybody heard."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from contract.keys import GUARD
from training.durable.record.history import AttemptSummary, History, _StepLines
from training.durable.report.receipt import _read_spending, interruption_facts
from training.durable.store.folder import open_store

BEGAN = datetime(2026, 11, 22, tzinfo=UTC)


def attempt(generation: int, **fields: Any) -> AttemptSummary:
    known: dict[str, Any] = {
        "writer": f"i-{generation}",
        "began": BEGAN,
        "last_heard": BEGAN + timedelta(seconds=9),
        "ended": "silent",
        "cause": None,
        "seconds_to_commit": None,
        "gained_steps": 0,
        "first_step": None,
        "last_step": None,
        "num_repeated": 0,
        "repeated_seconds": 0.0,
        "usd_per_hour": None,
        "ranks": None,
    }
    return AttemptSummary(**{**known, "generation": generation, **fields})


def history(steps: dict[int, range], lines: list[dict[str, Any]], last: int = 2) -> History:
    """Attempts 1 to `last`, with these steps and other lines."""
    columns = _StepLines()
    for generation, own in steps.items():
        for step in own:
            columns.add({"step": step, "stage": "program", "generation": generation, "seconds": 1})
    lineage, computed = columns.split()
    attempts = [
        attempt(
            number,
            first_step=computed[number].first if number in computed else None,
            last_step=computed[number].last if number in computed else None,
        )
        for number in range(1, last + 1)
    ]
    return History(lines=lines, steps=lineage, attempts=attempts, passed_over=())


def interruption_costs(history: History) -> list[dict[str, Any]]:
    costs: list[dict[str, Any]] = interruption_facts(history)["interruptions"]
    return costs


@pytest.mark.parametrize(
    ("steps", "redone"),
    [
        ({1: range(1, 9), 2: range(6, 20)}, [3]),
        # A program that reports every tenth step has done those between again, too.
        ({1: range(10, 50, 10), 2: range(30, 90, 10)}, [20]),
        ({1: range(1, 9), 2: range(9, 20)}, [0]),
        ({1: range(1, 9), 3: range(5, 20)}, [4, 0]),  # one attempt reported nothing
        ({}, [None]),
    ],
)
def test_steps_that_were_done_again_are_counted(
    steps: dict[int, range], redone: list[int | None]
) -> None:
    costs = interruption_costs(history(steps, [], last=len(redone) + 1))
    assert [cost["steps_redone"] for cost in costs] == redone


def test_seconds_are_those_that_were_last_heard_of() -> None:
    lines = [
        {"kind": "running", "generation": 1, "unsaved_seconds": 5.0},
        {"kind": "running", "generation": 1, "unsaved_seconds": 10.0},
        {"kind": "running", "generation": 2, "unsaved_seconds": 3.0},
        {"kind": "ended", "generation": 2, "unsaved_seconds": 0.5, "exit_code": 1},
    ]
    costs = interruption_costs(history({}, lines, last=4))
    assert [cost["seconds_lost"] for cost in costs] == [10.0, 0.5, None]
    assert [cost["exit_code"] for cost in costs] == [None, 1, None]


def test_no_figure_is_older_than_the_commit_it_follows() -> None:
    """The machine was lost after a commit, but before it could say what was unsaved then."""
    lines = [
        {"kind": "running", "generation": 1, "unsaved_seconds": 93.0, "snapshot": 0},
        {"kind": "running", "generation": 2, "unsaved_seconds": 4.0, "snapshot": 7},
        {"kind": "running", "generation": 3, "unsaved_seconds": 20.0},  # by an older version
    ]
    heard = BEGAN + timedelta(seconds=100)
    commit = {"step": 7, "written_at": heard.timestamp() - 3.5}
    known = history({}, lines, last=4)
    attempts = [replace(one, last_heard=heard, last_commit=commit) for one in known.attempts]
    facts = interruption_facts(replace(known, attempts=attempts))
    assert [cost["seconds_lost"] for cost in facts["interruptions"]] == [3.5, 4.0, 3.5]
    assert facts["seconds_lost"] == 11.0


def test_dollars_and_hours_by_market_and_the_moves_between_them(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert _read_spending(store) is None
    billed = {"spot": {"hours": 2.0, "usd": 1.0}, "on-demand": {"hours": 0.5, "usd": 0.51}}
    document = {"format": 2, "billed": billed, "market": {"moves": 2}}
    (tmp_path / GUARD).write_text(json.dumps(document))
    assert _read_spending(store) == {"usd": 1.51, "by_market": billed, "moves": 2}


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for text in ("{", '{"format": 1, "attempts": {}}', "[]", '{"billed": {"spot": 3}}'):
        (tmp_path / GUARD).write_text(text)
        assert _read_spending(store) is None
