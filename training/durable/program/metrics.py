"""A program's reports about itself: numbers in its log, in JSON lines, in its libraries' files.

Nothing here asks the program for anything. Whatever cannot be read is left out, never an error.
"""

import csv
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from training.durable.program.event_file import EventFile, MetricRow

# Longer lines hold no metric: a regular expression over megabytes would stop the attempt.
_MAX_LINE_BYTES = 4096
# Rows kept until they are fetched; beyond this, older ones are dropped.
_MAX_ROWS = 100_000
# Looking for files may take this share of the time, however many there are.
_SCAN_SHARE = 0.02
# Bytes per read of a file; the rest comes with the next.
_MAX_READ_BYTES = 1 << 20
# The head shows that a file was rewritten, even if it is longer than before.
_HEAD_BYTES = 256
_POSITIONS = ("step", "global_step", "epoch", "time")
_STEP = "step"
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
# {'loss': '0.6931', 'epoch': '0.5'}; before version 5 the numbers were not quoted.
_DICTIONARY = re.compile(r"\{'.*\}")
_ENTRY = re.compile(rf"'([\w./@-]+)': '?({_NUMBER})'?(?=[,}}])")
# Colors, and the cursor's moves between two bars.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# " 12%|█▏        | 6/50 [00:01<00:10,  4.20it/s]"; bars of other work begin with its name.
_BAR = re.compile(r"\s*\d+%\|.*\|\s*(\d+)/(\d+) \[")
# Lightning's "Epoch 2:  28%|██▊       | 5/18 [00:20<00:53,  4.14s/it, v_num=3, train_loss=9.850]".
_EPOCH_BAR = re.compile(
    r"Epoch (\d+): +\d+%\|[^|]*\| (\d+)/(\d+) \[[\d:]+<[\d:?]+, +[\d.?]+(?:s/it|it/s)((?:, .*)?)\]"
)
_POSTFIX = re.compile(rf", ([\w./@-]+)=({_NUMBER})(?=,|$)")
# nanoGPT's "iter 10: loss 3.0812, time 61.44ms, mfu 1.23%", and the line of its evaluations.
_ITERATION = re.compile(rf"iter (\d+): (loss) ({_NUMBER})(?:, time .*)?")
_EVALUATION = re.compile(rf"step (\d+): (train loss) ({_NUMBER}), (val loss) ({_NUMBER})")
# How any of them begins, perhaps after an escape.
_BEGINNING = re.compile(rb"\s*(?:\x1b|\{'|iter \d|step \d|Epoch \d|\d+%\|)")


class MetricReader:
    """Collects rows from the log's lines (`read_lines`, in any thread) and from files (`poll`).

    In the folders it reads TensorBoard event files, Lightning's metrics.csv and metrics.jsonl.
    """

    def __init__(
        self,
        *,
        definitions: Sequence[tuple[str, str]] = (),
        folders: Sequence[Path] = (),
    ) -> None:
        """Definitions are SageMaker's: a name and a regular expression whose group is the value.

        Without any, it reads what Hugging Face's Trainer, Lightning and nanoGPT print. The
        definition named `step` gives the step of the other metrics on its line and on those after
        it.
        """
        self._log = _DefinedMetrics(definitions) if definitions else _TrainerPrints()
        self._folders = folders
        self._files: dict[Path, _TextFile | EventFile] = {}
        self._lock = threading.Lock()
        self._rows: list[MetricRow] = []
        self._next_scan = 0.0

    def read_lines(self, lines: Sequence[bytes]) -> None:
        """Take the next lines of the program's output, without their ends."""
        with self._lock:
            for line in lines:
                # Most lines hold nothing, and there may be millions.
                is_wanted = self._log.waits or _BEGINNING.match(line)
                if is_wanted and 0 < len(line) <= _MAX_LINE_BYTES:
                    text = line.decode(errors="replace")
                    self._keep(self._log.read(_ESCAPE.sub("", text)))

    def skip_history(self) -> None:
        """Pass over what the files hold now: earlier attempts have reported it."""
        for path in self._paths():
            file = self._files[path] = _opened(path)
            with suppress(OSError, csv.Error):
                file.skip()

    def poll(self, until: float | None = None) -> list[MetricRow]:
        """Return the rows since the last call, as read; once the program has ended, all of them.

        These are read `until` then, by time.monotonic().
        """
        began = time.monotonic()
        from_files: list[MetricRow] = []
        if until is not None or began >= self._next_scan:
            from_files = self._read_files(until)
            while until is not None and self.has_more and time.monotonic() < until:
                from_files += self._read_files(until)
            ended = time.monotonic()
            self._next_scan = ended + (ended - began) / _SCAN_SHARE
        with self._lock:
            if until is not None:
                self._keep(self._log.finish())
            rows, self._rows = self._rows, []
        return rows + from_files

    def _keep(self, rows: Sequence[MetricRow]) -> None:
        self._rows.extend(rows)
        del self._rows[:-_MAX_ROWS]

    @property
    def has_more(self) -> bool:
        """Whether a file was longer than what the last read took."""
        return any(file.has_more for file in self._files.values())

    def _read_files(self, until: float | None = None) -> list[MetricRow]:
        """The new rows of all files; one that cannot be read is tried again the next time."""
        rows: list[MetricRow] = []
        found = set()
        for path in self._paths():
            found.add(path)
            file = self._files.get(path) or self._files.setdefault(path, _opened(path))
            file.has_more = until is not None and time.monotonic() >= until
            with suppress(OSError, csv.Error):
                rows.extend([] if file.has_more else file.read())
        self._files = {path: file for path, file in self._files.items() if path in found}
        return rows

    def _paths(self) -> Iterator[Path]:
        for folder in self._folders:
            for where, folders, names in os.walk(folder):
                folders.sort()
                for name in sorted(names):
                    if "tfevents" in name or name in ("metrics.jsonl", "metrics.csv"):
                        path = Path(where, name)
                        # Opening a pipe would wait for its writer.
                        if path.is_file():
                            yield path


class _DefinedMetrics:
    """Reads what definitions name, line by line, and remembers the step that the program is at."""

    waits = True  # for any line

    def __init__(self, definitions: Sequence[tuple[str, str]]) -> None:
        self._definitions = [(name, re.compile(regex)) for name, regex in definitions]
        self._step: int | None = None

    def read(self, line: str) -> list[MetricRow]:
        """The metrics that this line completes."""
        found: list[tuple[str, float]] = []
        for name, regex in self._definitions:
            match = regex.search(line)
            value = None if match is None else _number(match[1])
            if value is not None:
                found.append((name, value))
        for name, value in found:
            if name == _STEP and value.is_integer():
                self._step = int(value)
        return [
            MetricRow(name=name, value=value, step=self._step)
            for name, value in found
            if name != _STEP
        ]

    def finish(self) -> list[MetricRow]:
        """Return nothing: no metric waits for another line."""
        return []


class _TrainerPrints:
    """Reads trainers' prints; a dictionary waits for the bar after it, which has the step, if any.

    An epoch's bar waits for the next step's: at first it is redrawn with the previous numbers.
    """

    def __init__(self) -> None:
        self._waiting: list[MetricRow] = []
        self._num_steps: int | None = None  # of the training's own bar

    @property
    def waits(self) -> bool:
        """Whether the next line counts, however it begins."""
        return bool(self._waiting)

    def read(self, line: str) -> list[MetricRow]:
        text = line.strip()
        if _DICTIONARY.fullmatch(text):
            before = self.finish()
            self._waiting = [
                MetricRow(name=name, value=float(value), step=None)
                for name, value in _ENTRY.findall(text)
            ]
            return before
        if match := _ITERATION.fullmatch(text) or _EVALUATION.fullmatch(text):
            step, *printed = match.groups()
            names = (name.replace(" ", "_") for name in printed[::2])
            return [*self.finish(), *_rows_at(int(step), zip(names, printed[1::2], strict=True))]
        if epoch := _EPOCH_BAR.fullmatch(text):
            number, done, total = (int(epoch[group]) for group in (1, 2, 3))
            pairs = [pair for pair in _POSTFIX.findall(epoch[4]) if pair[0] != "v_num"]
            rows = _rows_at(number * total + done, pairs)
            is_same = rows and self._waiting and self._waiting[0].step == rows[0].step
            before = [] if is_same else self.finish()
            self._waiting = rows
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
        # Where a learning rate is printed, only the training's bar is open, not an evaluation's.
        if any(row.name == "learning_rate" for row in self._waiting):
            self._num_steps = num_steps
        if num_steps != self._num_steps:
            return []
        rows = self.finish()
        return [row if row.step is not None else replace(row, step=step) for row in rows]


def _rows_at(step: int, pairs: Iterable[tuple[str, str]]) -> list[MetricRow]:
    return [MetricRow(name=name, value=float(value), step=step) for name, value in pairs]


def _opened(path: Path) -> "_TextFile | EventFile":
    if path.suffix == ".jsonl":
        return _JsonLines(path)
    return _LightningCsv(path) if path.suffix == ".csv" else EventFile(path)


class _TextFile:
    """Reads the lines that a text file has gained; from the start if it was rewritten."""

    def __init__(self, path: Path) -> None:
        self.has_more = False
        self._path = path
        self._head = b""
        self._offset = 0

    def skip(self) -> None:
        """Pass over what it holds now; what is half a line is none once it is read on."""
        with self._path.open("rb") as file:
            self._head, self._offset = file.read(_HEAD_BYTES), file.seek(0, os.SEEK_END)

    def read(self) -> list[MetricRow]:
        with self._path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if not head.startswith(self._head) or file.seek(0, os.SEEK_END) < self._offset:
                self._offset = 0
            self._head = head
            is_first = self._offset == 0
            file.seek(self._offset)
            data = file.read(_MAX_READ_BYTES)
        self.has_more = len(data) == _MAX_READ_BYTES
        complete = data.rfind(b"\n") + 1
        # A line this long is not one that a program prints metrics in.
        self._offset += complete or (len(data) if self.has_more else 0)
        return list(self._rows(data[:complete].split(b"\n")[:-1], is_first))

    def _rows(self, lines: list[bytes], is_first: bool) -> Iterator[MetricRow]:
        """The rows of complete lines; `is_first` if they are the file's first."""
        raise NotImplementedError


class _JsonLines(_TextFile):
    """{"step": 10, "loss": 0.5} in each line; other lines are passed over."""

    def _rows(self, lines: list[bytes], is_first: bool) -> Iterator[MetricRow]:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield from _rows(record)


class _LightningCsv(_TextFile):
    """The CSVLogger's file, which it rewrites for each column that is added."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: list[str] = []
        self._num_read = 0
        self._num_seen = 0  # in the file as it is now
        self._was_short = False

    def skip(self) -> None:
        """Pass over its rows, counted for when it is rewritten."""
        super().skip()
        with self._path.open("rb") as file:
            self._columns = next(csv.reader([_text(file.readline())]), [])
            self._num_read = self._num_seen = sum(line.endswith(b"\n") for line in file)

    def _rows(self, lines: list[bytes], is_first: bool) -> Iterator[MetricRow]:
        if lines and is_first:
            self._columns, self._num_seen = next(csv.reader([_text(lines.pop(0))]), []), 0
        for values in csv.reader(map(_text, lines)):
            self._num_seen += 1
            if self._num_seen <= self._num_read:
                continue
            self._num_read = self._num_seen
            if len(values) == len(self._columns):
                yield from _rows(dict(zip(self._columns, values, strict=True)))
        is_short = self._num_seen < self._num_read and not self.has_more
        if is_short and self._was_short:  # at one look only, it is being rewritten
            self._num_read = self._num_seen
        self._was_short = is_short


def _text(line: bytes) -> str:
    return line.decode(errors="replace").replace("\0", "")


def _rows(record: Mapping[str, object]) -> Iterator[MetricRow]:
    """Yield each number of a record, at the record's step if it has one."""
    values = {name: _number(value) for name, value in record.items()}
    step = next((values[name] for name in _POSITIONS[:2] if values.get(name) is not None), None)
    for name, value in values.items():
        if value is not None and name not in _POSITIONS:
            at = int(step) if step is not None and step.is_integer() else None
            yield MetricRow(name=name, value=value, step=at)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
