"""What a trainer will read next from a folder that a sync is filling: the sync fetches it first.

The file is only ever appended to; each line is a list of names, and the newest goes before the
others. Without it a sync takes the manifest's order: it decides about time, never about numbers.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

READS = ".reads.jsonl"


def announce(folder: Path, names: Iterable[str]) -> None:
    """Ask the folder's sync for these files, in this order, before all others."""
    line = json.dumps(list(names))
    # Where the folder cannot be written to, the files come too, only later.
    with contextlib.suppress(OSError), (folder / READS).open("a") as reads:
        reads.write(f"\n{line}\n")


class AppendedLines:
    """The lines of a file that other processes append to, each given once and whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def new(self) -> Iterator[str]:
        """Those that were appended since; none while the file is missing or another user's."""
        try:
            if self._path.stat().st_size == self._position:
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in filter(None, whole.split(b"\n")):
            yield line.decode(errors="replace")
