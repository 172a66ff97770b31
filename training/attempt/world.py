"""Ranks: one process per GPU (gloo on the CPU) that train one model together.

Rank 0 leads: it alone holds the lease, commits, and writes metrics and events. Control messages use
a gloo group of their own, and may be pickled: whoever could write into that group could as well
write gradients. Nothing else is unpickled. A single process is a world of size 1.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

_T = TypeVar("_T")

# A step's micro-batches, in as many contiguous shares; and the numbers of ranks that have whole
# ones, for which sums do not depend on the number (training/engine/reduction.py).
SHARES = 8
RANKS = (1, 2, 4, 8)

# Rank 0 may wait for a lease, a dataset or an upload; the watchdog, not a timeout, detects hangs.
_TIMEOUT = timedelta(hours=24)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """This process's rank and how to meet the others, from torchrun's environment variables."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    rendezvous: str = "env://"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "RankEnvironment":
        """Read the variables that torchrun or rank 0 has set."""
        return cls(
            rank=int(environment.get("RANK", "0")),
            world_size=int(environment.get("WORLD_SIZE", "1")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            rendezvous=environment.get("TRAINING_RENDEZVOUS", "env://"),
        )

    def ranks(self, num_processes: int | None) -> int:
        """Number of ranks, given the requested number on this machine (None: one per GPU)."""
        if self.world_size > 1:
            return self.world_size
        return num_processes or max(1, torch.cuda.device_count())


class World:
    """All ranks of one attempt. Unless noted, all ranks call each method in the same order."""

    def __init__(self, place: RankEnvironment, device: torch.device) -> None:
        self.rank = place.rank
        self.size = place.world_size
        self.device = device
        self._pending: Tensor | Sequence[float] | None = None
        self._work: dist.Work | None = None
        self._group: dist.ProcessGroup | None = None
        self._notes: PrefixStore | None = None
        if self.size > 1:
            handshake = rendezvous(place.rendezvous, self.rank, self.size, timeout=_TIMEOUT)
            store, _, _ = next(handshake)
            store.set_timeout(_TIMEOUT)
            self._notes = PrefixStore("notes", store)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("group", store),
                rank=self.rank,
                world_size=self.size,
                timeout=_TIMEOUT,
            )
            group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def begin_sum(self, values: Sequence[float]) -> None:
        """Start summing numbers over the ranks while the step continues; one sum at a time."""
        self._pending = values
        if self.size > 1:
            self._pending = torch.tensor(values, dtype=torch.float64)
            self._work = dist.all_reduce(self._pending, group=self._group, async_op=True)

    def end_sum(self) -> list[float]:
        """Wait for the sums that `begin_sum` started."""
        assert self._pending is not None
        if self._work is not None:
            self._work.wait()
        pending, self._pending, self._work = self._pending, None, None
        return pending.tolist() if isinstance(pending, Tensor) else list(pending)

    def sum_later(self, values: Tensor) -> dist.Work | None:
        """Start summing a tensor on the device in place; None in a world of size 1."""
        return dist.all_reduce(values, async_op=True) if self.size > 1 else None

    def swap(self, sent: Tensor, received: Tensor, partner: int, tag: int) -> list[dist.Work]:
        """Begin to send a tensor to one other rank, and to receive one that this rank sends.

        Only the two call it; gloo tells swaps with different tags apart, NCCL goes by their order.
        """
        there = dist.P2POp(dist.isend, sent, partner, tag=tag)
        back = dist.P2POp(dist.irecv, received, partner, tag=tag)
        return list(dist.batch_isend_irecv([there, back]))

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Which of the flags are set on any rank."""
        found = torch.tensor(flags, dtype=torch.uint8)
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in found.tolist()]

    def share(self, value: _T) -> _T:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        shared: _T = box[0]
        return shared

    def share_tensors(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Return rank 0's CPU tensors on every rank, sent one by one; other ranks pass None."""
        if self.size == 1:
            assert tensors is not None
            return dict(tensors)
        shapes = {n: (t.shape, t.dtype) for n, t in tensors.items()} if tensors is not None else {}
        shared: dict[str, Tensor] = {}
        for name, (shape, dtype) in self.share(shapes).items():
            tensor = tensors[name] if tensors is not None else torch.empty(shape, dtype=dtype)
            # As bytes: gloo has neither bfloat16 nor the smaller float types.
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=self._group)
            shared[name] = tensor
        return shared

    def gather(self, value: _T) -> list[_T]:
        """Return all ranks' values, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def share_flag(self, value: bool) -> bool:
        """Return rank 0's flag on every rank; cheaper than `share`."""
        if self.size == 1:
            return value
        box = torch.tensor(int(value))
        dist.broadcast(box, src=0, group=self._group)
        return bool(box)

    def post(self, key: str, text: str) -> None:
        """Leave a note for the other ranks; for any thread, in any order."""
        if self._notes is not None:
            self._notes.set(key, text)

    def note(self, key: str) -> str | None:
        """The note last posted under this key, or None; does not wait."""
        if self._notes is None or not self._notes.check([key]):
            return None
        text: str = self._notes.get(key).decode()
        return text

    def share_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers to every rank, as a checkpoint has them."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            # One message for all buffers of a type.
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, src=0)
            pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.copy_(piece.view_as(buffer))

    def close(self) -> None:
        """Wait for the others (torchrun kills all ranks when one exits) and leave the group."""
        if self.size > 1:
            # A rank that is gone already must not keep this one from leaving.
            with contextlib.suppress(RuntimeError):
                dist.barrier(group=self._group)
            dist.destroy_process_group()
