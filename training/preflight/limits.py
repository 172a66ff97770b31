"""A limit on this process's memory, so that runs on one machine cannot harm each other."""

import importlib
import resource

import torch

from training.errors import UserError
from training.save.memory import data_bytes

_MEBIBYTE = 2**20
_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough",
    # A thread's stack counts as memory too, and may be what exceeds the limit.
    "can't start new thread",
    # What CUDA itself, its driver, NCCL and Triton say (torch.AcceleratorError, or RuntimeError),
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Cuda failure 2 'out of memory'",
    "Triton Error [CUDA]: out of memory",
    # and its libraries, which allocate beside torch: cuBLAS, cuDNN 8 and 9, cuSOLVER, cuSPARSE.
    "_STATUS_ALLOC_FAILED",
    "_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "CUFFT_ALLOC_FAILED",
)
# What cuBLAS and cuDNN say when their first call finds no memory, but not only then.
_UNCLEAR_MESSAGES = ("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED")
# Less than this is too little for their handles and workspaces.
_HANDLE_BYTES = 256 * 2**20


def limit_memory(mib: int, device: torch.device) -> None:
    """Limit the GPU's memory; without a GPU, what this process may take on top of what it has."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        if mib * _MEBIBYTE > total:
            raise UserError(
                f"--memory-limit-mib {mib} exceeds the device's memory; "
                f"give at most {total // _MEBIBYTE}"
            )
        torch.cuda.set_per_process_memory_fraction(mib * _MEBIBYTE / total, device)
        return
    # torch imports it with the first optimizer; the limit is not meant for code.
    importlib.import_module("torch._dynamo")
    # Private writable memory: files mapped for reading, such as datasets, do not count.
    used = data_bytes()
    if used is None:
        raise UserError("--memory-limit-mib needs Linux or a GPU; omit it on this machine")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + mib * _MEBIBYTE, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host ran out of memory, in every form that torch passes on."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    if any(message in text for message in _MESSAGES):
        return True
    return any(message in text for message in _UNCLEAR_MESSAGES) and _is_gpu_full()


def _is_gpu_full() -> bool:
    try:
        free, _ = torch.cuda.mem_get_info()
    except (RuntimeError, AssertionError):  # the device has failed, or there is none
        return False
    return free < _HANDLE_BYTES
