"""The parent's side of a scene: starts one or two attempts, signals them, waits, says what hit."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from training.proof.torture.attempt import AttemptRequest, fork, spawn
from training.proof.torture.plan import Kind, Scene, Trouble
from training.proof.torture.ranks import is_running
from training.proof.torture.watch import Board, send, send_signal

_POLL_SECONDS = 0.002
# What the other ranks may take to see that rank 0 has ended.
_OUTLIVING_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one attempt ended, and whether its trouble met it alive and where."""

    code: int  # an exit code, or minus the signal's number
    kind: Kind | None
    hit_phase: str | None
    aim: int | None  # the rank that was signalled; None: all
    outlived_by: tuple[int, ...]  # ranks that ran on without rank 0
    num_faults: int
    trained_on: bool  # in the extra time of a notice
    aftermath: tuple[signal.Signals, ...]  # what came after a dated notice, before it ended
    folder: Path
    seconds: float

    @property
    def log(self) -> str:
        """What it printed."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""


class _Child:
    def __init__(self, asked: AttemptRequest, is_fresh: bool) -> None:
        Path(asked.folder).mkdir(parents=True)
        self.asked = asked
        self._boards: list[Board] = asked.boards
        self.began = time.monotonic()
        self.code: int | None = None
        self.hit_phase: str | None = None
        self.stopped_at: float | None = None
        self.seconds = 0.0
        self.outlived_by: tuple[int, ...] = ()
        self._hit_at: float | None = None
        self._aftermath: list[signal.Signals] = []
        self.pid = spawn(asked) if is_fresh else fork(asked)
        self._boards[0].begin(self.pid)

    def poll(self) -> None:
        """See what became of it, and send what is due."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            self.stopped_at = time.monotonic()
        elif pid:
            self.code = os.waitstatus_to_exitcode(status)
            self.seconds = time.monotonic() - self.began
            self._see_the_others_off()
        if self.hit_phase is None:
            self.hit_phase = next((board.struck for board in self._boards if board.struck), None)
        if self.code is None and self.asked.trouble is not None:
            self._send_if_due(self.asked.trouble)
            self._follow_up(self.asked.trouble)

    def _send_if_due(self, trouble: Trouble) -> None:
        if trouble.seconds is None or self.hit_phase is not None:
            return
        if time.monotonic() - self.began >= trouble.seconds:
            phase = self._boards[0].phase
            if send(trouble, self._boards):
                self.hit_phase = phase

    def _follow_up(self, trouble: Trouble) -> None:
        """What comes after a dated notice: at last the end of the machine."""
        if self.hit_phase is None:
            return
        now = time.monotonic()
        self._hit_at = self._hit_at or now
        for seconds, number in trouble.aftermath[len(self._aftermath) :]:
            if now - self._hit_at >= seconds:
                self._aftermath.append(number)
                send_signal(number, trouble.aim, self._boards)

    def _see_the_others_off(self) -> None:
        """Rank 0 has ended, so every rank has to."""
        end = time.monotonic() + _OUTLIVING_SECONDS
        left = list(range(1, len(self._boards)))
        while left := [rank for rank in left if is_running(self._boards[rank].pid)]:
            if time.monotonic() > end:
                self.outlived_by = tuple(left)
                self.end()
                return
            time.sleep(_POLL_SECONDS)

    def resume(self) -> None:
        """Let a stopped one go on."""
        self.stopped_at = None
        os.killpg(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Leave none of its processes behind."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def ended(self) -> Ended:
        assert self.code is not None
        shutil.rmtree(Path(self.asked.folder) / "scratch", ignore_errors=True)
        return Ended(
            code=self.code,
            kind=self.asked.trouble.kind if self.asked.trouble and self.hit_phase else None,
            hit_phase=self.hit_phase,
            aim=self.asked.trouble.aim if self.asked.trouble else 0,
            outlived_by=self.outlived_by,
            num_faults=sum(board.num_faults for board in self._boards),
            trained_on=any(board.is_extra for board in self._boards),
            aftermath=tuple(self._aftermath),
            folder=Path(self.asked.folder),
            seconds=self.seconds,
        )


def play(scene: Scene, ask: Callable[[Trouble | None], AttemptRequest]) -> list[Ended]:
    """Play one scene to its end; every process that it started has ended then."""
    children: list[_Child] = []
    try:
        first = _Child(ask(scene.trouble), scene.is_fresh)
        children.append(first)
        while any(child.code is None for child in children):
            for child in children:
                if child.code is None:
                    child.poll()
            if scene.second and len(children) == 1 and _is_time_for_second(scene, first):
                children.append(_Child(ask(scene.second), False))
            slept = first.stopped_at
            if slept and time.monotonic() - slept >= scene.zombie_sleeps_seconds:
                first.resume()
            time.sleep(_POLL_SECONDS)
        return [child.ended() for child in children]
    finally:
        for child in children:
            if child.code is None:
                child.end()
                os.waitpid(child.pid, 0)


def _is_time_for_second(scene: Scene, first: _Child) -> bool:
    if scene.trouble and scene.trouble.kind == "zombie":
        return first.stopped_at is not None
    return time.monotonic() - first.began >= scene.second_after_seconds
