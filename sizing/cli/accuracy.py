"""How accurate the models are on runs that others measured: predictions, errors, misses.

python -m sizing accuracy              a summary, then row by row
python -m sizing accuracy --markdown   the table of docs/sizing.md

A row is predicted by a fit that has not seen its model; `python -m benchmarks evidence --fit` fits.
"""

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

from sizing.cli.tables import print_json, show
from sizing.evidence import accuracy, fit, memory
from sizing.evidence.accuracy import CheckedTruth
from sizing.models.constants import Constants

HELP = "predictions against published runs, misses included"
# What a run says of the batch that fits, if the memory model were 10 % lower or higher.
_SCALES = (0.9, 1.1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--all", action="store_true", help="every row, not only the misses")
    parser.add_argument("--markdown", action="store_true", help="the summary for docs/sizing.md")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.markdown:
        print(markdown(summary()))
        return 0
    rows = accuracy.rows()
    if arguments.json:
        content = {"summary": summary(), "rows": [_shown(row) for row in rows]}
        print_json("accuracy", content)
        return 0
    show(summary(), title="summary")
    show(
        [_shown(row) for row in rows if arguments.all or row.is_hit is not True],
        title="row by row" if arguments.all else "what is missed or not predicted",
        notes=[
            f"hit: within {accuracy.THROUGHPUT_LIMIT:.0%} (throughput), "
            f"{accuracy.MEMORY_LIMIT:.0%} (memory). Sources: sizing/evidence/ground_truths.csv.",
        ],
    )
    return 0


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the summary as a Markdown table."""
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(str(value) for value in row.values()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


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
    """Return one line for each promise: rows, how many hold, the median error."""
    by_model = accuracy.throughput_rows()
    first = [row for row in by_model if row.truth.role == "held out"]
    limit = f"throughput within {accuracy.THROUGHPUT_LIMIT:.0%}"
    memory_limit = f"max_memory_allocated within {accuracy.MEMORY_LIMIT:.0%}"
    return [
        _line(f"{limit}, fitted without the row's model", by_model),
        *(
            _line(f"{limit}, without its {what}", accuracy.throughput_rows(what))
            for what in ("chip", "lab", "code", "model and chip")
        ),
        _line(f"{limit}, the first 38 held-out rows, without their model", first),
        _covered("model"),
        _covered("model and chip"),
        _line(f"{memory_limit}: tensors alone", accuracy.tensors_rows()),
        _line(f"{memory_limit}: with workspaces, without its lab", accuracy.memory_rows()),
        _ladder(),
        *(_ranking(name, rows) for name, rows in _rankings(by_model).items()),
    ]


def _covered(what: str) -> dict[str, Any]:
    inside, rows = fit.covered(what)
    promise = f"p10 to p90 holds the run, without its {what}"
    return {"promise": promise, "rows": rows, "hold": inside, "figure": f"{inside / rows:.0%}"}


def _ladder() -> dict[str, Any]:
    rows, constants = accuracy.ladder(), Constants()
    exact, low, high = (
        sum(memory.largest_batch(row, constants, scale=scale) == row.batch for row in rows)
        for scale in (1.0, *_SCALES)
    )
    return {
        "promise": "the very batch that fitted 24 GB",
        "rows": len(rows),
        "hold": exact,
        "figure": f"with memory x {_SCALES[0]}: {low}, x {_SCALES[1]}: {high}",
    }


def _rankings(rows: Sequence[CheckedTruth]) -> dict[str, list[CheckedTruth]]:
    ranked = [row for row in rows if row.truth.is_on_the_ladder]
    others = [row for row in ranked if not row.truth.model.startswith("regnet")]
    return {"timm's models": ranked, "timm's models but the RegNets": others}


def _ranking(name: str, ranked: Sequence[CheckedTruth]) -> dict[str, Any]:
    found = accuracy.ranking(ranked)
    return {
        "promise": f"ranking over {accuracy.RANKING_LIMIT}, {name}",
        "rows": len(ranked),
        "hold": len(ranked) if found > accuracy.RANKING_LIMIT else 0,
        "figure": f"Spearman {found:.3f}",
    }


def _line(promise: str, rows: Sequence[CheckedTruth]) -> dict[str, Any]:
    errors = [abs(row.ratio - 1) for row in rows if row.ratio is not None]
    return {
        "promise": promise,
        "rows": len(rows),
        "hold": sum(row.is_hit is True for row in rows),
        "figure": f"median error {median(errors):.0%}, worst {max(errors):.0%}",
    }
