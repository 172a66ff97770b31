"""Removes the named segments in /dev/shm that a killed program has left: its next life would fail.

Only this user's segments count that came after the program's start, that one of its processes had
mapped, and that no process maps any more. Their list lies beside them, and vanishes with them.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from training.durable.save.snapshots.processes import mapped_for_writing

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
