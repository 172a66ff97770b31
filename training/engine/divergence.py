"""Going back to the last commit when training has diverged, in the same process.

The retry is the next generation of the run and resumes as a replacement machine would: from the
newest valid checkpoint, building everything again. Only a step that diverges again and again, with
no progress past it, fails the run.
"""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

from training.attempt.attempt import HeldRun
from training.attempt.context import AttemptContext
from training.errors import Divergence, GoBackError, RunFailedError

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Retries:
    """The retries of one attempt, counted on rank 0."""

    def __init__(
        self, context: AttemptContext, run: HeldRun | None, *, num_retries: int, num_skips: int
    ) -> None:
        """`run` is that of rank 0; the other ranks hold none."""
        self._context = context
        self._run = run
        self._num_retries = num_retries
        self._num_skips = num_skips  # of the run
        self._furthest_step = 0  # that has diverged
        self._count = 0  # of divergences there

    def train(self, train: Callable[[], T]) -> T:
        """Call `train`, and again after each divergence; RunFailedError when that is in vain."""
        while True:
            try:
                return train()
            except GoBackError as error:
                divergence = error.divergence
            # Here the error and its traceback are gone; with the cycles, so is the old model.
            self._context.supervisor.last_resort.save_with(None)
            gc.collect()
            self._go_back(divergence)

    def _go_back(self, divergence: Divergence | None) -> None:
        world, run = self._context.world, self._run
        if run is None:
            if not world.share_flag(False):
                raise RunFailedError("training diverged; rank 0 says where")
            return
        assert divergence is not None, "rank 0 reads what every rank reads"
        if divergence.step > self._furthest_step:
            self._furthest_step, self._count = divergence.step, 0
        self._count += 1
        world.share_flag(self._count <= self._num_retries)
        if self._count > self._num_retries:
            raise RunFailedError(_in_vain(divergence, self._num_retries))
        self._begin_generation(run, divergence)

    def _begin_generation(self, run: HeldRun, divergence: Divergence) -> None:
        skipped = run.lease.head.skipped_steps
        is_skipped = len(skipped) < self._num_skips and divergence.step not in skipped
        if is_skipped:
            skipped = tuple(sorted((*skipped, divergence.step)))
        _log.warning(
            "[diverged] %s; retry %d of %d from the last commit%s",
            divergence.message,
            self._count,
            self._num_retries,
            f", without step {divergence.step}" if is_skipped else "",
        )
        run.events.emit(
            "diverged",
            step=divergence.step,
            message=divergence.message,
            loss=_text(divergence.loss),
            gradient_norm=_text(divergence.gradient_norm),
            retry=self._count,
            is_skipped=is_skipped,
        )
        run.begin_generation(skipped)


def _in_vain(divergence: Divergence, num_retries: int) -> str:
    tried = f"{num_retries} retries from the last commit came no further; " if num_retries else ""
    return (
        f"{divergence.message}; nothing was published; {tried}lower the learning rate, clip the "
        "gradients, or leave such steps out (--nan-skips)"
    )


def _text(value: float | None) -> str | None:
    """A number that JSON may not have."""
    return None if value is None else str(value)
