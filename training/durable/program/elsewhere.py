"""Finds what a program writes where nothing is saved: the loss of its machine costs that.

It searches the container's folders, the paths that source and command name, and what is new in the
home folder, which others use, too. (Open files would show any path on Linux, but most are open for
milliseconds.)
"""

import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from training.durable.program.container import ProgramOptions
from training.durable.save.snapshots.listing import saved_places

# Between two searches, and at most for one, as a notice may come meanwhile.
_SEARCH_SECONDS, _MOST_SECONDS = 10.0, 0.3
_MOST_SHOWN = 3
_MOST_SOURCE_BYTES = 1024 * 1024
_CACHE = re.compile(r"\..+|__pycache__|.*\.pyc|lost\+found|tmp[a-z0-9_]{8}|torchinductor_.*")
_PATH = re.compile(r"""["'=:\s](~?/(?!(?:proc|sys|usr)/)[\w.-][\w./-]*)""")


class Elsewhere:
    """What a program has written since its start, other than what is saved."""

    def __init__(self, options: ProgramOptions) -> None:
        container = options.container
        self._working = container.code / options.program.working_folder
        # Whose entries are searched, the home folder last: it may be large.
        self._folders = [container.code, self._working, Path.home()]
        # What this process writes is not the program's.
        own = container.root / "input", options.scratch, Path(options.store.uri)
        self._saved = {path.resolve() for path in (*own, *saved_places(options.mirrored))}
        text = f" {options.program.command} "
        for path in _files(container.code, self._saved, math.inf):
            if path.stat().st_size <= _MOST_SOURCE_BYTES:
                text += path.read_text(errors="replace")
        named = {Path(name).expanduser() for name in _PATH.findall(text)}
        named -= {*self._folders, Path("/tmp")}
        self._named = [container.model, container.output, *named]
        self._began_ns, self._next_search = time.time_ns(), 0.0

    def found(self, *, is_last: bool = False) -> tuple[str, str] | None:
        """Return what is where, and what to do; None if there is nothing, or it is too soon."""
        if not is_last and time.monotonic() < self._next_search:
            return None
        places, sizes = list(self._named), dict[str, int]()
        for folder in self._folders:
            with suppress(OSError):
                places += folder.iterdir()
        ends = time.monotonic() + _MOST_SECONDS
        for path in dict.fromkeys(places):
            if size := self._new_bytes(path, ends):
                is_below = path.is_relative_to(self._working)
                sizes[str(path.relative_to(self._working) if is_below else path)] = size
        self._next_search = time.monotonic() + _SEARCH_SECONDS
        if not sizes:
            return None
        # The working folder's own first.
        names = sorted(sizes, key=lambda name: (name.startswith("/"), -sizes[name]))
        shown = ", ".join(names[:_MOST_SHOWN]) + " and others" * (len(names) > _MOST_SHOWN)
        what = f"new files are in {shown} ({sum(sizes.values()) / 1e6:,.1f} MB)"
        if any(name.startswith("/") for name in names):
            return what, "let it save to $SM_CHECKPOINT_DIR or below its working folder"
        # The next file may have another name.
        loose = [name for name in names if (self._working / name).is_file()]
        keep = ["."] if len(loose) > 1 or re.search(r"\d", "".join(loose)) else names
        return what, f'add "keep": {json.dumps(keep)} to program.json'

    def _new_bytes(self, path: Path, ends: float) -> int:
        """Return the size of the files there that have changed since the start."""
        target, num_old, size = path.resolve(), 0, 0
        is_saved = self._saved & {target, *target.parents} or self._working.is_relative_to(path)
        if _CACHE.fullmatch(path.name) or is_saved:
            return 0
        for file in _files(target, self._saved, ends):
            with suppress(OSError):
                about = file.lstat()
                is_old = about.st_ctime_ns < self._began_ns
                num_old, size = num_old + is_old, size + about.st_size * (not is_old)
        is_unsure = num_old or time.monotonic() > ends
        is_others = is_unsure and path.parent == Path.home() and path not in self._named
        return 0 if is_others else size


def _files(root: Path, saved: set[Path], ends: float) -> Iterator[Path]:
    """Yield a file, or the files of a folder, but no caches and nothing that is saved."""
    if root.is_file():
        yield root
    for folder, names, files in os.walk(root):
        if time.monotonic() > ends:
            return
        names[:] = [n for n in names if not _CACHE.fullmatch(n) and Path(folder, n) not in saved]
        yield from (Path(folder, name) for name in files if not _CACHE.fullmatch(name))
