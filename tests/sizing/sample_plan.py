"""A plan from sample footprints, without any measured calibration."""

from dataclasses import replace
from pathlib import Path

from sizing.plan.plan_inputs import Request
from sizing.plan.size_plan import Plan, make_plan
from tests.sizing import sample_footprints


def plan(tmp_path: Path, *, footprint: dict[str, object] | None = None, **changes: object) -> Plan:
    """The plan of `trajectory full` on g5.2xlarge, with fields of the request changed."""
    path = sample_footprints.write(tmp_path / "footprints.json", **(footprint or {}))
    request = Request(workload="trajectory", recipe="full", size="g5.2xlarge")
    return make_plan(
        replace(request, **changes),  # type: ignore[arg-type]
        footprints_file=path,
        calibration_file=tmp_path / "none.json",
    )
