"""Peak rates of each GPU model, the denominators of the step-time model, with their sources.

Reads gpus.csv next to it. Compute peaks are dense, in TFLOP/s; only the A10G's were measured.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sizing.csv_rows import read_rows
from sizing.figures import Basis

GPUS_FILE = Path(__file__).with_name("gpus.csv")
# The catalogue has one name for the 40 GB and the 80 GB card.
_A100_80GB_MIB = 81_920
_HALF = ("float16", "bfloat16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Peak rates and memory of one GPU model."""

    name: str
    memory_mib: int
    tensor_tflops: float
    tf32_tflops: float
    fp32_tflops: float
    bandwidth_gb_per_second: float
    host_copy_gb_per_second: float
    has_bfloat16: bool
    basis: Basis
    source: str

    def peak_flops(self, precision: str) -> float:
        """Return the highest FLOP/s that matrix products of `precision` reach."""
        if precision == "bfloat16" and not self.has_bfloat16:
            return self.fp32_tflops * 1e12
        if precision in _HALF:
            return self.tensor_tflops * 1e12
        if precision == "tf32":
            return self.tf32_tflops * 1e12
        if precision == "float32":
            return self.fp32_tflops * 1e12
        raise ValueError(
            f"precision {precision!r} is unknown; known are float32, tf32, bfloat16, float16"
        )

    def relative_speed(self, other: "Gpu", precision: str = "float16") -> float:
        """Return its speed relative to another's: the lower ratio of bandwidth and of peak."""
        return min(
            self.bandwidth_gb_per_second / other.bandwidth_gb_per_second,
            self.peak_flops(precision) / other.peak_flops(precision),
        )


@cache
def gpus(path: Path = GPUS_FILE) -> dict[str, Gpu]:
    """Return all GPU models of a file by name."""
    return {gpu.name: gpu for gpu in read_rows(path, Gpu)}


def find_gpu(name: str, memory_mib: int = 0) -> Gpu:
    """Return the GPU that the catalogue calls `name`; one without peaks is a ValueError."""
    if name == "NVIDIA A100" and memory_mib >= _A100_80GB_MIB:
        name = "NVIDIA A100 80GB"
    found = gpus().get(name)
    if found is None:
        raise ValueError(
            f"no compute peak or bandwidth is known for {name or 'a size without a GPU'}; "
            f"known are {', '.join(gpus())}: add it to sizing/catalogue/gpus.csv"
        )
    return found
