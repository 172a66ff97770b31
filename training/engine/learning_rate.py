"""The learning rate's course over a stage: a factor, at each step, for each group's own rate."""

import math

from training.errors import UserError
from training.settings import Milestones, Settings


def schedule_factor(settings: Settings, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """The factor at `step` (from 0) of `num_steps`; the warmup multiplies the schedule's own."""
    warmup, schedule = settings.warmup_steps, settings.schedule
    rising = (step + 1) / warmup if step < warmup else 1.0
    if schedule == "constant":
        return rising
    if isinstance(schedule, Milestones):
        at = schedule.steps or [epoch * steps_per_epoch for epoch in schedule.epochs]
        return rising * schedule.factor ** sum(step >= first for first in at)
    if callable(schedule):
        return rising * _checked(schedule(step, num_steps), step, num_steps)
    done = min(max(0, step - warmup) / max(1, num_steps - 1 - warmup), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done
    low = settings.final_lr_fraction
    return rising * (low + (1 - low) * left)


def _checked(factor: object, step: int, num_steps: int) -> float:
    if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise UserError(
            f"the schedule returned {factor!r} for step {step} of {num_steps}; "
            "return a finite number, at least 0"
        )
    return float(factor)
