"""Virtual time: the threads of many processes, one at a time, on a clock that nobody waits for.

A thread of the simulation is a greenlet; where real code sleeps, waits or contends for a lock, the
next one in time goes on. `Clock.patched` gives the project's own modules these names in place of
Python's: `time`, `threading`, `datetime`, pools, random bytes. Nothing of the project is changed.
"""

import contextlib
import datetime as real_datetime
import itertools
import math
import random
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

# Whose modules take their time from here.
OURS = ("training.", "userdata.")
_NEVER = math.inf


class PoweredOffError(BaseException):
    """Raised at every wait in a process that has ended: what it still does has no effect."""


@dataclass(eq=False, kw_only=True)
class Process:
    """Threads that end together, with the clock of their machine."""

    name: str
    clock_off: float = 0.0  # seconds that its wall clock is ahead
    is_dead: bool = False
    paused_until: float = 0.0
    tasks: dict["Task", None] = field(default_factory=dict)  # in their order
    code: int | None = None  # with which it ended
    supervisor: Any = None  # of a trainer
    program: Any = None  # of a trainer (programs.py), whose process is among its children
    children: list["Process"] = field(default_factory=list)  # they end with it
    stopped: list[tuple["Task", int]] | None = None  # its turns that wait for SIGCONT
    said: str = "{}"  # the last line of a call of the Guard
    version: str = ""  # of its code, where it is not the newest (versions.py)
    rank: int = 0
    ranks: list["Process"] = field(default_factory=list)  # the others, which rank 0 has started
    meeting: Any = None  # of all of them (collectives.py)
    attempt: Any = None  # of its machine
    ended: "Event" = field(default_factory=lambda: Event())

    def end(self, code: int = -9) -> None:
        """End it now, without any of its own doing."""
        if not self.is_dead:
            self.is_dead, self.code, self.paused_until, self.stopped = True, code, 0.0, None
            self.ended.set()
            for child in self.children:
                child.end()
            for task in [*self.tasks]:
                CLOCK.wake(task, task.token)

    def stop(self) -> None:
        """Let none of its threads go on, as SIGSTOP does."""
        self.stopped = []

    def go_on(self) -> None:
        """Let them go on."""
        turns, self.stopped = self.stopped, None
        for task, token in turns or ():
            CLOCK.wake(task, token)


class Task:
    """One thread."""

    __slots__ = ("act", "done", "error", "glet", "is_over", "process", "token")

    def __init__(self, process: Process, act: Callable[[], Any]) -> None:
        self.process, self.act = process, act
        self.token = 0  # of its present wait
        self.done, self.is_over = Event(), False
        self.error: BaseException | None = None
        self.glet: greenlet | None = None  # once it begins
        process.tasks[self] = None

    def run(self) -> None:
        try:
            if not self.process.is_dead:
                self.act()
        except PoweredOffError:
            pass
        except BaseException as error:
            self.error = error
            CLOCK.died(self, error)
        finally:
            self.is_over = True
            self.process.tasks.pop(self, None)
            self.done.set()


def _serve() -> None:
    """Run one task after the other in a greenlet: a new one costs more than most tasks."""
    while True:
        task = CLOCK.task
        assert task is not None
        task.run()
        assert task.glet is not None
        CLOCK.free.append(task.glet)
        following = CLOCK.following()
        (CLOCK.hub if following is None else following.glet).switch()


class Clock:
    """The one clock, in seconds since 1970, and what is to happen when."""

    def __init__(self) -> None:
        self.hub: Any = getcurrent()
        self.free: list[greenlet] = []
        self.restart(0.0)

    def restart(self, now: float, seed: int = 0) -> None:
        self.now, self.limit = now, math.inf
        self.queue: list[tuple[float, int, Task, int]] = []
        self.numbers = itertools.count()
        self.task: Task | None = None
        self.luck = random.Random(seed)
        self.died: Callable[[Task, BaseException], None] = lambda task, error: None

    @property
    def process(self) -> Process:
        assert self.task is not None, "only a task has a process"
        return self.task.process

    def start(self, process: Process, act: Callable[[], Any], at: float | None = None) -> Task:
        task = Task(process, act)
        self._push(self.now if at is None else at, task, 0)
        return task

    def _push(self, when: float, task: Task, token: int) -> None:
        heappush(self.queue, (when, next(self.numbers), task, token))

    def wake(self, task: Task, token: int, at: float | None = None) -> None:
        self._push(self.now if at is None else at, task, token)

    def block(self, until: float = math.inf) -> None:
        """Let others go on until then, or until somebody wakes this task."""
        task: Any = self.task
        process = task.process
        if process.is_dead:
            raise PoweredOffError
        task.token += 1
        if until < _NEVER:
            queue = self.queue
            is_next = not queue or queue[0][0] > until
            if is_next and process.paused_until <= until <= self.limit:
                self.now = max(self.now, until)
                return
            heappush(queue, (until, next(self.numbers), task, task.token))
        following = self.following()
        if following is not task:
            (self.hub if following is None else following.glet).switch()
        if process.is_dead:
            raise PoweredOffError

    def following(self) -> Any:
        """Whose turn it is, and now its; None: nobody's until the limit."""
        queue, limit = self.queue, self.limit
        while queue and queue[0][0] <= limit:
            when, _, task, token = heappop(queue)
            if token != task.token or task.is_over:
                continue
            if task.process.paused_until > when:
                self._push(task.process.paused_until, task, token)
                continue
            if task.process.stopped is not None:
                task.process.stopped.append((task, token))
                continue
            if when > self.now:
                self.now = when
            if task.glet is None:
                task.glet = self.free.pop() if self.free else greenlet(_serve, self.hub)
            self.task = task
            task.token += 1
            return task
        self.task = None
        return None

    def run(self, until: float) -> None:
        """Let happen what is due until then; called by nobody's task."""
        self.limit = until
        while (task := self.following()) is not None:
            task.glet.switch()  # returns once none is due
        self.now = max(self.now, until)

    def pass_by(self, seconds: float) -> None:
        """Let time pass in which nothing else happens."""
        self.now += seconds

    def is_alone_until(self, when: float) -> bool:
        """Whether nothing else happens before."""
        return when <= self.limit and (not self.queue or self.queue[0][0] > when)

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Context in which the project's modules know this time alone."""
        names: dict[int, Any] = {
            id(time): _TIME,
            id(threading): _THREADING,
            id(real_datetime.datetime): Datetime,
            id(futures.ThreadPoolExecutor): Pool,
            id(secrets): _SECRETS,
            id(random): _RANDOM,
        }
        changed = []
        for name, module in [*sys.modules.items()]:
            if name.startswith(OURS):
                for key, value in [*vars(module).items()]:
                    if id(value) in names:
                        changed.append((module, key, value))
                        setattr(module, key, names[id(value)])
        try:
            yield
        finally:
            for module, key, value in changed:
                setattr(module, key, value)


class _Waiters:
    """Tasks that wait for the same."""

    def __init__(self) -> None:
        self._waiters: list[tuple[Task, int]] = []

    def _wait(self, until: float) -> None:
        task = CLOCK.task
        assert task is not None
        waiters, waiter = self._waiters, (task, task.token + 1)
        waiters.append(waiter)
        CLOCK.block(until)
        if waiters and waiters[-1] is waiter:  # its time is up, and nobody has woken it
            waiters.pop()

    def _wake(self) -> None:
        if not self._waiters:
            return
        waiters, self._waiters = self._waiters, []
        for task, token in waiters:
            CLOCK.wake(task, token)


class Event(_Waiters):
    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._wait(math.inf if timeout is None else CLOCK.now + max(0.0, timeout))
        return self._is_set


class Lock(_Waiters):
    def __init__(self) -> None:
        super().__init__()
        self._holder: Task | None = None
        self._depth = 0
        self._is_reentrant = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._depth and not (self._is_reentrant and self._holder is CLOCK.task):
            until = math.inf if timeout < 0 else CLOCK.now + timeout
            while self._depth:
                if not blocking or CLOCK.now >= until:
                    return False
                self._wait(until)
        self._holder, self._depth = CLOCK.task, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._holder = None
            self._wake()

    def locked(self) -> bool:
        return self._depth > 0

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._is_reentrant = True


class Thread:
    def __init__(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self.name, self.daemon = name, daemon
        self._act = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = CLOCK.start(CLOCK.process, self._act)

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._task.done.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done.is_set()

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)


class Local:
    """What each thread has for itself."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__[CLOCK.task, name]  # type: ignore[index]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[CLOCK.task, name] = value  # type: ignore[index]


class Future:
    def __init__(self, act: Callable[[], Any]) -> None:
        self._act, self._over = act, Event()
        self._answer: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        if self._over.is_set():  # cancelled
            return
        try:
            self._answer = self._act()
        except PoweredOffError:
            raise
        except BaseException as error:
            self._error = error
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Any:
        if not self._over.wait(timeout):
            raise futures.TimeoutError
        if self._error is not None:
            raise self._error
        return self._answer


class Pool:
    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._free, self._orders = max_workers, deque[Future]()
        self._process = CLOCK.process

    def submit(self, act: Callable[..., Any], *args: Any, **named: Any) -> Future:
        future = Future(lambda: act(*args, **named))
        self._orders.append(future)
        if self._free:
            self._free -= 1
            CLOCK.start(self._process, self._work)
        return future

    def _work(self) -> None:
        while self._orders:
            self._orders.popleft().run()
        self._free += 1

    def map(self, act: Callable[..., Any], items: Any) -> Iterator[Any]:
        found = [self.submit(act, item) for item in items]
        return (each.result() for each in found)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._orders.clear()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


class Datetime(real_datetime.datetime):
    """The wall clock of the machine that asks."""

    @classmethod
    def now(cls, tz: real_datetime.tzinfo | None = None) -> "Datetime":
        return cls.fromtimestamp(wall(), tz)


CLOCK = Clock()


def wall() -> float:
    """Return the time by the clock of the machine that asks."""
    return CLOCK.now + (CLOCK.task.process.clock_off if CLOCK.task else 0.0)


def sleep(seconds: float) -> None:
    CLOCK.block(CLOCK.now + seconds if seconds > 0 else CLOCK.now)


_TIME = SimpleNamespace(
    monotonic=lambda: CLOCK.now,
    time=wall,
    time_ns=lambda: int(wall() * 1e9),
    thread_time=lambda: 0.0,  # nothing costs what the clock does not charge
    sleep=sleep,
)
_THREADING = SimpleNamespace(Event=Event, Lock=Lock, RLock=RLock, Thread=Thread, local=Local)
_SECRETS = SimpleNamespace(token_hex=lambda size: CLOCK.luck.randbytes(size).hex())
_RANDOM = SimpleNamespace(SystemRandom=lambda: CLOCK.luck)
