"""Growth that preserves the function: dense to experts, wider, deeper, on any model's state_dict.

Pure functions of a state and a layout that says what the axes are (docs/expansion.md). Imports only
torch.
"""

from training.workloads.expansion.adamw import RewarmingAdamW as RewarmingAdamW
from training.workloads.expansion.adamw import adamw_scales as adamw_scales
from training.workloads.expansion.adamw import clip_grad_norm as clip_grad_norm
from training.workloads.expansion.adamw import scaled_groups as scaled_groups
from training.workloads.expansion.deepen import block_origins as block_origins
from training.workloads.expansion.deepen import deepen as deepen
from training.workloads.expansion.deepen import deepen_optimizer as deepen_optimizer
from training.workloads.expansion.deepen import evenly_after as evenly_after
from training.workloads.expansion.layout import Layout as Layout
from training.workloads.expansion.tensors import fill as fill
from training.workloads.expansion.tensors import optimizer_state_by_name as optimizer_state_by_name
from training.workloads.expansion.tensors import set_optimizer_state as set_optimizer_state
from training.workloads.expansion.upcycle import upcycle as upcycle
from training.workloads.expansion.upcycle import upcycle_optimizer as upcycle_optimizer
from training.workloads.expansion.verify import Verification as Verification
from training.workloads.expansion.verify import observe as observe
from training.workloads.expansion.verify import verify as verify
from training.workloads.expansion.verify_optimizer import (
    OptimizerVerification as OptimizerVerification,
)
from training.workloads.expansion.verify_optimizer import gradients as gradients
from training.workloads.expansion.verify_optimizer import places as places
from training.workloads.expansion.verify_optimizer import verify_optimizer as verify_optimizer
from training.workloads.expansion.widen import widen as widen
from training.workloads.expansion.widen import widen_optimizer as widen_optimizer
