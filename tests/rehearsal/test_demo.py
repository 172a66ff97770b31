"""The whole way, small: the real CLI deploys, machines boot, train, are taken away and finish."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rehearsal.demo.deployment import processes_below
from rehearsal.drills.drill import NSPAWN, PROCESS
from tests.training import documented

SHORT = ("--count", "66", "--overrides", "baselines=false epochs=12")
SMALL = (*SHORT, "--notice-seconds", "5")


@pytest.mark.parametrize(
    ("machine", "kind", "notice_seconds"),
    [
        pytest.param(PROCESS, "spot", 5, marks=pytest.mark.rootless),
        pytest.param(PROCESS, "asg", 5, marks=pytest.mark.slow),
        # The second machine commits at its notice and then has the time to end the run: it needs
        # no third one, which the long proof has.
        pytest.param(NSPAWN, "spot", 60, marks=pytest.mark.machine),
        pytest.param(NSPAWN, "spot", 5, marks=[pytest.mark.machine, pytest.mark.slow]),
    ],
)
def test_an_interrupted_run_equals_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path,
    rehearse: Callable[..., subprocess.Popen[str]],
    machine: str,
    kind: str,
    notice_seconds: int,
) -> None:
    plan = ("--interrupt", "kill:head:5", "--interrupt", "notice:head:12")
    kinds = ("--machine", machine, "--fleet", kind, "--notice-seconds", str(notice_seconds))
    process = rehearse("demo", *kinds, "--out", str(tmp_path), *SHORT, *plan)
    _, said = process.communicate(timeout=850)
    assert process.returncode == 0, said[-3000:]
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
    assert receipt["losses_equal"]
    assert receipt["rules_broken"] == []
    assert receipt["interruptions"] == 2
    # A fast machine comes to the end of the run in what is left of its notice.
    assert receipt["attempts"] in (2, 3)
    assert "notice in head at step" in receipt["interruption_list"][1]["what"]
    assert 0 < receipt["notice_to_commit_seconds"] < 5
    assert receipt["fleet_target_capacity"] == 0
    assert receipt["instances_running"] == 0
    assert receipt["guard_invocations"] > 0
    assert receipt["resources"] == sum(receipt["resources_by_type"].values())
    assert 0 < receipt["goodput"]["goodput"] < 1
    assert processes_below(tmp_path) == []
    assert '<p class="verdict good">' in (tmp_path / "report.html").read_text()


@pytest.mark.slow  # its parts run in each run of the tests: embedded_aws/test_service_jobs.py
def test_two_hosts_of_one_job_lose_one_and_equal_one_rank(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]]
) -> None:
    plan = ("--interrupt", "kill:head:4", "--interrupt", "notice:head:9")
    process = rehearse("demo", "--hosts", "2", "--out", str(tmp_path), *SMALL, *plan)
    _, said = process.communicate(timeout=850)
    assert process.returncode == 0, said[-3000:]
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
    assert receipt["losses_equal"] and receipt["rules_broken"] == []
    assert receipt["interruptions"] == 2 and "started 3 times" in receipt["job"]
    assert 0 < receipt["notice_to_commit_seconds"] < 5
    assert receipt["denied"] == [] and receipt["processes_left"] == 0
    assert processes_below(tmp_path) == []
    assert '<p class="verdict good">' in (tmp_path / "report.html").read_text()


@pytest.mark.slow  # a drill is interrupted in each run of the tests
def test_ctrl_c_in_the_middle_leaves_nothing_running(
    tmp_path: Path,
    rehearse: Callable[..., subprocess.Popen[str]],
    stop_once_a_machine_runs: Callable[[subprocess.Popen[str], Path], str],
) -> None:
    stop_once_a_machine_runs(rehearse("demo", "--out", str(tmp_path), *SMALL), tmp_path)


@pytest.mark.slow  # its parts run in each run of the tests: tests/userdata/test_examples.py
def test_a_script_that_knows_nothing_of_this_project_loses_two_machines_and_finishes(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]]
) -> None:
    process = rehearse("demo", "--program", "examples/plain", "--out", str(tmp_path))
    _, said = process.communicate(timeout=850)
    assert process.returncode == 0, said[-3000:]
    receipt = json.loads((tmp_path / "receipt.json").read_text())
    assert receipt["attempts"] == 3
    assert [item["notice"] for item in receipt["interruption_list"]] == [False, True]
    assert receipt["steps"] == 12 * 256
    assert 0 <= receipt["steps_redone"] < receipt["steps"]
    assert receipt["final_files"].keys() == receipt["uninterrupted_final_files"].keys()
    assert receipt["fleet_target_capacity"] == 0
    assert receipt["instances_running"] == 0
    assert receipt["guard_invocations"] > 0
    assert processes_below(tmp_path) == []
    assert (tmp_path / "report.html").read_text().count('"is_reference"') == 2


@pytest.mark.slow  # its parts run in each run of the tests
def test_a_workload_of_one_s_own_loses_two_machines_and_nothing_but_time(
    tmp_path: Path, rehearse: Callable[..., subprocess.Popen[str]]
) -> None:
    source = documented.own_workload(tmp_path / "mine", name="shapes.py")
    maker = dict(documented.files(documented.PAGES[0].read_text()))["make_data.py"]
    (source / "make_data.py").write_text(maker)
    # What it requires is there already: the trainer then runs in an environment above the image's.
    (source / "requirements.txt").write_text("pillow\n")
    out = tmp_path / "demo"
    own = ("--workload", "shapes:SHAPES", "--source", str(source))
    process = rehearse("demo", *own, "--out", str(out))
    _, said = process.communicate(timeout=850)
    assert process.returncode == 0, said[-3000:]
    assert "program: shapes:SHAPES: python is " in said
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["workload"] == "shapes:SHAPES"
    assert [item["notice"] for item in receipt["interruption_list"]] == [False, True]
    assert receipt["weights_sha256"] == receipt["uninterrupted_weights_sha256"]
    assert receipt["losses_equal"] and receipt["rules_broken"] == []
    assert processes_below(tmp_path) == []
