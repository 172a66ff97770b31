"""The seed document's transitions at full size in float32, each in a process of its own: minutes.

`grown` needs 13 GB of memory that nobody else uses.
"""

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("transition", "most_gb"), [("experts", 5), ("grown", 13)])
def test_at_full_size_the_function_is_kept_within_the_stated_memory(
    transition: str, most_gb: float
) -> None:
    command = [sys.executable, "-m", "tests.training.workloads.expansion.full_size", transition]
    found = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    print(found)
    assert found["failures"] == []
    assert found["max_logit"] > 1
    assert found["max_logit_difference"] <= 1e-5
    assert found["peak_gb"] <= most_gb
