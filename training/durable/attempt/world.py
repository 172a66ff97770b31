"""Ranks: one process per GPU (gloo on the CPU) that train together, and what they decide together.

Rank 0 leads: it alone holds the lease, commits, and writes metrics and events. Control messages use
their own gloo group and may be pickled: whoever could write to that group could also write
gradients. Nothing else is unpickled. A single process is a world of size 1.
"""

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from contract.errors import Exit, UserError
from contract.grammar import Interval
from training.durable.attempt.notice import Notice, Saves
from training.durable.attempt.ranks import Hosts, OtherRanks, StartRank, interpreters, meet
from training.durable.attempt.supervisor import Supervisor, Work
from training.durable.errors import (
    AttemptEndedError,
    DivergedError,
    Divergence,
    GoBackError,
    InterruptedRunError,
)
from training.durable.record.head import KEEP_NEWEST, Retention
from training.durable.record.lease import Lease, LeaseLostError
from training.durable.record.metrics import Events, Metrics, SilentEvents, SilentMetrics
from training.durable.report.profiler import StepProfiler
from training.durable.store.protocol import Store

_T = TypeVar("_T")

# Rank 0 may wait for a lease, a dataset or an upload; the watchdog, not a timeout, detects hangs.
_TIMEOUT = timedelta(hours=24)
# A connection breaks a moment before its process ends.
_RANK_SECONDS = 1.0
_LEASE_LOST = "lease-lost"  # the note of rank 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """This process's rank and how to meet the others, as torchrun's variables or --hosts say."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    rendezvous: str = "env://"
    cpu_ranks: int = 1  # of a machine without GPUs; in a rehearsal, as many as its size has GPUs
    hosts: Hosts | None = None  # each has the same number of ranks

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str], hosts: Hosts | None = None
    ) -> "RankEnvironment":
        """Read the variables that torchrun or rank 0 has set."""
        return cls(
            rank=int(environment.get("RANK", "0")),
            world_size=int(environment.get("WORLD_SIZE", "1")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            rendezvous=environment.get("TRAINING_RENDEZVOUS", "env://"),
            cpu_ranks=int(environment.get("TRAINING_CPU_RANKS", "1")),
            hosts=hosts,
        )

    @property
    def num_hosts(self) -> int:
        """Number of machines that train together."""
        return len(self.hosts.names) if self.hosts else 1

    def ranks(self, num_processes: int | None) -> int:
        """Return the number of ranks, given the number wanted per machine (None: one per GPU)."""
        if self.world_size > 1:
            return self.world_size
        gpus = torch.cuda.device_count()
        if num_processes and 0 < gpus < num_processes:
            why = f"{num_processes} ranks need a GPU each, and this machine has {gpus}"
            raise UserError(f"{why}; pass --num-processes {gpus}")
        return self.num_hosts * (num_processes or gpus or self.cpu_ranks)

    @contextlib.contextmanager
    def meeting(
        self,
        supervisor: Supervisor,
        num_processes: int | None,
        scratch: Path,
        facts: Mapping[str, Any],
        *,
        arguments: Sequence[str],
        start: StartRank | None,
    ) -> Iterator["RankEnvironment"]:
        """Yield this process's rank; a machine's first one starts its others once all hosts met.

        The facts, and the number of ranks, must be the same on all hosts. A rank is an interpreter
        with this process's `arguments`, unless `start` starts it.
        """
        num_ranks = self.ranks(num_processes)
        if self.world_size > 1 or num_ranks == 1:
            yield self
            return
        num_here = num_ranks // self.num_hosts
        lost: queue.SimpleQueue[tuple[str, Exit]] = queue.SimpleQueue()
        codes, has_ended = list[Exit](), threading.Event()

        def report(why: str, grace_seconds: float = 0.0, code: Exit = Exit.FAILED) -> None:
            codes.append(code)
            code = codes[0]  # what is lost first is the cause of the rest
            lost.put((why, code))
            if self.hosts is not None:
                met.close()  # at once: other hosts' ranks may end with this loss
            time.sleep(grace_seconds)
            supervisor.last_resort.fail(why, code)
            supervisor.last_resort.end_without(why, has_ended, code)

        with contextlib.ExitStack() as stack:
            stack.callback(has_ended.set)
            rank, address = 0, ""
            if self.hosts is not None:
                met = meet(self.hosts, {"ranks": num_here, **facts}, supervisor.wait_for_others)
                stack.callback(met.close)
                # Another host's loss is no failure of this one, which would count it.
                met.watch(partial(report, code=Exit.INTERRUPTED))
                rank, address = self.hosts.number * num_here, met.address
            else:
                scratch.mkdir(parents=True, exist_ok=True)
                file = scratch.absolute() / f"rendezvous-{secrets.token_hex(4)}"
                stack.callback(file.unlink, missing_ok=True)
                address = file.as_uri()
            start = start or interpreters(arguments, scratch)
            siblings = OtherRanks(start, rank, num_here, num_ranks, address)
            stack.callback(siblings.close)
            supervisor.last_resort.when_failing = siblings.show_stacks
            siblings.watch(report)
            stack.callback(supervisor.last_resort.stand_down)
            with _naming_the_lost(lost):
                yield replace(self, rank=rank, world_size=num_ranks, rendezvous=address)


@contextlib.contextmanager
def _naming_the_lost(lost: "queue.SimpleQueue[tuple[str, Exit]]") -> Iterator[None]:
    """Name the lost rank or host where a collective's error names only a connection."""
    try:
        yield
    except RuntimeError as error:
        if not _is_collective(error):
            raise
        try:
            why, code = lost.get(timeout=_RANK_SECONDS)
        except queue.Empty:
            raise error from None
        if code == Exit.INTERRUPTED:
            raise InterruptedRunError(why) from error
        raise AttemptEndedError(f"{why}; the next attempt resumes from the last commit") from error


def _is_collective(error: RuntimeError) -> bool:
    """Whether this may be a collective's error, which names a connection but no reason."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


class World:
    """All ranks of one attempt. Unless noted, all ranks call each method in the same order."""

    def __init__(self, place: RankEnvironment, device: torch.device) -> None:
        self.rank = place.rank
        self.size = place.world_size
        self.begins_host = place.local_rank == 0  # which has a dataset of its own
        self.device = device
        self.hosts = place.hosts
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

        Only the two call it; gloo distinguishes swaps by their tags, NCCL by their order.
        """
        there = dist.P2POp(dist.isend, sent, partner, tag=tag)
        back = dist.P2POp(dist.irecv, received, partner, tag=tag)
        return list(dist.batch_isend_irecv([there, back]))

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return which of the flags are set on any rank."""
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
        """Return the note last posted under this key, or None; does not wait."""
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

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Let the other ranks wait for rank 0 where all end alike: torchrun ends all with one."""
        try:
            yield
        except InterruptedRunError:
            self.close()
            raise
        except LeaseLostError as error:
            # Rank 0 may still delete what it had begun to save, and takes another rank's end for a
            # loss; where it alone has found out, the others hear of it only as a broken connection.
            if self.leads:
                self.post(_LEASE_LOST, str(error))
            else:
                self.close()
            raise
        except RuntimeError as error:
            if self.leads or not _is_collective(error) or (lost := self.note(_LEASE_LOST)) is None:
                raise
            raise LeaseLostError(lost) from error
        self.close()

    def close(self) -> None:
        """Wait for the others (torchrun kills all ranks when one exits) and leave the group."""
        if self.size > 1:
            # A rank that is gone already must not keep this one from leaving.
            with contextlib.suppress(RuntimeError):
                dist.barrier(group=self._group)
            dist.destroy_process_group()


class _Vote(NamedTuple):
    """The agreement of all ranks at a boundary."""

    weights: Sequence[float]  # by share, of all ranks
    is_noticed: bool  # a notice or shutdown has come, to any rank
    must_stop: bool  # and no time is left for the work in progress


class _Consensus:
    """Agreement to stop or to continue; only rank 0 has a lease.

    Every method is called by all ranks in the same order. A single process decides alone.
    """

    def __init__(self, context: "AttemptContext") -> None:
        self._world = context.world
        self._supervisor = context.supervisor
        self._context = context
        self._is_notice_taken = False
        self._divergence: Divergence | None = None  # that this rank has found

    def begin_vote(self, weights: Sequence[float] = ()) -> None:
        """Ask the other ranks ahead of a step boundary, and send the weights of this rank's shares.

        The others have 0 there, so the order of the ranks does not change the sums.
        """
        self._supervisor.watchdog.beat()
        lease = self._context.own_lease
        is_lost = lease is not None and lease.lost.is_set()
        # Rank 0 saves, so it must learn of a recommendation to another machine's rank.
        interruption, extra_time = self._supervisor.interruption, self._supervisor.extra_time
        rebalance = not self._world.leads and interruption.take_rebalance()
        has_diverged = self._divergence is not None
        self._world.begin_sum([extra_time.must_stop, is_lost, has_diverged, rebalance, *weights])

    def end_vote(self) -> _Vote:
        """Return the result at the boundary; LeaseLostError or GoBackError if a rank needs it."""
        must_stop, is_lost, has_diverged, rebalance, *weights = self._world.end_sum()
        if self._world.size == 1:
            # No other rank was asked ahead: what came in the meantime counts too.
            must_stop = self._supervisor.extra_time.must_stop
            has_diverged = self._divergence is not None
            if (lease := self._context.own_lease) is not None:
                lease.check()
        if rebalance and self._world.leads:
            self._supervisor.interruption.recommend_rebalance()
        if is_lost:
            raise LeaseLostError(f"{self._context.store.uri} was taken over by another writer")
        if has_diverged:
            divergence, self._divergence = self._divergence, None
            raise GoBackError(divergence)
        is_noticed = bool(must_stop) or self._supervisor.extra_time.is_granted
        return _Vote(weights, is_noticed, bool(must_stop))

    @contextlib.contextmanager
    def noting_divergence(self) -> Iterator[None]:
        """Note a divergence found in here, perhaps by this rank alone, for the next vote."""
        try:
            yield
        except DivergedError as error:
            # Not the error: its traceback holds the model. The first divergence is the cause.
            self._divergence = self._divergence or error.divergence

    def refuse_diverged(self) -> None:
        """Raise DivergedError if one was noted: no state after it may be saved, however good."""
        if self._divergence is not None:
            raise DivergedError(self._divergence)

    def go_back_if_diverged(self) -> None:
        """Vote at once: what follows is expensive, or cannot be undone."""
        self.begin_vote()
        self.end_vote()

    def stop_if_due(self, *, may_use_extra_time: bool = False) -> None:
        """Raise InterruptedRunError if the attempt must stop; call where that loses only time.

        In the extra time of a notice only work that was started with it in mind continues.
        """
        self.begin_vote()
        vote = self.end_vote()
        if vote.must_stop or (vote.is_noticed and not may_use_extra_time):
            raise InterruptedRunError(self.take_notice().cause)

    def stop_unless_time_for(self, work: Work) -> None:
        """Like `stop_if_due`, but continue if `work`, which commits by itself, still fits."""
        self.begin_vote()
        if self.end_vote().is_noticed:
            seconds = self._supervisor.long_work.measured_seconds(work)
            self._supervisor.extra_time.answer(self, seconds, Saves())

    def all_agree(self, is_in_favor: bool) -> bool:
        """Whether every rank is in favor."""
        return all(self._world.gather(is_in_favor))

    def take_notice(self) -> Notice:
        """Return the notice, for the main thread to answer in place of the last resort.

        The first call writes the event.
        """
        self._supervisor.last_resort.stand_down()
        self._supervisor.interruption.record("notice")  # no-op unless only another rank has it
        notice = self._supervisor.interruption.notice
        assert notice is not None
        if not self._is_notice_taken:
            self._is_notice_taken = True
            left, whole = round(notice.seconds_left, 3), round(notice.seconds, 3)
            self._context.events.emit(
                "notice", cause=notice.cause, seconds_left=left, notice_seconds=whole
            )
        return notice

    def leave_to_last_resort(self, notice: Notice) -> None:
        """Have the last resort watch again: it stops what takes longer than the notice."""
        self._supervisor.last_resort.watch_again(notice)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptContext:
    """One attempt as its stages see it; ranks above 0 have no lease, and silent records."""

    store: Store
    own_lease: Lease | None = None
    metrics: Metrics = field(default_factory=SilentMetrics)
    events: Events = field(default_factory=SilentEvents)
    supervisor: Supervisor
    interval: Interval
    retention: Retention = KEEP_NEWEST
    scratch: Path
    world: World
    usd_per_hour: float | None = None
    planned_life_seconds: float = 0.0  # between interruptions, by the account's own runs
    planned_evaluations: float = 0.0  # seconds for each second of steps
    profiler: StepProfiler | None = None
    artifacts: Store | None = None  # where runs share derived data
    numerics: Mapping[str, Any] = field(default_factory=dict)  # this machine's key
    consensus: _Consensus = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "consensus", _Consensus(self))

    @property
    def lease(self) -> Lease:
        """Rank 0's right to write the run's state."""
        assert self.own_lease is not None, "only rank 0 holds the lease"
        return self.own_lease

    @property
    def generation(self) -> int:
        """This attempt's number, from 1."""
        return self.lease.head.generation

    def meter_text(self) -> str:
        """Format GPU memory if there is a GPU, dollars if there is a price, after a comma."""
        parts = []
        if torch.cuda.is_available():
            parts.append(f"GPU memory peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
        if (price := self.usd_per_hour) is not None:
            dollars = (time.monotonic() - self.supervisor.began) / 3600 * price
            parts.append(f"{dollars:.4f} dollars so far (this attempt, {price:g}/h)")
        return "".join(f", {part}" for part in parts)
