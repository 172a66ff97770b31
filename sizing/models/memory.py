"""GPU memory of a stage: the peak of its step's tensors, plus memory outside tensors.

allocated = (peak of the counted step + workspace) * memory_factor
need = allocated * (1 + fragmentation) + context
"""

from dataclasses import dataclass, replace

from sizing.models.constants import MIB, Constants
from sizing.models.fitted import fitted
from sizing.models.footprints import Footprint

# The parts that add up to `GpuMemory.need`.
MEMORY_PARTS = (
    *("parameters", "gradients", "optimizer", "activations"),
    *("workspace", "fragmentation", "context"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """MiB of one stage on one GPU by purpose; `need` is their sum."""

    stage: str
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    fragmentation: float
    context: float
    logits: float  # the part of the activations that the model returns
    usual_need: float | None  # where batches differ in size: the need of an average one

    @property
    def allocated(self) -> float:
        """MiB that torch.cuda.max_memory_allocated would report."""
        tensors = self.parameters + self.gradients + self.optimizer + self.activations
        return tensors + self.workspace

    @property
    def need(self) -> float:
        """MiB that must be free on the GPU."""
        return self.allocated + self.fragmentation + self.context


def gpu_memory(footprint: Footprint, constants: Constants) -> GpuMemory:
    """Return the memory that `footprint` needs on a GPU."""
    scale = constants.memory_factor / MIB
    fixed = footprint.parameter_bytes + footprint.optimizer_bytes
    # The peak may be in forward, before gradients exist; then it does not include them.
    rest = max(0, footprint.peak_bytes - fixed)
    gradients = min(footprint.gradient_bytes, max(0, rest - footprint.activation_bytes))
    # cuDNN's workspace, for which one number is known; matrix products need little.
    workspace = fitted().workspace_mib * footprint.convolution_share * constants.memory_factor
    allocated = footprint.peak_bytes * scale + workspace
    return GpuMemory(
        stage=footprint.stage,
        parameters=footprint.parameter_bytes * scale,
        gradients=gradients * scale,
        optimizer=footprint.optimizer_bytes * scale,
        activations=(rest - gradients) * scale,
        workspace=workspace,
        fragmentation=allocated * constants.fragmentation_share,
        context=constants.context_mib,
        logits=footprint.output_bytes * scale,
        usual_need=_usual_need(footprint, constants),
    )


def _usual_need(footprint: Footprint, constants: Constants) -> float | None:
    if footprint.usual_peak_bytes is None:
        return None
    usual = replace(footprint, peak_bytes=footprint.usual_peak_bytes, usual_peak_bytes=None)
    return gpu_memory(usual, constants).need
