"""A machine's memory: what several runs have reserved of it, and the limit of one process.

Four runs once each read the same dataset into memory, 63 GB in total on a host with 32 GB, and the
machine was unreachable for an hour. Each run, of any user, writes its reservation to a file under a
lock; files of exited processes are ignored. A run that does not fit is refused with the arithmetic.
"""

import fcntl
import importlib
import json
import logging
import os
import resource
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from contract.errors import UserError
from training.durable import MachineError, data_bytes, free_bytes, used_bytes

_log = logging.getLogger(__name__)

_MEBIBYTE = 2**20
# A trainer's own memory besides its data: 0.6 GiB measured on the CPU (training/LOG.md), and a CUDA
# context takes more on the host. Each loader process shares the trainer's by fork.
_PROCESS_MIB = 1024
_LOADER_MIB = 256
# The rest is for the system, the page cache of mapped data, and the unforeseen.
_USABLE_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceRequest:
    """A run's needs on a machine. `gpu_mib` None: all of a GPU's memory, if there is one."""

    run: str
    data_mib: int  # of data read into each process's own memory; mapped files are shared
    loader_workers: int
    threads: int  # of each process
    gpu_mib: int | None = None
    num_processes: int = 1  # the ranks of the run on this machine

    @property
    def host_mib(self) -> int:
        """Host memory of all its processes."""
        each = _PROCESS_MIB + _LOADER_MIB * self.loader_workers + self.data_mib
        return self.num_processes * each

    @property
    def vcpus(self) -> int:
        """Threads that compute at the same time."""
        return self.num_processes * (self.threads + self.loader_workers)

    def arithmetic(self) -> str:
        """Show how `host_mib` is computed."""
        times = f"{self.num_processes} processes, each " if self.num_processes > 1 else ""
        return (
            f"{times}{_PROCESS_MIB} for the process + {self.loader_workers} x {_LOADER_MIB} "
            f"for loaders + {self.data_mib} for its own copy of the data"
            f"{', in total' if times else ' ='} {self.host_mib} MiB"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineCapacity:
    """A machine's free resources; None if the system does not report it."""

    free_host_mib: int | None
    vcpus: int
    gpu_mib: Sequence[int] = ()  # of each GPU
    host_mib: int | None = None  # in total

    @classmethod
    def here(cls, gpu_mib: Sequence[int] = ()) -> "MachineCapacity":
        """Measure this machine now."""
        free = free_bytes()
        return cls(
            free_host_mib=None if free is None else free // _MEBIBYTE,
            vcpus=os.cpu_count() or 1,
            gpu_mib=gpu_mib,
            host_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MEBIBYTE,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reservation:
    """Another run's reservation, and what tells the bytes of it that are in use already."""

    request: ResourceRequest
    used: Callable[[], int] = int


def refuse_oversubscription(
    requests: Sequence[ResourceRequest], others: Sequence[_Reservation], machine: MachineCapacity
) -> None:
    """Raise an error with the arithmetic if these runs together do not fit next to the others.

    MachineError if they would fit on this machine with all of its memory free, else UserError.
    """
    requested = sum(request.host_mib for request in requests)
    if machine.free_host_mib is not None:
        usable = int(machine.free_host_mib * _USABLE_SHARE)
        reserved = sum(other.request.host_mib for other in others)
        # The kernel reads page by page what they use, 20 ms for a GB: asked only if it decides.
        if requested > usable - reserved:
            reserved = sum(max(0, o.request.host_mib - o.used() // _MEBIBYTE) for o in others)
        if requested > (available := usable - reserved):
            each = requests[0]
            num_fitting = max(0, available // each.host_mib)
            fits = machine.host_mib is not None and requested <= machine.host_mib * _USABLE_SHARE
            raise (MachineError if fits else UserError)(
                f"{len(requests)} run(s) need {requested} MiB of memory ({each.arithmetic()} "
                f"each); {machine.free_host_mib} MiB are free, of which {_USABLE_SHARE:.0%} may be "
                f"used and {reserved} MiB are reserved by {len(others)} other run(s): "
                f"{num_fitting} fit; run fewer at once, or let the workload map its data instead "
                "of reading it"
            )
    if machine.gpu_mib:
        _refuse_full_gpu(requests, others, machine)


def too_many_threads(
    requests: Sequence[ResourceRequest], others: Sequence[_Reservation], machine: MachineCapacity
) -> str | None:
    """Return a warning if there are fewer vCPUs than threads, which only slows runs down."""
    all_requests = [*requests, *(other.request for other in others)]
    threads = sum(request.vcpus for request in all_requests)
    if threads <= machine.vcpus:
        return None
    return f"{threads} threads and loaders share {machine.vcpus} vCPUs: each run will be slower"


def _refuse_full_gpu(
    requests: Sequence[ResourceRequest], others: Sequence[_Reservation], machine: MachineCapacity
) -> None:
    """Compare with GPU 0, which every run uses: a run takes GPUs from the first one on."""
    most = max(request.num_processes for request in requests)
    if most > len(machine.gpu_mib):
        raise UserError(
            f"--num-processes is {most}, but this machine has {len(machine.gpu_mib)} GPU(s); use "
            "at most that many, or auto"
        )
    total = machine.gpu_mib[0]
    requested = sum(request.gpu_mib or total for request in requests)
    reserved = sum(other.request.gpu_mib or total for other in others)
    if requested + reserved > total:
        raise (MachineError if requested <= total else UserError)(
            f"{len(requests)} run(s) need {requested} MiB of GPU memory, {len(others)} other "
            f"run(s) have reserved {reserved} MiB, and the GPU has {total} MiB; give each run its "
            "share with --memory-limit-mib, or run fewer at once"
        )


class Reservations:
    """The reservations of this machine's runs, one file each, in a folder that all users share."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir(), "training-reservations")

    @contextmanager
    def reserved(self, request: ResourceRequest, machine: MachineCapacity) -> Iterator[None]:
        """Hold a reservation in this context; raise as `refuse_oversubscription` if none fits.

        If no reservation can be written, the run goes on without one and logs that.
        """
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        others: list[_Reservation] = []
        try:
            with self._locked():
                others += self.others()
                refuse_oversubscription([request], others, machine)
                self._write(name, request)
        except OSError as error:
            _log.warning(f"[room] other runs cannot see what this one needs: {error}")
        if warning := too_many_threads([request], others, machine):
            _log.warning(f"[room] {warning}")
        try:
            yield
        finally:
            with suppress(OSError):
                (self._folder / f"{name}.json").unlink()

    def others(self) -> Iterator[_Reservation]:
        """The reservations of other live runs; files of dead ones are deleted."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                pid, started, request = _parse(path.read_bytes())
            except OSError:
                continue
            except (ValueError, KeyError, TypeError):
                pid, started, request = 0, None, None
            if request is None or started is None or _started(pid) != started:
                # Another user's file is deleted by a later run of that user.
                with suppress(OSError):
                    path.unlink()
            elif pid != os.getpid():
                yield _Reservation(request=request, used=partial(used_bytes, pid))

    def _write(self, name: str, request: ResourceRequest) -> None:
        """Write this process's reservation atomically, and readable by every user."""
        record = {"pid": os.getpid(), "began": _started(os.getpid()), "need": asdict(request)}
        part = self._folder / f".{name}.part"
        part.write_text(json.dumps(record))
        part.chmod(0o644)
        part.replace(self._folder / f"{name}.json")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        # Lock the folder itself: only the user who made a lock file could open it.
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(folder).st_uid == os.getuid():
                # Like /tmp: every user may add files and delete their own.
                os.fchmod(folder, 0o1777)
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _parse(data: bytes) -> tuple[int, str | None, ResourceRequest]:
    """Return process, start time and needs; ValueError, KeyError or TypeError if damaged."""
    record = json.loads(data)
    need = record["need"]
    numbers = [value for name, value in need.items() if name != "run" and value is not None]
    if not isinstance(need["run"], str) or any(
        not isinstance(number, int) or number < 0 for number in numbers
    ):
        raise ValueError("this is not a reservation")
    return int(record["pid"]), record["began"], ResourceRequest(**need)


def _started(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, as ids are reused; None if it exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


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
    # and its libraries, which allocate outside torch: cuBLAS, cuDNN 8 and 9, cuSOLVER, cuSPARSE.
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
                f"use at most {total // _MEBIBYTE}"
            )
        torch.cuda.set_per_process_memory_fraction(mib * _MEBIBYTE / total, device)
        return
    # torch imports this with the first optimizer, and the limit is not meant to cover code.
    importlib.import_module("torch._dynamo")
    # Private writable memory: files mapped for reading, such as datasets, do not count.
    if (used := data_bytes()) is None:
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
