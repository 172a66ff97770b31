"""Training beside the sync of its dataset: it starts early; a sync that fails is not survived."""

import pytest

from rehearsal.machines.machine import BOOT
from tests.userdata.rig import Rig, calls, signals, wait, wait_until


def test_training_starts_while_the_dataset_arrives_and_a_shutdown_lets_it_save_first(
    rig: Rig,
) -> None:
    rig.order(run="wait", sync="until it is asked")
    machine = rig.machine()
    wait(machine, "trainer listens")
    wait_until(lambda: "boot" in {event["name"] for event in rig.events()})
    assert "[ok] dataset" not in (machine.root / BOOT).read_text()
    (machine.folder / "sync-ends").write_text("0")
    wait(machine, "[ok] dataset")
    assert len(calls(machine, "data")) == 1
    machine.shut_down()
    wait_until(lambda: machine.is_off)
    assert signals(machine) == ["SIGTERM"]
    assert rig.read("head.json")["state"] == "released"
    assert machine.processes() == []


@pytest.mark.parametrize(
    ("status", "attempts", "reason"),
    [
        # In each run of the tests: a machine that may not end itself.
        pytest.param(1, 3, "status 1", marks=pytest.mark.slow),
        # The mail has the sync's own sentence: the log ends with the machine. In each run of the
        # tests: test_service_failed.py.
        pytest.param(
            2,
            1,
            "boot failed at dataset: error: clip-7 is missing; upload it again",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_sync_that_fails_while_training_waits_for_it_ends_the_machine_or_the_run(
    rig: Rig, status: int, attempts: int, reason: str
) -> None:
    rig.order(run="wait", sync="until it is asked")
    machine = rig.machine()
    wait(machine, "trainer listens")
    (machine.folder / "sync-ends").write_text(str(status))
    name = "machine-failed" if status == 1 else "run-given-up"
    wait_until(lambda: name in {event["name"] for event in rig.events()})
    (event,) = [event for event in rig.events() if event["name"] == name]
    assert event["message"].startswith("boot failed at dataset: ")
    assert reason in event["message"]
    assert len(calls(machine, "data")) == attempts
