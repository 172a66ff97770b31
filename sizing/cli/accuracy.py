"""How accurate the models are on runs that others measured: predictions, errors, misses.

python -m sizing accuracy              a summary, then row by row
python -m sizing accuracy --markdown   the table of docs/sizing.md
python -m sizing accuracy --fit        fit the step-time constants again
"""

import argparse
from statistics import median
from typing import Any

from sizing.cli.tables import print_json, show
from sizing.evidence import accuracy
from sizing.evidence.accuracy import Row, Truth
from sizing.models.constants import Constants

HELP = "predictions beside published runs, misses included"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them")
    parser.add_argument("--all", action="store_true", help="every model of timm's table by name")
    parser.add_argument("--markdown", action="store_true", help="the summary for docs/sizing.md")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    if arguments.fit:
        found = accuracy.fit()
        used = Constants()
        rows = [
            {"constant": name, "fitted": value, "in use": getattr(used, name)}
            for name, value in found.items()
        ]
        print_json("accuracy", {"constants": found}) if arguments.json else show(rows)
        return 0
    if arguments.markdown:
        print(markdown(summary()))
        return 0
    rows_by_truth = accuracy.rows()
    if arguments.json:
        found_rows = [_shown(row) for row in rows_by_truth]
        print_json("accuracy", {"summary": summary(), "rows": found_rows})
        return 0
    show(summary(), title="summary")
    shown = [
        row
        for row in rows_by_truth
        if arguments.all or not row.name.startswith("timm ") or row.is_hit is False
    ]
    show(
        [_shown(row) for row in shown],
        title="row by row" if arguments.all else "row by row; only the misses of timm's table",
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


def _shown(row: Row) -> dict[str, Any]:
    verdict = {None: "not predicted", True: "hit", False: "MISS"}[row.is_hit]
    return {
        "run": row.name,
        "what": row.kind,
        "role": row.role,
        "measured": row.measured,
        "predicted": None if row.predicted is None else round(row.predicted, 2),
        "unit": row.unit,
        "error": None if row.ratio is None else f"{row.ratio - 1:+.0%}",
        "verdict": verdict,
    }


def summary() -> list[dict[str, Any]]:
    """Return one line for each promise: rows, how many hold, the median error."""
    rows = accuracy.rows()
    found = [
        _line(
            f"throughput within {accuracy.THROUGHPUT_LIMIT:.0%}, {role}",
            [r for r in rows if r.kind == "throughput" and r.role == role],
        )
        for role in ("held out", "calibrates")
    ]
    found.append(
        _line(
            f"GPU memory within {accuracy.MEMORY_LIMIT:.0%}, held out (detectors, 2 images)",
            [r for r in rows if r.kind == "memory" and r.role == "held out"],
        )
    )
    constants = Constants()
    climbed = [truth for truth in accuracy.truths() if truth.is_timm]
    errors = [accuracy.ladder_error(truth, constants) for truth in climbed]
    exact = sum(accuracy.largest_batch(t, constants) == t.batch for t in climbed)
    found.append(
        {
            "promise": f"GPU memory within {accuracy.MEMORY_LIMIT:.0%}: the batch that fits 24 GB",
            "rows": len(errors),
            "hold": sum(error <= accuracy.MEMORY_LIMIT for error in errors),
            "figure": f"worst {max(errors):.0%}; the very batch of the ladder for {exact}",
        }
    )
    return found + [_ranking(name, ranked) for name, ranked in _rankings(climbed).items()]


def _rankings(timm: list[Truth]) -> dict[str, list[Truth]]:
    return {
        "all models": timm,
        "held out": [truth for truth in timm if truth.role == "held out"],
        "held out but the RegNets": [
            truth
            for truth in timm
            if truth.role == "held out" and not truth.model.startswith("regnet")
        ],
    }


def _ranking(name: str, ranked: list[Truth]) -> dict[str, Any]:
    found = accuracy.ranking(ranked)
    return {
        "promise": f"ranking of models over {accuracy.RANKING_LIMIT}, {name}",
        "rows": len(ranked),
        "hold": len(ranked) if found > accuracy.RANKING_LIMIT else 0,
        "figure": f"Spearman {found:.3f}",
    }


def _line(promise: str, rows: list[Row]) -> dict[str, Any]:
    errors = [abs(row.ratio - 1) for row in rows if row.ratio is not None]
    return {
        "promise": promise,
        "rows": len(rows),
        "hold": sum(row.is_hit is True for row in rows),
        "figure": f"median error {median(errors):.0%}, worst {max(errors):.0%}",
    }
