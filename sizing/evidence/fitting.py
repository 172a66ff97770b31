"""Everything that is fitted, as fitted.json has it: constants, intervals, launches, workspace."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sizing.evidence import fit, memory
from sizing.evidence.launches import launches
from sizing.evidence.truths import gpu_of, predictable, step_of
from sizing.models.constants import MIB
from sizing.models.fitted import FITTED_FILE, Fitted, Interval
from sizing.models.step_time import features

COMMAND = "python -m benchmarks evidence --fit"
# For runs on a GPU with published runs, and on one without: what the fit must not have seen.
SEEN = {"known GPU": "model", "new GPU": "model and chip"}
_DIGITS = 4


def found() -> Fitted:
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


def intervals() -> dict[str, Interval]:
    """Return the interval of each kind of run, on GPUs with published runs and without."""
    found = {
        f"{kind}, {seen}": interval(_ratios(what, kind))
        for seen, what in SEEN.items()
        for kind in sorted({step_of(truth).kind for truth in predictable("throughput")})
    }
    for name, new in found.items():
        # Nothing is known better of a GPU without published runs than of one with them.
        known = found[name.replace("new GPU", "known GPU")]
        found[name] = replace(new, low=min(new.low, known.low), high=max(new.high, known.high))
    return found


def _ratios(what: str, kind: str) -> list[float]:
    rows = zip(predictable("throughput"), fit.without(what), strict=True)
    return [ratio for truth, ratio in rows if step_of(truth).kind == kind]


def interval(ratios: Sequence[float]) -> Interval:
    """Return p10 and p90 of measured / predicted, a little outside where there are few runs."""
    ordered = sorted(ratios)
    last = len(ordered) - 1
    low = max(0, math.floor(0.1 * (last + 2)) - 1)
    high = min(last, math.ceil(0.9 * (last + 2)) - 1)
    return Interval(low=min(1.0, ordered[low]), high=max(1.0, ordered[high]), runs=len(ordered))


def covered(what: str) -> tuple[int, int]:
    """Return how many runs lie in the interval of those that are not like them, and of all.

    `what` was left out of the fit, and is left out of the runs that make the interval (see fit).
    """
    rows = list(zip(predictable("throughput"), fit.without(what), strict=True))
    inside = 0
    for truth, ratio in rows:
        group, kind = fit.LIKE[what](truth), step_of(truth).kind
        unlike = [(t, r) for t, r in rows if not fit.is_like(what, t, group)]
        alike = [r for t, r in unlike if step_of(t).kind == kind]
        expected = interval(alike or [r for _, r in unlike])
        inside += expected.low <= ratio <= expected.high
    return inside, len(rows)


def to_json(fitted: Fitted) -> dict[str, Any]:
    """Return what fitted.json has."""
    content = {"command": COMMAND, **asdict(fitted)}
    rounded: dict[str, Any] = _rounded(content)
    return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float | np.floating) else value


def differences(fitted: Fitted, path: Path = FITTED_FILE) -> list[str]:
    """Return which constants of the file the fit does not give; the last digit may differ."""
    there = json.loads(path.read_text(encoding="utf-8"))
    return list(_different(there, to_json(fitted), ""))


def _different(there: Any, here: Any, name: str) -> list[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        names = dict.fromkeys([*there, *here])
        return [
            found for n in names for found in _different(there.get(n), here.get(n), f"{name} {n}")
        ]
    if isinstance(there, float) and isinstance(here, float):
        same = math.isclose(there, here, rel_tol=2e-3)
    else:
        same = there == here
    return [] if same else [f"{name.strip()}: {there} in the file, {here} fitted"]
