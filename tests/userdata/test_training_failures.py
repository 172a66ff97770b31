"""A trainer that fails: it ends the machine, and the run only where two machines failed alike."""

import json

import pytest

from tests.userdata.rig import Rig, calls, wait

AT_STEP_7 = (
    json.dumps({"kind": "resume", "stage": None, "step": 0}),
    json.dumps({"kind": "step", "stage": "head", "step": 7}),
)


@pytest.mark.slow
def test_three_failures_end_the_machine_and_the_same_place_on_a_second_one_the_run(
    rig: Rig,
) -> None:
    rig.order(run=1, lines=AT_STEP_7)
    first = rig.machine()
    wait(first, f"[ok] machine {first.instance_id}: EC2 terminates it")
    assert len(calls(first, "run")) == 3
    assert calls(first, "fail") == []
    assert rig.target_capacity() == 1
    (event,) = [each for each in rig.events() if each["name"] == "machine-failed"]
    assert event["place"] == "stage head after step 7"
    why = "training failed (start-limit-hit, exit status 1): the trainer's last words"
    assert event["message"] == why

    first.remove()
    second = rig.machine()
    wait(second, f"[ok] fleet {rig.fleet_id} to zero")
    assert rig.read("head.json") == {
        "state": "failed",
        "reason": f"{why}; {first.instance_id} failed there too: stage head after step 7",
    }
    assert rig.target_capacity() == 0


def test_a_gpu_that_fails_in_training_ends_the_machine_at_the_first_time(rig: Rig) -> None:
    words = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
    rig.order(run=1, lines=AT_STEP_7, words=words)
    machine = rig.machine()
    wait(machine, f"[ok] machine {machine.instance_id}: EC2 terminates it")
    # The restart after it looks at the logs before it starts the trainer.
    assert len(calls(machine, "run")) == 1
    (event,) = [each for each in rig.events() if each["name"] == "machine-failed"]
    assert event["message"] == f"a GPU of this machine failed: {words} (exit-code, exit status 4)"
    # Another machine's GPU may fail at the same step.
    assert "place" not in event
    assert rig.target_capacity() == 1
