"""Growth that preserves the function: dense to experts, wider, deeper, on any model's state_dict.

Pure functions of a state and a layout that says what the axes are (docs/expansion.md). Imports only
torch.
"""

from training.workloads.expansion.adamw import RewarmingAdamW as RewarmingAdamW
from training.workloads.expansion.adamw import adamw_scales as adamw_scales
from training.workloads.expansion.adamw import clip_grad_norm as clip_grad_norm
from training.workloads.expansion.adamw import scaled_groups as scaled_groups
from training.workloads.expansion.grow import block_origins as block_origins
from training.workloads.expansion.grow import deepen as deepen
from training.workloads.expansion.grow import deepen_optimizer as deepen_optimizer
from training.workloads.expansion.grow import evenly_after as evenly_after
from training.workloads.expansion.grow import upcycle as upcycle
from training.workloads.expansion.grow import upcycle_optimizer as upcycle_optimizer
from training.workloads.expansion.grow import widen as widen
from training.workloads.expansion.grow import widen_optimizer as widen_optimizer
from training.workloads.expansion.layout import Layout as Layout
from training.workloads.expansion.layout import fill as fill
from training.workloads.expansion.layout import optimizer_state_by_name as optimizer_state_by_name
from training.workloads.expansion.layout import set_optimizer_state as set_optimizer_state
from training.workloads.expansion.verify import OptimizerVerification as OptimizerVerification
from training.workloads.expansion.verify import Verification as Verification
from training.workloads.expansion.verify import gradients as gradients
from training.workloads.expansion.verify import observe as observe
from training.workloads.expansion.verify import places as places
from training.workloads.expansion.verify import verify as verify
from training.workloads.expansion.verify import verify_optimizer as verify_optimizer
