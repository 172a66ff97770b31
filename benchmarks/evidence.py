"""`python -m benchmarks evidence`: the evidence for sizing, from seed documents and published runs.

python -m benchmarks evidence 002           every number of a document, next to ours
python -m benchmarks evidence --fit         fit the models' constants to published runs, write them

Documents: 000 sizes and Spot, 001 language models, 002 ImageNet, 003 detection, 004 serving.
`python -m sizing accuracy` says how good the fit is. The hosts of EC2's GPUs were not measured; for
each, the most similar published hosts are used.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import groupby
from statistics import geometric_mean, median, quantiles
from typing import Any, get_args

import numpy as np

from benchmarks.seeds.tables import SEEDS, Claim, Verdict, claims
from sizing.cli.tables import print_json, show
from sizing.evidence import fit, memory
from sizing.evidence.truths import Truth, counts, gpu_of, predictable, step_of
from sizing.models.constants import MIB, Constants
from sizing.models.fitted import FITTED_FILE, ErrorRange, Fitted, Launch, fitted
from sizing.models.step_time import features, roofline

COMMAND = "python -m benchmarks evidence --fit"
_DIGITS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "seed", nargs="?", choices=SEEDS, metavar="NUMBER", help=f"a document: {', '.join(SEEDS)}"
    )
    parser.add_argument("--fit", action="store_true", help="fit the constants to published runs")


def run(arguments: argparse.Namespace) -> int:
    """Show a document's numbers, or fit."""
    if bool(arguments.seed) == arguments.fit:
        raise ValueError("pass either a document's number or --fit, such as `evidence 002`")
    if arguments.fit:
        return _fit(as_json=arguments.json)
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


# "adds up": ours is computed from the document's own figures, and says nothing about these.
_SAME = {"reproduced": "as ours", "adds up": "adds up"}


def _claim_row(claim: Claim) -> dict[str, Any]:
    """Return a claim for readers; a reason is only shown if it does not hold."""
    unit = f" {claim.unit}" if claim.unit else ""
    return {
        "what": claim.what,
        "line": claim.lines[0],
        "claimed": f"{claim.claimed.replace('..', ' to ')}{unit}",
        "ours": claim.ours,
        "claimed is": _SAME.get(claim.verdict, claim.difference),
        "why": claim.why if claim.verdict not in _SAME else "",
    }


def _fit(*, as_json: bool) -> int:
    """Fit the constants, and write them."""
    content = to_json(fitted_again())
    FITTED_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    fitted.cache_clear()
    print_json("evidence", content) if as_json else print(f"[ok] {FITTED_FILE}")
    return 0


def fitted_again() -> Fitted:
    """Fit everything again."""
    truths = predictable("throughput")
    best = fit.fit(fit.rows_of(truths))
    names = features(step_of(truths[0]), gpu_of(truths[0]))
    constants = Fitted(
        time_factors={
            name: math.exp(value) for name, value in zip(fit.PRECISIONS, best[:3], strict=True)
        },
        traffic_passes=math.exp(best[3]),
        exponents=dict(zip(names, (float(value) for value in best[4:]), strict=True)),
        intervals=intervals(),
        launches={},
        runs=dict(sorted(Counter(truth.gpu for truth in truths).items())),
        workspace_mib=median(memory.missing_bytes(t) for t in memory.calibrating()) / MIB,
    )
    return replace(constants, launches=launches(constants))


def intervals() -> dict[str, ErrorRange]:
    """Return the error interval of each kind of run."""
    kinds = {step_of(truth).kind for truth in predictable("throughput")}
    return {kind: fit.expected(kind) for kind in sorted(kinds)}


def to_json(fitted: Fitted) -> dict[str, Any]:
    """Return the content of fitted.json."""
    content = {"command": COMMAND, **asdict(fitted)}
    rounded: dict[str, Any] = _rounded(content)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float | np.floating) else value


# Seconds per kernel launch, from steps so small that the GPU waits for its host.

# If the GPU works for a larger share of the step, the step says little about launches.
_MOST_WORK = 0.5
_UNKNOWN = Launch(low=1.0, likely=1.0, high=1.0, hosts="not known yet")
_DESKTOP, _ZEN_2 = "a desktop of 2025", "EPYC 7742"
_T4_SERVER, _BROADWELL = "a T4 server of NVIDIA", "Xeon E5-2698 v4"
# EC2: g5 has EPYC 7R32 (Zen 2), g6, g6e and p5 EPYC 7R13 (Zen 3) or newer, p3 Xeon E5-2686 v4
# (Broadwell), g4dn and p4d Xeon of the generation between it and Zen 3.
HOSTS = {
    "NVIDIA A10G": (_ZEN_2,),
    "NVIDIA T4": (_T4_SERVER,),
    "NVIDIA V100": (_BROADWELL,),
    "NVIDIA A100": (_ZEN_2, _T4_SERVER),
    "NVIDIA A100 80GB": (_ZEN_2, _T4_SERVER),
    "other": (_DESKTOP, _ZEN_2),
}


def seconds_per_kernel(truth: Truth) -> float:
    """Return the seconds of a published step per kernel that it starts."""
    kernels = counts()[truth.model][truth.counted_as]["kernels_per_step"]
    return truth.measured / 1000 / float(kernels)


def is_launch_bound(truth: Truth, found: Fitted) -> bool:
    """Whether the GPU's own work explains less than half of a published step."""
    if truth.precision.startswith("forward"):
        return truth.batch == 1
    step = roofline(step_of(truth), gpu_of(truth), Constants(), launch=_UNKNOWN, found=found)
    return step.seconds < _MOST_WORK * truth.measured / 1000


def by_host(found: Fitted) -> dict[str, list[float]]:
    """Return the seconds of a launch in every launch-bound row, by host."""
    rows: dict[str, list[float]] = {}
    for truth in predictable("launches"):
        if is_launch_bound(truth, found):
            rows.setdefault(truth.host, []).append(seconds_per_kernel(truth))
    return rows


def launches(found: Fitted) -> dict[str, Launch]:
    """Return each GPU's launch time: the medians of its hosts, and how far steps scatter."""
    rows = by_host(found)
    medians = {host: median(each) for host, each in rows.items()}
    # Models scatter alike on every host, and some hosts have few rows: one spread for all.
    scatter = [value / medians[host] for host, each in rows.items() for value in each]
    tenths = quantiles(scatter, n=10, method="inclusive")
    return {
        gpu: Launch(
            low=min(medians[host] for host in hosts) * tenths[0],
            likely=geometric_mean([medians[host] for host in hosts]),
            high=max(medians[host] for host in hosts) * tenths[-1],
            hosts=" to ".join(hosts),
        )
        for gpu, hosts in HOSTS.items()
    }
