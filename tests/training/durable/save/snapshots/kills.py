"""A program that writes two files per epoch, not atomically, killed at random moments.

Each attempt is a tree of two processes, a supervisor with the mirror and the program; SIGKILL hits
the tree or the program alone. The next attempt, on the same disk or a new one, must find a state
that the program wrote: whole files, and where it says `commit` a pair of one epoch. Where nothing
but a crash-consistent snapshot was as new, it may have to fail on that first.
"""

import os
import random
import signal
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.training.durable.save.scene import PATIENCE_SECONDS, Machine
from training.durable.record.head import Head
from training.durable.save.snapshots import watcher
from training.durable.store.folder import FolderStore

_BYTES = {"model.pt": 1_200_000, "optimizer.pt": 100_000}
_HEADER = struct.Struct("<Q")


@dataclass(kw_only=True, slots=True)
class Series:
    """What a series of kills found."""

    restored: list[int] = field(default_factory=list)  # the epoch that each attempt began with
    firm: list[int] = field(default_factory=list)  # of those, the ones that no crash may have torn
    lost: list[int] = field(default_factory=list)  # epochs that had been finished and were lost
    torn: int = 0  # restores of a crash-consistent snapshot on which the program failed
    problems: list[str] = field(default_factory=list)


def kill_again_and_again(root: Path, kills: int, seed: int, *, says_when: bool) -> Series:
    """Kill that many attempts of one run; look at what each next one restores."""
    rng = random.Random(seed)
    found = Series()
    store = FolderStore(root / "run")
    disk = root / "disk-0"
    for number in range(kills):
        if rng.random() < 0.5:
            disk = root / f"disk-{number}"
        for name in ("program.pid", "finished"):
            (disk / name).unlink(missing_ok=True)
        supervisor = _fork(store, disk, seed + number, says_when)
        _wait_for(store, _newest(store) + rng.choice([0, 1, 1, 2]), supervisor)
        time.sleep(rng.choice([0.0, 0.01, 0.1, 0.3]) * rng.random())
        program = _number(disk / "program.pid")
        if rng.random() < 0.3 and program:
            with suppress(ProcessLookupError):  # it has failed: the supervisor says so
                os.kill(program, signal.SIGKILL)
        else:
            os.killpg(supervisor, signal.SIGKILL)
        _, status = os.waitpid(supervisor, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            found.problems.append(f"attempt {number} failed")
        _look(store, root / f"look-{number}", found, says_when=says_when)
        found.lost.append(max(0, _number(disk / "finished") - found.restored[-1]))
    return found


def _fork(store: FolderStore, disk: Path, seed: int, says_when: bool) -> int:
    """Start an attempt in a process group of its own."""
    supervisor = os.fork()
    if supervisor == 0:
        try:
            os.setpgid(0, 0)
            os._exit(_supervise(store, disk, seed, says_when))
        finally:
            os._exit(1)
    os.setpgid(supervisor, supervisor)  # whoever is first
    return supervisor


def _newest(store: FolderStore) -> int:
    head = Head.read(store)
    return head.checkpoints[-1].step if head and head.checkpoints else 0


def _wait_for(store: FolderStore, number: int, supervisor: int = 0) -> None:
    """Wait until that snapshot is committed, however slow this machine is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _newest(store) < number and time.monotonic() < deadline:
        if supervisor and os.waitid(os.P_PID, supervisor, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.005)


def _supervise(store: FolderStore, disk: Path, seed: int, says_when: bool) -> int:
    # The folder is small, and the seconds of a real program's epochs are not waited for here.
    watcher._LOOKING_SHARE = 1.0
    machine = Machine(store, disk, quiet_seconds=0.08)
    machine.lease.start_heartbeat()
    program = os.fork()
    if program == 0:
        try:
            _train(store, machine, disk, random.Random(seed), says_when)
        finally:
            os._exit(1)
    (disk / "program.pid").write_text(str(program))
    machine.mirror.start(program)
    _, status = os.waitpid(program, 0)
    if (code := os.waitstatus_to_exitcode(status)) > 0:
        machine.mirror.count_failure("reading it")
    machine.end(code)
    return 0


def _train(
    store: FolderStore, machine: Machine, disk: Path, rng: random.Random, says_when: bool
) -> None:
    """What the program does: it reads its two files, and goes on from there for ever."""
    epoch = _epochs(machine.folder).get("model.pt", 0)
    while True:
        epoch += 1
        for name, size in _BYTES.items():
            with (machine.folder / name).open("wb", buffering=0) as stream:
                stream.write(_HEADER.pack(epoch))
                for _ in range(4):
                    # Now and then it stalls for longer than the quiet time, the file half written.
                    time.sleep(rng.choice([0, 0.002, 0.01, 0.15]))
                    # As a number's bytes, no text: that could be a log.
                    stream.write(bytes([epoch % 9]) * (size // 4))
        if says_when:
            machine.mirror.commit_file.touch()
            while machine.mirror.commit_file.exists():
                time.sleep(0.001)
        (disk / "finished.new").write_text(str(epoch))
        (disk / "finished.new").rename(disk / "finished")
        if says_when or rng.random() < 0.5:
            time.sleep(rng.choice([0, 0.05, 0.1]))
        else:  # a long epoch, however slow this machine is
            _wait_for(store, _newest(store) + 1)


def _look(store: FolderStore, disk: Path, found: Series, *, says_when: bool) -> None:
    """Restore as a machine of its own, and judge what is there."""
    machine = Machine(store, disk)
    try:
        epochs = _epochs(machine.folder)
    except ValueError as error:
        if machine.restored and machine.restored.entry.is_tentative:
            machine.mirror.count_failure("reading it")
            machine.end(1)
            found.torn += 1
            _look(store, disk, found, says_when=says_when)
            return
        found.problems.append(str(error))
        epochs = {}
    machine.end(-9)
    if says_when and len(set(epochs.values())) > 1:
        found.problems.append(f"a mix of two epochs: {epochs}")
    if machine.restored and len(machine.passed_over) > found.torn / 2:
        found.problems.append(f"passed over: {machine.passed_over}")
    found.restored.append(epochs.get("model.pt", 0))
    is_tentative = machine.restored is not None and machine.restored.entry.is_tentative
    before = found.firm[-1] if found.firm else 0
    found.firm.append(before if is_tentative else found.restored[-1])


def _epochs(folder: Path) -> dict[str, int]:
    """The epoch of each file; ValueError for half a file."""
    found = {}
    for name, size in _BYTES.items():
        if (path := folder / name).exists():
            data = path.read_bytes()
            if len(data) != _HEADER.size + size:
                raise ValueError(f"{name} has {len(data)} bytes")
            (found[name],) = _HEADER.unpack(data[: _HEADER.size])
            if set(data[_HEADER.size :]) != {found[name] % 9}:
                raise ValueError(f"{name} is a mix of two epochs in itself")
    return found


def _number(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0
