"""The place where a trainer fails, as the boot programs read it, is the same on every machine."""

from pathlib import Path

from torch import Tensor

from tests.training import tiny
from tests.training.runs import Run
from userdata.failure_place import failed_there, place_of


def test_two_machines_that_fail_in_the_same_step_name_the_same_place(
    run: Run, tmp_path: Path
) -> None:
    def broken(step: int, total: Tensor) -> Tensor:
        if step == 10:
            raise RuntimeError("the eleventh batch is broken")
        return total

    tiny.LOSSES["first"] = broken
    events = []
    for machine in ("i-1", "i-2"):
        metrics = tmp_path / machine / "metrics.jsonl"
        process = run.fork(f"--metrics-file={metrics}", f"--writer={machine}")
        process.join(120)
        assert process.exitcode == 1
        # The second one resumes from step 9. Step 10's line would come with the end of step 11.
        place = place_of(metrics.read_text().splitlines())
        assert place == "stage first after step 9"
        assert failed_there(events, place, machine) == ("i-1" if events else None)
        events.append({"name": "machine-failed", "instance_id": machine, "place": place})
    assert [entry.step for entry in run.head.checkpoints] == [3, 6, 9]
