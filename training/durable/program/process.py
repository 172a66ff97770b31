"""A program's processes: started, signalled, stopped and ended together. Imports no torch.

Removes the named segments in /dev/shm that a killed program has left: its next life would fail.
Only this user's segments count that came after the program's start, that one of its processes had
mapped, and that no process maps any more. Their list lies next to them, and vanishes with them.
"""

import contextlib
import errno
import hashlib
import json
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

from contract.errors import UserError
from training.durable.save.snapshots.processes import mapped_for_writing

_KEEPER = Path(__file__).parent / "keeper.py"
_START_SECONDS = 60.0
_SIGNAL_SECONDS = 2.0
_LAUNCHER = re.compile(r"python[0-9.]*|bash|sh|torchrun|accelerate|deepspeed")


class ProgramProcess:
    """A running program, with all that its processes start; none of them outlives this process."""

    def __init__(
        self, words: Sequence[str], *, folder: Path, variables: Mapping[str, str], output: int
    ) -> None:
        """Start `words` in `folder`, standard output and error going to the descriptor `output`."""
        self._parent, child = socket.socketpair()
        with child:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), str(child.fileno()), *words],
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
        self.pid = self._started(words)

    def wait(self, seconds: float) -> int | None:
        """Wait up to `seconds` for all its processes to end; return the exit code, or None."""
        if self.exit_code is None and select.select([self._parent], [], [], seconds)[0]:
            word, number = self._read()
            if word != "sent":
                # Without a word the keeper itself was killed, and the program with it.
                self.exit_code = number if word else -signal.SIGKILL
        return self.exit_code

    def catches(self, number: int) -> bool | None:
        """Whether its first process handles or ignores the signal; None if that is unknown."""
        try:
            text = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return None
        masks = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        caught = int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16)
        return bool(caught >> (number - 1) & 1)

    def signal(self, number: int) -> None:
        """Send a signal to its first process, as `docker stop` does; return once that is done."""
        with contextlib.suppress(OSError):  # it has ended
            self._parent.sendall(f"{number}\n".encode())
        self.wait(_SIGNAL_SECONDS)

    def close(self) -> None:
        """End every process at once, and wait for that."""
        with contextlib.suppress(OSError):
            self._parent.shutdown(socket.SHUT_WR)  # the keeper kills them
        self._keeper.wait()
        if self.exit_code is None:
            self.wait(0.0)
        self._parent.close()

    def _started(self, words: Sequence[str]) -> int:
        if not select.select([self._parent], [], [], _START_SECONDS)[0]:
            self.close()
            raise RuntimeError(f"{words[0]} did not start within {_START_SECONDS:g} s")
        word, number = self._read()
        if word == "started":
            return number
        self.close()
        advice = "check the command and its interpreter"
        if number == errno.ENOEXEC:
            advice = "begin the file with #! and its interpreter, or name that in the command"
        why = os.strerror(number) if word else "no answer"
        raise UserError(f"{words[0]} could not be started: {why}; {advice}")

    def _read(self) -> tuple[str, int]:
        """The keeper's next line; ("", 0) after its end."""
        text = b""
        while not text.endswith(b"\n"):
            byte = b""
            with contextlib.suppress(ConnectionResetError):  # killed before it read what we sent
                byte = self._parent.recv(1)
            if not byte:
                return "", 0
            text += byte
        word, _, number = text.decode().partition(" ")
        return word, int(number)


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
    for word in words[1:]:
        if word in ("-c", "-m") or word.endswith((".py", ".sh")):
            return None if word in ("-c", "-m") else word
    return None


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
