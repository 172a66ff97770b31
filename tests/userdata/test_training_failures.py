"""A GPU that fails under the trainer: it ends the machine at the first time."""

import json

from tests.userdata.rig import Rig, calls, wait

AT_STEP_7 = (
    json.dumps({"kind": "resume", "stage": None, "step": 0}),
    json.dumps({"kind": "step", "stage": "head", "step": 7}),
)


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
