"""The detector's rungs: what keeps learning as it is, is taken; what changes it, is offered.

In the order of what they cost: nothing but time first, the model's width, which no published
weights fit afterwards, last.
"""

from collections.abc import Sequence
from dataclasses import replace

from training.rungs import autocast_rungs, micro_batch_rungs, offered_rung
from training.workload import Rung
from training.workloads.detection.config import DetectionConfig

_MAX_SIDES = (1066, 800)
_FEWER_NOISED = 50
_NUM_QUERIES = (300, 200)
_WIDTH = 192


def rungs(c: DetectionConfig) -> Sequence[Rung]:
    """The ladder of a recipe; smaller micro-batches accumulate, and count objects as before."""
    taken = []
    if not c.recompute_encoder:
        taken.append(
            Rung(
                name="activations of the encoder recomputed",
                apply=lambda c: replace(c, recompute_encoder=True),
            )
        )
    return [*taken, *micro_batch_rungs(c), *autocast_rungs(c), *_offered(c)]


def _offered(c: DetectionConfig) -> Sequence[Rung]:
    # A shorter side may not be longer than the longest.
    sides = [side for side in _MAX_SIDES if max(c.sides) <= side < c.max_side]
    queries = [number for number in _NUM_QUERIES if number < c.num_queries]
    return [
        *(offered_rung(max_side=side) for side in sides),
        *([offered_rung(denoising_queries=_FEWER_NOISED)] * (c.denoising_queries > _FEWER_NOISED)),
        *(offered_rung(num_queries=number) for number in queries),
        *([offered_rung(width=_WIDTH)] * (c.width > _WIDTH)),
    ]
