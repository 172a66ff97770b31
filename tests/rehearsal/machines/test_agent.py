"""The stand-in of the CloudWatch agent refuses what the agent would not know."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rehearsal.machines import agent
from rehearsal.machines.agent import CALL, find_faults

REPOSITORY = Path(__file__).parents[3]
OURS = json.loads((REPOSITORY / "userdata/cloudwatch-agent.json").read_text())


def test_our_configuration_is_checked_and_kept(tmp_path: Path) -> None:
    done = run(tmp_path, OURS)
    assert done.stdout == "Configuration validation succeeded\n"
    kept = tmp_path / "opt/aws/amazon-cloudwatch-agent/etc/amazon-cloudwatch-agent.json"
    assert json.loads(kept.read_text()) == OURS


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda c: c.update(metric={}), "the configuration has no 'metric'; it has agent, metrics"),
        (lambda c: c["metrics"].update(name="x"), "metrics has no 'name'; it has aggregation_"),
        (
            lambda c: c["metrics"]["metrics_collected"].update(gpu={}),
            "metrics_collected has no 'gpu'",
        ),
        (lambda c: plugin(c, "mem").update(measures=[]), "mem has no 'measures'; it has append_"),
        (lambda c: plugin(c, "mem").update(measurement=[]), "mem measures nothing"),
        (
            lambda c: plugin(c, "nvidia_gpu")["measurement"].append("gpu_utilization"),
            "nvidia_gpu's measurement has no 'gpu_utilization'; it has clocks_",
        ),
    ],
)
def test_fails_a_name_that_the_agent_does_not_know(
    change: Callable[[dict[str, Any]], None], fault: str
) -> None:
    config = copy.deepcopy(OURS)
    change(config)
    (found,) = find_faults(config)
    assert found.startswith(fault)


def test_fails_in_the_boot_step_and_names_what_is_unknown(tmp_path: Path) -> None:
    config = copy.deepcopy(OURS)
    plugin(config, "disk")["measurement"] = ["used_percentage"]
    done = run(tmp_path, config)
    assert done.returncode == 1
    assert done.stderr.startswith("disk's measurement has no 'used_percentage'")


def plugin(config: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = config["metrics"]["metrics_collected"][name]
    return found


def run(root: Path, config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    path = root / "config.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-I", "-S", agent.__file__, *CALL, f"file:{path}"]
    environment = {"MACHINE_ROOT": str(root)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
