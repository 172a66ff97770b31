"""What a program leaves that ends itself at a notice: it may hold half of a save."""

from collections.abc import Callable

import pytest

from tests.training.save.scene import Machine, entries, wait_for_snapshot
from training.record.checkpoint_entry import Retention
from training.store.protocol import Store

NewMachine = Callable[..., Machine]


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_program_that_says_when_is_not_taken_where_it_exits_at_a_notice(
    new_machine: NewMachine, exit_code: int
) -> None:
    machine = new_machine("first")
    machine.mirror.start()
    machine.write({"model.pt": b"1"})
    machine.commit()
    machine.mirror.request("emergency")
    machine.write({"model.pt": b"ha"})
    assert not machine.end(exit_code)
    assert (new_machine("second").folder / "model.pt").read_bytes() == b"1"


def test_an_exit_at_a_notice_takes_the_place_of_no_quiet_snapshot(
    new_machine: NewMachine, store: Store
) -> None:
    keeps_one = {"retention": Retention(newest=1), "quiet_seconds": 0.05}
    machine = new_machine("machine-0", **keeps_one)
    machine.mirror.start()
    machine.write({"model.pt": b"whole"})
    wait_for_snapshot(machine, 1)
    machine.vanish()
    for number in range(1, 4):
        machine = new_machine(f"machine-{number}", **keeps_one)
        machine.mirror.request("emergency")
        machine.write({"model.pt": b"half" * number})
        assert machine.end()
        assert [entry.is_tentative for entry in entries(store)] == [False, True]
    machine = new_machine("last", **keeps_one)
    assert (machine.folder / "model.pt").read_bytes() == b"half" * 3, "as a rule it is whole"
    machine.mirror.start()
    machine.write({"model.pt": b"whole again"})
    wait_for_snapshot(machine, 5)
    assert [(entry.step, entry.is_tentative) for entry in entries(store)] == [(5, False)]


def test_a_program_that_fails_twice_on_such_a_snapshot_starts_from_the_quiet_one(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("machine-0", quiet_seconds=0.05)
    machine.mirror.start()
    machine.write({"model.pt": b"whole"})
    wait_for_snapshot(machine, 1)
    machine.mirror.request("emergency")
    machine.write({"model.pt": b"ha"})
    machine.end()
    for number in range(1, 3):
        machine = new_machine(f"machine-{number}", quiet_seconds=0.05)
        assert (machine.folder / "model.pt").read_bytes() == b"ha"
        machine.mirror.count_failure()
        machine.end(exit_code=1)
        assert [entry.failed_starts for entry in entries(store)] == [0, number]
    machine = new_machine("machine-3", quiet_seconds=0.05)
    assert (machine.folder / "model.pt").read_bytes() == b"whole"
    assert machine.restored is not None
    ((name, why),) = machine.restored.passed_over
    assert name == entries(store)[-1].name, "it is kept"
    assert why == "taken when the program ended itself after a notice, and it failed 2 times on it"


def test_where_there_is_nothing_else_a_program_starts_from_such_a_snapshot_again(
    new_machine: NewMachine,
) -> None:
    machine = new_machine("machine-0")
    machine.mirror.request("emergency")
    machine.write({"model.pt": b"ha"})
    machine.end()
    for number in range(1, 4):
        machine = new_machine(f"machine-{number}")
        assert (machine.folder / "model.pt").read_bytes() == b"ha"
        machine.mirror.count_failure()
        machine.end(exit_code=1)
