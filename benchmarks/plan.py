"""Time of 1,000 plans over every size and every measured recipe; the limit is ten seconds."""

import itertools
import subprocess
import sys
import time
from typing import Any

from sizing import catalogue
from sizing.models import footprints
from sizing.plan.checks import check_plan
from sizing.plan.plan import make_plan
from sizing.plan.report import to_json
from sizing.plan.request import Request

LIMIT_SECONDS = 10.0
_IMPORTED = (
    "import sizing.plan.plan, sys; print('torch' in sys.modules or 'training' in sys.modules)"
)


def measure(*, calls: int = 1000) -> list[dict[str, Any]]:
    """Make `calls` plans, each to its JSON; the first calls read the files."""
    if calls < 1:
        raise ValueError(f"at least one call, got {calls}")
    recipes = [(w, r) for w, names in footprints.recipes().items() for r in names]
    sizes = [instance.size for instance in catalogue.trainable_by_price()]
    pairs = itertools.islice(itertools.cycle(itertools.product(recipes, sizes)), calls)
    seconds: list[float] = []
    for (workload, recipe), size in pairs:
        began = time.perf_counter()
        plan = make_plan(Request(workload=workload, recipe=recipe, size=size))
        to_json(plan, check_plan(plan))
        seconds.append(time.perf_counter() - began)
    seconds.sort()
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True
    )
    return [
        {
            "what": f"{calls} plans, {len(recipes)} recipes, {len(sizes)} sizes",
            "total s": sum(seconds),
            "limit s": LIMIT_SECONDS,
            "median ms": 1e3 * seconds[len(seconds) // 2],
            "p99 ms": 1e3 * seconds[int(0.99 * len(seconds))],
            "worst ms": 1e3 * seconds[-1],
            "start s": time.perf_counter() - began,
            "imports torch": done.stdout.strip(),
        }
    ]
