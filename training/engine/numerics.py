"""The numerics key: everything besides the seed that changes the bits of a result."""

import os
import subprocess
from collections.abc import Mapping
from typing import Any

import torch


def configure(*, num_threads: int, deterministic: bool, local_rank: int = 0) -> torch.device:
    """Set threads and determinism before any work; return this process's device."""
    torch.set_num_threads(num_threads)
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        # cuBLAS reads it with its first handle; without it torch refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Otherwise Inductor chooses kernels by timing them.
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
        torch.backends.cudnn.benchmark = False
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def numerics_key(
    device: torch.device,
    *,
    world: int,
    deterministic: bool,
    stages: Mapping[str, Mapping[str, Any]],
    code: str,
) -> dict[str, Any]:
    """The key as JSON; equal keys mean equal bits (on a GPU: if `deterministic` is true)."""
    key: dict[str, Any] = {
        "torch": torch.__version__,
        "device": device.type,
        "threads": torch.get_num_threads(),
        "world": world,
        "deterministic": deterministic,
        "stages": {name: dict(values) for name, values in stages.items()},
        "code": code,
    }
    if device.type == "cuda":
        key |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "gpu": torch.cuda.get_device_name(device),
            "driver": _driver_version(),
        }
    else:
        key |= {"cpu_capability": torch.backends.cpu.get_cpu_capability()}
    return key


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.splitlines()[0].strip() if result.stdout else "unknown"
