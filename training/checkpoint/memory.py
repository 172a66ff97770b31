"""Host memory: how much is free, and large blocks for copies of a state. Imports torch only."""

import mmap
import os
import resource
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUP = Path("/sys/fs/cgroup")
_HUGE_PAGE = 2 * 1024 * 1024


def available_bytes() -> int | None:
    """Bytes this process can take without swapping or being killed; None if unknown."""
    known = [left for left in (free_bytes(), _limit_bytes_left()) if left is not None]
    return min(known, default=None)


def free_bytes() -> int | None:
    """Bytes free on the machine (or in the unit), ignoring this process's own limit."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAv")), None)
    known = [left for left in (free, _cgroup_bytes_left()) if left is not None]
    return min(known, default=None)


def data_bytes() -> int | None:
    """Private writable memory of this process, which RLIMIT_DATA limits; None off Linux."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmDa")), None)


def _limit_bytes_left() -> int | None:
    """Bytes left below this process's own limit, if it has one."""
    limit, used = resource.getrlimit(resource.RLIMIT_DATA)[0], data_bytes()
    return None if limit == resource.RLIM_INFINITY or used is None else max(0, limit - used)


def _cgroup_bytes_left() -> int | None:
    """Bytes left below the limit of this process's cgroup (a unit's MemoryMax), if any."""
    try:
        path = _OWN_CGROUP.read_text().strip().rpartition("::/")[2]
        folder = _CGROUP / path.lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
        # The kernel drops cached files before it kills anything.
        cached = next((int(x.split()[1]) for x in lines if x.startswith("inactive_file ")), 0)
        return int(limit) - used + cached
    except (OSError, ValueError):
        return None


def view_of(block: Tensor) -> memoryview:
    """The bytes of a block on the host, without a copy."""
    array: Any = block.numpy()
    return memoryview(array)


def open_shared(size: int) -> int:
    """The file descriptor of memory that another process can map; of at least one byte."""
    memory = os.memfd_create("host-copy")
    os.truncate(memory, max(size, 1))
    return memory


def allocate(size: int, device: torch.device, shared: int = -1) -> Tensor:
    """Allocate bytes on the host, aligned to a page; page-locked for copies from a GPU.

    `shared` is a file descriptor of `open_shared`; by default the memory is this process's own.

    The memory is returned to the system with the tensor. Page-locked memory from `torch.empty`
    would be rounded up to a power of two, too much for a copy of a whole state.
    """
    # At least one byte: a mapping cannot be empty.
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if shared < 0 else mmap.MAP_SHARED
    block = mmap.mmap(shared, max(size, 1), flags=kind)
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(block, dtype=torch.uint8)[:size]
    if device.type == "cuda":
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = tensor.data_ptr()
        if int(runtime.cudaHostRegister(address, max(size, 1), 0)) == 0:
            # `block` stays mapped until it is unregistered: the finalizer references it.
            weakref.finalize(tensor, _unregister, runtime, address, block)
    return tensor


def _unregister(runtime: object, address: int, block: mmap.mmap) -> None:
    runtime.cudaHostUnregister(address)  # type: ignore[attr-defined]
