"""A run in a folder, and machines that mirror a folder of theirs to it."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.durable.record.head import KEEP_NEWEST, CheckpointEntry, Head
from training.durable.record.lease import Lease, acquire
from training.durable.record.metrics import Events, SilentMetrics
from training.durable.save.publish import CheckpointPublisher
from training.durable.save.snapshots.mirror import Mirror
from training.durable.save.snapshots.processes import living_below
from training.durable.store.protocol import Store

TTL_SECONDS = 0.5
# Long enough for a loaded machine, whose speed nothing here depends on.
PATIENCE_SECONDS = 120.0


class Machine:
    """A machine with a disk of its own, and the mirror of its folder while it holds the lease."""

    def __init__(self, store: Store, disk: Path, **options: Any) -> None:
        self.store = store
        self.folder = disk / "checkpoints"
        self.work = disk / ".snapshots"
        self.lease = take_lease(store, disk.name)
        publisher = CheckpointPublisher(
            store,
            self.lease,
            events=Events(store, disk.name),
            metrics=SilentMetrics(),
            retention=options.pop("retention", KEEP_NEWEST),
        )
        self.mirror = Mirror(
            publisher, folder=self.folder, work=self.work, **{"quiet_seconds": 0.3, **options}
        )
        self.restored, self.passed_over = self.mirror.restore()

    @property
    def step(self) -> int | None:
        """Of the snapshot that was restored."""
        return self.restored.entry.step if self.restored else None

    def save(self, files: Mapping[str, bytes]) -> None:
        """Write files, and wait until a snapshot that the program asked for has them."""
        number = self.mirror.last.number if self.mirror.last else 0
        self.write(files)
        self.commit()
        wait_until(lambda: self.mirror.last and self.mirror.last.number > number, self.mirror)

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files as a program does, not atomically."""
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def commit(self) -> None:
        """Ask for a snapshot and wait until the folder may be changed again."""
        self.mirror.commit_file.touch()
        wait_until(lambda: not self.mirror.commit_file.exists(), self.mirror)

    def end(self, exit_code: int = 0, *, release: bool = True) -> bool:
        """The program has ended."""
        is_safe = self.mirror.final(exit_code=exit_code, release=release)
        self.mirror.close()
        return is_safe

    def vanish(self) -> None:
        """The machine is lost, as far as the store can see."""
        self.mirror.close()
        self.lease.close()


NewMachine = Callable[..., Machine]


def take_lease(store: Store, writer: str) -> Lease:
    """Take the run over; a holder that shows no heartbeat is gone after a TTL."""

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    lease = acquire(store, "run-1", writer, TTL_SECONDS, wait, lambda holder: None)
    assert isinstance(lease, Lease)
    return lease


def wait_until(is_so: Callable[[], object], mirror: Mirror) -> None:
    """Wait, however slow this machine is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        mirror.check()
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def wait_for_snapshot(machine: Machine, number: int) -> None:
    """Wait until the mirror has committed this many."""
    wait_until(
        lambda: machine.mirror.last is not None and machine.mirror.last.number >= number,
        machine.mirror,
    )


def entries(store: Store) -> tuple[CheckpointEntry, ...]:
    """What the head names."""
    head = Head.read(store)
    assert head is not None
    return head.checkpoints


def tree(root: Path) -> dict[str, object]:
    """All of a folder: contents, modes and times of files, links, folders with modes."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name, about = os.fsdecode(path.relative_to(root)), path.lstat()
        if path.is_symlink():
            found[name] = path.readlink()
        elif path.is_dir():
            found[name] = about.st_mode
        elif path.is_file():
            found[name] = (path.read_bytes(), about.st_mode, about.st_mtime_ns)
    return found


@contextmanager
def program(act: Callable[[], None]) -> Iterator[int]:
    """A process that does this until the end; it and what it has started is killed."""
    number = os.fork()
    if number == 0:
        try:
            act()
        finally:
            os._exit(1)
    try:
        yield number
    finally:
        for process in living_below(number):
            os.kill(process, signal.SIGKILL)
        os.waitpid(number, 0)
