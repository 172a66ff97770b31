"""A program that never stands still is stopped for its snapshot, and goes on."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.durable.save.scene import (
    NewMachine,
    entries,
    program,
    wait_for_snapshot,
    wait_until,
)
from training.durable.record.head import Retention
from training.durable.save.snapshots.listing import Listing, list_folder
from training.durable.save.snapshots.processes import living_below, stopped
from training.durable.save.snapshots.snapshot import FolderManifest, read_manifest
from training.durable.store.protocol import Store


def counting(path: Path) -> Callable[[], None]:
    """Writes a number to two places of a file that stays open, one after the other, for ever."""

    def count() -> None:
        with path.open("wb", buffering=0) as stream:
            number = 0
            while True:
                number += 1
                for start in (0, 100_000):
                    os.pwrite(stream.fileno(), number.to_bytes(8, "big"), start)
                time.sleep(0.001)

    return count


def counted(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    return int.from_bytes(data[:8], "big"), int.from_bytes(data[100_000:], "big")


def test_a_file_that_stays_open_is_taken_as_a_crash_would_leave_it(
    new_machine: NewMachine, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    machine = new_machine("first", quiet_seconds=0.05)
    path = machine.folder / "state.db"
    with program(counting(path)) as number:
        machine.mirror.start(number)
        wait_for_snapshot(machine, 2)
        before = counted(path)
        wait_until(lambda: counted(path) > before, machine.mirror)
    kept = entries(store)
    assert [entry.is_tentative for entry in kept] == [True] * len(kept)
    assert {read_manifest(store, entry).reason for entry in kept} == {"crash-consistent"}
    machine.vanish()
    first, second = counted(new_machine("second").folder / "state.db")
    assert first - 1 <= second <= first > 0


def test_of_a_file_that_is_written_anew_all_the_time_no_half_is_taken(
    new_machine: NewMachine, store: Store
) -> None:
    """It is open for half of the time, and never quiet."""
    machine = new_machine("first", quiet_seconds=0.3)
    path = machine.folder / "model.pt"

    def save() -> None:
        while True:
            with path.open("wb", buffering=0) as stream:
                for _ in range(3):
                    time.sleep(0.005)
                    stream.write(b"x" * 3000)
            time.sleep(0.015)

    with program(save) as number:
        machine.mirror.start(number)
        wait_for_snapshot(machine, 1)
    (kept,) = entries(store)
    assert read_manifest(store, kept).reason == "crash-consistent"
    machine.vanish()
    assert (new_machine("second").folder / "model.pt").stat().st_size == 9000


def test_at_a_notice_nothing_is_taken_of_what_may_be_half_a_save(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("first", quiet_seconds=0.5)
    with program(counting(machine.folder / "model.pt")) as number:
        machine.mirror.request("emergency")
        machine.mirror.start(number)
        time.sleep(2)
    assert entries(store) == ()


def test_a_program_that_trains_on_after_its_signal_is_taken_in_its_next_pauses(
    new_machine: NewMachine, store: Store
) -> None:
    """Seed 120068: it saves more often than each quiet time, and was signalled just after one."""
    machine = new_machine("first", quiet_seconds=2.5)

    def save() -> None:
        for number in itertools.count(10):
            (machine.folder / f"step-{number}.pt").write_bytes(b"%d" % number)
            time.sleep(1.2)

    with program(save) as number:
        machine.mirror.start(number)
        wait_until(lambda: list(machine.folder.iterdir()), machine.mirror)
        with machine.mirror.signalling():
            pass
        machine.mirror.request("emergency")
        wait_for_snapshot(machine, 1)
        assert not (machine.folder / "step-30.pt").exists(), "after a few of them"
    assert [entry.is_tentative for entry in entries(store)] == [True]


def test_what_then_stands_still_is_taken_once_more_and_is_firm(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("first", quiet_seconds=0.1)
    with program(signal.pause) as number, (machine.folder / "state.db").open("wb") as stream:
        stream.write(b"whole")
        stream.flush()
        machine.mirror.start(number)
        wait_for_snapshot(machine, 1)
        assert [entry.is_tentative for entry in entries(store)] == [True]
        stream.close()
        wait_for_snapshot(machine, 2)
    assert [entry.is_tentative for entry in entries(store)] == [True, False]


def test_nothing_of_a_program_runs_while_it_is_stopped_and_all_of_it_goes_on(
    tmp_path: Path,
) -> None:
    def have_children() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            if os.fork() == 0:
                (tmp_path / f"{os.getpid()}").touch()
                os._exit(0)
            time.sleep(0.002)

    with program(have_children) as number:
        for _ in range(5):
            with stopped(number):
                before = list_folder(tmp_path)
                time.sleep(0.05)
                assert list_folder(tmp_path).files == before.files
            deadline = time.monotonic() + 60
            while list_folder(tmp_path).files == before.files:
                assert time.monotonic() < deadline


def test_no_parent_sees_that_its_child_was_stopped(tmp_path: Path) -> None:
    # sudo and shells then stop themselves, and nobody would continue them.
    def watch() -> None:
        for _ in range(3):
            if os.fork() == 0:
                signal.pause()
        (tmp_path / "ready").touch()
        while True:
            child, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if child and os.WIFSTOPPED(status):
                (tmp_path / "seen").touch()

    with program(watch) as number:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        for _ in range(100):
            with stopped(number):
                pass
    assert not (tmp_path / "seen").exists()


def test_a_process_that_waits_for_its_childs_exec_is_stopped_after_it(tmp_path: Path) -> None:
    # Subprocess and posix_spawn start theirs so (vfork); this child waits for its input first.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def start() -> None:
        sleep = ["sleep", "60"]
        opened = [(os.POSIX_SPAWN_OPEN, 0, str(pipe), os.O_RDONLY, 0)]
        os.posix_spawnp(sleep[0], sleep, os.environ, file_actions=opened)
        signal.pause()

    with program(start) as number:
        while len(living_below(number)) < 2:
            time.sleep(0.01)
        writer = threading.Timer(0.3, pipe.write_bytes, [b""])
        writer.start()
        with stopped(number):
            about = [Path(f"/proc/{one}/stat").read_text() for one in living_below(number)]
        writer.join()
    assert [one.split()[2] for one in about] == ["T", "T"]


def test_a_process_that_somebody_else_has_stopped_stays_so() -> None:
    with program(signal.pause) as number:
        os.kill(number, signal.SIGSTOP)
        os.waitid(os.P_PID, number, os.WSTOPPED)
        with stopped(number):
            pass
        time.sleep(0.05)
        assert Path(f"/proc/{number}/stat").read_text().split()[2] == "T"


def test_a_copy_that_takes_too_long_is_given_up_and_said(
    new_machine: NewMachine,
    store: Store,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "training.durable.save.snapshots.capture._FICLONE", 0
    )  # no file system knows that
    monkeypatch.setattr("training.durable.save.snapshots.capture._STANDSTILL_SECONDS", 0.0)
    machine = new_machine("first", quiet_seconds=0.1)
    path = machine.folder / "state.db"
    with program(counting(path)) as number:
        machine.mirror.start(number)
        wait_until(
            lambda: "would keep the program stopped for more than" in caplog.text, machine.mirror
        )
        before = counted(path)
        wait_until(lambda: counted(path) > before, machine.mirror)
    assert entries(store) == ()
    assert not list(machine.work.glob("staging-*"))


def test_a_program_that_has_said_when_once_is_not_stopped_any_more(
    new_machine: NewMachine, store: Store
) -> None:
    machine = new_machine("first", quiet_seconds=0.05)
    with program(counting(machine.folder / "state.db")) as number:
        machine.mirror.start(number)
        wait_for_snapshot(machine, 2)
        with stopped(number):
            machine.commit()
            wait_until(
                lambda: read_manifest(store, entries(store)[-1]).reason == "commit", machine.mirror
            )
        time.sleep(1.5)  # more than twice what it takes until a program is stopped
        machine.mirror.request("emergency")
        time.sleep(0.5)
    machine.end(0)
    last = entries(store)[-1]
    assert (read_manifest(store, last).reason, last.is_tentative) == ("commit", False)


# It appends to a file that stays open at each pause, and saves at each, or at every fortieth.
@pytest.mark.parametrize(
    ("pause_seconds", "save_every"), [pytest.param(0.5, 1, marks=pytest.mark.slow), (0.1, 40)]
)
def test_a_program_that_saves_more_often_than_the_quiet_time_gets_firm_snapshots(
    new_machine: NewMachine, store: Store, pause_seconds: float, save_every: int
) -> None:
    machine = new_machine("first", quiet_seconds=1.0)

    def save() -> None:
        curves = (machine.folder / "metrics.csv").open("ab", buffering=0)
        part, number = machine.folder / "model.pt.part", 0
        while True:
            curves.write(b"%d\n" % number)
            if number % save_every == 0:
                part.write_bytes(b"%d" % number * 100_000)
                part.rename(machine.folder / "model.pt")
            number += 1
            time.sleep(pause_seconds)

    with program(save) as number:
        machine.mirror.start(number)
        wait_until(lambda: any(not one.is_tentative for one in entries(store)), machine.mirror)
    machine.vanish()
    data = (new_machine("second").folder / "model.pt").read_bytes()
    assert len(set(data.split(data[: len(data) // 100_000]))) == 1, "it is of one save"


def _snapshots_of(
    new_machine: NewMachine, act: Callable[[Path], None], count: int, quiet_seconds: float
) -> list[FolderManifest]:
    """What is captured of a program that does this in its folder."""
    machine = new_machine("first", quiet_seconds=quiet_seconds, retention=Retention(newest=99))
    with program(lambda: act(machine.folder)) as number:
        machine.mirror.start(number)
        wait_for_snapshot(machine, count)
    return [read_manifest(machine.store, entry) for entry in entries(machine.store)]


def _write(path: Path, pieces: int, pause_seconds: float) -> None:
    with path.open("wb", buffering=0) as stream:
        for _ in range(pieces):
            stream.write(bytes([0, 1]) * 1000)
            time.sleep(pause_seconds)


# Without it, the fifth snapshot takes most of a minute, in which one pause of a busy machine looks
# like a save's end; the simulation's numbered saves have both in their own time.
@pytest.mark.parametrize("has_status", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_new_file_is_taken_whole_at_each_save_whatever_is_replaced_beside_it(
    new_machine: NewMachine, has_status: bool
) -> None:
    def save(folder: Path) -> None:
        def replace() -> None:
            while has_status:
                (folder / "status.tmp").write_text(f"{time.time()}")
                (folder / "status.tmp").rename(folder / "status.json")
                time.sleep(0.1)

        threading.Thread(target=replace, daemon=True).start()
        for number in itertools.count(1):
            time.sleep(1.2)
            _write(folder / f"ckpt_{number}.pt", 20, 0.02)
            (folder / f"ckpt_{number - 2}.pt").unlink(missing_ok=True)

    found = _snapshots_of(new_machine, save, 6, quiet_seconds=2.0)
    sizes = [{f.path: f.content.bytes for f in one.files if f.path[0] == "c"} for one in found]
    assert {size for one in sizes for size in one.values()} == {40_000}
    newest = [max(int(path[5:-3]) for path in one) for one in sizes if one]
    most = max(after - before for before, after in itertools.pairwise(newest))
    assert most <= 9, "and not only after twelve quiet times, which are fifteen saves"


def test_a_pause_between_the_files_of_a_save_is_shorter_than_the_one_after_it(
    new_machine: NewMachine,
) -> None:
    def save(folder: Path) -> None:
        for number in itertools.count(1):
            for name, seconds in (("model.pt", 0.4), ("optimizer.pt", 1.2)):
                (folder / name).write_bytes(b"%d" % number)
                time.sleep(seconds)

    # The first two saves show which pause is which.
    found = _snapshots_of(new_machine, save, 4, quiet_seconds=4.0)[1:]
    assert all(len({f.content.sha256 for f in one.files}) == 1 for one in found)


def test_a_file_that_is_rewritten_all_the_time_is_taken_each_quiet_time(
    new_machine: NewMachine,
) -> None:
    def save(folder: Path) -> None:
        while True:
            _write(folder / "state.json", 2, 0.001)
            time.sleep(0.001)

    began = time.monotonic()
    found = _snapshots_of(new_machine, save, 2, quiet_seconds=3.0)
    assert time.monotonic() - began < 30, "and not only after twelve of them"
    assert [[f.content.bytes for f in one.files] for one in found] == [[4000]] * len(found)


@pytest.mark.parametrize(("is_saved", "is_moment"), [(True, True), (False, False)])
def test_what_is_replaced_waits_for_one_quiet_time_also_where_earlier_lives_saved_in_place(
    new_machine: NewMachine, *, is_saved: bool, is_moment: bool
) -> None:
    watcher, now = new_machine("first", quiet_seconds=10.0).mirror._watcher, time.monotonic()
    watcher.rest.earlier_gap, watcher.rest.since = 60.0, now - 20
    watcher._captured_since = watcher.rest.since if is_saved else 0.0
    watcher._uncaptured_since = now - 12
    assert watcher._is_between_saves(20.0) is is_moment, "only a save in place may be under way"


def test_a_copy_blinds_nobody_but_a_long_one_is_not_repeated_at_once(
    new_machine: NewMachine,
) -> None:
    machine = new_machine("first", quiet_seconds=0.1)
    watcher, seen = machine.mirror._watcher, list_folder(machine.folder)
    machine.write({"model.pt": b"whole"})

    def copy(*_: object) -> Listing:
        ends = time.thread_time() + 1.1
        while time.thread_time() < ends:
            pass
        return list_folder(machine.folder)

    watcher._capture_now = copy
    while watcher.captured in (None, seen):
        time.sleep(0.05)
        next_look = watcher._look()
    assert next_look - time.monotonic() < 5, "1.1 s of 2 % of one core are 55 s"
    assert not watcher._may_copy
    watcher._copied_at -= 600
    assert watcher._may_copy
