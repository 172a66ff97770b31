"""Publish the metrics of CloudWatch's training alarms, from the trainer's own metrics file.

Every minute while training.service is active: that it runs, its progress and the age of the last
commit; soon after a notice: whether steps before it would be lost. It uses the AWS CLI, not the
CloudWatch agent, so it works wherever the AWS CLI does. Run: python3 -m userdata.send_metrics
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

from contract.goodput import useful_seconds
from contract.notice import MAX_SECONDS
from contract.program import WORKLOAD
from userdata.machine import machine_path, send, stop_event

METRICS_FILE = "/var/log/training/metrics.jsonl"
NOTICE_FILE = "/run/training/notice.json"
# It exists while the dataset is synced alongside training.
ARRIVING_FILE = "/run/training/dataset-begun"
SEND_SECONDS = 60.0
POLL_SECONDS = 2.0
SEND_TIMEOUT_SECONDS = 30
SYSTEMCTL_TIMEOUT_SECONDS = 10
# Share of the notice budget after which the verdict is sent, before the machine ends.
NOTICE_SHARE = 0.75

RUNNING = "training_running"
STEPS = "training_steps"
COMMIT_AGE = "seconds_since_commit"
UNSAVED = "notice_without_commit"
# Seconds of steps, without their waits, that a commit has made safe: what the money is for.
USEFUL = "useful_seconds"
# Kinds of lines that show progress, and kinds after which progress is safe in the store.
PROGRESS = ("step", "metrics", "evaluation", "prepare")
SAFE = ("commit", "prepare")

# A program prints what and when it likes, and an evaluation may be silent. It counts as stuck only
# after this much silence, and only if that is three times its longest pause on this machine.
PROGRAM_SILENCE_SECONDS = 1800.0
PAUSES = 3


@dataclass(kw_only=True, slots=True)
class TrainingWatch:
    """The metrics file as read so far; times are of the caller's monotonic clock."""

    is_program: bool = False
    progress: int = 0
    last_progress: float | None = None
    longest_pause: float | None = None
    last_step: int = 0
    committed_step: int | None = None
    # The trainer's step at the notice: later steps are a bonus and no loss if uncommitted.
    noticed_step: int | None = None
    # A program's work that no snapshot holds, by the trainer's last word.
    unsaved_seconds: float = 0.0
    # Seconds of useful steps that no commit contains yet, and those not sent yet that one does.
    pending_seconds: float = 0.0
    useful_seconds: float = 0.0
    # When training started on this machine, or its progress was last safe in the store.
    safe_since: float | None = None

    def read(self, lines: Iterable[str], now: float) -> None:
        """Read lines of the metrics file, skipping those that are not records."""
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict):
                continue
            kind, step = record.get("kind"), int(record.get("step") or 0)
            if kind in PROGRESS:
                self._count(now)
            if kind == "step":
                # A replacement's first step follows the commit that it resumed from.
                if self.committed_step is None:
                    self.committed_step = step - 1
                self.last_step = step
            if kind in ("step", "prepare"):
                with suppress(TypeError):  # a line that somebody else wrote
                    self.pending_seconds += useful_seconds(record)[0]
            if kind in SAFE:
                self.safe_since = now
                self.useful_seconds += self.pending_seconds
                self.pending_seconds = 0.0
            if kind == "commit":
                self.committed_step = step
            if kind in ("commit", "running", "ended"):
                self.unsaved_seconds = float(record.get("unsaved_seconds") or 0.0)
            if kind == "notice":
                self.noticed_step = step

    def data(self, now: float) -> dict[str, float]:
        """Return a running trainer's metrics since the last call of `sent`."""
        if self.safe_since is None:
            self.safe_since = now
        data = {RUNNING: 1, COMMIT_AGE: round(now - self.safe_since, 1)}
        if not self.is_program:  # nobody times its steps
            data[USEFUL] = round(self.useful_seconds, 1)
        return data if self.has_no_pace else {**data, STEPS: self._progress(now)}

    @property
    def has_no_pace(self) -> bool:
        """Whether a program has yet to report progress twice; before that, no count is useful."""
        return self.is_program and self.longest_pause is None

    def _count(self, now: float) -> None:
        self.progress += 1
        if self.last_progress is not None:
            self.longest_pause = max(self.longest_pause or 0.0, now - self.last_progress)
        self.last_progress = now

    def _progress(self, now: float) -> int:
        if not self.is_program or self.last_progress is None or self.longest_pause is None:
            return self.progress
        usual = max(PROGRAM_SILENCE_SECONDS, PAUSES * self.longest_pause)
        return max(self.progress, int(now - self.last_progress < usual))

    def sent(self) -> None:
        """Start a new count of progress."""
        self.progress, self.useful_seconds = 0, 0.0

    def forget_times(self) -> None:
        """Forget when lines were read, because they were not written at those times."""
        self.safe_since = self.last_progress = self.longest_pause = None

    @property
    def has_unsaved_steps(self) -> bool:
        """Whether there are steps up to the notice that no commit contains.

        Without steps: whether work is unsaved that is older than any notice.
        """
        if not self.last_step:
            return self.unsaved_seconds > MAX_SECONDS
        until = self.last_step if self.noticed_step is None else self.noticed_step
        return self.committed_step is not None and until > self.committed_step


@dataclass(kw_only=True, slots=True)
class MetricsPublisher:
    """Passes metrics to `put` when due; what a failed `put` did not send goes with the next."""

    put: Callable[[dict[str, float]], bool]
    is_running: Callable[[], bool]
    notice_budget_seconds: float
    send_seconds: float = SEND_SECONDS
    clock: Callable[[], float] = time.monotonic
    watch: TrainingWatch = field(default_factory=TrainingWatch)
    _offset: int = 0
    _rest: str = ""
    _sent: float = float("-inf")
    _noticed: float | None = None
    _judged: bool = False

    def skip_history(self) -> None:
        """Read what was in the file before this program started, without counting it as new."""
        self._read()
        self.watch.sent()
        self.watch.forget_times()

    def step(self) -> None:
        """Read new lines and publish what is due now."""
        now = self.clock()
        self._read()
        if now - self._sent >= self.send_seconds:
            self._sent = now
            if self._only_waits or not self.is_running():
                # The next trainer's commit age counts from its own start.
                self.watch.forget_times()
            elif self.put(self.watch.data(now)):
                self.watch.sent()
        self._judge_notice(now)

    @property
    def _only_waits(self) -> bool:
        """Whether this is still the boot: no progress yet, and the dataset is being synced."""
        return self.watch.last_progress is None and machine_path(ARRIVING_FILE).exists()

    def _judge_notice(self, now: float) -> None:
        if self._judged or not machine_path(NOTICE_FILE).exists():
            return
        if self._noticed is None:
            self._noticed = now
        is_late = now - self._noticed >= NOTICE_SHARE * self.notice_budget_seconds
        if not is_late and self.is_running():
            return
        self._read()
        self._judged = self.put({UNSAVED: float(self.watch.has_unsaved_steps)})

    def _read(self) -> None:
        path = machine_path(METRICS_FILE)
        if not path.exists():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._offset)
            text = self._rest + file.read()
            self._offset = file.tell()
        *lines, self._rest = text.split("\n")
        self.watch.read(lines, self.clock())


def is_training() -> bool:
    """Return whether training.service is active, restarts included."""
    command = ["systemctl", "is-active", "training.service"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SYSTEMCTL_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def put_metric_data(values: dict[str, float]) -> bool:
    """Send values to CloudWatch under this stack's dimension; return False if that failed."""
    stack = os.environ["STACK_NAME"]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    data = [
        {
            "MetricName": name,
            "Dimensions": [{"Name": "Stack", "Value": stack}],
            "Timestamp": when,
            "Value": value,
        }
        for name, value in values.items()
    ]
    put = ("cloudwatch", "put-metric-data", "--namespace", f"Training/{stack}", "--metric-data")
    return send("metrics not sent", *put, json.dumps(data), timeout=SEND_TIMEOUT_SECONDS)


def main() -> int:
    """Publish until the service is stopped."""
    stop = stop_event()
    publisher = MetricsPublisher(
        put=put_metric_data,
        is_running=is_training,
        notice_budget_seconds=float(os.environ["NOTICE_BUDGET_SECONDS"]),
        send_seconds=float(os.environ.get("SEND_METRICS_SECONDS", SEND_SECONDS)),
        watch=TrainingWatch(is_program=os.environ["WORKLOAD"] == WORKLOAD),
    )
    publisher.skip_history()
    while not stop.wait(float(os.environ.get("POLL_SECONDS", POLL_SECONDS))):
        publisher.step()
    publisher.step()
    return 0


if __name__ == "__main__":
    sys.exit(main())
