"""A program's attempt: the project's own `run_program`, over a process of the virtual clock.

Stubbed are the process, what /proc says of it, the pipe of its output, and how long copies, hashes
and uploads of its tiny files take: as long as those of the files for which they stand.
"""

import itertools
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contract.program import Program
from tests.simulation.bucket import FOLDER_BYTES, TENSORS
from tests.simulation.clock import CLOCK, Event, PoweredOffError, Process, sleep
from tests.simulation.disk import TIMES, Disk, TimedPath, now_ns, state_of
from tests.simulation.habits import Habit
from tests.simulation.machine import Attempt
from tests.simulation.scripts import Script
from training.durable.attempt.supervisor import Supervisor
from training.durable.program import container as container_file
from training.durable.program import job, watch
from training.durable.program import log as log_file
from training.durable.program.container import ProgramOptions
from training.durable.program.job import run_program
from training.durable.program.log import ProgramLog
from training.durable.save.snapshots import capture as capture_file
from training.durable.save.snapshots import folder_saves, listing, mirror, processes, restore
from training.durable.save.snapshots.folder_saves import FolderSave
from training.durable.save.snapshots.listing import SnapshotError
from training.durable.save.snapshots.mirror import Mirror
from training.durable.save.snapshots.watcher import Watcher
from training.durable.store.protocol import Store

_PIDS = itertools.count(10**8)  # no process of this machine has such a number
_KEEPER = 10**8 - 1
# How long the watch waits where nothing wakes it: it looks five times a second.
_LONGEST_WAIT = 20.0
_SMALL_BYTES = 512  # of tiny files: larger ones are blobs of their own
_COPY_RATE, _HASH_RATE = 2e9, 4e9


class ProgramAttempt(Attempt):
    """The trainer's process of a program: `run_program`."""

    def attempt_options(self, store: Store) -> ProgramOptions:
        habit = self.plan.program
        assert habit is not None
        root = TimedPath(self.host.folder / "ml")
        if self.host.disk is None:
            self.host.disk = Disk(root, self.world.record.past)
        source = self.host.folder / "source"
        source.mkdir(parents=True, exist_ok=True)
        program = Program(command="python train.py", quiet_seconds=habit.quiet_seconds)
        return ProgramOptions(
            **self.about(store), program=program, source=source, dataset_uri=None, root=root
        )

    def lead(self, supervisor: Supervisor) -> int:
        assert isinstance(self.options, ProgramOptions)
        return run_program(self.options, supervisor)


class SimulatedProcess:
    """ProgramProcess, whose program is a task of the clock."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        variables: Mapping[str, str],
        output: int,
        view: Sequence[Path] = (),
    ) -> None:
        del words, folder, view
        trainer = CLOCK.process
        self.trainer, self.variables = trainer, variables
        self.host = trainer.supervisor.host
        self.exit_code: int | None = None
        self.left_code: int | None = None
        self.is_background = False
        self.pid = next(_PIDS)
        self.woken = Event()
        self._output = _CHANNELS[output]
        self.process = Process(name=f"{trainer.name} program", clock_off=trainer.clock_off)
        self.process.program = trainer.program = self
        trainer.children.append(self.process)
        self.disk: Disk = self.host.disk
        self.disk.begin()
        self.host.world.record.judge_restored(self.host.machine, self.disk)
        self.script = Script(self, self.disk, self.host.world.plan.program)
        CLOCK.start(self.process, self._main)

    def _main(self) -> None:
        try:
            code = self.script.run()
        except PoweredOffError:
            raise
        self._has_ended(code)

    def _has_ended(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self._output.end()
            self.disk.close_all()
            self.process.end(code)
            self.woken.set()

    @property
    def tops(self) -> list[int]:
        return [self.pid]

    @property
    def is_alive(self) -> bool:
        return not self.process.is_dead

    def say(self, line: str) -> None:
        self._output.write(line.encode() + b"\n")

    def poke(self) -> None:
        """Something has happened that the watch must see now."""
        self.woken.set()

    def kill(self) -> None:
        """As the kernel does where memory runs out."""
        self._has_ended(-9)

    def wait(self, seconds: float) -> int | None:
        if self.exit_code is None and seconds > 0:
            is_calm = self.trainer.supervisor.interruption.notice is None
            self.woken.clear()
            self.woken.wait(_LONGEST_WAIT if is_calm else seconds)
        return self.exit_code

    def takers(self, number: int) -> list[int] | None:
        del number
        return [self.pid] if self.script.habit.handler else []

    def signal(self, number: int, pids: Sequence[int] = ()) -> None:
        del number, pids
        self.script.signalled.set()

    def close(self) -> None:
        self._has_ended(-9)


class _Channel:
    """A pipe of the program's output."""

    def __init__(self) -> None:
        self._data, self._is_over, self._came = deque[bytes](), False, Event()

    def write(self, data: bytes) -> None:
        self._data.append(data)
        self._came.set()

    def end(self) -> None:
        self._is_over = True
        self._came.set()

    def read(self) -> bytes:
        while not self._data and not self._is_over:
            self._came.clear()
            self._came.wait()
        data = b"".join(self._data)
        self._data.clear()
        return data


_CHANNELS: dict[int, _Channel] = {}
_NUMBERS = itertools.count(10**6, 2)


def _pipe() -> tuple[int, int]:
    number = next(_NUMBERS)
    _CHANNELS[number] = _CHANNELS[number + 1] = _Channel()
    return number, number + 1


_PIPES = SimpleNamespace(
    pipe=_pipe,
    read=lambda number, _: _CHANNELS[number].read(),
    close=lambda number: None,
    pread=os.pread,
)


def _close(log: ProgramLog, seconds: float) -> None:
    try:
        _REAL_CLOSE(log, seconds)
    except PoweredOffError:
        log._local.close()  # as the kernel does
        raise


_REAL_CLOSE = ProgramLog.close


# -- what /proc says


def _program() -> SimulatedProcess | None:
    found: SimulatedProcess | None = CLOCK.process.program
    return found


def _children() -> dict[int, list[int]]:
    program = _program()
    alive = [program.pid] if program and program.is_alive else []
    return {os.getpid(): [_KEEPER], _KEEPER: alive}


def _open_for_writing(inodes: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    program = _program()
    return set(inodes) & program.disk.held.keys() if program else set()


@contextmanager
def _stopped(pid: int | None) -> Iterator[None]:
    del pid
    program = _program()
    if program is None or not program.is_alive:
        raise SnapshotError("it takes a program that stands still, and it has just ended")
    program.process.stop()
    try:
        yield
    finally:
        program.process.go_on()


# -- how long it takes


def _habit() -> Habit:
    habit: Habit = CLOCK.process.supervisor.host.world.plan.program
    return habit


def _bytes_of(data: bytes) -> float:
    """Return how many bytes those of a file stand for."""
    state_bytes = CLOCK.process.supervisor.host.world.plan.state_bytes
    return len(data) * (state_bytes / FOLDER_BYTES if data.startswith(TENSORS) else 1.0)


def _copy(source: Path, target: Path, ends: float) -> None:
    if not _habit().clones:
        seconds = _bytes_of(source.read_bytes()) / _COPY_RATE
        sleep(min(seconds, ends - CLOCK.now + 0.001))
        if CLOCK.now > ends:
            raise SnapshotError(f"copying {source.name!r} would keep the program stopped")
    _REAL_COPY(source, target, ends)


def _hash(save: FolderSave) -> Any:
    sources = set(save.capture.sources.values())
    found = _REAL_HASH(save)
    sleep(sum(_bytes_of(one.read_bytes()) for one in sources if one.exists()) / _HASH_RATE)
    return found


def _change_after(changed: int, path: Path, mtime_ns: int, may_wait: bool) -> bool:
    """Restore's times of change, one tick after another."""
    del mtime_ns, may_wait
    TIMES[os.stat(path).st_ino] = max(changed + 1_000_000, now_ns())  # noqa: PTH116
    return True


_REAL_COPY, _REAL_HASH = capture_file._copy, FolderSave._hash


# -- looks at the folder that find nothing new are left out


class QuietLooks(Event):
    """What stops a watcher: it lets the looks pass that cannot find anything to do."""

    def __init__(self, watcher: Any, disk: Disk) -> None:
        super().__init__()
        self._watcher, self._disk, self.next, self.due = watcher, disk, 0.0, 0.0
        self.is_idle, self._seen = False, -1

    def poke(self) -> None:
        """The folder has changed, or the program asks."""
        is_longer, self.next = self.next > self.due, min(self.next, self.due)
        if self.is_idle or is_longer or self._watcher._commit_file.exists():
            self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        watcher = self._watcher
        while not self._is_set:
            if watcher._commit_file.exists():
                self._wait(CLOCK.now + (timeout or 0.0))
                return self._is_set
            until = self.next
            if self.is_idle and self._seen == self._disk.changes:
                until = float("inf")
            if until <= CLOCK.now:
                return False
            self._wait(until)
        return True

    def looked(self, following: float, seen: int) -> None:
        """Note a look, and when the next is due."""
        watcher = self._watcher
        captured, found, self.due = watcher.captured, watcher._quiet.listing, following
        is_new = watcher._uncaptured_since is not None or watcher._is_tentative
        has_grown = bool(captured and found and captured.files != found.files)
        self._seen, self.is_idle = seen, not is_new and not has_grown
        if not watcher.is_hasty and not self.is_idle:
            if not is_new:
                following = max(following, CLOCK.now + 10.0)
            elif CLOCK.now - watcher._quiet.since > 300.0:
                following = max(following, CLOCK.now + 5.0)
        self.next = following


def _start(watcher: Watcher, program: int | None = None) -> None:
    process = _program()
    assert process is not None
    looks = QuietLooks(watcher, process.disk)
    process.disk.watch = looks.poke
    watcher._stop = looks  # type: ignore[assignment]
    _REAL_START(watcher, program)


def _look(watcher: Watcher) -> float:
    looks: Any = watcher._stop
    seen = looks._disk.changes
    following = _REAL_LOOK(watcher)
    pause = _habit().look_seconds
    looks.looked(max(following, CLOCK.now + pause), seen)
    return 0.0  # a look is due whenever `wait` returns


def _request(own: Mirror, haste: Any) -> None:
    _REAL_REQUEST(own, haste)
    looks: Any = own._watcher._stop
    looks.next = min(looks.next, CLOCK.now + 0.5)
    looks._wake()


_REAL_START, _REAL_LOOK, _REAL_REQUEST = Watcher.start, Watcher._look, Mirror.request


# -- a thread's answer


class _Answer:
    """concurrent.futures' Future, as `_beating` uses it."""

    def __init__(self) -> None:
        self.over, self._result, self._error = Event(), None, None

    def set_result(self, result: Any) -> None:
        self._result = result
        self.over.set()

    def set_exception(self, error: Any) -> None:
        if isinstance(error, PoweredOffError):
            raise error
        self._error = error
        self.over.set()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def _wait(answers: Sequence[_Answer], seconds: float) -> Any:
    (answer,) = answers
    return SimpleNamespace(done=[answer] if answer.over.wait(5 * seconds) else [])


class _Nothing:
    """What is not played: segments of shared memory, and files elsewhere."""

    def __init__(self, *_: object) -> None:
        return

    def remove(self) -> None:
        return

    look = remove

    def found(self, *, is_last: bool = False) -> None:
        return


def _copy_source(source: Path, code: Path) -> None:
    del source
    code.mkdir(parents=True, exist_ok=True)
    (code / "train.py").write_text("main()\n")


STUBS: tuple[tuple[Any, str, Any], ...] = (
    (listing.FileState, "of", classmethod(state_of)),
    (processes, "children", _children),
    (processes, "_open_for_writing", _open_for_writing),
    (capture_file, "mapped_for_writing", lambda _: set()),
    (capture_file, "_has_room", lambda *_: _habit().has_room),
    (capture_file, "_copy", _copy),
    (FolderSave, "_hash", _hash),
    (mirror, "stopped", _stopped),
    (folder_saves, "SMALL_BYTES", _SMALL_BYTES),
    (restore, "SMALL_BYTES", _SMALL_BYTES),
    (restore, "_change_after", _change_after),
    (job, "ProgramProcess", SimulatedProcess),
    (job, "source_sha256", lambda _: "0" * 64),
    (job, "copy_source", _copy_source),
    (job, "futures", SimpleNamespace(wait=_wait)),
    (job, "Future", _Answer),
    (container_file, "certified", lambda *_: {}),
    (container_file, "_num_gpus", lambda: 1),
    (watch, "SharedMemory", _Nothing),
    (watch, "Elsewhere", _Nothing),
    (watch, "_POLL_SECONDS", 1.0),
    (log_file, "os", _PIPES),
    (ProgramLog, "close", _close),
    (log_file, "_SEND_SECONDS", 60.0),
    (Watcher, "start", _start),
    (Watcher, "_look", _look),
    (Mirror, "request", _request),
    (mirror, "_POLL_SECONDS", 1.0),
)
