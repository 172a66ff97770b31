"""Facts and predictions before a run starts: the instance catalogue and models built on it.

Each room's docstring says what it is for, what it promises and which rooms it may use; `make check`
enforces that. The ground floor has `figures`, a number with its basis, and `suggestion`. Two
commands write data files here: `python -m training measure` footprints.json, and
`plan --calibrate` calibration.json.
"""

from typing import TYPE_CHECKING

import contract.environment  # noqa: F401
from contract import door

if TYPE_CHECKING:
    from sizing.catalogue import PRICE_REGION, InstanceType, hourly_price
    from sizing.catalogue.gpus import Gpu, find_gpu, gpus
    from sizing.catalogue.prices import UnknownPriceError
    from sizing.catalogue.refresh import LEAST_FOR_SCORES, PriceBook
    from sizing.cli.tables import markdown_table, print_json, show_table, table_cell, table_heading
    from sizing.evidence.memory import needed_mib
    from sizing.evidence.truths import Truth, counts, gpu_of, predictable, step_of
    from sizing.fallback.decision import decide_market
    from sizing.fallback.situation import (
        Decision,
        Market,
        Place,
        Situation,
        SpotHistory,
        observe_market,
    )
    from sizing.models.constants import GIB, MIB, Constants
    from sizing.models.data_path import DATA, GP3_MB_PER_SECOND, epoch_data, volume_rate
    from sizing.models.fitted import FITTED_FILE, ErrorRange, Fitted, Launch, fitted
    from sizing.models.footprints import (
        FOOTPRINTS_FILE,
        FOOTPRINTS_FORMAT,
        Footprint,
        NotMeasuredError,
        counted_stages,
        usable_gpus,
    )
    from sizing.models.host import host_memory
    from sizing.models.memory import GpuMemory, gpu_memory
    from sizing.models.serving import Service, published, serve_online
    from sizing.models.step_time import StepEstimate, features, roofline, step_time
    from sizing.plan.checks import Findings, check_plan
    from sizing.plan.dataset import read_manifest
    from sizing.plan.deadline import deadline_fallback, deadline_sentence
    from sizing.plan.plan import Plan, make_plan
    from sizing.plan.report import plan_json, plan_line
    from sizing.plan.request import Request
    from sizing.plan.work import StagePlan
    from sizing.select.families import cost_level
    from sizing.service_prices import IMAGE_GIB, initialization_usd
    from sizing.spot.interruptions import ADVISOR_SHARES
    from sizing.spot.traces import read_spot_counts
else:
    __getattr__ = door.of(__name__)

# fmt: off
__all__ = [
    "ADVISOR_SHARES", "DATA", "FITTED_FILE", "FOOTPRINTS_FILE", "FOOTPRINTS_FORMAT", "GIB",
    "GP3_MB_PER_SECOND", "IMAGE_GIB", "LEAST_FOR_SCORES", "MIB", "PRICE_REGION", "Constants",
    "Decision", "ErrorRange", "Findings", "Fitted", "Footprint", "Gpu", "GpuMemory",
    "InstanceType", "Launch", "Market", "NotMeasuredError", "Place", "Plan", "PriceBook",
    "Request", "Service", "Situation", "SpotHistory", "StagePlan", "StepEstimate", "Truth",
    "UnknownPriceError", "catalogue", "check_plan", "cost_level", "counted_stages", "counts",
    "deadline_fallback", "deadline_sentence", "decide_market", "epoch_data", "features",
    "find_gpu", "fitted", "gpu_memory", "gpu_of", "gpus", "host_memory", "hourly_price",
    "initialization_usd", "make_plan", "markdown_table", "needed_mib", "observe_market",
    "plan_json", "plan_line", "predictable", "print_json", "published", "read_manifest",
    "read_spot_counts", "roofline", "serve_online", "service_prices", "show_table", "step_of",
    "step_time", "table_cell", "table_heading", "usable_gpus", "volume_rate",
]
