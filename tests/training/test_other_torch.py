"""A run resumed with another torch: the same samples, close losses, and a note in the receipt.

The other torch is in an environment that `make compat TORCH=...` has made.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.runs import ROOT, Run, assert_close

OTHERS = sorted((ROOT / ".venv-compat").glob("*/bin/python"))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def begin(python: str, run: Run) -> None:
    """Train, until a notice comes in the middle of the first stage."""
    metrics = run.scratch.parent / "metrics.jsonl"
    command = [python, "-m", "training", *run.arguments(), f"--metrics-file={metrics}"]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT) as process:
        deadline = time.monotonic() + 120
        while not metrics.exists() or metrics.read_text().count('"kind":"step"') < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 75


def end(python: str, run: Run) -> None:
    command = [python, "-m", "training", *run.arguments()]
    assert subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS, ids=lambda python: python.parents[1].name)
@pytest.mark.parametrize("is_other_first", [True, False], ids=["begins", "ends"])
def test_another_torch_goes_on_with_the_same_samples_and_says_so(
    run: Run, whole: Run, other: Path, is_other_first: bool
) -> None:
    first, second = (str(other), sys.executable)[:: 1 if is_other_first else -1]
    run.options = ["--override=step_seconds=0.1"]
    begin(first, run)
    taken = len(run.lineage())
    assert 3 <= taken < 12
    end(second, run)
    assert {step: line["generation"] for step, line in run.lineage().items()} == {
        step: 1 if step <= taken else 2 for step in range(1, 25)
    }
    # float32 and 24 steps, as for other world sizes; the sample ids are equal.
    assert_close(run, whole, 1e-5)
    receipt = run.json("receipt.json")
    assert receipt["numerics_changed"] == ["torch"]
    assert receipt["numerics_key"]["torch"] != run.json("config.json")["numerics_key"]["torch"]
