"""`python -m benchmarks evidence`: what proves sizing, the seed documents' numbers and the fit.

python -m benchmarks evidence 002           every number of a document, and ours
python -m benchmarks evidence --fit         fit the models' constants to published runs, and write
python -m benchmarks evidence --fit --check write nothing; exit code 1 if the file differs

Documents: 000 sizes and Spot, 001 language models, 002 ImageNet, 003 detection, 004 serving.
What the fit is worth: python -m sizing accuracy.
"""

import argparse
import json
from dataclasses import asdict
from itertools import groupby
from typing import Any, get_args

from benchmarks import fitting
from benchmarks.seeds.tables import SEEDS, Claim, Verdict, claims
from sizing.cli.tables import print_json, show
from sizing.models.fitted import FITTED_FILE, Fitted, fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "seed", nargs="?", choices=SEEDS, metavar="NUMBER", help=f"a document: {', '.join(SEEDS)}"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants to published runs")
    parser.add_argument("--check", action="store_true", help="--fit: write nothing, only compare")


def run(arguments: argparse.Namespace) -> int:
    """Show a document's numbers, or fit."""
    if bool(arguments.seed) == arguments.fit:
        raise ValueError("give either a document's number or --fit, such as `evidence 002`")
    if arguments.fit:
        return _fit(arguments)
    return _show_claims(claims(arguments.seed), as_json=arguments.json)


def _show_claims(found: list[Claim], *, as_json: bool) -> int:
    """Show the tables one after the other, and how many claims hold."""
    counts = {word: sum(claim.verdict == word for claim in found) for word in get_args(Verdict)}
    if as_json:
        rows = [
            {**asdict(each), "verdict": each.verdict, "difference": each.difference}
            for each in found
        ]
        print_json("evidence", {"claims": rows, "verdicts": counts})
        return 0
    for table, group in groupby(found, key=lambda claim: claim.table):
        show([_claim_row(claim) for claim in group], title=f"{found[0].seed}: {table}")
    show(
        [],
        notes=[
            f"{len(found)} claims: {', '.join(f'{n} {word}' for word, n in counts.items())}. "
            "Ours: from the catalogue, the models and counted footprints."
        ],
    )
    return 0


# "adds up": ours is computed from the document's own figures, and says nothing of them.
_SAME = {"reproduced": "as ours", "adds up": "adds up"}


def _claim_row(claim: Claim) -> dict[str, Any]:
    """Return a claim for people; of one that holds no more is said."""
    unit = f" {claim.unit}" if claim.unit else ""
    return {
        "what": claim.what,
        "line": claim.lines[0],
        "claimed": f"{claim.claimed.replace('..', ' to ')}{unit}",
        "ours": claim.ours,
        "claimed is": _SAME.get(claim.verdict, claim.difference),
        "why": claim.why if claim.verdict not in _SAME else "",
    }


def _fit(arguments: argparse.Namespace) -> int:
    """Fit, then write or compare."""
    found = fitting.found()
    if arguments.check:
        differing = fitting.differences(found)
        if arguments.json:
            print_json("evidence", {"differences": differing})
            return 1 if differing else 0
        for difference in differing:
            print(f"[failed] {difference}")
        print(f"[failed] write it: {fitting.COMMAND}" if differing else f"[ok] {FITTED_FILE}")
        return 1 if differing else 0
    content = fitting.to_json(found)
    FITTED_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fitted.cache_clear()
    print_json("evidence", content) if arguments.json else _show_fit(found)
    return 0


def _show_fit(found: Fitted) -> None:
    values: list[dict[str, Any]] = [
        *({"constant": f"time factor, {n}", "value": v} for n, v in found.time_factors.items()),
        {"constant": "passes of kept bytes", "value": found.traffic_passes},
        *({"constant": f"exponent, {n}", "value": v} for n, v in found.exponents.items()),
        {"constant": "workspace, MiB", "value": found.workspace_mib},
    ]
    show([{**row, "value": f"{row['value']:.3g}"} for row in values], title="step time and memory")
    show(
        [
            {"like": name, "p10": f"{i.low:.2f}", "p90": f"{i.high:.2f}", "runs": i.runs}
            for name, i in found.intervals.items()
        ],
        title="measured time / predicted time",
    )
    show(
        [
            {
                "GPU": gpu,
                "p10 us": round(launch.low * 1e6),
                "median us": round(launch.likely * 1e6),
                "p90 us": round(launch.high * 1e6),
                "hosts": launch.hosts,
            }
            for gpu, launch in found.launches.items()
        ],
        title="a kernel launch, microseconds",
    )
