"""Runs an experiment from the parent: starts one or two attempts, signals them, waits."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from training.proof.torture.attempt import AttemptRequest, fork, spawn
from training.proof.torture.injector import StatusFile, send, send_signal
from training.proof.torture.plan import Experiment, Kill, Kind
from training.proof.torture.ranks import is_running

_POLL_SECONDS = 0.002
# How long the other ranks may take to exit after rank 0.
_OUTLIVING_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """How one attempt ended, and whether and where its kill hit it."""

    code: int  # an exit code, or minus the signal's number
    kind: Kind | None
    hit_phase: str | None
    target_rank: int | None  # the rank that was signalled; None: all
    outlived_by: tuple[int, ...]  # ranks that ran on without rank 0
    num_faults: int
    trained_on: bool  # in the extra time of a notice
    follow_up: tuple[signal.Signals, ...]  # sent after a dated notice, before the attempt ended
    folder: Path
    seconds: float

    @property
    def log(self) -> str:
        """The output of rank 0."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""


class _Child:
    def __init__(self, request: AttemptRequest, is_fresh: bool) -> None:
        Path(request.folder).mkdir(parents=True)
        self.request = request
        self._statuses: list[StatusFile] = request.statuses
        self.began = time.monotonic()
        self.code: int | None = None
        self.hit_phase: str | None = None
        self.stopped_at: float | None = None
        self.seconds = 0.0
        self.outlived_by: tuple[int, ...] = ()
        self._hit_at: float | None = None
        self._sent_follow_up: list[signal.Signals] = []
        self.pid = spawn(request) if is_fresh else fork(request)
        self._statuses[0].begin(self.pid)

    def poll(self) -> None:
        """Check the attempt's state and send due signals."""
        pid, wait_status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(wait_status):
            self.stopped_at = time.monotonic()
        elif pid:
            self.code = os.waitstatus_to_exitcode(wait_status)
            self.seconds = time.monotonic() - self.began
            self._wait_for_other_ranks()
        if self.hit_phase is None:
            self.hit_phase = next(
                (status.hit_phase for status in self._statuses if status.hit_phase),
                None,
            )
        if self.code is None and self.request.kill is not None:
            self._send_if_due(self.request.kill)
            self._send_follow_up(self.request.kill)

    def _send_if_due(self, kill: Kill) -> None:
        if kill.seconds is None or self.hit_phase is not None:
            return
        if time.monotonic() - self.began >= kill.seconds:
            phase = self._statuses[0].phase
            if send(kill, self._statuses):
                self.hit_phase = phase

    def _send_follow_up(self, kill: Kill) -> None:
        """Send the signals that follow a dated notice, the last of which ends the machine."""
        if self.hit_phase is None:
            return
        now = time.monotonic()
        self._hit_at = self._hit_at or now
        for seconds, number in kill.follow_up[len(self._sent_follow_up) :]:
            if now - self._hit_at >= seconds:
                self._sent_follow_up.append(number)
                send_signal(number, kill.target_rank, self._statuses)

    def _wait_for_other_ranks(self) -> None:
        """Wait until all ranks have exited after rank 0; kill those that do not."""
        end = time.monotonic() + _OUTLIVING_SECONDS
        left = list(range(1, len(self._statuses)))
        while left := [rank for rank in left if is_running(self._statuses[rank].pid)]:
            if time.monotonic() > end:
                self.outlived_by = tuple(left)
                self.end()
                return
            time.sleep(_POLL_SECONDS)

    def resume(self) -> None:
        """Resume a suspended attempt."""
        self.stopped_at = None
        os.killpg(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def result(self) -> AttemptResult:
        assert self.code is not None
        shutil.rmtree(Path(self.request.folder) / "scratch", ignore_errors=True)
        return AttemptResult(
            code=self.code,
            kind=self.request.kill.kind if self.request.kill and self.hit_phase else None,
            hit_phase=self.hit_phase,
            target_rank=self.request.kill.target_rank if self.request.kill else 0,
            outlived_by=self.outlived_by,
            num_faults=sum(status.num_faults for status in self._statuses),
            trained_on=any(status.has_used_extra_time for status in self._statuses),
            follow_up=tuple(self._sent_follow_up),
            folder=Path(self.request.folder),
            seconds=self.seconds,
        )


def run_experiment(
    experiment: Experiment, make_request: Callable[[Kill | None], AttemptRequest]
) -> list[AttemptResult]:
    """Run one experiment until every process that it started has exited."""
    children: list[_Child] = []
    try:
        first = _Child(make_request(experiment.kill), experiment.is_fresh)
        children.append(first)
        while any(child.code is None for child in children):
            for child in children:
                if child.code is None:
                    child.poll()
            if experiment.second and len(children) == 1 and _is_time_for_second(experiment, first):
                children.append(_Child(make_request(experiment.second), False))
            stopped_at = first.stopped_at
            if stopped_at and time.monotonic() - stopped_at >= experiment.zombie_sleeps_seconds:
                first.resume()
            time.sleep(_POLL_SECONDS)
        return [child.result() for child in children]
    finally:
        for child in children:
            if child.code is None:
                child.end()
                os.waitpid(child.pid, 0)


def _is_time_for_second(experiment: Experiment, first: _Child) -> bool:
    if experiment.kill and experiment.kill.kind == "zombie":
        return first.stopped_at is not None
    return time.monotonic() - first.began >= experiment.second_after_seconds
