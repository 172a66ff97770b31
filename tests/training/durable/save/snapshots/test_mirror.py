"""A folder becomes snapshots at the right moments, and the next machine gets it back whole."""

import logging
import mmap
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from contract.keys import blob_of
from tests.training.durable.save.scene import (
    Machine,
    NewMachine,
    entries,
    tree,
    wait_for_snapshot,
    wait_until,
)
from training.durable.record.head import Retention
from training.durable.record.metrics import Events
from training.durable.save.snapshots.listing import list_folder
from training.durable.save.snapshots.quiet import QuietTime
from training.durable.save.snapshots.snapshot import read_manifest
from training.durable.store.protocol import Store


def test_what_a_program_leaves_is_there_on_the_next_machine(new_machine: NewMachine) -> None:
    first = new_machine("first")
    assert first.restored is None
    first.mirror.start()
    first.write({"model.pt": os.urandom(3_000_000), "deep/er/small": b"abc", "empty": b""})
    (first.folder / "nothing").mkdir()
    (first.folder / "nothing").chmod(0o750)
    (first.folder / "deep/er/small").chmod(0o755)
    (first.folder / "latest").symlink_to("deep/er/small")
    (first.folder / "dangling").symlink_to("/nowhere")
    os.utime(first.folder / "empty", ns=(1, 1_234_567_891_234_567_000))
    first.write({"ünï \n\t'\"\\": b"1", os.fsdecode(b"no text \xff\xfe"): b"2"})
    assert first.end()
    second = new_machine("second")
    assert second.restored is not None
    assert len(second.restored.content.manifest.files) == 5
    assert tree(second.folder) == tree(first.folder)


def test_a_quiet_folder_is_committed_by_itself(new_machine: NewMachine, store: Store) -> None:
    machine = new_machine("first")
    machine.mirror.start()
    machine.write({"model.pt": b"one"})
    wait_for_snapshot(machine, 1)
    assert read_manifest(store, entries(store)[0]).reason == "quiet"
    machine.write({"model.pt": b"two"})
    wait_for_snapshot(machine, 2)
    last = machine.mirror.last
    assert last is not None
    assert (last.num_files, last.changed_bytes, last.sent_bytes) == (1, 3, 3)


def test_nothing_is_taken_while_a_file_is_open_for_writing(new_machine: NewMachine) -> None:
    machine = new_machine("first", quiet_seconds=0.1)
    machine.mirror.start()
    with (machine.folder / "model.pt").open("wb") as stream:
        stream.write(b"half")
        stream.flush()
        watcher = machine.mirror._watcher
        wait_until(lambda: watcher._quiet.held_open == "'model.pt'", machine.mirror)
        looked = watcher._quiet.listing
        wait_until(lambda: watcher._quiet.listing is not looked, machine.mirror)
        assert machine.mirror.last is None
        stream.write(b" and whole")
    wait_for_snapshot(machine, 1)
    assert (machine.folder / "model.pt").read_bytes() == b"half and whole"


def test_a_writable_map_counts_as_open_and_is_read_again_each_time(new_machine: NewMachine) -> None:
    machine = new_machine("first", quiet_seconds=0.1)
    machine.write({"state": bytes(4096)})
    machine.mirror.start()
    with (machine.folder / "state").open("r+b") as stream:
        mapped = mmap.mmap(stream.fileno(), 4096)
    mapped[:5] = b"first"
    machine.commit()
    wait_for_snapshot(machine, 1)
    mapped[:5] = b"later"  # without a change of the file's times
    machine.commit()
    wait_for_snapshot(machine, 2)
    mapped.close()
    machine.vanish()
    second = new_machine("second")
    assert (second.folder / "state").read_bytes()[:5] == b"later"


def test_an_event_file_that_stays_open_holds_up_nothing(new_machine: NewMachine) -> None:
    machine = new_machine("first", quiet_seconds=0.1)
    machine.mirror.start()
    with (machine.folder / "events.out.tfevents.1.host").open("wb", buffering=0) as stream:
        stream.write(b"row")
        machine.write({"model.pt": b"whole"})
        wait_for_snapshot(machine, 1)
    machine.vanish()
    second = new_machine("second")
    assert (second.folder / "events.out.tfevents.1.host").read_bytes() == b"row"


@pytest.mark.parametrize("exit_code", [1, -9])
def test_curves_alone_are_no_save(
    new_machine: NewMachine, store: Store, caplog: pytest.LogCaptureFixture, exit_code: int
) -> None:
    """With them in the folder, transformers' examples refuse to start: it "is not empty"."""
    machine = new_machine("first", quiet_seconds=0.1)
    machine.mirror.start()
    machine.write({"runs/events.out.tfevents.1.host": b"row"})
    watcher = machine.mirror._watcher
    for _ in range(4):
        looked = watcher._quiet.listing
        wait_until(lambda seen=looked: watcher._quiet.listing is not seen, machine.mirror)
    assert machine.mirror.obstacle(1e-9) is None
    assert not machine.end(exit_code)
    assert entries(store) == ()
    assert "only TensorBoard's curves" in caplog.text


def test_the_curves_of_what_has_finished_are_kept(new_machine: NewMachine, store: Store) -> None:
    machine = new_machine("first")
    machine.mirror.start()
    machine.write({"events.out.tfevents.1.host": b"row"})
    assert machine.end()
    assert len(entries(store)) == 1


def test_a_request_is_dropped_if_the_program_wrote_on_without_waiting(
    new_machine: NewMachine, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    machine = new_machine("first")
    machine.write({"model.pt": b"1", "optimizer.pt": b"1"})
    machine.mirror.commit_file.touch()
    time.sleep(0.05)
    machine.write({"model.pt": b"2"})
    machine.mirror.start()
    wait_until(lambda: not machine.mirror.commit_file.exists(), machine.mirror)
    assert not machine.end(exit_code=1)
    assert entries(store) == ()
    assert "wait until it is gone" in caplog.text


@pytest.mark.parametrize("exit_code", [1, -9])
@pytest.mark.parametrize("writes_on", [True, False])
def test_what_a_dead_program_had_asked_for_is_taken_if_it_is_still_so(
    new_machine: NewMachine, store: Store, exit_code: int, writes_on: bool
) -> None:
    machine = new_machine("first")
    machine.write({"model.pt": b"1", "optimizer.pt": b"1"})
    machine.mirror.commit_file.touch()
    if writes_on:
        time.sleep(0.05)
        machine.write({"model.pt": b"2"})
    assert machine.end(exit_code) is not writes_on
    assert len(entries(store)) == (not writes_on)
    assert all(read_manifest(store, entry).program_says_when for entry in entries(store))


@pytest.mark.parametrize("exit_code", [0, 1, 143, -9])
@pytest.mark.parametrize("was_told", [False, True])
def test_a_program_that_says_when_is_not_taken_at_its_end(
    new_machine: NewMachine, exit_code: int, was_told: bool
) -> None:
    machine = new_machine("first", quiet_seconds=0.05)
    machine.mirror.start()
    machine.write({"model.pt": b"1"})
    machine.commit()
    if was_told:
        machine.mirror.request("emergency")
    machine.write({"model.pt": b"ha"})
    assert not machine.end(exit_code)
    second = new_machine("second")
    assert (second.folder / "model.pt").read_bytes() == b"1"
    second.mirror.start()
    second.write({"model.pt": b"ha"})
    assert not second.end(exit_code), "it said when on the machine before"
    assert (new_machine("third").folder / "model.pt").read_bytes() == b"1"


@pytest.mark.parametrize(
    ("exit_code", "was_told", "is_taken"),
    [
        (0, False, True),
        (0, True, True),
        (1, False, False),  # maybe of a disk that was full, in mid-save
        (1, True, True),
        (137, True, False),
        (-9, False, False),
        (-9, True, False),
    ],
)
def test_a_folder_in_motion_is_taken_if_the_program_ended_well_or_was_told_to(
    new_machine: NewMachine, exit_code: int, was_told: bool, is_taken: bool
) -> None:
    machine = new_machine("first", quiet_seconds=1000)
    machine.mirror.start()
    if was_told:
        machine.mirror.request("emergency")
    machine.write({"model.pt": b"maybe half"})
    assert machine.end(exit_code) is is_taken
    assert (machine.mirror.last is not None) is is_taken


def save_by_rename(machine: Machine, content: bytes) -> None:
    machine.write({"model.part": content})
    (machine.folder / "model.part").rename(machine.folder / "model.pt")


@pytest.mark.parametrize("exit_code", [1, -11])
@pytest.mark.parametrize("has_paused", [False, True])
def test_what_was_saved_before_an_end_of_another_kind_is_not_lost(
    new_machine: NewMachine, store: Store, exit_code: int, has_paused: bool
) -> None:
    """A save by rename is whole at once; any other after a pause, with nothing open."""
    machine = new_machine("first", quiet_seconds=10)
    quiet, path = machine.mirror._watcher._quiet, machine.folder / "model.pt"
    machine.mirror.start()

    def is_seen() -> bool:
        files = quiet.listing.files if quiet.listing else {}
        is_there = "model.pt" in files and files["model.pt"].inode == path.stat().st_ino
        return is_there and (quiet.held_open is None or not has_paused)

    for number in range(1 if has_paused else 2):
        save_by_rename(machine, b"%d" % number)
        wait_until(is_seen, machine.mirror)
    assert machine.end(exit_code)
    assert entries(store)[-1].is_tentative


@pytest.mark.parametrize("replaces", [True, False])
def test_a_program_that_is_told_in_mid_save_may_replace_what_it_was_writing(
    new_machine: NewMachine, store: Store, replaces: bool
) -> None:
    machine = new_machine("first", quiet_seconds=5)
    machine.mirror.start()
    machine.write({"model.pt": b"maybe half"})
    with machine.mirror.signalling():
        machine.mirror.request("emergency")
    if replaces:
        save_by_rename(machine, b"whole")
    assert machine.end(0) is replaces


def test_a_notice_shortens_the_quiet_time(new_machine: NewMachine, store: Store) -> None:
    machine = new_machine("first", quiet_seconds=1000)
    machine.mirror.start()
    machine.write({"model.pt": b"x"})
    machine.mirror.request("emergency")
    wait_for_snapshot(machine, 1)
    (entry,) = entries(store)
    assert entry.kind == "emergency"
    assert entry.is_tentative, "a handler may be in a save of several files (seed 50752)"
    assert machine.end(exit_code=-9), "what it left is committed already"


def test_deletions_are_followed_and_what_nobody_needs_is_deleted(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("first", retention=Retention(newest=2))
    machine.mirror.start()
    for epoch in range(5):
        machine.write({f"epoch-{epoch}.pt": os.urandom(2_000_000)})
        (machine.folder / f"epoch-{epoch - 2}.pt").unlink(missing_ok=True)
        machine.commit()
        wait_for_snapshot(machine, epoch + 1)
    assert machine.end(release=False)
    kept = [read_manifest(store, entry) for entry in entries(store)]
    assert [[file.path for file in one.files] for one in kept] == [
        ["epoch-2.pt", "epoch-3.pt"],
        ["epoch-3.pt", "epoch-4.pt"],
    ]
    needed = {blob for one in kept for blob in one.blobs}
    assert {blob_of(key) for key in store.sizes("blobs/")} == needed
    assert len(needed) == 3


def test_a_crash_right_after_a_publication_leaves_blobs_that_the_next_machine_sweeps(
    new_machine: NewMachine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = new_machine("first", retention=Retention(newest=1))
    machine.mirror.start()
    monkeypatch.setattr(
        "training.durable.save.snapshots.folder_saves.Blobs.delete_unneeded", lambda self: None
    )
    for _ in range(3):
        machine.save({"model.pt": os.urandom(1000)})
    monkeypatch.undo()
    assert len(store.sizes("blobs/")) == 3
    machine.vanish()
    new_machine("second")
    assert len(store.sizes("blobs/")) == 1


def test_what_an_attempt_left_on_the_disk_is_used_if_it_is_equal(new_machine: NewMachine) -> None:
    machine = new_machine("first")
    machine.mirror.start()
    machine.save({"same": os.urandom(2_000_000), "changed": b"committed", "gone": b"x"})
    machine.vanish()
    machine.write({"changed": b"afterward", "new": b"x"})
    (machine.folder / "gone").unlink()
    again = new_machine("first")
    assert again.restored is not None
    assert again.restored.content.reused_bytes == 2_000_000
    assert {p.name for p in again.folder.iterdir()} == {"same", "changed", "gone"}
    assert (again.folder / "changed").read_bytes() == b"committed"


def test_pipes_sockets_and_links_out_of_the_folder_are_each_said_once(
    new_machine: NewMachine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = new_machine("first", quiet_seconds=0.1)
    monkeypatch.chdir(machine.folder)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    Path("out").symlink_to("../elsewhere")
    Path("model.pt").write_bytes(b"x")
    machine.mirror.start()
    wait_for_snapshot(machine, 1)
    machine.write({"model.pt": b"y"})
    with caplog.at_level(logging.WARNING):
        wait_for_snapshot(machine, 2)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == [
        "[snapshot] 'pipe' is a pipe and is not saved",
        "[snapshot] 'socket' is a socket and is not saved",
        "[snapshot] 'out' points out of the folder, to '../elsewhere': the link is saved, "
        "but not its target",
    ]
    machine.vanish()
    assert {p.name for p in new_machine("second").folder.iterdir()} == {"out", "model.pt"}


def test_a_folder_that_vanishes_is_said_and_costs_nothing(
    new_machine: NewMachine, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    machine = new_machine("first", quiet_seconds=0.05)
    machine.mirror.start()
    machine.write({"model.pt": b"x"})
    wait_for_snapshot(machine, 1)
    (machine.folder / "model.pt").unlink()
    machine.folder.rmdir()
    wait_until(lambda: "checkpoints is gone" in caplog.text, machine.mirror)
    assert len(entries(store)) == 1
    machine.write({"model.pt": b"y"})
    wait_for_snapshot(machine, 2)


def test_a_commit_tells_its_seconds_bytes_and_files(new_machine: NewMachine, store: Store) -> None:
    machine = new_machine("first", note=lambda: {"step": 7})
    machine.mirror.start()
    machine.write({"a": bytes(1000), "b": bytes(1000)})
    machine.commit()
    assert machine.end()
    (event,) = Events.read(store, "committed")
    expected = {"step": 1, "num_files": 2, "changed_bytes": 2000, "sent_bytes": 1000}
    assert {**event, **expected, "note": {"step": 7}} == event and event["seconds"] > 0


def test_a_file_that_a_killed_process_left_half_written_does_not_count_as_closed(
    new_machine: NewMachine,
) -> None:
    machine = new_machine("first")
    writer = os.fork()
    if writer == 0:
        with (machine.folder / "model.pt").open("wb", buffering=0) as stream:
            stream.write(b"half")
            time.sleep(600)
    wait_until((machine.folder / "model.pt").exists, machine.mirror)
    quiet = QuietTime()
    quiet.look(list_folder(machine.folder))
    wait_until(lambda: not quiet.is_closed(), machine.mirror)
    assert quiet.held_open == "'model.pt'"
    os.kill(writer, signal.SIGKILL)
    os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)  # not reaped: still a zombie
    assert not quiet.is_closed()
    assert quiet.look(list_folder(machine.folder)) == 0, "the quiet time begins anew"
    os.waitpid(writer, 0)


def test_what_a_program_wrote_last_before_it_was_killed_is_not_taken_however_late_its_end_is_told(
    new_machine: NewMachine,
) -> None:
    machine = new_machine("first", quiet_seconds=0.05)
    program = os.fork()
    if program == 0:
        time.sleep(600)
    machine.mirror.start(program)
    os.kill(program, signal.SIGKILL)
    os.waitpid(program, 0)
    machine.write({"model.pt": b"half"})  # as if just before, between two looks
    time.sleep(0.3)
    assert machine.mirror.last is None
    assert not machine.end(-9)
    assert machine.mirror.last is None


def test_a_worker_that_began_after_the_last_change_may_end(new_machine: NewMachine) -> None:
    machine = new_machine("first")
    machine.write({"model.pt": b"whole"})
    quiet = QuietTime()
    quiet.look(list_folder(machine.folder))
    began = quiet.since
    worker = os.fork()
    if worker == 0:
        os._exit(0)
    os.waitpid(worker, 0)
    assert quiet.is_closed()
    quiet.look(list_folder(machine.folder))
    assert quiet.since == began
