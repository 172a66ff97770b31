"""The constants fitted to published runs, with the errors for similar runs.

`python -m benchmarks evidence --fit` wrote fitted.json; its last commit is f99a62e3. A test fits
again with sizing/evidence/fit.py and compares.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FITTED_FILE = Path(__file__).with_name("fitted.json")
_RANGE = "the range is of labs, models and chips that a fit had not seen"


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRange:
    """Measured time / predicted time of similar runs: p10, p90 and the number of runs."""

    low: float
    high: float
    runs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Seconds of one kernel launch on a GPU's host: p10, median, p90 and the hosts measured."""

    low: float
    likely: float
    high: float
    hosts: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """The results of the fit.

    `time_factors`: by precision, the time of matrix products relative to that at peak.
    `traffic_passes`: how often each kept byte crosses the memory bus in a step.
    `exponents`: by feature of sizing/models/step_time.py. `runs`: published runs by GPU.
    """

    time_factors: Mapping[str, float]
    traffic_passes: float
    exponents: Mapping[str, float]
    intervals: Mapping[str, ErrorRange]
    launches: Mapping[str, Launch]
    runs: Mapping[str, int]
    workspace_mib: float

    def basis(self, gpu: str) -> str:
        """Say which runs the range of a step is from."""
        count = self.runs.get(gpu, 0)
        return f"{count or 'no'} published run{'s' if count > 1 else ''} on {gpu}: {_RANGE}"


@cache
def fitted() -> Fitted:
    """Return the constants of fitted.json."""
    content = json.loads(FITTED_FILE.read_text(encoding="utf-8"))
    content["intervals"] = {n: ErrorRange(**each) for n, each in content["intervals"].items()}
    content["launches"] = {n: Launch(**each) for n, each in content["launches"].items()}
    return Fitted(**content)
