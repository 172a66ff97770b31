"""A limit on the memory of this process, so that several runs on one machine cannot hurt others."""

import importlib
import resource

import torch

from training.checkpoint.memory import data_bytes
from training.errors import UserError

_MEBIBYTE = 2**20
_HOST_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough",
    # A thread's stack is memory too, and where that is limited it may be what does not fit.
    "can't start new thread",
)


def limit_memory(mib: int, device: torch.device) -> None:
    """On a GPU: of the device. Elsewhere: what this process may take beyond what it has now."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if mib * _MEBIBYTE > total:
            raise UserError(
                f"--memory-limit-mib {mib} is more than the device has, {total // _MEBIBYTE} MiB"
            )
        torch.cuda.set_per_process_memory_fraction(mib * _MEBIBYTE / total, device)
        return
    # torch's optimizers import it when the first one is made; code is not what is limited here.
    importlib.import_module("torch._dynamo")
    # Private writable memory: files that are mapped for reading, as datasets are, do not count.
    used = data_bytes()
    if used is None:
        raise UserError("--memory-limit-mib needs Linux or a GPU; leave it out on this machine")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + mib * _MEBIBYTE, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory, of the device or of the host, did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(message in str(error) for message in _HOST_MESSAGES)
