"""The log files of a machine, read as they grow."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.05
# What every machine logs: the user data, the boot that it starts, and training.
USER_DATA = "var/log/cloud-init-output.log"
BOOT = "var/log/training/boot.log"
TRAINING = "var/log/training/training.log"


@dataclass(kw_only=True, slots=True)
class Logs:
    """Whole lines of a machine's log files, in the order in which they were seen."""

    _lines: list[str] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def read(self, root: Path) -> list[str]:
        """Return all lines so far; `root` is the machine's /."""
        for name in (USER_DATA, BOOT, TRAINING):
            path = root / name
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # Its writer is still writing this line.
                    self._read[path] = self._read.get(path, 0) + len(raw)
                    self._lines.append(raw.decode(errors="replace").rstrip())
        return self._lines


def wait_for(lines: Callable[[], Sequence[str]], seconds: float, text: str) -> bool:
    """Wait for a line that contains the text; return False if none came."""
    give_up_at = time.monotonic() + seconds
    while not any(text in line for line in lines()):
        if time.monotonic() > give_up_at:
            return False
        time.sleep(POLL_SECONDS)
    return True
