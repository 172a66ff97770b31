"""The program of the process that sends parts out of shared memory (part_process.py starts it).

It never starts, completes or aborts an upload, so nothing that it sends exists before its trainer
completes it; it ends when its trainer does, however that ends. It imports no torch.
"""

import json
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from contract.errors import UserError
from training.durable.store.part_process import READY
from training.durable.store.protocol import CredentialsError, LastingError, StoreError
from training.durable.store.s3 import S3Store
from training.durable.store.transfer import new_hash

# A core hashes more than 10 Gb/s can carry, and training and its loader need the others.
_HASHING = threading.Semaphore(max(1, (os.cpu_count() or 1) // 4))
# Three threads of it weigh as one of training's. With 10, where those take every core, a save would
# hardly ever end.
_NICE = 5
_ORDER_BYTES = 64 * 1024


class _Order:
    """One object: its memory, and the socket for answers, whose closing withdraws the order."""

    def __init__(self, store: S3Store, text: bytes, memory: int, answers: int) -> None:
        order = json.loads(text)
        self._store = store
        self._where: dict[str, str] = order["where"]
        self._is_fast: bool = order["is_fast"]
        # The newest order knows best: JSON has the infinity of Python.
        store.patience.deadline = partial(float, order["deadline"])
        self._size, self._part_bytes = int(order["size"]), int(order["part_bytes"])
        self._answers = socket.socket(fileno=answers)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error, self._is_lasting = "", False
        self._memory = mmap.mmap(memory, self._size, prot=mmap.PROT_READ)
        os.close(memory)

    def tasks(self) -> Iterator[Callable[[], None]]:
        """Return one for each part; a last answer reports that nothing more is being sent."""
        threading.Thread(target=self._listen, daemon=True).start()
        parts = range(-(-self._size // self._part_bytes))
        self._left = len(parts)
        return (partial(self._send, number) for number in parts)

    def _listen(self) -> None:
        with suppress(OSError):  # or the order is over, and its socket closed
            self._answers.recv(1)  # nothing is ever sent: the trainer has withdrawn the order
        self._stop.set()

    def _send(self, number: int) -> None:
        try:
            if not self._stop.is_set():
                self._answer(self._sent(number))
        except (UserError, StoreError, FileNotFoundError) as error:
            self._is_lasting = isinstance(error, LastingError)
            is_settings = self._is_lasting and not self._store.patience.is_reached
            if is_settings or isinstance(error, UserError | CredentialsError):
                # The trainer found credentials but this process did not: every order would fail.
                os.write(sys.stderr.fileno(), f"{error}\n".encode())
                os._exit(1)
            self._stop.set()
            self._error = str(error)
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._answer({"end": self._error, "is_lasting": self._is_lasting})

    def _sent(self, number: int) -> dict[str, Any]:
        start = number * self._part_bytes
        data = memoryview(self._memory)[start : min(start + self._part_bytes, self._size)]
        with _HASHING:
            digest = new_hash(data, is_fast=self._is_fast).digest()
        tag = self._store.put_part(self._stop, self._where, number, data, digest)
        return {"part": number, "tag": tag, "digest": digest.hex()}

    def _answer(self, answer: dict[str, Any]) -> None:
        with suppress(ConnectionError):  # the trainer has given up the order
            self._answers.send(json.dumps(answer).encode())


def main(trainer: int, bucket: str, prefix: str) -> None:
    """Take orders from standard input until the trainer has ended or closes it."""
    try:
        alive = os.pidfd_open(trainer)
    except ProcessLookupError:
        return
    if os.getppid() != trainer:
        return
    os.nice(_NICE)
    with suppress(OSError):  # where Linux weighs sessions, that of this process
        Path("/proc/self/autogroup").write_text(f"{_NICE}")
    store = S3Store(bucket, prefix)
    tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for _ in range(store.num_threads):
        threading.Thread(target=_work, args=(tasks,), daemon=True).start()
    control = socket.socket(fileno=sys.stdin.fileno())
    with suppress(ConnectionError):  # the trainer has ended
        control.send(READY)
        while control.fileno() in select.select([control.fileno(), alive], [], [])[0]:
            if not _take_order(control, store, tasks):
                return


def _take_order(
    control: socket.socket, store: S3Store, tasks: "queue.SimpleQueue[Callable[[], None]]"
) -> bool:
    """Take an order, whose memory is freed once its tasks are done; False if the trainer left."""
    text, files, _, _ = socket.recv_fds(control, _ORDER_BYTES, 2)
    if text:
        for task in _Order(store, text, files[0], files[1]).tasks():
            tasks.put(task)
    return bool(text)


def _work(tasks: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        tasks.get()()


def _fail(error: threading.ExceptHookArgs) -> None:
    """Exit at an unexpected error: the loss of a thread would go unnoticed."""
    threading.__excepthook__(error)
    os._exit(1)


if __name__ == "__main__":
    # The trainer handles signals, and this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.excepthook = _fail
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    os._exit(0)  # whatever its threads still send
