"""Calls a function in worker processes, a few calls ahead; they end with their parent.

Imports no torch, which every process would have to wait for.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import wait as wait_for_end
from typing import TypeVar

from contract.errors import UserError

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def in_processes(
    act: Callable[[_Task], _Result], tasks: Sequence[_Task], num: int | None = None
) -> Iterator[tuple[_Task, _Result]]:
    """Call `act` for each task, by default on all cores; yield results as they come, unordered."""
    num = min(num or os.cpu_count() or 1, len(tasks))
    if num < 2:
        for task in tasks:
            yield task, act(task)
        return
    waiting = iter(tasks)
    with _processes(num) as pool:
        # One task ahead per process: submitting all of them would pickle all of them at once.
        running: dict[Future[_Result], _Task] = {}
        while True:
            for task in islice(waiting, 2 * num - len(running)):
                running[pool.submit(act, task)] = task
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


@contextmanager
def _processes(num: int) -> Iterator[ProcessPoolExecutor]:
    # spawn: a fork is unsafe if the caller has threads (torch).
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num, mp_context=context, initializer=_end_with_the_parent)
    try:
        yield pool
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process was killed, probably because memory ran out; run the same command "
            "again"
        ) from error
    finally:
        # After an error, tasks that have not begun are dropped.
        pool.shutdown(cancel_futures=True)


def _end_with_the_parent() -> None:
    """Leave Ctrl-C to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if parent := multiprocessing.parent_process():
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()


def _exit_after(sentinel: int) -> None:
    wait_for_end([sentinel])
    os._exit(1)
