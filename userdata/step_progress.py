"""The progress of a boot step: files and bytes that stay on the disk, never time or output.

A step whose counts grow is not cut off, and the Guard sees it: at most once a minute they go to
the run's folder in S3, with the AWS CLI. What is written again and again adds nothing.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from contract.keys import progress_key
from contract.progress import progress_record, read_progress
from userdata.machine import machine_path, send

# On the data volume: where a program's requirements are built and installed. They are installed
# from a copy, because a build would leave files in the program's own source.
BUILD = "program-build"
ENVIRONMENT = "program-environment"


class StepProgress:
    """The progress of one step over all its attempts."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._last: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._most, self._record = 0, b""

    def advances(self) -> bool:
        """Return whether the step has got further than ever, and keep how far.

        A file counts once it was there at two looks, with the lower of its two sizes, also after it
        was deleted: under a new name each time, nothing would ever be old.
        """
        found = dict(_sizes(_folders_of(self._step)))
        for path in found.keys() & self._last.keys():
            size = min(found[path], self._last[path])
            self._kept[path] = max(size, self._kept.get(path, 0))
        self._last = found
        record = progress_record(self._step, len(self._kept), sum(self._kept.values()))
        with suppress(OSError, ValueError):  # nothing counted yet, or half written
            if self._step == "dataset":  # a sync counts by itself
                record = machine_path("/run/training/dataset-begun").read_bytes()
            _, done = read_progress(record)
            if done > self._most:
                self._most, self._record = done, record
                return True
        return False

    def send(self) -> None:
        """Send how far it is; if that fails, the next growth is sent."""
        file = machine_path(f"/run/training/progress-{self._step}.json")
        uri = f"{os.environ['RUN_URI']}/{progress_key(os.environ['INSTANCE_ID'])}"
        with suppress(OSError):  # a full disk: then nothing grows
            file.write_bytes(self._record)
            send("progress not sent", "s3", "cp", "--only-show-errors", str(file), uri, timeout=60)


def _folders_of(step: str) -> list[Path]:
    """Return where pip downloads, builds and installs in a step."""
    if step == "interpreter":
        return [machine_path("/opt/training/packages"), *Path(tempfile.gettempdir()).glob("pip-*")]
    if step == "program":
        return [machine_path(os.environ["DATA_MOUNT"]) / x for x in ("scratch", BUILD, ENVIRONMENT)]
    return []


def _sizes(folders: Iterable[Path]) -> Iterator[tuple[str, int]]:
    """Yield the files below, without logs: what hangs may still write them."""
    for folder, _, names in (each for top in folders for each in os.walk(top)):
        for path in (f"{folder}/{name}" for name in names if not name.endswith(".log")):
            with suppress(OSError):  # deleted in the meantime
                yield path, os.lstat(path).st_size
