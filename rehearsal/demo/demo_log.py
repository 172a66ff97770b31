"""A demo's output: its phases, and the news among the lines of programs and machines.

All of these lines go to demo.log.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COLUMNS = 120 - len("[9999.9 s] ")
# The most lines of news; phases and interruptions do not count, and the receipt adds about 25.
NEWS = 70
_PROGRESS_SECONDS = 12.0
_NOISE = re.compile(
    r": {2,}|: \[(checkpoint|bottleneck|\w+\] (after epoch|artifact))"
    r"|^(cdk|upload|uninterrupted:|\d+ resources)"
)
# Steps of a boot, which are news only for the first machine.
_BOOT = re.compile(r"^i-\w+: \[ok\] (?!training:|dataset:|fleet )[\w-]+: ")
_PROGRESS = re.compile(r": +\d+/\d+ |^waiting for ")


class DemoLog:
    """Prints and keeps lines; `usual` are the seconds of the demo's phases on two idle cores."""

    def __init__(self, say: Callable[[str], None], path: Path, usual: Sequence[float]) -> None:
        self._say, self._path, self._usual = say, path, usual
        self._began, self._phase = time.monotonic(), -1
        self._num_news, self._progress_at, self._first = 0, 0.0, ""

    def __call__(self, text: str, *, shows: bool = True) -> None:
        """Keep a line, and print it if it `shows`."""
        with self._path.open("a", encoding="utf-8") as log:
            print(text, file=log)
        if shows:
            self._say(text if len(text) <= COLUMNS else f"{text[: COLUMNS - 1]}…")

    def hear(self, text: str) -> None:
        """Keep a line from a program or machine; print it if it is news."""
        is_news = "[failed]" in text or self._is_news(text)
        self._num_news += is_news
        self(text, shows=is_news)

    def begin(self, what: str, *, is_last: bool = False) -> None:
        """Print which phase begins, and how long it and all remaining phases will take."""
        last = len(self._usual) - 1
        self._phase = last if is_last else min(self._phase + 1, last - 1)
        here, left = self._usual[self._phase], sum(self._usual[self._phase :])
        times = f"about {here * self.pace:.0f} s, {left * self.pace:.0f} s to the end"
        self(f"{self._phase + 1}/{len(self._usual)} {what}: {times}")

    @property
    def pace(self) -> float:
        """How many times longer than usual this machine takes; 1 if it is idle."""
        usual = sum(self._usual[: max(self._phase, 0)])
        elapsed = time.monotonic() - self._began
        return max(1.0, elapsed / usual if usual else os.getloadavg()[0] / (os.cpu_count() or 1))

    def _is_news(self, text: str) -> bool:
        if self._num_news >= NEWS or _NOISE.search(text):
            return False
        if _BOOT.search(text):
            self._first = self._first or text.partition(":")[0]
            return text.startswith(self._first)
        if _PROGRESS.search(text):
            if time.monotonic() - self._progress_at < _PROGRESS_SECONDS * self.pace:
                return False
            self._progress_at = time.monotonic()
        return True
