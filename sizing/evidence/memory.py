"""GPU memory compared with others' measurements of torch.cuda.max_memory_allocated."""

from sizing.evidence.truths import OPTIMIZER_BYTES, Truth, counts, gpu_of, predictable
from sizing.models.constants import MIB, Constants
from sizing.models.fitted import fitted

# The batch sizes that timm's benchmark tries, downwards, until one fits.
LADDER = (512, 384, 256, 192, 128, 96, 64)
# Their code of 2019 kept more of a frozen batch norm; how much more is not known.
_OF_OTHER_CODE = ("torchvision",)


def counted_bytes(truth: Truth, batch: int) -> float:
    """Return the bytes of all tensors at the peak, from parameters to temporaries."""
    count = counts()[truth.model]
    own = count[truth.counted_as]
    parameters = float(count["parameters"])
    trainable = float(count.get("trainable_parameters", parameters))
    state = OPTIMIZER_BYTES[truth.optimizer][1]
    if "peak_bytes_per_sample" in own:  # counted to the peak of backward, gradients included
        return 4 * parameters + state * trainable + batch * float(own["peak_bytes_per_sample"])
    half_copies = 2 if truth.precision == "float16" else 0
    fixed = (4 + half_copies) * parameters + (4 + state) * trainable
    return fixed + batch * float(own["kept_bytes_per_sample"])


def missing_bytes(truth: Truth) -> float:
    """Return the bytes measured beyond the tensors' need: the libraries' workspaces."""
    return truth.measured * 1e9 - counted_bytes(truth, truth.batch)


def calibrating() -> list[Truth]:
    """Return the rows that the workspace is fitted to."""
    return [truth for truth in predictable("memory") if truth.lab not in _OF_OTHER_CODE]


def needed_mib(truth: Truth, batch: int, constants: Constants, *, scale: float = 1.0) -> float:
    """Return the MiB that must be free on the GPU, as in sizing/models/memory.py."""
    convolutions = float(counts()[truth.model].get("convolution_share", 1.0))
    workspace = fitted().workspace_mib * convolutions
    allocated = counted_bytes(truth, batch) / MIB + workspace
    return (allocated * (1 + constants.fragmentation_share) + constants.context_mib) * scale


def largest_batch(truth: Truth, constants: Constants, *, scale: float = 1.0) -> int:
    """Return the largest batch of the ladder that fits the run's GPU; 0 if none does."""
    there = gpu_of(truth).memory_mib
    fitting = (b for b in LADDER if needed_mib(truth, b, constants, scale=scale) <= there)
    return next(fitting, 0)
