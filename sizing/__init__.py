"""Facts and predictions before a run starts: the instance catalogue and models built on it.

Each package's docstring says what it is for, what it promises and which others it may use;
`make check` enforces that. The ground floor has `figures`, a number with its basis. Two commands
write data files here: `python -m training measure` footprints.json, and `plan --calibrate`
calibration.json.
"""

from typing import TYPE_CHECKING

import contract.environment  # noqa: F401
from contract import door

if TYPE_CHECKING:
    from sizing.catalogue import PRICE_REGION, InstanceType, hourly_price
    from sizing.catalogue.gpus import Gpu, gpus
    from sizing.catalogue.refresh import LEAST_FOR_SCORES, PriceBook
    from sizing.cli.tables import markdown_table, show_table, table_cell, table_heading
    from sizing.fallback.decision import (
        Decision,
        Market,
        Place,
        Situation,
        SpotHistory,
        decide_market,
        observe_market,
    )
    from sizing.fallback.pools import PoolHistory, PoolRecord
    from sizing.models.constants import Constants
    from sizing.models.footprints import (
        FOOTPRINTS_FILE,
        FOOTPRINTS_FORMAT,
        Footprint,
        NotMeasuredError,
        counted_stages,
        usable_gpus,
    )
    from sizing.models.memory import gpu_memory
    from sizing.models.step_time import step_time
    from sizing.plan.checks import Findings, check_plan
    from sizing.plan.outcomes import deadline_fallback, deadline_sentence
    from sizing.plan.plan_inputs import Request, read_manifest
    from sizing.plan.report import plan_json, plan_line
    from sizing.plan.size_plan import Plan, make_plan
    from sizing.service_prices import IMAGE_GIB, initialization_usd
    from sizing.spot.interruptions import read_spot_counts
else:
    __getattr__ = door.of(__name__)

# fmt: off
__all__ = [
    "FOOTPRINTS_FILE", "FOOTPRINTS_FORMAT", "IMAGE_GIB", "LEAST_FOR_SCORES", "PRICE_REGION",
    "Constants", "Decision", "Findings", "Footprint", "Gpu", "InstanceType", "Market",
    "NotMeasuredError", "Place", "Plan", "PoolHistory", "PoolRecord", "PriceBook",
    "Request", "Situation", "SpotHistory",
    "catalogue", "check_plan", "counted_stages", "deadline_fallback",
    "deadline_sentence", "decide_market", "gpu_memory", "gpus", "hourly_price",
    "initialization_usd", "make_plan", "markdown_table", "observe_market", "plan_json",
    "plan_line", "read_manifest", "read_spot_counts", "service_prices", "show_table",
    "step_time", "table_cell", "table_heading", "usable_gpus",
]
