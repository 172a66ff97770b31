"""Metrics in lines of a log: SageMaker's metric definitions, or what Hugging Face's Trainer prints.

The Trainer prints a dictionary without its step, but its progress bar follows, with the step.
"""

import re
from collections.abc import Sequence

from training.errors import UserError
from training.program.metric_row import MetricRow

STEP = "step"
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
# {'loss': '0.6931', 'epoch': '0.5'}; before version 5 the numbers stood without quotes.
_DICTIONARY = re.compile(r"\{'.*\}")
_ENTRY = re.compile(rf"'([\w./@-]+)': '?({_NUMBER})'?(?=[,}}])")
# Colors, and the cursor's way between two bars.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# " 12%|█▏        | 6/50 [00:01<00:10,  4.20it/s]"; bars of other work begin with its name.
_BAR = re.compile(r"\s*\d+%\|.*\|\s*(\d+)/(\d+) \[")


class LogMetrics:
    """Reads one line after the other and remembers at which step the program is."""

    def __init__(self, definitions: Sequence[tuple[str, str]]) -> None:
        self._definitions = [(name, _compiled(name, regex)) for name, regex in definitions]
        self._step: int | None = None
        self._trainer = _TrainerPrints()

    def read(self, line: str) -> list[MetricRow]:
        """The metrics that this line completes."""
        line = _ESCAPE.sub("", line)
        if not self._definitions:
            return self._trainer.read(line)
        found: list[tuple[str, float]] = []
        for name, regex in self._definitions:
            match = regex.search(line)
            value = None if match is None else _number(match[1])
            if value is not None:
                found.append((name, value))
        for name, value in found:
            if name == STEP and value.is_integer():
                self._step = int(value)
        return [
            MetricRow(name=name, value=value, step=self._step)
            for name, value in found
            if name != STEP
        ]

    def finish(self) -> list[MetricRow]:
        """What was waiting for a line that did not come."""
        return self._trainer.finish()


class _TrainerPrints:
    """A dictionary waits for the bar behind it, which has the step; without a bar it has none."""

    def __init__(self) -> None:
        self._waiting: list[MetricRow] = []
        self._num_steps: int | None = None  # of the training's own bar

    def read(self, line: str) -> list[MetricRow]:
        text = line.strip()
        if _DICTIONARY.fullmatch(text):
            before = self.finish()
            self._waiting = [
                MetricRow(name=name, value=float(value), step=None)
                for name, value in _ENTRY.findall(text)
            ]
            return before
        bar = _BAR.match(line)
        if bar is None:
            return self.finish() if text else []
        return self._completed(int(bar[1]), int(bar[2]))

    def finish(self) -> list[MetricRow]:
        """The dictionary that waits, without a step."""
        rows, self._waiting = self._waiting, []
        return rows

    def _completed(self, step: int, num_steps: int) -> list[MetricRow]:
        # Only the training's bar is open where a learning rate is printed; an evaluation has one.
        if any(row.name == "learning_rate" for row in self._waiting):
            self._num_steps = num_steps
        if num_steps != self._num_steps:
            return []
        return [MetricRow(name=row.name, value=row.value, step=step) for row in self.finish()]


def _compiled(name: str, regex: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise UserError(
            f"the metric {name!r} has the invalid regular expression {regex!r} ({error}); "
            "write it as Python's re module reads it"
        ) from error
    if compiled.groups < 1:
        raise UserError(
            f"the metric {name!r} has the regular expression {regex!r} without a group; put the "
            "number in parentheses, as in loss=([0-9.]+)"
        )
    return compiled


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
