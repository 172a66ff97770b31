"""Progress for people: a bar on a terminal, plain lines elsewhere (in a log, in the journal).

A module writes `logging.getLogger(__name__).info("[save] ...")`; a command that runs training calls
`configure_logging` once. The text is the entire line; the journal adds time and level.
"""

import logging
import sys
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self, TextIO

from contract.readable import duration

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_SECONDS = 5.0
_TOO_FEW = 10  # how many must be done to estimate the time of the rest


class ProgressBar:
    """Progress of one task. Use as a context manager; `show` may set or change its length."""

    def __init__(self, title: str, total: int = 0, done: int = 0) -> None:
        self._title = title
        self._total = total
        self._first = done
        self._began = time.monotonic()
        self._shown = -1e9
        self._rich: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._total:
            self._begin(self._total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._rich is not None:
            self._rich.stop()

    @property
    def is_due(self) -> bool:
        """Whether the next `show` would print; otherwise its text need not be built."""
        return self._rich is not None or time.monotonic() - self._shown >= _LINE_SECONDS

    def show(self, done: int, text: str, total: int | None = None) -> None:
        """Show `done` of the total; a plain line every few seconds."""
        self._begin(self._total if total is None else total)
        if self._rich is not None and self._task is not None:
            self._rich.update(self._task, completed=done, total=self._total, text=text)
        elif self.is_due or done == self._total:
            self._shown = time.monotonic()
            print(f"{self._title}: {done}/{self._total} {text}{self._remaining(done)}", flush=True)

    def _begin(self, total: int) -> None:
        """Draw the bar on a terminal as soon as the total is known."""
        self._total = total
        # The AMI's interpreter may lack rich; its output goes to the journal anyway.
        if self._rich is None and sys.stdout.isatty() and find_spec("rich"):
            self._rich = _rich_progress()
            self._rich.start()
            self._task = self._rich.add_task(
                self._title, total=total, completed=self._first, text=""
            )

    def _remaining(self, done: int) -> str:
        num_new, passed = done - self._first, time.monotonic() - self._began
        # It is too early to know if it has just begun, or few of many are done.
        is_early = num_new < min(_TOO_FEW, 0.05 * self._total) or passed < _LINE_SECONDS
        if num_new <= 0 or done >= self._total or is_early:
            return ""
        seconds = passed / num_new * (self._total - done)
        return f", about {duration(seconds)} left"


class FileProgressBar(ProgressBar):
    """Progress over files with the speed so far; the first call sets their number."""

    def __call__(self, done: int, total: int, size: int) -> None:
        if self.is_due or done == total:
            speed = size / 1e6 / max(time.monotonic() - self._began, 1e-9)
            self.show(done, f"files, {size / 1e6:.1f} MB, {speed:.1f} MB/s", total)


def _rich_progress() -> "RichProgress":
    """Return a bar whose count and remaining time fit any width: only the text may wrap."""
    from rich import progress as rich
    from rich.table import Column

    return rich.Progress(
        rich.TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        rich.BarColumn(bar_width=16, table_column=Column(min_width=16)),
        rich.MofNCompleteColumn(table_column=Column(no_wrap=True)),
        rich.TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
        rich.TextColumn("{task.fields[text]}", table_column=Column(ratio=1)),
        expand=True,
    )


_ROOT = logging.getLogger("training")


class _Stdout(logging.StreamHandler[TextIO]):
    """Writes to whatever sys.stdout is now: commands and tests redirect it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


def configure_logging() -> None:
    """Print log lines of level INFO and above on standard output, each at once."""
    if not any(isinstance(handler, _Stdout) for handler in _ROOT.handlers):
        _ROOT.addHandler(_Stdout())
        _ROOT.propagate = False
    _ROOT.setLevel(logging.INFO)
