"""A program that cannot start from a snapshot gets an older one, and nothing is deleted for it."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.training.durable.save.scene import (
    Machine,
    NewMachine,
    entries,
    wait_for_snapshot,
    wait_until,
)
from training.durable.errors import MachineError
from training.durable.record.head import Retention
from training.durable.record.metrics import Events
from training.durable.save.snapshots import listing
from training.durable.save.snapshots.snapshot import read_manifest
from training.durable.store.protocol import Store


def _leave_a_half_save_after_a_whole_one(new_machine: NewMachine) -> None:
    machine = new_machine("machine-0", quiet_seconds=0.05)
    machine.mirror.start()
    machine.write({"model.pt": b"whole"})
    wait_for_snapshot(machine, 1)
    machine.mirror.request("emergency")
    machine.write({"model.pt": b"ha"})
    machine.end()


def test_an_exit_between_the_files_of_a_save_is_not_taken(new_machine: NewMachine) -> None:
    machine = new_machine("machine-0", quiet_seconds=1.0)
    machine.mirror.start()
    for number in (1, 2, 3):
        machine.write(dict.fromkeys(("shard-1", "shard-2", "index.json"), b"%d" % number))
        wait_for_snapshot(machine, number)
    machine.mirror.request("emergency")
    machine.write({"shard-1": b"4"})
    assert not machine.end()
    assert (new_machine("machine-1").folder / "shard-1").read_bytes() == b"3"


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
    _leave_a_half_save_after_a_whole_one(new_machine)
    for number in range(1, 3):
        machine = new_machine(f"machine-{number}", quiet_seconds=0.05)
        assert (machine.folder / "model.pt").read_bytes() == b"ha"
        machine.mirror.count_failure("train.py:1")
        machine.end(exit_code=1)
        assert [entry.failed_starts for entry in entries(store)] == [0, number]
    machine = new_machine("machine-3", quiet_seconds=0.05)
    assert (machine.folder / "model.pt").read_bytes() == b"whole"
    assert machine.restored is not None
    ((name, why),) = machine.passed_over
    assert name == entries(store)[-1].name, "it is kept"
    assert why == "the program failed 2 times while it read it"


def test_where_no_save_so_far_was_whole_a_program_that_fails_twice_on_it_starts_over(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("machine-0")
    machine.mirror.request("emergency")
    machine.write({"model.pt": b"ha"})
    machine.end()
    for number in (1, 2):
        machine = new_machine(f"machine-{number}")
        assert (machine.folder / "model.pt").read_bytes() == b"ha"
        machine.mirror.count_failure("train.py:1")
        machine.end(exit_code=1)
    machine = new_machine("machine-3")
    assert not (machine.folder / "model.pt").exists()
    assert [entry.is_left_behind for entry in entries(store)] == [True], "it is kept"


def _two_whole_saves(new_machine: NewMachine) -> None:
    machine = new_machine("machine-0", quiet_seconds=0.05)
    machine.mirror.start()
    for number in (1, 2):
        machine.write({"model.pt": b"%d" % number})
        wait_for_snapshot(machine, number)
    machine.vanish()


def _begun_with(new_machine: NewMachine, places: list[str]) -> list[bytes]:
    """What a program begins with that fails at these places, one after the other."""
    begun = []
    for number, place in enumerate(places, 1):
        machine = new_machine(f"machine-{number}")
        begun.append((machine.folder / "model.pt").read_bytes())
        said = machine.mirror.count_failure(place)
        assert f"reopen --from-checkpoint 1 --run-uri {machine.store.uri}" in said or (
            begun[-1] == b"1" and "reopen --from-scratch" in said
        )
        machine.end(exit_code=1)
    return begun


def test_a_snapshot_that_a_program_twice_cannot_read_is_passed_over(
    new_machine: NewMachine, store: Store
) -> None:
    _two_whole_saves(new_machine)
    assert _begun_with(new_machine, ["a:1"] * 4) == [b"2", b"2", b"1", b"1"]
    assert [entry.failed_starts for entry in entries(store)] == [2, 2], "both are kept"
    found = store.get("head.json")
    assert found is not None
    assert json.loads(found.data)["format"] == 5, "the bundle of an older run can read it"
    machine = new_machine("machine-5")
    assert not (machine.folder / "model.pt").exists(), "then it starts afresh"
    assert Events.read(store, "none-valid")[-1]["starts_over"]
    machine.mirror.start()
    for number in range(5):
        machine.save({"model.pt": b"anew %d" % number})
    assert [e.step for e in entries(store) if e.is_left_behind] == [2], "and the newest stays"


def test_what_a_program_twice_cannot_read_is_no_way_on_where_the_rest_is_damaged(
    new_machine: NewMachine, store: Store
) -> None:
    """Seed 521776 read it again and again, on 46 machines."""
    _two_whole_saves(new_machine)
    assert _begun_with(new_machine, ["a:1"] * 2) == [b"2", b"2"]
    for blob in read_manifest(store, entries(store)[0]).blobs:
        (Path(store.uri) / "blobs" / blob).write_bytes(b"?")
    with pytest.raises(MachineError, match=r"none of the 2 checkpoints .* failed 2 times while"):
        new_machine("machine-3")
    machine = new_machine("machine-4")
    assert not (machine.folder / "model.pt").exists()
    assert [entry.is_left_behind for entry in entries(store)] == [True, True], "and none is lost"


def test_an_end_without_a_word_counts_only_against_what_may_be_half_a_save(
    new_machine: NewMachine, store: Store
) -> None:
    _leave_a_half_save_after_a_whole_one(new_machine)
    begun = []
    for number in range(1, 6):
        machine = new_machine(f"machine-{number}", quiet_seconds=0.05)
        begun.append((machine.folder / "model.pt").read_bytes())
        machine.mirror.count_failure("", "exit code 1")
        machine.end(exit_code=1)
    assert begun == [b"ha", b"ha", b"whole", b"whole", b"whole"]


def test_failures_elsewhere_or_at_two_places_never_count_against_a_snapshot(
    new_machine: NewMachine, store: Store
) -> None:
    _two_whole_saves(new_machine)
    places = ["", "", "", "a:1", "", "b:2", "a:1"]
    assert _begun_with(new_machine, places) == [b"2"] * len(places)
    assert [entry.failed_starts for entry in entries(store)] == [0, 1]


def test_what_a_program_adds_to_a_torn_snapshot_before_it_fails_on_it_is_no_save(
    new_machine: NewMachine, store: Store
) -> None:
    _leave_a_half_save_after_a_whole_one(new_machine)
    begun = []
    for number in range(1, 9):
        machine = new_machine(f"machine-{number}", quiet_seconds=0.05)
        begun.append((machine.folder / "model.pt").read_bytes())
        if begun[-1] == b"whole":
            break
        machine.mirror.start()
        machine.write({f"config-{number}.json": b"+"})
        wait_for_snapshot(machine, entries(store)[-1].step + 1)
        machine.mirror.count_failure("train.py:1")
        machine.end(exit_code=1)
    assert begun == [b"ha", b"ha", b"ha", b"whole"]
    machine.mirror.start()
    machine.write({"model.pt": b"again"})
    wait_for_snapshot(machine, entries(store)[-1].step + 1)
    assert [entry.is_tentative for entry in entries(store)] == [False, True, True, False]


@pytest.mark.parametrize("is_firm", [False, True])
@pytest.mark.parametrize("mode", ["config.json", "train.log", "lock"])
def test_what_a_program_rewrites_as_it_starts_makes_no_torn_snapshot_whole(
    new_machine: NewMachine,
    store: Store,
    mode: str,
    is_firm: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three such starts took the place of the whole one, whose work was lost.

    One that is not tentative may be torn, too: by a save that pauses for longer than the quiet
    time (seed 160214 of tests/simulation).
    """
    monkeypatch.setattr(listing, "_SAVE_NS", 0)  # each start is long after the one before
    machine = new_machine("machine-0", quiet_seconds=0.05)
    machine.write({mode: b"+"})
    os.utime(machine.folder / mode, (1e9, 1e9))
    if is_firm:
        machine.mirror.start()
        for number, data in ((1, b"whole"), (2, b"ha")):
            machine.write({"model.pt": data})
            wait_for_snapshot(machine, number)
        machine.vanish()
    else:
        _leave_a_half_save_after_a_whole_one(lambda *_, **__: machine)
    begun = []
    for number in range(1, 9):
        machine = new_machine(f"machine-{number}", quiet_seconds=0.05)
        begun.append((machine.folder / "model.pt").read_bytes())
        if begun[-1] == b"whole":
            break
        machine.mirror.start()
        if mode == "lock":
            (machine.folder / mode).unlink(missing_ok=True)
        machine.write({} if mode == "lock" and number == 1 else {mode: b"+"})
        wait_for_snapshot(machine, entries(store)[-1].step + 1)
        assert entries(store)[-1].is_tentative
        machine.mirror.count_failure("train.py:1")
        machine.end(exit_code=1)
    assert begun == [b"ha", b"ha", b"ha", b"whole"]


@pytest.mark.parametrize(
    ("torn", "saved"),
    [
        pytest.param({"model.pt": b"ha"}, {"model.pt": b"whole"}, id="in place, and longer"),
        pytest.param({"model-3.pt": b"ha"}, {"model-4.pt": b"whole"}, id="a new name each time"),
        pytest.param(
            {"model.pt": b"half", "history.json": b"[1]"},
            {"model.pt": b"whole", "history.json": b"[1, 2]"},
            id="beside what grows",
        ),
        pytest.param(
            {"best.pt": b"best", "last.pt": b"half"}, {"last.pt": b"last"}, id="beside a best one"
        ),
    ],
)
def test_a_save_after_a_torn_one_is_whole_in_place_or_beside_it(
    new_machine: NewMachine, store: Store, torn: dict[str, bytes], saved: dict[str, bytes]
) -> None:
    machine = new_machine("machine-0", quiet_seconds=0.05)
    machine.mirror.request("emergency")
    machine.write(torn)
    machine.end()
    machine = new_machine("machine-1", quiet_seconds=0.05)
    machine.mirror.start()
    machine.write(saved)  # of the same inode
    wait_for_snapshot(machine, 2)
    assert [entry.is_tentative for entry in entries(store)][-1] is False


def test_a_program_that_has_saved_before_it_failed_is_no_witness_against_its_snapshot(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("machine-0")
    for number in (1, 2):
        machine.mirror.start()
        machine.save({"model.pt": b"%d" % number})
        machine.mirror.count_failure("train.py:1")
        machine.end(exit_code=1)
        machine = new_machine(f"machine-{number}")
    assert [entry.failed_starts for entry in entries(store)] == [0, 0]


def _told_in_a_save(new_machine: NewMachine, *, is_open: bool) -> Machine:
    """A machine whose program was told to end with half of a second save written."""
    machine = new_machine("machine-0", quiet_seconds=0.05)
    machine.mirror.start()
    machine.write({"model.pt": b"whole"})
    wait_for_snapshot(machine, 1)
    machine.vanish()
    machine = new_machine("machine-1", quiet_seconds=1000.0)
    machine.mirror.start()
    with (machine.folder / "model.pt").open("wb") as stream:
        stream.write(b"ha")
        if not is_open:
            stream.close()
        with machine.mirror.signalling():
            pass  # the signal, whose handler raises SystemExit; that closes the file
    machine.mirror.request("emergency")
    return machine


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "just written"])
def test_an_exit_in_a_save_that_was_under_way_at_the_notice_is_not_taken(
    new_machine: NewMachine, is_open: bool
) -> None:
    machine = _told_in_a_save(new_machine, is_open=is_open)
    time.sleep(0 if is_open else 1.5)  # the second that such an exit takes is no quiet time
    assert machine.mirror.last is None
    assert not machine.end(143)
    assert (new_machine("machine-2").folder / "model.pt").read_bytes() == b"whole"


def test_a_program_that_replaces_whole_files_keeps_its_last_when_it_exits_in_a_save(
    new_machine: NewMachine,
) -> None:
    machine = new_machine("machine-0", quiet_seconds=100.0)
    machine.mirror.start()
    watcher = machine.mirror._watcher
    for number in (1, 2):
        for is_written in (False, True):
            looked = watcher._quiet.listing
            if is_written:
                (machine.folder / "part").rename(machine.folder / "model.pt")
            else:
                machine.write({"part": b"%d" % number})
            wait_until(lambda seen=looked: watcher._quiet.listing is not seen, machine.mirror)
    with (machine.folder / "part").open("wb") as stream, machine.mirror.signalling():
        stream.write(b"ha")
    machine.mirror.request("emergency")
    assert machine.end(143)
    assert (new_machine("machine-1").folder / "model.pt").read_bytes() == b"2"


def test_what_a_program_saves_when_it_is_told_is_taken_at_its_exit(new_machine: NewMachine) -> None:
    machine = new_machine("machine-0", quiet_seconds=1000.0)
    machine.mirror.start()
    with machine.mirror.signalling():
        pass
    machine.mirror.request("emergency")
    machine.write({"model.pt": b"whole"})
    assert machine.end(143)


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_program_that_empties_its_folder_displaces_no_snapshot(
    new_machine: NewMachine, store: Store, size: int
) -> None:
    def first() -> Machine:
        machine = new_machine(f"machine-{len(Events.read(store, 'committed'))}", quiet_seconds=0.1)
        machine.mirror.start()
        return machine

    machine = first()
    machine.write({"config.json": b"{}", "model.pt": bytes(size)})
    wait_for_snapshot(machine, 1)
    machine.vanish()
    machine = first()
    for path in machine.folder.iterdir():
        path.unlink()
    machine.write({"config.json": b"{...}"})
    wait_until(lambda: machine.mirror._watcher.was_emptied, machine.mirror)
    machine.mirror.request("emergency")
    assert not machine.end(143), "less than there was is no save"
    for life in (1, 2):
        machine = first()
        assert (machine.folder / "model.pt").exists()
        for path in machine.folder.iterdir():
            path.unlink()
        wait_until(lambda m=machine: m.mirror._watcher.was_emptied, machine.mirror)
        for number in range(4):
            machine.write({"model.pt": bytes([life, number]) * size})
            wait_for_snapshot(machine, entries(store)[-1].step + 1)
        machine.vanish()
        assert entries(store)[0].step == 1, "the work of the first life is there to go back to"
    told = [event["message"] for event in Events.read(store, "emptied")]
    assert len(told) == 2
    assert all(f"reopen --from-checkpoint 1 --run-uri {store.uri}" in text for text in told)
