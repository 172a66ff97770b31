"""How accurate the models are: predictions against runs that others measured and published.

Every throughput row is predicted by a fit that has not seen its model; `fit.without` leaves out its
GPU or its lab. Misses stay in the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, median

import numpy as np

from sizing.evidence import fit, memory
from sizing.evidence.truths import Truth, predictable, truths

THROUGHPUT_LIMIT, MEMORY_LIMIT, RANKING_LIMIT = 0.30, 0.15, 0.90


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTruth:
    """A truth and its prediction; `ratio` is predicted / measured."""

    truth: Truth
    ratio: float | None
    limit: float

    @property
    def predicted(self) -> float | None:
        """The prediction, in the unit of what was measured."""
        return None if self.ratio is None else self.ratio * self.truth.measured

    @property
    def is_hit(self) -> bool | None:
        """Whether the prediction is within the limit; None without a prediction."""
        return None if self.ratio is None else abs(self.ratio - 1) <= self.limit


def throughput_rows(left_out: str = "model") -> list[CheckedTruth]:
    """Return every throughput row with its prediction by a fit without its like."""
    return [
        CheckedTruth(truth=truth, ratio=ratio, limit=THROUGHPUT_LIMIT)
        for truth, ratio in zip(predictable("throughput"), fit.without(left_out), strict=True)
    ]


def memory_rows() -> list[CheckedTruth]:
    """Return every row of max_memory_allocated with its prediction, its lab left out."""
    return [
        CheckedTruth(truth=truth, ratio=_memory_ratio(truth), limit=MEMORY_LIMIT)
        for truth in predictable("memory")
    ]


def _memory_ratio(truth: Truth) -> float:
    others = [other for other in memory.calibrating() if other.lab != truth.lab]
    workspace = median(memory.missing_bytes(other) for other in others)
    return (memory.counted_bytes(truth, truth.batch) + workspace) / (truth.measured * 1e9)


def tensors_rows() -> list[CheckedTruth]:
    """Return the same rows with what tensors alone need."""
    return [
        CheckedTruth(
            truth=truth,
            ratio=memory.counted_bytes(truth, truth.batch) / (truth.measured * 1e9),
            limit=MEMORY_LIMIT,
        )
        for truth in predictable("memory")
    ]


def rows() -> list[CheckedTruth]:
    """Return every row of throughput and memory; those that cannot be predicted come last."""
    unknown = [
        CheckedTruth(truth=truth, ratio=None, limit=THROUGHPUT_LIMIT)
        for truth in truths()
        if truth.role == "not predictable"
    ]
    return throughput_rows() + memory_rows() + unknown


def ladder() -> list[Truth]:
    """Return the rows whose batch is the largest that fitted: they say what memory was needed."""
    return [truth for truth in predictable("throughput") if truth.is_on_the_ladder]


def ranking(ranked: Sequence[CheckedTruth]) -> float:
    """Return Spearman's correlation of predicted and measured throughput."""
    return spearman(
        [row.truth.measured for row in ranked], [row.predicted or 0.0 for row in ranked]
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences without ties."""
    ranks = (np.argsort(np.argsort(values)) for values in (one, other))
    return correlation(*(rank.tolist() for rank in ranks))
