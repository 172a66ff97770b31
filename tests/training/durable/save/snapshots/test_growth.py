"""A state that only grows is saved; a log beside a checkpoint keeps the checkpoint's rows."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.durable.save.scene import (
    Machine,
    NewMachine,
    entries,
    program,
    wait_for_snapshot,
    wait_until,
)
from training.durable.record.metrics import Events
from training.durable.save.snapshots.listing import list_folder
from training.durable.save.snapshots.quiet import GrowingFiles
from training.durable.save.snapshots.snapshot import read_manifest
from training.durable.store.protocol import Store

QUIET = {"quiet_seconds": 0.1}


def _append(machine: Machine, name: str = "results.csv", *, rows: int = 1) -> int:
    """Append lines as a program does; return how many there are."""
    path = machine.folder / name
    for _ in range(rows):
        with path.open("a") as stream:
            stream.write("0.5,0.25\n")
        time.sleep(0.05)
    return len(path.read_text().splitlines())


def _grow_until(machine: Machine, is_so: Callable[[], object], *names: str) -> None:
    def grow() -> object:
        for name in names:
            _append(machine, name)
        return is_so()

    wait_until(grow, machine.mirror)


def _reasons(store: Store) -> list[str]:
    return [event["reason"] for event in Events.read(store, "committed")]


def _told(store: Store) -> list[str]:
    return [event["message"] for event in Events.read(store, "logs")]


@pytest.mark.parametrize("name", ["results.csv", "journal.log"])
def test_what_only_grows_is_saved_again_and_again(
    new_machine: NewMachine, store: Store, name: str
) -> None:
    machine = new_machine("machine-0", **QUIET)
    machine.write({"config.json": b"{}"})
    machine.mirror.start()
    _grow_until(machine, lambda: _reasons(store)[-2:] == ["appended", "appended"], name)
    assert machine.mirror.last is not None
    assert read_manifest(store, entries(store)[-1]).reason == "quiet", "as older readers know it"
    assert not entries(store)[-1].is_tentative
    assert time.time() - machine.mirror.last.written_at < 60
    count = _append(machine, name, rows=0)
    machine.vanish()
    assert count - _append(new_machine("machine-1"), name, rows=0) < 40
    assert _told(store)[-1] == f"treated as logs, and saved as they grow: {name}"
    again = new_machine("machine-2")
    again.mirror.start()
    wait_until(lambda: again.mirror._watcher.growing.logs, again.mirror)
    assert again.mirror._watcher.growing.logs == {name}, "it need not be learned again"


def test_several_files_that_grow_are_saved_at_one_moment(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("machine-0", **QUIET)

    def append() -> None:
        while True:
            _append(machine, "items.jsonl")
            _append(machine, "ids.csv")

    with program(append) as process:
        machine.mirror.start(process)
        wait_until(lambda: _reasons(store)[-2:] == ["appended", "appended"], machine.mirror)
    machine.vanish()
    again = new_machine("machine-1")
    assert _append(again, "items.jsonl", rows=0) - _append(again, "ids.csv", rows=0) in (0, 1)


@pytest.mark.parametrize("exit_code", [-9, 1, 143])
def test_growth_is_saved_to_the_last_line_when_the_program_ends(
    new_machine: NewMachine, store: Store, exit_code: int
) -> None:
    machine = new_machine("machine-0", quiet_seconds=0.3)
    machine.mirror.start()
    _grow_until(machine, lambda: "appended" in _reasons(store), "results.csv")
    machine.mirror.request("emergency")
    count = _append(machine, rows=3)
    machine.end(exit_code)
    again = new_machine("machine-1")
    assert len((again.folder / "results.csv").read_text().splitlines()) == count


def test_a_notice_saves_growth_at_once_however_big_the_file(
    new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.save.snapshots.watcher._GROWTH_BYTES_PER_SECOND", 1e-3)
    machine = new_machine("machine-0", **QUIET)
    machine.mirror.start()
    _grow_until(machine, lambda: "appended" in _reasons(store), "results.csv")
    number = entries(store)[-1].step
    _append(machine, rows=20)
    assert entries(store)[-1].step == number, "a big file is sent again as seldom as that asks"
    machine.mirror.request("emergency")
    _grow_until(machine, lambda: entries(store)[-1].step > number, "results.csv")


def test_the_rows_of_a_log_beside_a_checkpoint_are_those_of_its_save_on_every_machine(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("machine-0", **QUIET)
    machine.mirror._watcher.growing.saved_ns -= 3600 * 10**9  # it saves once an hour
    machine.mirror.start()
    machine.mirror._watcher.growing.saved_ns -= 3600 * 10**9
    machine.write({"model.pt": b"1"})
    rows = []
    for number in (1, 2):
        saves = entries(store)[-1].step if entries(store) else 0
        _grow_until(machine, lambda m=machine: m.mirror._watcher.growing.logs, "metrics.csv")
        wait_until(lambda m=machine: m.mirror._watcher.is_captured(), machine.mirror)
        _append(machine, "metrics.csv", rows=10)
        assert _told(store)[-1] == "treated as logs, and saved with other files: metrics.csv"
        assert "appended" not in _reasons(store)
        machine.mirror.request("emergency")
        _append(machine, "metrics.csv", rows=10)
        machine.end(-9)
        assert "appended" not in _reasons(store)
        machine = new_machine(f"machine-{number}", **QUIET)
        rows.append(_append(machine, "metrics.csv", rows=0))
        machine.mirror.start()
    assert saves
    assert rows


def test_growth_counts_once_the_other_files_have_stood_still_three_times_as_long_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = GrowingFiles(tmp_path, 0.1, 0.02)
    (tmp_path / "train.log").write_text("line\n")
    assert growing.are_state(list_folder(tmp_path)), "there is nothing else"
    (tmp_path / "model.pt").write_bytes(b"1")
    listing = list_folder(tmp_path)
    growing.saved_ns = listing.written_ns - 10**9
    growing.captured(listing)
    assert not growing.are_state(listing)
    growing.longest_ns = 10**6
    time.sleep(0.02)
    assert growing.are_state(list_folder(tmp_path))
    growing.longest_ns = 10**12
    assert not growing.are_state(listing)
    monkeypatch.setattr(time, "time_ns", lambda: listing.written_ns - 3600 * 10**9)
    assert growing.are_state(listing), "a clock that was set back says nothing of their age"


@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_file_named_like_a_log_that_is_replaced_or_rewritten_is_none(
    tmp_path: Path, is_renamed: bool
) -> None:
    growing, path, found = GrowingFiles(tmp_path, 0.1, 0.02), tmp_path / "state.log", []
    for number in range(4):
        target = tmp_path / "part" if is_renamed else path
        target.write_text(f"{number}\n")
        target.rename(path)
        listing = list_folder(tmp_path, growing.logs)
        growing.look(listing)
        assert growing.logs is not None
        found.append(path.name in growing.logs)
        time.sleep(0.02)
    assert found == [True, True, False, False]


def test_a_log_that_is_rotated_stays_one(tmp_path: Path) -> None:
    growing, path = GrowingFiles(tmp_path, 0.1, 0.02), tmp_path / "train.log"
    for number in range(4):
        path.write_text(f"{number}\n")
        growing.look(list_folder(tmp_path, growing.logs))
        assert growing.logs == {path.name}
        path.rename(tmp_path / "train.log.1")


def test_the_state_of_a_program_in_a_file_named_like_a_log_is_saved_at_each_replacement(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("machine-0", **QUIET)
    machine.mirror.start()
    for number in (1, 2, 3):
        machine.write({"state.tmp": b"%d" % number})
        (machine.folder / "state.tmp").rename(machine.folder / "state.log")
        wait_for_snapshot(machine, number)
    machine.vanish()
    assert (new_machine("machine-1").folder / "state.log").read_bytes() == b"3"
