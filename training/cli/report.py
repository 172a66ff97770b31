"""`python -m training report | tensorboard`: a run, or those of a sweep, for people to look at."""

import argparse
import json
import logging
import signal
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from contract.cleared_folder import cleared_folder
from contract.errors import Exit, UserError
from contract.keys import REPORT
from contract.lineage import Line
from contract.readable import shown
from training.cli.run import RUN_URI, checked_file, checked_folder, positive
from training.durable import Head, History, OpenRun, Store, StoreError, SweptRuns, write_report


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of `report`."""
    parser.description = (
        "Write a run's report.html: loss curves, evaluations, attempts, cost of interruptions. "
        "Every run writes it at its end; this writes it at any time, and copies it to --out. For a "
        "sweep (its --runs-uri): curves over its runs, hyperparameters against results."
    )
    add = parser.add_argument
    add("--run-uri", required=True, help=RUN_URI)
    add("--out", type=Path, help="also write the page to this file")
    add("--usd-per-hour", type=positive, help="price of the machine, to show costs in dollars")
    add("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(act=_report)


def _report(options: argparse.Namespace) -> int:
    if (sweep := SweptRuns.at(options.run_uri)) is not None:
        verdict = sweep.write_report()
        if options.out is not None:
            sweep.store.get_file(REPORT, checked_file(options.out))
        rows = [each.row() for each in sweep.runs]
        print(json.dumps(rows, indent=1) if options.json else shown(verdict))
        return Exit.FINISHED
    run = OpenRun.at(options.run_uri)
    store, head = run.store, run.head
    if options.out is not None:
        checked_file(options.out)
    history, bought, summary = write_report(store, run.record, head, options.usd_per_hour)
    if options.out is not None:
        store.get_file(REPORT, options.out)
    if options.json:
        found = {
            "state": head.state,
            "steps": len(history.steps),
            "attempts": len(history.attempts),
            "steps_repeated": sum(a.num_repeated for a in history.attempts),
            "goodput": bought.to_json(),
            "passed_over": list(history.passed_over),
            "report": f"{store.uri}/{REPORT}",
        }
        print(json.dumps(found, indent=1))
    else:
        print(shown(summary))
        print(f"[ok] {options.out or f'{store.uri}/{REPORT}'}")
    return Exit.FINISHED


_log = logging.getLogger(__name__)

# A store that fails for longer than this ends the command; until then reads are retried.
_MAX_FAILING_SECONDS = 600.0
# How often to check for Ctrl-C.
_TICK_SECONDS = 0.1


def add_tensorboard(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tensorboard`."""
    parser.description = (
        "Write a run's metrics as TensorBoard event files, each step once. Then: "
        "tensorboard --logdir FOLDER. With --follow it continues until the run has ended or Ctrl-C "
        "is pressed; steps repeated after an interruption replace the earlier ones."
    )
    add = parser.add_argument
    add("--run-uri", required=True, help=RUN_URI)
    add("--out", required=True, type=Path, help="the log folder")
    add("--follow", action="store_true", help="keep up with a run in progress")
    add(
        "--poll-seconds",
        type=positive,
        default=5.0,
        help="with --follow: how often to check (default: %(default)s)",
    )
    parser.set_defaults(act=_tensorboard)


def _tensorboard(options: argparse.Namespace) -> int:
    store = OpenRun.at(options.run_uri).store
    checked_folder(options.out)
    if options.follow:
        print(f"[tensorboard] following; view with: tensorboard --logdir {options.out}", flush=True)
        num = _follow(store, options.out, options.poll_seconds)
    else:
        num = _write_event_files(store, options.out)
    print(f"[ok] {options.out}: {num} values; view with: tensorboard --logdir {options.out}")
    return Exit.FINISHED


class _EventFiles:
    """A log folder, written from scratch; takes steps back by TensorBoard's own `purge_step`."""

    def __init__(self, out: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "the package tensorboard is not installed; install it with: pip install tensorboard"
            ) from error
        self._held = ExitStack()
        self._out = self._held.enter_context(cleared_folder(out))
        self._open = SummaryWriter
        self._writer = SummaryWriter(str(out))
        self._written: dict[str, array[int]] = {}  # tag -> its steps, rising

    @property
    def num_values(self) -> int:
        """Number of values shown."""
        return sum(map(len, self._written.values()))

    @property
    def last_step(self) -> int:
        """The newest step shown."""
        return max((steps[-1] for steps in self._written.values() if steps), default=0)

    def write(self, tag: str, value: float, step: int) -> None:
        """Show a value; a second one for the same step is ignored."""
        steps = self._written.setdefault(tag, array("q"))
        at = bisect_left(steps, step)
        if at == len(steps) or steps[at] != step:
            self._writer.add_scalar(tag, value, step)
            steps.insert(at, step)

    def take_back(self, step: int) -> None:
        """Remove everything after `step`, by starting a new file."""
        if self.last_step <= step:
            return
        self._writer.close()
        self._writer = self._open(str(self._out), purge_step=step + 1)
        for steps in self._written.values():
            del steps[bisect_right(steps, step) :]

    def flush(self) -> None:
        """Make what was written visible to TensorBoard."""
        self._writer.flush()

    def __enter__(self) -> "_EventFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Ctrl-C may have come while the writer's queue was locked: closing would wait for it.
        if kind is not KeyboardInterrupt:
            self._writer.close()
        self._held.close()


class _Follower:
    """Shows a run's metrics lines as they appear."""

    def __init__(self, store: Store, files: _EventFiles) -> None:
        self._reader = History.line_reader(store)
        self._files = files
        self._resumed: dict[int, int] = {}  # generation -> the step that it resumed from

    def poll(self, *, is_last: bool = False) -> None:
        """Write new lines; on the last call also those after an object that never appeared."""
        for line in self._reader.new(is_last=is_last):
            if line["kind"] == "resume":
                self._resumed[line["generation"]] = line["step"]
                self._files.take_back(line["step"])
            elif not self._is_repeated(line):
                if line["kind"] == "step" and line["generation"] >= max(self._resumed, default=0):
                    # No-op unless an attempt repeats steps of its own.
                    self._files.take_back(line["step"] - 1)
                for tag, value, step in _values(line):
                    self._files.write(tag, value, step)
        while self._reader.passed_over:
            _log.warning(f"[tensorboard] passed over {self._reader.passed_over.pop()}")
        self._files.flush()

    def _is_repeated(self, line: Line) -> bool:
        """Whether a later attempt resumed before this step or evaluation."""
        own, step = line["generation"], line.get("step", 0)
        return any(own < other and start < step for other, start in self._resumed.items())


def _write_event_files(store: Store, out: Path) -> int:
    """Write a run's event files, replacing earlier ones; return the number of values."""
    with _EventFiles(out) as files:
        _Follower(store, files).poll(is_last=True)
        return files.num_values


def _follow(store: Store, out: Path, poll_seconds: float) -> int:
    """Keep event files up to date until the run has ended or Ctrl-C is pressed."""
    with _EventFiles(out) as files, _ctrl_c() as is_pressed:
        follower, last_read = _Follower(store, files), time.monotonic()
        while not is_pressed():
            try:
                # The head first: all metrics of an ended run were stored before it ended.
                head = Head.read(store)
                is_over = head is not None and head.is_ended
                follower.poll(is_last=is_over)
                last_read = time.monotonic()
            except StoreError as error:
                if time.monotonic() - last_read > _MAX_FAILING_SECONDS:
                    raise
                _log.warning(f"[tensorboard] {error}; retrying")
                is_over = False
            if is_over:
                return files.num_values
            until = time.monotonic() + poll_seconds
            while not is_pressed() and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, _TICK_SECONDS))
        _log.info("[tensorboard] stopped; the run continues")
        return files.num_values


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed; only the second time raises KeyboardInterrupt.

    Raised while the writer's queue is locked, the first would leave that lock held, and closing the
    files would wait for it forever.
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


def _values(line: Line) -> Iterator[tuple[str, float, int]]:
    """Tag, value and step of everything in a line that TensorBoard shows."""
    if line["kind"] == "step":
        for name in ("loss", "gradient_norm", "lr", "samples_per_second", "data_wait"):
            if line.get(name) is not None:
                yield f"{line['stage']}/{name}", line[name], line["step"]
        yield from _metrics(f"{line['stage']}/train", line)
    elif line["kind"] == "evaluation":
        yield from _metrics(f"{line['stage']}/validation", line)


def _metrics(prefix: str, line: Line) -> Iterator[tuple[str, float, int]]:
    for name, value in line.get("metrics", {}).items():
        if value is not None:
            yield f"{prefix}/{name}", value, line["step"]
