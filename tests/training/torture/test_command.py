"""Killed at any moment, a run equals the uninterrupted one; and the torture is shown to fail."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def torture(*arguments: str, program: str = "training") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_thirty_kills_change_no_bit() -> None:
    done = torture("torture", "--kills=30", "--seed=1", "--json")
    result = result_of(done)
    assert result["differences"] == []
    assert done.returncode == 0
    assert result["kills"] >= 30
    assert result["fresh_attempts"] >= 2
    assert result["faults"] > 0
    assert len(result["by_kind_and_phase"]) >= 5, "kills hit different phases"
    assert set().union(*result["by_kind_and_phase"].values()) >= {"kill", "term", "notice"}


@pytest.mark.parametrize(
    ("bug", "says"),
    [
        ("answers_before_it_wrote", "the head names checkpoints/"),
        ("draws_noise_that_is_not_derived", "loss is "),
        ("forgets_the_optimizer", "the first tensor that differs is "),
    ],
)
def test_a_known_bug_of_the_engine_is_found_and_named(tmp_path: Path, bug: str, says: str) -> None:
    done = torture(
        bug,
        "--kills=6",
        "--json",
        f"--out={tmp_path / 'out'}",
        program="tests.training.torture.broken",
    )
    assert done.returncode == 1, done.stderr
    result = result_of(done)
    assert not result["is_equal"]
    assert [line for line in result["differences"] if says in line], result["differences"]
    assert f"runs and logs are kept in {tmp_path / 'out'}" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kills=0"], "--kills is 0; give at least 1"),
        (["--workload=nothing"], "unknown workload 'nothing'"),
        (["--override=epoch=1"], "no field 'epoch'"),
        (["--out=training"], "training is not empty; give a new folder"),
        (["--override=epochs=0"], "does not run undisturbed (exit code 2): error: "),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(arguments: list[str], says: str) -> None:
    done = torture("torture", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
