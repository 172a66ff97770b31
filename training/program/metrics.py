"""What a program reports of itself: numbers in its log, in JSON lines and in its libraries' files.

Nothing here asks the program for anything. Whatever cannot be read is left out, never an error.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from training.program.log_metrics import LogMetrics
from training.program.metric_files import MetricFiles
from training.program.metric_row import MetricRow

# Longer lines hold no metric: a regular expression over megabytes would stop the attempt.
_MAX_LINE_BYTES = 4096
# Rows that nobody fetched; older ones are dropped beyond it.
_MAX_ROWS = 100_000
# Looking for files may take this share of the time, however many there are.
_SCAN_SHARE = 0.02


class MetricReader:
    """Collects rows from the log's lines (`read_line`, in any thread) and from files (`poll`).

    In the folders it reads TensorBoard event files, Lightning's metrics.csv and metrics.jsonl.
    """

    def __init__(
        self,
        *,
        definitions: Sequence[tuple[str, str]] = (),
        folders: Sequence[Path] = (),
    ) -> None:
        """Definitions are SageMaker's: a name and a regular expression whose group is the value.

        Without any, the prints of Hugging Face's Trainer are understood. The definition named
        `step` says at which step the others of its line, and of those after it, were measured.
        """
        self._log = LogMetrics(definitions)
        self._files = MetricFiles(folders)
        self._lock = threading.Lock()
        self._rows: list[MetricRow] = []
        self._next_scan = 0.0

    def read_line(self, line: bytes) -> None:
        """Take the next line of the program's output, without its end."""
        if 0 < len(line) <= _MAX_LINE_BYTES:
            with self._lock:
                self._keep(self._log.read(line.decode(errors="replace")))

    def skip_history(self) -> None:
        """Pass over what the files hold now: earlier attempts have reported it."""
        self._files.read()
        while self._files.has_more:
            self._files.read()

    def poll(self, *, is_last: bool = False) -> list[MetricRow]:
        """The rows since the last call, as read; `is_last` once the program has ended."""
        began = time.monotonic()
        from_files: list[MetricRow] = []
        if is_last or began >= self._next_scan:
            from_files = self._files.read()
            while is_last and self._files.has_more:
                from_files += self._files.read()
            ended = time.monotonic()
            self._next_scan = ended + (ended - began) / _SCAN_SHARE
        with self._lock:
            if is_last:
                self._keep(self._log.finish())
            rows, self._rows = self._rows, []
        return rows + from_files

    def _keep(self, rows: Sequence[MetricRow]) -> None:
        self._rows.extend(rows)
        del self._rows[:-_MAX_ROWS]
