"""Known bugs of an engine, each put into this process by its function.

The bugs are where the engine cannot prevent them, in the store, torch or randomness; or in what
only some runs have: a moving average, a loss scaler, other ranks.
"""

import contextlib
import itertools
import queue
from collections.abc import Callable
from typing import Any

import training.numerics
from training.durable.save.tensors.resume import CheckpointContent
from training.durable.store.folder import FolderStore
from training.engine import learner
from training.engine.learner import Learner
from training.engine.optimizer import MovingAverage, Scaling


def answers_before_it_wrote() -> None:
    """A store that writes a file only when the next one starts or one is read, like a cache.

    Not some time later: which kill finds it must not depend on how busy the machine is.
    """
    upload, sizes, read_into = FolderStore.upload, FolderStore.sizes, FolderStore.read_into
    unwritten: queue.SimpleQueue[_Late] = queue.SimpleQueue()

    def write() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                unwritten.get_nowait().write()

    def upload_later(self: FolderStore, *arguments: Any) -> Any:
        write()
        made = upload(self, *arguments)
        late = _Late(made.finish, made.abort)
        made.finish = lambda: unwritten.put(late)  # type: ignore[method-assign]
        made.abort = late.forget  # type: ignore[method-assign]
        return made

    def sizes_after_write(self: FolderStore, prefix: str) -> dict[str, int]:
        write()
        return sizes(self, prefix)

    def read_after_write(self: FolderStore, key: str, start: int, data: memoryview) -> None:
        write()
        read_into(self, key, start, data)

    FolderStore.upload = upload_later  # type: ignore[method-assign]
    FolderStore.sizes = sizes_after_write  # type: ignore[method-assign]
    FolderStore.read_into = read_after_write  # type: ignore[method-assign]


class _Late:
    """A file that was reported as written; an aborted upload never is written."""

    def __init__(self, finish: Callable[[], None], abort: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._abort = abort

    def write(self) -> None:
        if self._finish is not None:
            self._finish()

    def forget(self) -> None:
        self._finish = None
        self._abort()


def draws_noise_that_is_not_derived() -> None:
    """Dropout depends on what this process did before."""
    derive, count = training.numerics.derive_seed, itertools.count()

    def derive_seed(*parts: int | str) -> int:
        return next(count) if parts[0] == "noise" else derive(*parts)

    training.numerics.derive_seed = derive_seed


def forgets_the_optimizer() -> None:
    """A checkpoint whose optimizer is not restored."""
    learner.load_optimizer_state = lambda optimizer, saved: None


def forgets_the_moving_average() -> None:
    """A checkpoint whose average is not restored: it restarts from the weights."""
    MovingAverage.load = lambda self, tensors: None  # type: ignore[method-assign]


def forgets_the_loss_scaler() -> None:
    """A checkpoint whose loss scaler is not restored: it restarts with its initial scale."""
    Scaling.load = lambda self, state: None  # type: ignore[method-assign]


def forgets_the_other_ranks() -> None:
    """A checkpoint from which only rank 0 resumes."""
    load = Learner._load

    def load_in_rank_0(self: Learner, snapshot: CheckpointContent) -> None:
        if self._world.leads:
            load(self, snapshot)

    Learner._load = load_in_rank_0  # type: ignore[method-assign]
