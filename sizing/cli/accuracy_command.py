"""How accurate the models are on runs that others measured: predictions, errors, misses.

python -m sizing accuracy              a summary, then what is missed; --json has every row
python -m sizing accuracy --markdown   the table of docs/sizing.md

Each row is predicted by a fit that has not seen its model; misses stay in the table.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, median
from typing import Any

import numpy as np

from sizing.cli.tables import markdown_table, print_json, show_table
from sizing.evidence import fit
from sizing.evidence.truths import (
    Truth,
    calibrating,
    counted_bytes,
    largest_batch,
    missing_bytes,
    predictable,
    truths,
)
from sizing.models.constants import Constants

HELP = "predictions against published runs, misses included"
# The largest batch that fits is also predicted with memory 10 % lower and 10 % higher.
_SCALES = (0.9, 1.1)
THROUGHPUT_LIMIT, MEMORY_LIMIT, RANKING_LIMIT = 0.30, 0.15, 0.90


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTruth:
    """A truth and its prediction; `ratio` is predicted / measured."""

    truth: Truth
    ratio: float | None

    @property
    def predicted(self) -> float | None:
        """The prediction, in the unit of what was measured."""
        return None if self.ratio is None else self.ratio * self.truth.measured

    @property
    def is_hit(self) -> bool | None:
        """Whether the prediction is within the limit; None without a prediction."""
        limit = MEMORY_LIMIT if self.truth.kind == "memory" else THROUGHPUT_LIMIT
        return None if self.ratio is None else abs(self.ratio - 1) <= limit


def throughput_rows(left_out: str = "model") -> list[CheckedTruth]:
    """Return every throughput row with its prediction by a fit without similar rows."""
    return [
        CheckedTruth(truth=truth, ratio=ratio)
        for truth, ratio in zip(predictable("throughput"), fit.without(left_out), strict=True)
    ]


def memory_rows(*, with_workspace: bool = True) -> list[CheckedTruth]:
    """Return every row of max_memory_allocated with its prediction, without its lab's rows.

    Without the workspace, the prediction is what tensors alone need.
    """
    return [
        CheckedTruth(
            truth=truth,
            ratio=(counted_bytes(truth, truth.batch) + with_workspace * _workspace(truth.lab))
            / (truth.measured * 1e9),
        )
        for truth in predictable("memory")
    ]


def _workspace(without_lab: str) -> float:
    others = [other for other in calibrating() if other.lab != without_lab]
    return median(missing_bytes(other) for other in others)


def all_rows() -> list[CheckedTruth]:
    """Return every row of throughput and memory; those that cannot be predicted come last."""
    unknown = [
        CheckedTruth(truth=truth, ratio=None)
        for truth in truths()
        if truth.role == "not predictable"
    ]
    return throughput_rows() + memory_rows() + unknown


def ladder() -> list[Truth]:
    """Return the rows whose batch is the largest that fitted, which shows the memory needed."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--markdown", action="store_true", help="the summary for docs/sizing.md")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.markdown:
        print(markdown_table(summary()))
        return 0
    rows = all_rows()
    if arguments.json:
        content = {"summary": summary(), "rows": [_shown(row) for row in rows]}
        print_json("accuracy", content)
        return 0
    show_table(summary(), title="summary")
    show_table(
        [_shown(row) for row in rows if row.is_hit is not True],
        title="what is missed or not predicted",
        notes=[
            f"hit: within {THROUGHPUT_LIMIT:.0%} (throughput), "
            f"{MEMORY_LIMIT:.0%} (memory). Sources: sizing/evidence/ground_truths.csv."
        ],
    )
    return 0


def _shown(row: CheckedTruth) -> dict[str, Any]:
    verdict = {None: "not predicted", True: "hit", False: "MISS"}[row.is_hit]
    return {
        "run": row.truth.name,
        "what": row.truth.kind,
        "measured": row.truth.measured,
        "predicted": None if row.predicted is None else round(row.predicted, 2),
        "unit": row.truth.unit,
        "error": None if row.ratio is None else f"{row.ratio - 1:+.0%}",
        "verdict": verdict,
    }


def summary() -> list[dict[str, Any]]:
    """Return one line per promise: rows, how many hold, the median error."""
    by_model = throughput_rows()
    first = [row for row in by_model if row.truth.role == "held out"]
    limit = f"throughput within {THROUGHPUT_LIMIT:.0%}"
    memory_limit = f"max_memory_allocated within {MEMORY_LIMIT:.0%}"
    return [
        _line(f"{limit}, fitted without the row's model", by_model),
        *(
            _line(f"{limit}, without its {what}", throughput_rows(what))
            for what in ("chip", "lab", "code", "model and chip")
        ),
        _line(f"{limit}, the first 38 held-out rows, without their model", first),
        *(_covered(what) for what in ("lab", "model and chip", "model")),
        _line(f"{memory_limit}: tensors alone", memory_rows(with_workspace=False)),
        _line(f"{memory_limit}: with workspaces, without its lab", memory_rows()),
        _ladder(),
        *(_ranking(name, rows) for name, rows in _rankings(by_model).items()),
    ]


def _covered(what: str) -> dict[str, Any]:
    inside, rows = fit.covered(what)
    promise = f"p10 to p90 holds the run, without its {what}"
    return _promise(promise, rows, inside, f"{inside / rows:.0%}")


def _ladder() -> dict[str, Any]:
    rows, constants = ladder(), Constants()
    exact, low, high = (
        sum(largest_batch(row, constants, scale=scale) == row.batch for row in rows)
        for scale in (1.0, *_SCALES)
    )
    figure = f"with memory x {_SCALES[0]}: {low}, x {_SCALES[1]}: {high}"
    return _promise("the very batch that fitted 24 GB", len(rows), exact, figure)


def _rankings(rows: Sequence[CheckedTruth]) -> dict[str, list[CheckedTruth]]:
    ranked = [row for row in rows if row.truth.is_on_the_ladder]
    others = [row for row in ranked if not row.truth.model.startswith("regnet")]
    return {"timm's models": ranked, "timm's models but the RegNets": others}


def _ranking(name: str, ranked: Sequence[CheckedTruth]) -> dict[str, Any]:
    found, num = ranking(ranked), len(ranked)
    hold = num if found > RANKING_LIMIT else 0
    return _promise(f"ranking over {RANKING_LIMIT}, {name}", num, hold, f"Spearman {found:.3f}")


def _line(promise: str, rows: Sequence[CheckedTruth]) -> dict[str, Any]:
    errors = [abs(row.ratio - 1) for row in rows if row.ratio is not None]
    figure = f"median error {median(errors):.0%}, worst {max(errors):.0%}"
    return _promise(promise, len(rows), sum(row.is_hit is True for row in rows), figure)


def _promise(promise: str, rows: int, hold: int, figure: str) -> dict[str, Any]:
    return {"promise": promise, "rows": rows, "hold": hold, "figure": figure}
