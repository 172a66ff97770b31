"""The stacks: DatasetStack (kept), NetworkStack, a TrainingStack per run, and optional ones."""

from typing import TYPE_CHECKING

import contract.environment  # noqa: F401
from contract import door

if TYPE_CHECKING:
    from stacks.dataset_stack import DatasetStack
    from stacks.guard.fleet import StackFleet, StackInstance, instances_of_stack, spot_prices
    from stacks.guard.ledger import Ledger
    from stacks.guard.market import work_left
    from stacks.guard.settings import GuardSettings, quick_client
    from stacks.network import NetworkStack
    from stacks.parameters import StackParameters
    from stacks.review_stack import ReviewStack
    from stacks.sagemaker.__main__ import sagemaker_command
    from stacks.sagemaker.service_jobs import JobState, QueuedSweep
    from stacks.sweep_stack import SweepStack
    from stacks.training_stack import TrainingStack
else:
    __getattr__ = door.of(__name__)

# fmt: off
__all__ = [
    "DatasetStack", "GuardSettings", "JobState", "Ledger", "NetworkStack", "QueuedSweep",
    "ReviewStack", "StackFleet", "StackInstance", "StackParameters", "SweepStack",
    "TrainingStack", "instances_of_stack", "quick_client", "sagemaker_command", "spot_prices",
    "work_left",
]
