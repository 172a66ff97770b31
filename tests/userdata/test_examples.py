"""Each example as it is, through the real boot of a machine that is then lost."""

import re
import shutil
import time
from pathlib import Path

import pytest

from rehearsal.machines.machine import TRAINING
from rehearsal.machines.process import ProcessMachine
from stacks.guard import records
from stacks.guard.reasons import reason_to_stop
from stacks.guard.settings import GuardSettings
from stacks.guard.tick import Tick
from tests.userdata.rig import Rig, boot_program, run_on, wait, wait_until


def start(rig: Rig, variables: dict[str, str]) -> ProcessMachine:
    return rig.machine(variables=variables)


def wait_for_snapshot(rig: Rig, machine: ProcessMachine) -> None:
    wait(machine, "[ok] training:")
    client = rig.aws.client("s3")

    def has_snapshot() -> bool:
        found = client.list_objects_v2(Bucket="runs", Prefix=f"runs/{rig.run_id}/head.json")
        return bool(found.get("Contents")) and bool(rig.read("head.json")["checkpoints"])

    wait_until(has_snapshot)


def guard_settings(rig: Rig) -> GuardSettings:
    return GuardSettings(
        stack_name="TrainingStack",
        fleet_parameter=rig.parameter,
        run_bucket="runs",
        run_prefix=f"runs/{rig.run_id}",
        topic_arn="",
        max_billed_hours=1,
        heartbeat_timeout_seconds=60,
        max_barren_attempts=2,
        notice_seconds=60,
    )


@pytest.mark.slow  # SageMaker's style of script does as much in each run of the tests
def test_plain_pytorch_goes_on_from_its_last_snapshot_after_a_kill(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The Guard reads a program's head as a workload's.
    monkeypatch.setattr(records, "quick_client", rig.aws.client)
    guard = guard_settings(rig)
    variables = boot_program(rig, "plain", tmp_path, epochs=8)
    first = start(rig, variables)
    wait_for_snapshot(rig, first)
    first.kill()
    head, written = records.read_head(guard)
    assert time.time() - 600 < records.last_commit(guard, head) <= time.time()
    tick = Tick(settings=guard, now=time.time(), head=head, head_written=written)
    assert reason_to_stop(tick) is None
    second = start(rig, variables)
    wait(second, f"fleet {rig.fleet_id} to zero: the run is finished")
    head, written = records.read_head(guard)
    tick = Tick(settings=guard, now=time.time(), head=head, head_written=written)
    reason = reason_to_stop(tick)
    assert reason is not None
    assert reason.sentence == "the run is finished"
    log = (second.root / TRAINING).read_text()
    assert "resuming after epoch" in log
    assert "\ndone\n" in log
    receipt = rig.read("receipt.json")
    assert [cost["ended"] for cost in receipt["interruptions"]] == ["silent"]
    assert receipt["interruptions"][0]["steps_redone"] >= 0
    assert receipt["steps"] == 8 * 32
    assert [*receipt["final_files"]] == ["model/model.pth"]


def reports(log: str) -> list[float]:
    """The steps, or epochs, that the program has printed."""
    return [float(found) for found in re.findall(r"(?:^step |'epoch': ')([0-9.]+)", log, re.M)]


def replace(machine: ProcessMachine) -> None:
    """Train again with nothing left of the attempt before, as a new machine: its boot is known."""
    shutil.rmtree(machine.folder / "data/ml")
    (machine.folder / "data/ml").mkdir()
    machine.metadata._announced.clear()
    (machine.folder / "run/training/notice.json").unlink()
    run_on(machine, "systemctl", "start", "training.service")


@pytest.mark.parametrize(
    ("example", "hyperparameters", "model"),
    [
        pytest.param(
            "huggingface",
            {"max-steps": 300, "save-steps": 40},
            "model/model.safetensors",
            marks=pytest.mark.slow,
        ),
        pytest.param("lightning", {"epochs": 8}, "model/model.ckpt", marks=pytest.mark.slow),
    ],
)
def test_a_library_that_saves_at_a_notice_loses_nothing_but_time(
    rig: Rig, tmp_path: Path, example: str, hyperparameters: dict[str, object], model: str
) -> None:
    variables = boot_program(rig, example, tmp_path, **hyperparameters)
    machine = start(rig, variables)
    wait_for_snapshot(rig, machine)
    machine.metadata.notice(60)
    wait(machine, "after training: success, exited 75; the head says released")
    first_log = (machine.root / TRAINING).read_text()
    replace(machine)
    wait(machine, f"fleet {rig.fleet_id} to zero: the run is finished")
    second_log = (machine.root / TRAINING).read_text().removeprefix(first_log)
    receipt = rig.read("receipt.json")
    (cost,) = receipt["interruptions"]
    assert (cost["ended"], cost["cause"]) == ("released", "notice")
    assert cost["seconds_lost"] < 1
    assert model in receipt["final_files"]
    # It did not begin anew. A fast machine is done before its library looks at the signal.
    first_report, second_report = reports(first_log), reports(second_log)
    assert first_report
    assert not second_report or first_report[-1] <= second_report[0]
