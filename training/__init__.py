"""The trainer: what a workload is made of, and the engine that trains one.

The names below are its door (README.md): workloads, of one's own too, import them from here, and
nothing else of it. Each package's docstring says what it is for, what it promises and which
packages it may use; `make check` enforces that.
"""

from typing import TYPE_CHECKING

import contract.environment  # noqa: F401
from contract import door

# fmt: off
# isort: off
if TYPE_CHECKING:
    from contract.errors import UserError
    from training.artifact_key import key_of
    from training.cli.main import main
    from training.engine.attempt import run_workload
    from training.engine.job import PrepareProxy, ResolvedWorkload, Restaged, RunOptions, TrainProxy
    from training.engine.stage_checks import checked_order, problems, samples_of
    from training.evaluation_files import Captioned, write_moving, write_sheet, write_table
    from training.numerics import configure
    from training.preflight.preflight import train_steps
    from training.processes import in_processes
    from training.program import commit
    from training.numerics import derive_seed, drawing_from
    from training.registry import load_workload, parse_overrides
    from training.rungs import autocast_rungs, micro_batch_rungs, offered_rung, rung
    from training.settings import changed, check_choice, check_fields
    from training.workload import (
        Batch, Dataset, DatasetSamples, Inputs, Loss, Milestones, OptimizerState, Order, Partial,
        Prepare, Prior, Probe, Progress, Rung, Samples, Settings, Start, Train, Workload, Writer,
    )
else:
    __getattr__ = door.of(__name__)

__all__ = [  # noqa: RUF022
    # what a workload is made of
    "Batch", "Dataset", "DatasetSamples", "Inputs", "Loss", "Milestones", "OptimizerState", "Order",
    "Partial", "Prepare", "Prior", "Probe", "Progress", "Rung", "Samples", "Settings", "Start",
    "Train", "Workload", "Writer",
    # what it may use
    "Captioned", "UserError", "autocast_rungs", "changed", "check_choice", "check_fields",
    "derive_seed", "drawing_from", "in_processes", "key_of", "micro_batch_rungs", "offered_rung",
    "rung", "write_moving", "write_sheet", "write_table",
    # what a program may use
    "commit",
    # the trainer, for those that run, prove and measure it
    "PrepareProxy", "ResolvedWorkload", "Restaged", "RunOptions", "TrainProxy", "checked_order",
    "configure", "load_workload", "main", "parse_overrides", "problems", "run_workload",
    "samples_of", "train_steps",
]
