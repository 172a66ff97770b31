"""Room for several runs on one machine: what this one needs, what others reserved, what is there.

Four runs once read the same dataset into memory each, 63 GB in all on a host of 32, and the machine
was gone for an hour. Each run writes what it reserves to a file under a lock; the files of
processes that have ended are ignored. Where the sum does not fit, a run is refused with the sum.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from training.checkpoint.memory import free_bytes
from training.errors import UserError

_MEBIBYTE = 2**20
# A trainer's own memory beside its data: 0.6 GiB was measured on the CPU (training/LOG.md), and a
# CUDA context has more on the host. Each loader process shares the trainer's by fork.
PROCESS_MIB = 1024
LOADER_MIB = 256
# The rest is for the system, the page cache of mapped data, and what nobody foresaw.
_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceRequest:
    """What one run takes of a machine. `gpu_mib` None: all of a GPU's memory, or there is none."""

    run: str
    data_mib: int  # of the dataset, read into the process's own memory; mapped files are shared
    loader_workers: int
    threads: int  # of each process
    gpu_mib: int | None = None
    num_processes: int = 1  # the ranks of the run on this machine

    @property
    def host_mib(self) -> int:
        """All of its own memory on the host."""
        each = PROCESS_MIB + LOADER_MIB * self.loader_workers + self.data_mib
        return self.num_processes * each

    @property
    def vcpus(self) -> int:
        """Threads that compute at once."""
        return self.num_processes * (self.threads + self.loader_workers)

    def arithmetic(self) -> str:
        """How `host_mib` comes about."""
        times = f"{self.num_processes} processes, each " if self.num_processes > 1 else ""
        return (
            f"{times}{PROCESS_MIB} for the process + {self.loader_workers} x {LOADER_MIB} "
            f"for loaders + {self.data_mib} for its own copy of the data"
            f"{': together' if times else ' ='} {self.host_mib} MiB"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineCapacity:
    """What there is; None where the system does not say."""

    free_host_mib: int | None
    vcpus: int
    gpu_mib: Sequence[int] = ()  # of each GPU

    @classmethod
    def here(cls, gpu_mib: Sequence[int] = ()) -> "MachineCapacity":
        """This one, now."""
        free = free_bytes()
        return cls(
            free_host_mib=None if free is None else free // _MEBIBYTE,
            vcpus=os.cpu_count() or 1,
            gpu_mib=gpu_mib,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """What another run has reserved and how much of it it has already taken."""

    need: ResourceRequest
    used_mib: int = 0


def refuse_oversubscription(
    needs: Sequence[ResourceRequest], others: Sequence[Reservation], machine: MachineCapacity
) -> None:
    """Raise UserError with the sum if these runs, all at once, do not fit beside the others."""
    to_come = sum(max(0, held.need.host_mib - held.used_mib) for held in others)
    wanted = sum(need.host_mib for need in needs)
    if machine.free_host_mib is not None:
        room = int(machine.free_host_mib * _SHARE) - to_come
        if wanted > room:
            each = needs[0]
            fit = max(0, room // each.host_mib)
            raise UserError(
                f"{len(needs)} run(s) need {wanted} MiB of memory ({each.arithmetic()} each); "
                f"{machine.free_host_mib} MiB are free, of which {_SHARE:.0%} may be taken and "
                f"{to_come} MiB are reserved by {len(others)} other run(s): {fit} fit; run fewer "
                "at once, or let the workload map its data instead of reading it"
            )
    if machine.gpu_mib:
        _refuse_full_gpu(needs, others, machine)


def too_many_threads(
    needs: Sequence[ResourceRequest], others: Sequence[Reservation], machine: MachineCapacity
) -> str | None:
    """A sentence if there are fewer vCPUs than threads: slower, but nothing breaks."""
    threads = sum(need.vcpus for need in needs) + sum(held.need.vcpus for held in others)
    if threads <= machine.vcpus:
        return None
    return f"{threads} threads and loaders share {machine.vcpus} vCPUs: each run will be slower"


def _refuse_full_gpu(
    needs: Sequence[ResourceRequest], others: Sequence[Reservation], machine: MachineCapacity
) -> None:
    """All runs are on GPU 0: the trainer takes as many GPUs as there are, from the first on."""
    most = max(need.num_processes for need in needs)
    if most > len(machine.gpu_mib):
        raise UserError(
            f"--num-processes is {most}, and this machine has {len(machine.gpu_mib)} GPU(s); give "
            "at most as many, or auto"
        )
    total = machine.gpu_mib[0]
    wanted = [need.gpu_mib or total for need in needs]
    held = [held.need.gpu_mib or total for held in others]
    if sum(wanted) + sum(held) > total:
        raise UserError(
            f"{len(needs)} run(s) want {sum(wanted)} MiB of GPU memory, {len(held)} other run(s) "
            f"have reserved {sum(held)} MiB, the GPU has {total} MiB; give each run its part with "
            "--memory-limit-mib, or run fewer at once"
        )


class Reservations:
    """Files of what the runs of this machine have reserved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def reserved(self, need: ResourceRequest, machine: MachineCapacity) -> Iterator[None]:
        """Hold a reservation while the run goes on; UserError where there is no room for it."""
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
        with self._locked():
            others = list(self.others())
            refuse_oversubscription([need], others, machine)
            record = {"pid": os.getpid(), "began": _began(os.getpid()), "need": asdict(need)}
            path.write_text(json.dumps(record))
        warning = too_many_threads([need], others, machine)
        if warning:
            print(f"[room] {warning}", flush=True)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def others(self) -> Iterator[Reservation]:
        """What runs that live have reserved; files of dead ones are removed."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                record = json.loads(path.read_text())
                pid, began = int(record["pid"]), record["began"]
                need = ResourceRequest(**record["need"])
            except (OSError, ValueError, KeyError, TypeError):
                path.unlink(missing_ok=True)
                continue
            if began is None or _began(pid) != began:
                path.unlink(missing_ok=True)
            elif pid != os.getpid():
                yield Reservation(need=need, used_mib=_used_mib(pid))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _began(pid: int) -> str | None:
    """When a process began, in clock ticks since boot: its id may be used again. None: it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _used_mib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kib = next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)
    return kib // 1024
