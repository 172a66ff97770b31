"""A trace of some steps is stored in the run and changes nothing else; texts for people."""

import gzip
import json

import pytest

from contract.readable import duration
from tests.training.runs import Run, assert_equal


def test_a_trace_of_some_steps_is_kept_and_changes_nothing(
    run: Run, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt("--profile=2", "--usd-per-hour=1.21") == 0
    said = capsys.readouterr().out
    assert "[profile] 2 steps: " in said
    assert "dollars so far (this attempt, 1.21/h)" in said
    (key,) = run.store.sizes("profiles/")
    found = run.store.get(key)
    assert found is not None
    names = [
        event.get("name", "") for event in json.loads(gzip.decompress(found.data))["traceEvents"]
    ]
    assert sum(name.startswith("Optimizer.step#AdamW") for name in names) == 2
    assert_equal(run, whole)
    usd, bought = run.json("receipt.json")["goodput"]["usd"], run.page
    assert f"${sum(usd.values()):.4f} for " in bought


def test_a_run_that_is_shorter_keeps_what_there_was(run: Run) -> None:
    short = ("--override=epochs=1", "--override=second_epochs=1")
    assert run.attempt("--profile=1000", *short) == 0
    assert list(run.store.sizes("profiles/")) == ["profiles/0001-trace.json.gz"]


def test_durations_are_for_people() -> None:
    seconds = (0.4, 59.4, 60, 3599, 3600, 90_061)
    said = ["0 s", "59 s", "1 min 0 s", "59 min 59 s", "1 h 0 min", "25 h 1 min"]
    assert [duration(value) for value in seconds] == said
