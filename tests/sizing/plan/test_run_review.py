"""Review: a finished run against its plan, and what it teaches the next one."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.metrics import merge, metrics_objects
from sizing.models.calibration import add_entry, calibrated, entries
from sizing.plan.finished_run import FinishedRun, read_run
from sizing.plan.plan import Plan, make_plan
from sizing.plan.request import Request
from sizing.plan.run_review import calibration, compare
from tests.sizing import sample_footprints

MIB = sample_footprints.MIB


def planned(tmp_path: Path, calibration_file: str = "calibration.json") -> Plan:
    return make_plan(
        Request(workload="trajectory", recipe="full", size="g5.2xlarge"),
        footprints_file=sample_footprints.write(tmp_path / "footprints.json"),
        calibration_file=tmp_path / calibration_file,
    )


def write_run(folder: Path, step_seconds: float, **receipt: Any) -> FinishedRun:
    content = {
        "run_id": "run-1",
        "workload": "trajectory",
        "recipe": "full",
        "state": "finished",
        "seconds": 3600.0,
        "generations": 3,
        "checkpoint_bytes": 300 * MIB,
        "numerics_key": {"device": "NVIDIA A10G"},
        **receipt,
    }
    (folder / "metrics").mkdir(parents=True)
    (folder / "receipt.json").write_text(json.dumps(content))
    steps = [
        {
            "kind": "step",
            "stage": "head",
            "step": 1,
            "generation": 1,
            "num_samples": 64,
            "samples_per_second": 64 / step_seconds,
            "data_wait": 0.25,
        }
    ] * 3
    lines = [json.dumps(step) for step in steps] + ['{"kind": "step", "cut off']
    (folder / "metrics" / "0001-a-00001.jsonl").write_text("\n".join(lines))
    return read_run(folder)


def test_a_run_is_read_while_its_metrics_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", 0.5)
    read_bytes = Path.read_bytes

    def read_late(path: Path) -> bytes:
        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        name, data = merge(metrics_objects([f"metrics/{path.name}"]), [path.read_bytes()])
        (tmp_path / "run" / name).write_bytes(data)
        path.unlink()
        return path.read_bytes()

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert read_run(tmp_path / "run").step_seconds == {"head": pytest.approx(0.5)}


def test_a_run_is_read_from_its_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0.5)
    assert run.step_seconds == {"head": pytest.approx(0.5)}
    assert run.interruptions == 2
    assert run.signals()["data_wait_percent"] == 25


def test_a_step_slower_than_predicted_names_the_constant(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    run = write_run(tmp_path / "run", 3 * plan.work.main.step.seconds)
    rows = {row.what: row for row in compare(run, plan)}
    assert rows["a step of head"].ratio == pytest.approx(3)
    assert rows["a step of head"].verdict == "correct time_factor"
    assert rows["checkpoint"].verdict == "as predicted"
    assert rows["hours"].actual == 1


def test_a_calibrated_plan_predicts_the_run_that_taught_it(tmp_path: Path) -> None:
    before = planned(tmp_path)
    actual = 3 * before.work.main.step.seconds
    peak = round(before.work.memory.allocated * 1.2 * MIB)
    run = write_run(tmp_path / "run", actual, peak_gpu_bytes=peak)
    add_entry(calibration(run, before), tmp_path / "calibration.json")
    after = planned(tmp_path)
    assert after.work.main.step.seconds == pytest.approx(actual, rel=1e-3)
    assert after.work.memory.allocated == pytest.approx(
        before.work.memory.allocated * 1.2, rel=1e-3
    )
    assert after.inputs.calibrated_by == ("run-1",)
    # The same run again teaches nothing new.
    add_entry(calibration(run, after), tmp_path / "calibration.json")
    assert planned(tmp_path).work.main.step.seconds == pytest.approx(actual, rel=1e-3)
    assert len(entries(tmp_path / "calibration.json")) == 1


def test_what_a_run_teaches_counts_for_its_own_work_only(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    add_entry(calibration(write_run(tmp_path / "run", 1.0), plan), tmp_path / "calibration.json")
    path = tmp_path / "calibration.json"
    assert calibrated("growth", "full", "g5.2xlarge", "NVIDIA A10G", path=path)[1] == ()
    assert calibrated("trajectory", "full", "g6.xlarge", "NVIDIA L4", path=path)[1] == ()


def test_what_was_predicted_then_counts_before_what_is_predicted_now(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 0.5)
    (folder / "config.json").write_text(json.dumps({"prediction": {"hours_p50": 2.0}}))
    rows = {row.what: row for row in compare(read_run(folder), planned(tmp_path))}
    assert rows["hours"].predicted == 2.0


def test_fails_to_learn_of_a_gpu_from_a_run_on_another_device(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 0.5, numerics_key={"device": "cpu"})
    with pytest.raises(ValueError, match="and cannot calibrate it"):
        calibration(run, planned(tmp_path))


def test_fails_to_learn_from_a_receipt_without_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 0.5)
    alone = tmp_path / "receipt.json"
    alone.write_text((folder / "receipt.json").read_text())
    with pytest.raises(ValueError, match="give the run's whole folder"):
        calibration(read_run(alone), planned(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "is not a JSON object"), ("{}", "it has no 'run_id'")],
)
def test_fails_on_what_is_no_receipt(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run(path)


def test_fails_on_a_calibration_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text('{"entries": [{"run": 1}]}')
    with pytest.raises(ValueError, match="cannot be read as a calibration"):
        entries(path)
