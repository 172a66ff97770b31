"""Notices, recommendations, failures and ends of training on a booted machine."""

import json
import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.userdata.rig import Rig, calls, signals, wait, wait_until


def event_names(rig: Rig) -> list[str]:
    return [event["name"] for event in rig.events()]


def arrived(rig: Rig, name: str, *, at_least: float) -> float:
    """Wait until the sum of a metric's values is there; return it."""
    cloudwatch = rig.aws.client("cloudwatch")
    deadline, total = time.monotonic() + 120, 0.0
    while total < at_least and time.monotonic() < deadline:
        time.sleep(0.2)
        now = datetime.now(UTC)
        found = cloudwatch.get_metric_statistics(
            Namespace="Training/MeteredStack",
            MetricName=name,
            Dimensions=[{"Name": "Stack", "Value": "MeteredStack"}],
            StartTime=now - timedelta(hours=1),
            EndTime=now + timedelta(hours=1),
            Period=7200,
            Statistics=["Sum"],
        )
        total = sum(point["Sum"] for point in found["Datapoints"])
    return total


def test_a_recommendation_and_a_notice_reach_the_trainer_once_each_and_metrics_the_stack(
    rig: Rig,
) -> None:
    variables = rig.run_env(STACK_NAME="MeteredStack")
    machine = rig.machine(variables=variables, environment={"SEND_METRICS_SECONDS": "0.5"})
    wait(machine, "trainer listens")
    steps = [json.dumps({"kind": "step", "step": step}) + "\n" for step in (1, 2)]
    machine.metrics_file.write_text("".join(steps))
    assert arrived(rig, "training_steps", at_least=2) == 2
    machine.metadata.rebalance()
    wait_until(lambda: signals(machine) == ["SIGUSR2"])
    # Some polls later it has still got one signal.
    time.sleep(0.5)
    assert signals(machine) == ["SIGUSR2"]
    machine.metadata.notice(120)
    wait(machine, "after training: success, exited 75; the head says released")
    assert signals(machine) == ["SIGUSR2", "SIGUSR1"]
    notice = json.loads((machine.folder / "run/training/notice.json").read_text())
    assert notice.keys() == {"action", "time", "received_at"}
    wait_until(lambda: {"notice", "rebalance"} <= set(event_names(rig)))
    # 75 is no failure: no restart, and the fleet is left alone, which replaces this machine.
    assert len(calls(machine, "run")) == 1
    assert calls(machine, "fail") == []
    assert rig.target_capacity() == 1
    # The trainer of the rig ends at a notice without having committed its two steps.
    assert arrived(rig, "notice_without_commit", at_least=1) == 1


def test_training_does_not_start_on_a_machine_that_has_its_notice(rig: Rig) -> None:
    rig.order(run="wait", sync="until notice")
    machine = rig.machine()
    machine.metadata.notice(120)
    wait(machine, "after training: success, exited 75; the head says nothing")
    assert calls(machine, "run") == []
    assert rig.target_capacity() == 1


@pytest.mark.slow  # weekly; in each run of the tests: test_service_failed.py
def test_a_mistake_of_the_user_is_not_tried_again(rig: Rig) -> None:
    rig.order(run=2)
    machine = rig.machine()
    wait(machine, f"[ok] fleet {rig.fleet_id} to zero")
    assert len(calls(machine, "run")) == 1
    assert rig.read("head.json")["state"] == "failed"


@pytest.mark.slow  # drill gpu-fails; in each run of the tests: test_gpu_fault.py
def test_a_gpu_that_fails_in_training_ends_the_machine_at_the_first_time(rig: Rig) -> None:
    at_step_7 = json.dumps({"kind": "step", "stage": "head", "step": 7})
    words = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    rig.order(run=1, lines=[at_step_7], words=words)
    machine = rig.machine()
    wait(machine, f"[ok] machine {machine.instance_id}: EC2 terminates it")
    # The restart after it looks at the logs before it starts the trainer.
    assert len(calls(machine, "run")) == 1
    (event,) = [each for each in rig.events() if each["name"] == "machine-failed"]
    assert event["message"] == f"a GPU of this machine failed: {words} (exit-code, exit status 4)"
    # Another machine's GPU may fail at the same step.
    assert "place" not in event
    assert rig.target_capacity() == 1
