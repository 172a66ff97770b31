"""The common base of both kinds of machines: their folder, announcements in metadata, logs."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from rehearsal.machines.metadata import MetadataServer
from rehearsal.machines.quirks import Quirks

POLL_SECONDS = 0.05
# The virtual environment that stands in for the Deep Learning AMI's /opt/pytorch.
PYTORCH = Path(sys.prefix).resolve()
# Every machine's logs: of the user data, of the boot that it starts, and of training.
USER_DATA = "var/log/cloud-init-output.log"
BOOT = "var/log/training/boot.log"
TRAINING = "var/log/training/training.log"


def new_lines(path: Path, start: int) -> list[bytes]:
    """Return a file's lines from this byte on, except one that is still being written."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(start)
        return list(takewhile(lambda raw: raw.endswith(b"\n"), file))


@dataclass(kw_only=True)
class RehearsedMachine:
    """One machine in `folder`, which must be empty or new."""

    folder: Path
    metadata: MetadataServer
    quirks: Quirks = field(default_factory=Quirks)
    _lines: list[str] = field(default_factory=list)
    _read: dict[str, int] = field(default_factory=dict)

    @property
    def instance_id(self) -> str:
        """The id of its EC2 instance."""
        return self.metadata.instance.id

    @cached_property
    def root(self) -> Path:
        """The path of the machine's / on this host."""
        return self.folder.resolve()

    @property
    def metrics_file(self) -> Path:
        """The file to which the trainer appends JSON lines."""
        return self.root / "var/log/training/metrics.jsonl"

    def log_lines(self) -> Sequence[str]:
        """Return the lines of boot and training so far, in the order in which they were read."""
        for name in (USER_DATA, BOOT, TRAINING):
            for raw in new_lines(self.root / name, self._read.get(name, 0)):
                self._read[name] = self._read.get(name, 0) + len(raw)
                self._lines.append(raw.decode(errors="replace").rstrip())
        return self._lines

    def wait(self, seconds: float, log_has: str) -> bool:
        """Wait for a log line that contains the text; return False if none came."""
        give_up_at = time.monotonic() + seconds
        while not any(log_has in line for line in self.log_lines()):
            if time.monotonic() > give_up_at:
                return False
            time.sleep(POLL_SECONDS)
        return True
