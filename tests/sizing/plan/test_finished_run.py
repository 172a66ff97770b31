"""Review: a finished run against its plan, and what it teaches the next one."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.goodput import PLANNED, USEFUL
from contract.metrics import merge, metrics_objects
from sizing.models.calibration import add_entry, calibrated, entries
from sizing.plan.finished_run import (
    FinishedRun,
    calibration,
    compare,
    read_run,
    request_of,
    unplanned,
)
from sizing.plan.plan_inputs import Request
from sizing.plan.size_plan import Plan, make_plan
from tests.sizing import sample_footprints

MIB = sample_footprints.MIB


# A step that waits for the GPU, not for launches.
HEAVY = {"flops_per_sample": 2_000_000_000_000}


def planned(tmp_path: Path, size: str = "g5.2xlarge", **footprint: Any) -> Plan:
    return make_plan(
        Request(workload="trajectory", recipe="full", size=size),
        footprints_file=sample_footprints.write(tmp_path / "footprints.json", **footprint),
        calibration_file=tmp_path / "calibration.json",
    )


def write_run(
    folder: Path, step_seconds: float, data_wait: float = 0.0, **receipt: Any
) -> FinishedRun:
    content = {
        "run_id": "run-1",
        "workload": "trajectory",
        "recipe": "full",
        "state": "finished",
        "seconds": 3600.0,
        "generations": 3,
        "checkpoint_bytes": 300 * MIB,
        "numerics_key": {"device": "cuda", "gpu": "NVIDIA A10G"},
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
            "data_wait": data_wait,
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
    run = write_run(tmp_path / "run", 0.5, data_wait=0.25)
    # A quarter of the half second waited for data: the GPU's step is the rest.
    assert run.step_seconds == {"head": pytest.approx(0.375)}
    assert run.interruptions == 2
    assert run.signals()["data_wait_percent"] == 25


def test_a_step_slower_than_predicted_names_the_constant(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    run = write_run(tmp_path / "run", 3 * plan.work.main.step.seconds)
    rows = {row.what: row for row in compare(run, plan)}
    assert rows["a step of head"].ratio == pytest.approx(3)
    assert rows["a step of head"].verdict == "correct time_factor"
    assert rows["checkpoint"].verdict == "as predicted"
    assert rows["hours from the first attempt"].actual == 1


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
    plan = planned(tmp_path, **HEAVY)
    assert plan.work.main.bound_by == "GPU compute"
    add_entry(calibration(write_run(tmp_path / "run", 9.0), plan), tmp_path / "calibration.json")
    path = tmp_path / "calibration.json"
    assert calibrated("growth", "full", "g5.2xlarge", "NVIDIA A10G", path=path)[1] == ()
    assert calibrated("trajectory", "full", "g6.xlarge", "NVIDIA L4", path=path)[1] == ()


def test_what_launches_bind_is_learned_for_every_gpu(tmp_path: Path) -> None:
    sizes = ("g5.2xlarge", "g6e.2xlarge")
    before = {size: planned(tmp_path, size) for size in sizes}
    assert all(plan.work.main.bound_by == "kernel launches" for plan in before.values())
    measured = 3 * before["g5.2xlarge"].work.main.step.seconds
    run = write_run(tmp_path / "run", measured)
    add_entry(calibration(run, before["g5.2xlarge"]), tmp_path / "calibration.json")
    after = {size: planned(tmp_path, size) for size in sizes}
    assert after["g5.2xlarge"].work.main.step.seconds == pytest.approx(measured, rel=1e-3)
    # One run with an A10G must not make an L40S look three times as fast as it.
    ratio = {
        size: after[size].work.main.step.seconds / before[size].work.main.step.seconds
        for size in sizes
    }
    assert ratio["g6e.2xlarge"] == pytest.approx(ratio["g5.2xlarge"], rel=0.1)
    assert after["g6e.2xlarge"].inputs.calibrated_by == ("run-1",)


def test_a_run_is_planned_with_its_own_gpus_and_micro_batch(tmp_path: Path) -> None:
    key = {"device": "cuda", "gpu": "NVIDIA A10G", "world": 4}
    run = write_run(
        tmp_path / "run", 0.5, numerics_key=key, overrides={"micro_batch": "8", "epochs": "2"}
    )
    request = request_of(run, Request(workload="trajectory", recipe="full", size="g5.12xlarge"))
    assert (request.gpus, request.micro_batch) == (4, 8)
    assert unplanned(run) == ["epochs"]


def test_restarts_are_learned_from_the_events_of_replacements(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 0.5)
    (folder / "events").mkdir()
    boots = [("i-1", "10:00:00", 30.0, 20.0, None), ("i-2", "11:00:00", 40.0, 24.0, "11:00:33")]
    events: list[dict[str, Any]] = []
    for machine, booted, seconds, sync, resumed in boots:
        of = {"instance_id": machine, "status": "ok"}
        day = "2026-11-22T"
        events += [
            {**of, "name": "boot-dataset", "time": f"{day}{booted}Z", "seconds": sync},
            {**of, "name": "boot", "time": f"{day}{booted}Z", "seconds": seconds},
            *([{**of, "name": "resumed", "time": f"{day}{resumed}Z"}] if resumed else []),
        ]
    for number, event in enumerate(events):
        (folder / "events" / f"{number}.json").write_text(json.dumps(event))
    (folder / "events" / "torn.json").write_text('{"name": "boot"')
    large = {"checkpoint_bytes": 3 * 10**9}
    before = planned(tmp_path, **large)
    found = calibration(read_run(folder), before).constants
    assert found["user_data_seconds"] == pytest.approx((30 + 40) / 2)
    add_entry(calibration(read_run(folder), before), tmp_path / "calibration.json")
    after = planned(tmp_path, **large).restart
    # It had resumed after 33 s, in which it also read the checkpoint.
    assert after.resume == before.restart.resume > 10
    assert after.first_step + after.resume == pytest.approx(33, rel=1e-3)
    # Another size boots as it boots.
    other = planned(tmp_path, "g5.xlarge", **large).restart
    assert other.first_step == before.restart.first_step


def test_the_first_step_of_each_machine_is_compared_with_its_boot(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 0.5)
    (folder / "events").mkdir()
    steps = []
    for generation, first in enumerate(("10:01:00", "11:00:50", "12:02:00"), start=1):
        of, day = {"instance_id": f"i-{generation}", "status": "ok"}, "2026-11-22T"
        booted = f"{day}{first[:3]}00:20Z"
        events = [
            {**of, "name": "boot", "time": booted, "seconds": 15.0},
            {**of, "name": "take-over", "time": booted, "generation": generation},
        ]
        for event in events:
            path = folder / "events" / f"{generation}-{event['name']}.json"
            path.write_text(json.dumps(event))
        line = {"kind": "step", "stage": "head", "step": 1, "generation": generation}
        # A later stage of the same attempt has a first step, too.
        times = (f"{day}{first}+00:00", f"{day}23:00:00+00:00")
        steps += [json.dumps({**line, "time": time}) for time in times]
    (folder / "metrics" / "0002-a-00001.jsonl").write_text("\n".join(steps))
    run = read_run(folder)
    assert run.starts == [55, 45, 115]
    plan = planned(tmp_path)
    rows = {row.what: row for row in compare(run, plan)}
    first, later = rows["boot to the first step"], rows["boot to a replacement's first step"]
    assert (first.actual, later.actual) == (55, 80)
    assert first.predicted == plan.first.to_training - plan.first.launch
    assert later.predicted == plan.restart.to_training - plan.restart.launch


def test_what_was_predicted_then_counts_before_what_is_predicted_now(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 0.5)
    (folder / "config.json").write_text(json.dumps({"prediction": {"hours_p50": 2.0}}))
    rows = {row.what: row for row in compare(read_run(folder), planned(tmp_path))}
    # Then, the clock started before launch and user data; a receipt's starts after them.
    boot = planned(tmp_path).first
    expected = 2.0 - (boot.launch + boot.user_data) / 3600
    assert rows["hours from the first attempt"].predicted == pytest.approx(expected)


def test_a_run_that_waits_for_its_loader_does_not_make_the_gpu_slower(tmp_path: Path) -> None:
    plan = planned(tmp_path, **HEAVY)
    step = plan.work.main.step.seconds
    found = calibration(write_run(tmp_path / "run", 3 * step, data_wait=2 / 3), plan).constants
    assert found["time_factor"] == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "key"),
    [
        ("g5.2xlarge", {"device": "cpu", "cpu_capability": "AVX512"}),
        ("g6.2xlarge", {"device": "cuda", "gpu": "NVIDIA L40S"}),
    ],
)
def test_fails_to_learn_of_a_gpu_from_a_run_on_another_device(
    tmp_path: Path, size: str, key: dict[str, str]
) -> None:
    run = write_run(tmp_path / "run", 0.5, numerics_key=key)
    with pytest.raises(ValueError, match="and cannot calibrate it"):
        calibration(run, planned(tmp_path, size))


def test_fails_to_learn_from_a_receipt_without_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, 0.5)
    alone = tmp_path / "receipt.json"
    alone.write_text((folder / "receipt.json").read_text())
    with pytest.raises(ValueError, match="use the run's folder, not the receipt alone"):
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


def test_fails_on_a_program_which_has_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ran a program, which has no plan to compare with"):
        write_run(tmp_path / "run", 0.5, workload="program", recipe="program")


def test_fails_on_a_calibration_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text('{"entries": [{"run": 1}]}')
    with pytest.raises(ValueError, match="cannot be read as a calibration"):
        entries(path)


def test_a_finished_run_is_compared_with_what_was_planned_then(tmp_path: Path) -> None:
    bought = {"goodput": 0.4, "seconds": {}, "usd": {"useful": 2.0, "boot": 1.0}}
    run = write_run(tmp_path / "then", 0.1, goodput=bought, prediction={PLANNED + USEFUL: 0.8})
    rows = {row.what: row for row in compare(run, planned(tmp_path))}
    assert (rows["goodput"].predicted, rows["goodput"].actual) == (0.8, 0.4)
    assert rows["goodput"].verdict.startswith("correct the cause")
    assert rows["dollars (Spot)"].actual == 3.0
    older = write_run(tmp_path / "older", 0.1)
    rows = {row.what: row for row in compare(older, planned(tmp_path))}
    assert rows["goodput"].actual is None
