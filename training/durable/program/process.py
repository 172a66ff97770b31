"""A program's processes: started, signalled, waited for, and ended together. Imports no torch.

Removes the named segments in /dev/shm that a killed program has left: its next life would fail.
Only this user's segments count that came after the program's start, that one of its processes had
mapped, and that no process maps any more. Their list lies next to them, and vanishes with them.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contract.errors import UserError
from training.durable.program.signals import takers
from training.durable.save.snapshots.processes import (
    children,
    cpu_seconds,
    held_open,
    mapped_for_writing,
)
from training.durable.save.snapshots.quiet import QuietTime

_log = logging.getLogger(__name__)

_KEEPER = Path(__file__).parent / "keeper.py"
_START_SECONDS = 60.0
_SIGNAL_SECONDS = 2.0
# A first process that ends well this soon has only started the program.
_BACKGROUND_SECONDS = 60.0
# How often those that it has left are looked at, how long they may pause, also with a file open or
# in the background, and how long they are waited for at most, unless they are the program itself.
_LOOK_SECONDS, _IDLE_SECONDS, _HELD_SECONDS, _LEFT_SECONDS = 0.5, 2.0, 60.0, 300.0
_CPU_SHARE = 0.1  # of a core, that shows that they compute
_LAUNCHER = re.compile(r"python[0-9.]*|bash|sh|torchrun|accelerate|deepspeed")


class ProgramProcess:
    """A running program, with all that its processes start; none of them outlives this process."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        folder: Path,
        variables: Mapping[str, str],
        output: int,
        view: Sequence[Path] = (),
    ) -> None:
        """Start `words` in `folder`, standard output and error going to the descriptor `output`.

        If that can be done, what it changes in the first folder of `view` is kept in the second.
        """
        self._parent, child = socket.socketpair()
        shown = json.dumps([str(one) for one in view])
        with child:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), str(child.fileno()), shown, *words],
                cwd=folder,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[child.fileno()],
                # Ctrl-C is for this process, which signals the program.
                start_new_session=True,
            )
        self.exit_code: int | None = None  # -N: ended by signal N
        self.left_code: int | None = None  # its first process ended so, and others go on
        self.is_background = False  # the first one only started it, with `&` in a script
        self._began = time.monotonic()
        self.pid = self._started(words)

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for all its processes to end; return the exit code, or None."""
        if self.exit_code is None and select.select([self._parent], [], [], seconds)[0]:
            word, *numbers = self._read()
            if word == "left":
                self.left_code = numbers[0]
                is_soon = time.monotonic() - self._began < _BACKGROUND_SECONDS
                self.is_background = is_soon and not self.left_code
            elif word != "sent":
                # Without a word the keeper itself was killed, and the program with it.
                code, other = numbers if word else (-signal.SIGKILL, 0)
                self.exit_code = code or other * self.is_background
        return self.exit_code

    @property
    def tops(self) -> list[int]:
        """Its first process, or, once that has ended, those that it has left."""
        is_left = self.left_code is not None
        return children().get(self._keeper.pid, []) if is_left else [self.pid]

    def takers(self, number: int) -> list[int] | None:
        """Return which of its processes handle, ignore or block a signal; None if unknown."""
        return takers(self.tops, number)

    def signal(self, number: int, pids: Sequence[int] = ()) -> None:
        """Send a signal to these processes, or to the first, as `docker stop`; return when done."""
        with contextlib.suppress(OSError):  # it has ended
            self._parent.sendall(f"{number} {' '.join(map(str, pids or self.tops))}\n".encode())
        self.wait(_SIGNAL_SECONDS)

    def close(self) -> None:
        """End every process at once, and wait for that."""
        with contextlib.suppress(OSError):
            self._parent.shutdown(socket.SHUT_WR)  # the keeper kills them
        self._keeper.wait()
        while self.exit_code is None:  # there may be a word before the last one
            self.wait(0.0)
        self._parent.close()

    def _started(self, words: Sequence[str]) -> int:
        if not select.select([self._parent], [], [], _START_SECONDS)[0]:
            self.close()
            raise RuntimeError(f"{words[0]} did not start within {_START_SECONDS:g} s")
        word, *numbers = self._read()
        if word == "bare":
            why = os.strerror(*numbers)
            _log.warning(f"[program] no view of the data ({why}): what it changes there stays")
            word, *numbers = self._read()
        if word == "started":
            return int(numbers[0])
        self.close()
        advice = "check the command and its interpreter"
        if numbers == [errno.ENOEXEC]:
            advice = "begin the file with #! and its interpreter, or name that in the command"
        why = os.strerror(*numbers) if word else "no answer"
        raise UserError(f"{words[0]} could not be started: {why}; {advice}")

    def _read(self) -> tuple[Any, ...]:
        """The keeper's next line, a word and its numbers; ("",) after its end."""
        text = b""
        while not text.endswith(b"\n"):
            byte = b""
            with contextlib.suppress(ConnectionResetError):  # killed before it read what we sent
                byte = self._parent.recv(1)
            if not byte:
                return ("",)
            text += byte
        word, *numbers = text.decode().split()
        return word, *map(int, numbers)


class LeftProcesses:
    """What a program's first process has left running, which is waited for while it writes.

    That is a writer of checkpoints, an uploader, or the program itself, if that was started in the
    background: then its pauses may be longer, as long as it computes.
    """

    def __init__(
        self, process: ProgramProcess, folders: Sequence[Path], quiet_seconds: float
    ) -> None:
        self.still_write = False
        self._process, self._quiet_seconds = process, max(quiet_seconds, _IDLE_SECONDS)
        self._looks = [(folder, QuietTime()) for folder in folders]
        self._began = self._worked = self._next_look = self._cpu_seconds = 0.0  # at the first look

    def are_done(self) -> bool:
        """Whether there are some that need not be waited for any longer; called again and again."""
        process, now = self._process, time.monotonic()
        if process.left_code is None or now < self._next_look:
            return False
        if not self._next_look:
            self._began = self._worked = now
            _log.info(
                f"[program] its first process has ended with {process.left_code}, and others live: "
                "waiting for them while they write"
            )
        self._next_look = now + _LOOK_SECONDS
        before, self._cpu_seconds = self._cpu_seconds, cpu_seconds(process.tops)
        works = process.is_background and self._cpu_seconds - before > _CPU_SHARE * _LOOK_SECONDS
        if works | sum(quiet.look_at(folder) for folder, quiet in self._looks):
            self._worked = now
        listings = [quiet.listing for _, quiet in self._looks if quiet.listing]
        is_patient = process.is_background or any(map(held_open, listings))
        limit = _HELD_SECONDS if is_patient else self._quiet_seconds
        self.still_write = now - self._worked < limit
        is_long = now - self._began > _LEFT_SECONDS and not process.is_background
        return is_long or not self.still_write


def resolve_command(words: Sequence[str], folder: Path, path: str) -> None:
    """Raise UserError, before anything is started, if folder or command cannot be used."""
    if not folder.is_dir():
        raise UserError(f"the working folder {folder.name!r} is not in the source folder; check it")
    word = words[0]
    if "/" in word:
        place = folder / word
        if not place.is_file():
            raise UserError(f"the program {word!r} is not in the source folder; check the command")
        if not os.access(place, os.X_OK):
            raise UserError(
                f"the program {word!r} is not executable; run chmod +x, or name its interpreter, "
                f"as in 'bash {word}'"
            )
    elif shutil.which(word, path=path) is None:
        raise UserError(
            f"the program {word!r} is not found on this machine; check the command, or add the "
            "package that has it to requirements.txt"
        )
    script = _script_of(words)
    if script is not None and not (folder / script).is_file():
        raise UserError(f"the script {script!r} is not in the source folder; check the command")


def _script_of(words: Sequence[str]) -> str | None:
    """Return the file that a launcher is to run, if that is certain."""
    if not _LAUNCHER.fullmatch(Path(words[0]).name):
        return None
    codes = ("-c", "-m")
    found = next((one for one in words[1:] if one in codes or one.endswith((".py", ".sh"))), "-c")
    return None if found in codes else found


_FOLDER = Path("/dev/shm")
# Looking takes at most this share of one core: other programs may keep segments there.
_SHARE = 0.01


class SharedMemory:
    """Finds what the program creates, and first removes what its last life has left."""

    def __init__(self, run_uri: str) -> None:
        self._list = _FOLDER / f"training-{hashlib.sha256(run_uri.encode()).hexdigest()[:16]}"
        self.remove()
        self._before, self._ours = _segments(), set[tuple[int, int]]()
        self._next_look = 0.0

    def remove(self) -> None:
        """Remove what a life has left."""
        with contextlib.suppress(OSError, ValueError):
            left = {(device, inode) for device, inode in json.loads(self._list.read_text())}
            processes = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
            unused = left - mapped_for_writing(left, processes)
            for name in [name for key, name in _segments().items() if key in unused]:
                (_FOLDER / name).unlink()
            if unused == left:
                self._list.unlink()

    def look(self) -> None:
        """Note which new segments the program has mapped."""
        if (began := time.monotonic()) < self._next_look:
            return
        new = _segments().keys() - self._before.keys() - self._ours
        if new and (found := mapped_for_writing(new)):
            self._ours |= found
            with contextlib.suppress(OSError):
                self._list.write_text(json.dumps(list(self._ours)))
        self._next_look = began + (time.monotonic() - began) / _SHARE


def _segments() -> dict[tuple[int, int], str]:
    """Return the names of this user's segments, by device and inode."""
    with contextlib.suppress(OSError), os.scandir(_FOLDER) as entries:
        about = [(entry.stat(follow_symlinks=False), entry.name) for entry in entries]
        return {(s.st_dev, s.st_ino): name for s, name in about if s.st_uid == os.getuid()}
    return {}
