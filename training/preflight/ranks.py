"""How many ranks train: refuses a number that would give other bits, or leave some idle."""

import logging
from collections.abc import Sequence

from contract.trainer_options import RANKS
from training.engine.job import RunOptions
from training.errors import UserError
from training.workload import Prepare, Train

_log = logging.getLogger(__name__)


def usable_ranks(stages: Sequence[Prepare | Train], options: RunOptions) -> int:
    """How many ranks train: as many as asked for, or on as many of the GPUs as the stages can use.

    Asked now, and not when a stage begins, after others have been trained.
    """
    asked = options.environment.ranks(options.num_processes)
    refused = _refusal(stages, asked)
    if refused is None:
        return asked
    if options.num_processes is not None or options.environment.world_size > 1:
        raise UserError(refused)
    usable = next(n for n in reversed(RANKS) if n < asked and _refusal(stages, n) is None)
    _log.warning("[ranks] %d of %d GPUs train: %s", usable, asked, refused)
    return usable


def _refusal(stages: Sequence[Prepare | Train], num_ranks: int) -> str | None:
    """Why a stage cannot have that many: it would give other bits, or leave ranks idle."""
    for stage in stages:
        if num_ranks == 1 or not isinstance(stage, Train):
            continue
        settings, each = stage.settings, stage.settings.global_batch // num_ranks
        if settings.optimizer_in_backward:
            return (
                f"stage {stage.name!r} has optimizer_in_backward: {num_ranks} processes would each "
                "update with gradients of their own; give --num-processes 1, or overrides with "
                "which its settings have optimizer_in_backward=False"
            )
        if num_ranks not in RANKS and settings.sharding == "none" and settings.reduction == "tree":
            return (
                f"stage {stage.name!r} on {num_ranks} processes: only 1, 2, 4 or 8 sum gradients "
                "in one order; give --num-processes one of these, or --override reduction=ring, "
                "whose results depend on the number"
            )
        if settings.micro_batch > each:
            return (
                f"stage {stage.name!r} on {num_ranks} processes: a step of {settings.global_batch} "
                f"samples has {settings.global_batch // settings.micro_batch} micro-batches of "
                f"{settings.micro_batch}, so some would have nothing to do; give fewer "
                f"--num-processes, or a micro_batch of at most {each}"
            )
    return None
