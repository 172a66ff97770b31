"""TensorBoard event files from a run's metrics: each step once, also while the run goes on.

From the store, so that they show the lineage (what an interruption repeated is shown once), and so
that training depends on no library for them.
"""

import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType

from contract.keys import METRICS
from contract.lineage import Line
from training.errors import UserError
from training.record.head import read_head
from training.record.history import read_lines
from training.store.protocol import Store, StoreError

_MARK = "made-by-training"
_OBJECT = re.compile(rf"{METRICS}(?P<writer>.+)-(?P<number>[0-9]{{5}})\.jsonl")
# A store that fails for so long is said to the caller; until then it is asked again.
_MOST_SECONDS = 600.0
# Ctrl-C is looked for so often.
_TICK_SECONDS = 0.1


class EventFiles:
    """A log folder that is made anew; with TensorBoard's own way to take steps back."""

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the package tensorboard is not installed; install it with: pip install tensorboard"
            ) from error
        if out.exists() and any(out.iterdir()) and not (out / _MARK).exists():
            raise UserError(
                f"{out} is not empty and was not made by this command; give a new folder"
            )
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / _MARK).touch()
        self._out = out
        self._open = SummaryWriter
        self._writer = SummaryWriter(str(out))
        self._written: set[tuple[str, int]] = set()

    @property
    def num_values(self) -> int:
        """That are shown."""
        return len(self._written)

    @property
    def last_step(self) -> int:
        """The newest that is shown."""
        return max((step for _, step in self._written), default=0)

    def write(self, tag: str, value: float, step: int) -> None:
        """Show a value; the first one of a step counts."""
        if (tag, step) not in self._written:
            self._writer.add_scalar(tag, value, step)
            self._written.add((tag, step))

    def take_back(self, step: int) -> None:
        """Show nothing any more of what came after `step`: a new file says so to TensorBoard."""
        if self.last_step <= step:
            return
        self._writer.close()
        self._writer = self._open(str(self._out), purge_step=step + 1)
        self._written = {(tag, at) for tag, at in self._written if at <= step}

    def flush(self) -> None:
        """Let TensorBoard see what was written."""
        self._writer.flush()

    def __enter__(self) -> "EventFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Ctrl-C may have come while the writer's queue was locked: closing would wait for that.
        if kind is not KeyboardInterrupt:
            self._writer.close()


class Follower:
    """Reads the objects of a run's metrics as they appear; none is ever rewritten."""

    def __init__(self, store: Store, files: EventFiles) -> None:
        self._store = store
        self._files = files
        self._read: set[str] = set()
        self._resumed: dict[int, int] = {}  # generation -> the step that it began behind

    def poll(self, *, is_last: bool = False) -> None:
        """Write what is new; the last time also what lies behind an object that never came."""
        lines = list(read_lines(self._store, self._new(is_last)))
        for line in lines:
            if line["kind"] == "resume":
                self._resumed[int(line["generation"])] = int(line["step"])
                self._files.take_back(int(line["step"]))
        for line in lines:
            if not self._is_repeated(line):
                for tag, value, step in _values(line):
                    self._files.write(tag, value, step)
        self._files.flush()

    def _new(self, is_last: bool) -> Sequence[str]:
        """Keys that were not read yet, those of each writer without a gap."""
        keys = sorted(self._store.sizes(METRICS))
        there = set(keys)
        if not is_last:
            matches = [match for match in map(_OBJECT.fullmatch, keys) if match]
            there = {
                key
                for writer in {match["writer"] for match in matches}
                for key in _without_gap(writer, there)
            }
        new = [key for key in keys if key in there and key not in self._read]
        self._read.update(new)
        return new

    def _is_repeated(self, line: Line) -> bool:
        """Whether a later attempt began before this step, or evaluation."""
        own, step = int(line["generation"]), line.get("step", 0)
        return any(own < other and began < step for other, began in self._resumed.items())


def write_event_files(store: Store, out: Path) -> int:
    """Replace what an earlier call wrote into `out`; return the number of values."""
    with EventFiles(out) as files:
        Follower(store, files).poll(is_last=True)
        return files.num_values


def follow(store: Store, out: Path, poll_seconds: float) -> int:
    """The same of a run that goes on, until it has ended or Ctrl-C is pressed."""
    with EventFiles(out) as files, _ctrl_c() as is_pressed:
        follower, heard = Follower(store, files), time.monotonic()
        while not is_pressed():
            try:
                # The head first: what an ended run has written lies in the store before that.
                head = read_head(store)
                is_over = head is not None and head.is_ended
                follower.poll(is_last=is_over)
                heard = time.monotonic()
            except StoreError as error:
                if time.monotonic() - heard > _MOST_SECONDS:
                    raise
                print(f"[tensorboard] {error}; asking again", flush=True)
                is_over = False
            if is_over:
                return files.num_values
            until = time.monotonic() + poll_seconds
            while not is_pressed() and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, _TICK_SECONDS))
        print("[tensorboard] stopped; the run goes on", flush=True)
        return files.num_values


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Whether it was pressed; a second time raises KeyboardInterrupt as ever.

    The first does not: in the middle of the writer's queue it would leave a lock behind that nobody
    opens, and closing the files would wait for it for ever.
    """
    pressed: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _without_gap(writer: str, there: set[str]) -> Iterator[str]:
    for number in count(1):
        key = f"{METRICS}{writer}-{number:05d}.jsonl"
        if key not in there:
            return
        yield key


def _values(line: Line) -> Iterator[tuple[str, float, int]]:
    """Tag, value and step of everything in a line that TensorBoard shows."""
    if line["kind"] == "step":
        for name in ("loss", "lr", "samples_per_second", "data_wait"):
            if line.get(name) is not None:
                yield f"{line['stage']}/{name}", line[name], line["step"]
        yield from _metrics(f"{line['stage']}/train", line)
    elif line["kind"] == "evaluation":
        yield from _metrics(f"{line['stage']}/validation", line)


def _metrics(prefix: str, line: Line) -> Iterator[tuple[str, float, int]]:
    for name, value in line.get("metrics", {}).items():
        if value is not None:
            yield f"{prefix}/{name}", value, line["step"]
