"""Host memory: how much is free, and large blocks for copies of a state."""

import contextlib
import errno
import logging
import mmap
import os
import resource
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.durable.save.snapshots.processes import living_below

_log = logging.getLogger(__name__)

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
    free = _bytes_in(_MEMINFO, "MemAvailable:")
    known = [left for left in (free, _cgroup_bytes_left()) if left is not None]
    return min(known, default=None)


def data_bytes() -> int | None:
    """Private writable memory of this process, which RLIMIT_DATA limits; None off Linux."""
    return _bytes_in(_STATUS, "VmData:")


def used_bytes(pid: int) -> int:
    """Memory of a run's processes that no other can get; what they share counts once."""
    try:
        used = _bytes_of(pid, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:")
    except OSError:  # another user's: what its processes share is not known
        with contextlib.suppress(OSError):
            return _bytes_of(pid, "status", "RssAnon:", "RssShmem:")
        return 0
    for child in living_below(pid) - {pid}:
        with contextlib.suppress(OSError):  # it has just ended
            used += _bytes_of(child, "smaps_rollup", "Pss_Anon:", "Pss_Shmem:")
    return used


def page_lock(address: int, size: int, device: torch.device) -> Callable[[], None] | None:
    """Page-lock memory and return a function to undo it; None, with a warning, if refused."""
    # A new thread's device is GPU 0, where every rank would open a context.
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(address, size, 0)
        if int(error) == 0:
            return partial(_unlock, address, device)
        # CUDA keeps the error for the next check of a kernel launch. Make it this one.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    why = runtime.cudaGetErrorString(error)
    _log.warning(
        "[memory] %d MB of host memory could not be page-locked (%s); copies to and from it "
        "take longer",
        size // 10**6,
        why,
    )
    return None


def _bytes_of(pid: int, file: str, *names: str) -> int:
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(names))


def _bytes_in(path: Path, name: str) -> int | None:
    """Read a value in kB from a file of /proc, as bytes; None if it is not there."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in path.read_text().splitlines())
        return next((int(words[1]) * 1024 for words in lines if words[:1] == [name]), None)
    return None


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
    """Return a file descriptor of memory that another process can map, at least one byte."""
    memory = os.memfd_create("host-copy")
    os.truncate(memory, max(size, 1))
    return memory


def allocate(size: int, device: torch.device, shared: int = -1) -> Tensor:
    """Allocate bytes on the host, aligned to a page; page-locked for copies from a GPU.

    `shared` is a file descriptor of `open_shared`; by default the memory is this process's own.

    The memory is returned to the system with the tensor, and forked children do not get it.
    Page-locked memory from `torch.empty` would be rounded up to a power of two, too much for a copy
    of an entire state.
    """
    # At least one byte: a mapping cannot be empty.
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if shared < 0 else mmap.MAP_SHARED
    try:
        block = mmap.mmap(shared, max(size, 1), flags=kind)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        # Reported like any other lack of memory: neither a file nor the store is at fault.
        raise MemoryError(f"{size} bytes of host memory: {error.strerror}") from error
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    if hasattr(mmap, "MADV_DONTFORK"):
        # A fork copies page-locked memory: every loader worker would get a copy of the state.
        block.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(block, dtype=torch.uint8)[:size]
    unlock = page_lock(tensor.data_ptr(), max(size, 1), device) if device.type == "cuda" else None
    # `block` stays mapped until it is unlocked: the finalizer references it.
    weakref.finalize(tensor, _release, block, os.getpid(), unlock)
    return tensor


# Blocks of the process that this one was forked from; they are not mapped here.
_not_mapped_here: list[mmap.mmap] = []


def _release(block: mmap.mmap, owner: int, unlock: Callable[[], None] | None) -> None:
    if os.getpid() != owner:
        # Unmapping would hit whatever this forked child has at these addresses by now.
        _not_mapped_here.append(block)
    elif unlock is not None:
        unlock()


def _unlock(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        runtime.cudaHostUnregister(address)
