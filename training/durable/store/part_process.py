"""The trainer's side of a process that sends parts of uploads out of shared memory.

Hashing and sending in threads of the trainer would take the interpreter lock from training. If the
process ends by itself, no other is started: this attempt then sends its parts itself.
"""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from training.durable.store.protocol import LastingError, StoreError

_log = logging.getLogger(__name__)

_PROGRAM = "training.durable.store.part_worker"
_ROOT = Path(__file__).parents[3]
# It imports boto3 and little else; far longer than that takes on a machine under full load.
_START_SECONDS = 60.0
_TICK_SECONDS = 0.1
# Longer than all attempts at a part take (s3.py), shorter than the trainer's watchdog waits.
_SILENT_SECONDS = 400.0
_ANSWER_BYTES = 64 * 1024
READY = b"ready"


class PartProcess:
    """The process, which starts when first needed and ends with the trainer (part_worker.py)."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._where = (bucket, prefix)
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        # Linux only. Elsewhere, such as on a laptop, the trainer sends everything.
        self._can_start = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")

    def start(self) -> bool:
        """Start it unless it is running; return False if it cannot run."""
        with self._lock:
            if self._worker is not None and self._worker.owner != os.getpid():
                self._worker = None  # it is the parent's: this process is a fork
            if not self._can_start:
                return False
            if self._worker is None:
                try:
                    self._worker = _Worker(*self._where)
                except OSError as error:
                    self._give_up(f"cannot be started: {error}")
                else:
                    weakref.finalize(self, self._worker.close)
            elif not self._worker.is_alive:
                self._give_up(f"ended with {self._worker.process.poll()}")
            return self._can_start

    def is_ready(self) -> bool:
        """Whether it accepts orders; waits while it starts."""
        worker = self._worker if self.start() else None
        if worker is None:
            return False
        if not worker.is_ready():
            self._give_up("did not start")
        return self._can_start

    def send(
        self, order: Mapping[str, Any], memory: int, must_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, str, bytes]]:
        """Send every part of the memory; yield number, ETag and digest of each as they arrive.

        Ends early once it `must_stop`, but only when nothing of the order is being sent any more.
        """
        worker = self._worker
        assert worker is not None
        with worker.ordered(order, memory) as answers:
            while "end" not in (answer := worker.next_answer(answers, must_stop)):
                yield answer["part"], answer["tag"], bytes.fromhex(answer["digest"])
        if answer["end"]:
            raise (LastingError if answer["is_lasting"] else StoreError)(answer["end"])

    def _give_up(self, why: str) -> None:
        self._can_start = False
        _log.warning(
            "[save] the process that sends checkpoints %s; the trainer now sends them itself", why
        )


class _Worker:
    """A process that runs part_worker.py, and the socket on which it takes orders."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # -P: ignore a package of the same name in the working directory.
        command = [sys.executable, "-P", "-m", _PROGRAM, str(self.owner)]
        with theirs:
            self.process = subprocess.Popen(
                [*command, bucket, prefix],
                stdin=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": path},
                # Where Linux weighs sessions (sched(7), autogroup), its threads would halve the
                # trainer's share of busy cores.
                start_new_session=True,
            )
        self._control.settimeout(_START_SECONDS)
        self._lock = threading.Lock()
        self._is_ready = False
        self._heard = 0.0

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def is_ready(self) -> bool:
        """Whether it accepts orders; waits while it starts."""
        with self._lock:
            if not self._is_ready:
                with contextlib.suppress(TimeoutError):
                    self._is_ready = self._control.recv(len(READY)) == READY
            return self._is_ready

    @contextlib.contextmanager
    def ordered(self, order: Mapping[str, Any], memory: int) -> Iterator[socket.socket]:
        """Place an order; its answers come on its own socket, and closing that withdraws it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                try:
                    text = json.dumps(order).encode()
                    socket.send_fds(self._control, [text], [memory, theirs.fileno()])
                except OSError as error:
                    raise StoreError(f"the sending process accepts no orders: {error}") from error
            self._heard = time.monotonic()
            ours.settimeout(_TICK_SECONDS)
            try:
                yield ours
            finally:
                # Not by closing: a process forked since then holds the socket open.
                ours.shutdown(socket.SHUT_RDWR)

    def next_answer(self, answers: socket.socket, must_stop: Callable[[], bool]) -> dict[str, Any]:
        """Wait for the next answer; withdraw the order once it `must_stop`.

        A process that has not answered any order for a long time is killed.
        """
        while True:
            if must_stop():
                answers.shutdown(socket.SHUT_WR)
            try:
                message = answers.recv(_ANSWER_BYTES)
            except TimeoutError:
                if self.is_alive and time.monotonic() < self._heard + _SILENT_SECONDS:
                    continue
                message = b""
            if not message:
                self.process.kill()
                raise StoreError(f"the sending process ended with {self.process.wait()}")
            self._heard = time.monotonic()
            answer: dict[str, Any] = json.loads(message)
            return answer

    def close(self) -> None:
        """Kill it; in a fork of the trainer, only disconnect from it."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()
        self._control.close()
