"""Two to eight ranks on one machine: each a process with its own supervisor, which rank 0 starts.

Real are `RankEnvironment.meeting`, `OtherRanks`, `World`, votes, `leaving`, the engine's job (lead
and follow) and order of stages, `Resume`, and the saves of a sharded stage; `collectives.py` stands
for torch.distributed. As systemd does, signals reach rank 0, unless the plan says otherwise.
"""

import json
import math
import subprocess
from collections.abc import Container, Mapping
from contextlib import closing
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from contract.grammar import parse_interval
from contract.keys import checkpoint_prefix
from tests.simulation import collectives
from tests.simulation.bucket import SimulatedStore
from tests.simulation.clock import CLOCK, Event, PoweredOffError, Process, sleep
from tests.simulation.collectives import Meeting
from tests.simulation.machine import Attempt, Host, _Loop
from tests.simulation.plan import SLOWEST, Happening
from tests.simulation.stubs import StateCopies, is_intact, newest_valid, place_of, send_state
from tests.stacks.guard.world import HOUR, MINUTE, Machine
from training.durable.attempt.attempt import AttemptOptions
from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.attempt.supervisor import _PATIENCE, Supervisor
from training.durable.attempt.world import RankEnvironment, World
from training.durable.errors import AttemptEndedError, DivergedError, Divergence, exit_code_of
from training.durable.record.head import CheckpointEntry, Position
from training.durable.record.run import RunConfig
from training.durable.report.receipt import RunResult
from training.durable.save.tensors import resume as resume_file
from training.durable.save.tensors import sharded_saves
from training.durable.save.tensors.checkpointer import Checkpointer
from training.durable.save.tensors.state import STATE, LiveState
from training.durable.store.protocol import Store
from training.durable.store.transfer import FileEntry
from training.engine import attempt as engine
from training.engine.job import RunOptions
from userdata.interruption_handler import REBALANCE

if TYPE_CHECKING:
    from tests.simulation.world import Universe

# Within which an attempt ends that has lost a rank: S3 answers, and faulthandler writes.
LOSS_SECONDS = 60.0
_RUN: Mapping[str, Any] = {"workload": "simulated", "recipe": "laptop", "overrides": {}}


class _RankProcess:
    """What rank 0 has of another rank's process, as subprocess.Popen."""

    def __init__(self, process: Process, leader: Process) -> None:
        self._process = process
        self.stdin: Any = SimpleNamespace(close=self._closed)
        self._pipe = Event()
        CLOCK.start(process, self._end_with_rank_0)
        CLOCK.start(leader.supervisor.host.world.process, lambda: self._die_with(leader))

    def _closed(self) -> None:
        self._pipe.set()

    def _end_with_rank_0(self) -> None:
        self._pipe.wait()
        self._process.end(1)

    def _die_with(self, leader: Process) -> None:
        """Linux kills it once rank 0 has ended, however that was."""
        leader.ended.wait()
        self._process.end(-9)

    def wait(self, timeout: float | None = None) -> int:
        if not self._process.ended.wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        assert self._process.code is not None
        return self._process.code

    def send_signal(self, sig: int) -> None:
        self._process.end(-sig)

    def kill(self) -> None:
        self._process.end(-9)


class RankedHost(Host):
    """A machine of several GPUs, or of one."""

    def __init__(self, world: "Universe", machine: Machine) -> None:
        super().__init__(world, machine)
        plan = world.plan
        self.ranks = CLOCK.luck.choice([1, 2, 4, 8]) if plan.mixes_ranks else plan.ranks
        self.slow: tuple[int, float, float] = (0, 0.0, 1.0)  # a rank, until when, how many times
        self.hanging: dict[int, str] = {}  # a rank, and where it will hang

    def begin(self, trainer: Process) -> int:
        code = RankedAttempt(self, trainer).run()
        if alive := [each.name for each in trainer.ranks if not each.is_dead]:
            self.world.breaks("no rank outlives rank 0", ", ".join(alive))
        return code

    @property
    def rank_processes(self) -> list[Process]:
        return [] if self.trainer is None else [self.trainer, *self.trainer.ranks]

    def judge_rebalance(self) -> None:
        """Rank 0 saves at the next boundary, or two later if only a vote tells it."""
        trainer, step, plan, began = self.trainer, self.step, self.world.plan, CLOCK.now
        votes = 2.2 * plan.step_seconds * (plan.hears == "other")
        sleep(plan.answer_seconds + plan.evaluation_seconds + plan.life.first_step + MINUTE + votes)
        has_ended = self.trainer is not trainer or trainer is None or trainer.ended.is_set()
        is_excused = self.is_excused or self.is_noticed or has_ended
        is_excused |= self.world.diverged_at > began - 3 * plan.step_seconds
        if step is None or is_excused or self.world.was_troubled() or self.world.ended_at:
            return
        if self.world.committed_at < began and step < plan.steps - 2:
            self.world.breaks("a recommendation is followed by a commit", f"of step {step}")

    def recommend_rebalance(self) -> None:
        is_first = REBALANCE not in self.metadata  # EC2 recommends once
        super().recommend_rebalance()
        if is_first and self.world.plan.answer_seconds < HOUR:
            CLOCK.start(self.world.process, self.judge_rebalance)

    def _signal(self, name: str) -> None:
        """systemd signals the main process; a person may signal others as well, or one of them."""
        hears, ranks = self.world.plan.hears, self.rank_processes[1:]
        if hears == "first" or not ranks or name == "SIGTERM":
            super()._signal(name)
            return
        if hears == "other":
            self.is_excused |= name == "SIGUSR1"  # only the votes tell rank 0
            ranks = ranks[-1:]
        else:
            super()._signal(name)
        for process in ranks:
            if not process.is_dead and process.supervisor is not None:
                interruption = process.supervisor.interruption
                act = {
                    "SIGUSR1": partial(interruption.record, "notice"),
                    "SIGUSR2": interruption.recommend_rebalance,
                }[name]
                CLOCK.start(process, act, at=CLOCK.now + CLOCK.luck.uniform(0, 3))

    def reaches(self, other: "RankedHost") -> bool:
        """Whether the network brings what it sends to another host of its attempt (hosts.py)."""
        return True

    def slowness(self, rank: int) -> float:
        slow, until, times = self.slow
        return times if rank == slow and CLOCK.now < until else 1.0

    def hang_if_due(self, rank: int, where: str) -> None:
        if self.hanging.get(rank) == where or (self.hangs and where == "a step"):
            self.hanging.pop(rank, None)
            self.hangs, self.is_excused, self.owed = False, True, 0
            assert self.trainer is not None
            CLOCK.start(self.world.process, partial(self._judge_hang, self.trainer, rank))
            sleep(math.inf)

    def _judge_hang(self, trainer: Process, rank: int) -> None:
        """The watchdog allows for work that takes many times longer than any before.

        For a first step, after training has gone back, ten others are assumed.
        """
        watchdog, known = trainer.supervisor.watchdog, trainer.supervisor.long_work._measured
        longest = max(60.0, *known.values(), 10 * known.get("step", 0.0))
        most = watchdog._limit_seconds + _PATIENCE * longest + LOSS_SECONDS
        has_ended = trainer.ended.wait(most)  # while S3 is away, the word of it takes its time
        if not (has_ended or trainer.paused_until or self.world.was_troubled()):
            self.world.breaks(
                "a rank that hangs ends the attempt", f"rank {rank}: not in {most:.0f} s"
            )

    def judge_loss(self, trainer: Process, rank: int) -> None:
        """A lost rank ends the attempt soon; S3 may make it wait, and a notice has its own end."""
        is_excused = trainer.paused_until > CLOCK.now or self.is_noticed
        if not trainer.ended.wait(LOSS_SECONDS) and not (is_excused or self.world.was_troubled()):
            how = f"rank 0 lives {LOSS_SECONDS:.0f} s after rank {rank}"
            self.world.breaks("a lost rank ends the attempt", how)


def diverge(host: Host, each: Happening) -> None:
    """The step after the one under way will, once or whenever it is computed."""
    if isinstance(host, RankedHost) and host.step is not None and host.trainer is not None:
        world = host.world  # what has been computed before is good
        world.last_bad_step = max(world.last_bad_step, host.step) + 2
        world.bad_steps[world.last_bad_step] = each.how


def happen_to_rank(host: Host, each: Happening) -> None:
    """A rank of a machine ends, hangs or becomes slow."""
    if not isinstance(host, RankedHost) or host.trainer is None or host.trainer.is_dead:
        return
    rank, trainer = int(each.whose) % host.ranks, host.trainer
    if each.how == "slow":
        host.slow = rank, CLOCK.now + each.seconds, SLOWEST
        return
    host.is_excused = True
    host.world.ill.add(host.machine.id)
    if each.how.startswith("hang"):
        host.hanging[rank] = each.how.removeprefix("hang in ")
        return
    host.owed = 0  # nobody is left to answer a notice
    for process in host.rank_processes:
        if process.rank == rank and not process.is_dead:
            process.end(int(each.share))
            CLOCK.start(host.world.process, partial(host.judge_loss, trainer, rank))


class RankedAttempt(Attempt):
    """The trainer's process with the others that it starts."""

    host: RankedHost

    def diverges(self, number: int, step: int) -> bool:
        """Whether a step diverges, for all ranks alike: once, or whenever it is not left out."""
        known, bad = self.process.meeting.diverged, self.world.bad_steps
        if (number, step) not in known:
            known[number, step] = step in bad
            if step in bad:
                self.world.tell(f"{self.host.machine.id[-4:]} step {step} diverges")
                self.world.diverged_at, self.host.owed = CLOCK.now, 0
                self.host.step = min(self.host.step or 0, self.world.committed_step)
            if bad.get(step) == "once":
                del bad[step]
        return known[number, step]

    def lead(self, supervisor: Supervisor) -> int:
        host, process = self.host, self.process
        process.attempt = self
        process.meeting = Meeting(host, host.ranks, is_gpu=self.plan.is_gpu)
        CLOCK.start(self.world.process, lambda: collectives.watch(process))
        meeting = RankEnvironment().meeting(
            supervisor, host.ranks, host.folder, {}, arguments=(), start=self._start
        )
        with meeting as place:
            return self._as_rank(place, supervisor, self.options)

    def supervised(self, process: Process) -> Supervisor:
        supervisor = super().supervised(process)
        if self.plan.is_sharded:  # all ranks send at once
            supervisor.upload_rate = self.plan.upload_rate / self.host.ranks  # type: ignore[attr-defined]
        return supervisor

    def _start(self, variables: Mapping[str, str]) -> _RankProcess:
        own, rank = self.process, int(variables["RANK"])
        process = Process(
            name=f"{own.name}/{rank}", clock_off=own.clock_off, version=own.version, rank=rank,
            meeting=own.meeting, attempt=self,
        )  # fmt: skip
        own.ranks.append(process)
        CLOCK.start(process, lambda: process.end(self._follow(process, variables)))
        CLOCK.start(self.world.process, lambda: collectives.watch(process))
        return _RankProcess(process, own)

    def _follow(self, process: Process, variables: Mapping[str, str]) -> int:
        """A rank above 0, as training/cli/run.py runs it."""
        supervisor = self.supervised(process)
        store = SimulatedStore(self.world, self.host.machine.id)
        store.patience.deadline = supervisor.interruption.deadline
        options = self.attempt_options(store)
        place = RankEnvironment.from_environment(variables)
        try:
            code = exit_code_of(lambda: self._as_rank(place, supervisor, options))
        except PoweredOffError:
            raise
        except Exception as error:
            self.world.breaks("a rank crashed", f"rank {process.rank}: {place_of(error)}")
            return 1
        supervisor.close()
        if code != 75:
            sleep(CLOCK.luck.uniform(0.05, 0.4))  # the interpreter's end
        return code

    def _as_rank(
        self, place: RankEnvironment, supervisor: Supervisor, options: AttemptOptions
    ) -> int:
        """As run_workload does."""
        try:
            world = World(place, torch.device("cuda" if self.plan.is_gpu else "cpu"))
            job = _Job(self, options, world)
            with world.leaving(), closing(job):
                return job.lead(supervisor) if world.leads else job.follow(supervisor)
        except RuntimeError as error:
            own, is_first = CLOCK.process, CLOCK.process is self.process
            if type(error) is not RuntimeError or is_first or not own.meeting.gone:
                raise
            raise AttemptEndedError(str(error)) from error  # Python ends with 1, too


class _Job(engine._WorkloadJob):
    """The engine's job, of one stage that is simulated."""

    def __init__(self, attempt: RankedAttempt, options: AttemptOptions, world: World) -> None:
        own = {each.name: getattr(options, each.name) for each in fields(AttemptOptions)}
        run_options = RunOptions(
            **own,
            **_RUN,
            dataset_uri="",
            interval=parse_interval(attempt.plan.interval),
            nan_skips=6,
        )  # type: ignore[arg-type]
        resolved: Any = SimpleNamespace(workload=SimpleNamespace(placement_fields=frozenset()))
        super().__init__(run_options, resolved, SimpleNamespace(), world, {})  # type: ignore[arg-type]
        self._attempt = attempt

    def run_config(self) -> RunConfig:
        return self._options.run_config(**_RUN, config={}, dataset="d", numerics_key={})


class _Stages(engine.StageSequence):
    """The engine's order, with the simulated stage."""

    def __init__(self, context: Any, resolved: Any, dataset: Any, record: RunConfig) -> None:
        self._context, self._run_config = context, record
        self._store = context.supervisor.hearing(context.store)
        self._skipped_steps, self._snapshot, self._verified = (), None, None
        self._attempt: RankedAttempt = CLOCK.process.attempt

    def _resume(self) -> Position | None:
        position = super()._resume()
        own, step = self._attempt, position.step if position else 0
        generation, size = self._context.generation, self._context.world.size
        own.world.tell(f"{own.host.machine.id[-4:]} g{generation}x{size} from step {step}")
        return position

    def _is_sharded(self, name: str) -> bool:
        return self._attempt.plan.is_sharded and self._context.world.size > 1

    def _train(self, checkpointer: Checkpointer | None, position: Position | None) -> Position:
        self._context.consensus.stop_if_due()
        self._snapshot = None
        start = position or Position(stage="train")
        if start.has_ended:
            return start
        num_shards = self._context.world.size if self._is_sharded("train") else 1
        loop = RankedLoop(self._attempt, self._context, checkpointer, start, num_shards)
        meeting, rank = CLOCK.process.meeting, self._context.world.rank
        meeting.rounds[rank] += 1
        loop.skipped, loop.round = self._skipped_steps, meeting.rounds[rank]
        with closing(loop.policy):
            return loop.run()

    def _result(self, position: Position) -> RunResult:
        self._context.supervisor.last_resort.stand_down()
        self._context.lease.beat()
        return RunResult(steps=position.step, weights_sha256="0" * 64, stages={"train": {}})


class RankedLoop(_Loop):
    """The loop of one rank, with the collectives of its steps and evaluations.

    As the engine's, it reads what a step has found while the next one computes.
    """

    skipped: Container[int] = ()  # steps that diverged
    round: int = 0  # of this attempt
    _unread: Position | None = None  # the last step, of which nothing is known yet
    _diverged: int | None = None  # the first step that did, in this generation

    def _step(self, more: float) -> None:
        step = self.position.step + 1
        if step in self.skipped:
            self._read_last()
            self._advance()
            self._record(self.position)
            return
        self._compute(more)
        self._read_last()
        self._advance()
        self._unread = self.position
        if self._diverged is None and self.attempt.diverges(self.round, step):
            self._diverged = step
        if self._diverged is None:
            self._tell()

    def _read(self) -> None:
        position, self._unread = self._unread, None
        if position is not None and self._diverged is not None and self._diverged <= position.step:
            text = f"step {position.step}: the loss is nan"
            raise DivergedError(Divergence(step=position.step, message=text, loss=math.nan))
        if position is not None:
            self._record(position)

    def _read_last(self) -> None:
        with self.context.consensus.noting_divergence():
            self._read()

    def _answer_notice(self, seconds: float | None) -> None:
        self._read_last()
        super()._answer_notice(seconds)

    def _capture(self) -> LiveState:
        self._read()
        self.context.consensus.refuse_diverged()
        if self._diverged is not None:
            self.attempt.world.breaks("a diverged state is never saved", f"of {self._diverged}")
        return super()._capture()

    def _compute(self, more: float) -> None:
        host, rank, world = self.attempt.host, self.context.world.rank, self.context.world
        number = self.position.stage_step
        seconds = (self.plan.step_seconds + more) * CLOCK.luck.uniform(0.97, 1.02)
        sleep(seconds * host.slowness(rank))
        host.hang_if_due(rank, "a step")
        total = torch.tensor([float(number)])
        if (work := world.sum_later(total)) is not None:
            work.wait()
            if total.item() != number * world.size:
                how = f"rank {rank} at {number} of a sum of {total.item():.0f}"
                self.attempt.world.breaks("all ranks do the same steps", how)

    def _evaluate_if_due(self) -> None:
        if self._is_evaluation_due:
            self._read_last()
            self.context.consensus.go_back_if_diverged()
            if self.context.world.size > 1:
                self.context.world.gather(0.0)  # each rank's own time
        super()._evaluate_if_due()

    def _evaluate(self) -> None:
        self.attempt.host.hang_if_due(self.context.world.rank, "an evaluation")
        super()._evaluate()
        self.context.world.gather({})
        self.context.world.share({})

    def _next_seconds(self, is_first: bool) -> float | None:
        found = super()._next_seconds(is_first)
        measured = self.context.supervisor.long_work.measured_seconds("step")
        return found and max(found, measured or 0.0)


# -- what stands for tensors: files of the right size, and the time to read them


def _read_whole(store: Store, entry: CheckpointEntry, parts: Any = None) -> Any:
    del parts
    state = CLOCK.process.attempt._read(store, entry)
    return resume_file.CheckpointContent(tensors={}, state=state)


def _read_state(store: Store, entry: CheckpointEntry) -> dict[str, Any]:
    about = next(file for file in entry.files if file.name == STATE)
    state: dict[str, Any] = json.loads(_intact(store, checkpoint_prefix(entry.name), about))
    return state


def _read_tensors(store: Store, prefix: str, file: FileEntry) -> dict[str, Any]:
    plan = CLOCK.process.attempt.plan
    left = plan.state_bytes / plan.upload_rate
    while left > 0:
        store.uri  # noqa: B018 - each part that arrives is heard
        sleep(min(left, 30.0))
        left -= 30.0
    _intact(store, prefix, file)
    return {}


def _intact(store: Store, prefix: str, file: FileEntry) -> bytes:
    stored = store.get(prefix + file.name)
    if stored is None or not is_intact(stored.data, file):
        raise DamagedCheckpointError(f"{file.name} is missing or damaged")
    return stored.data


STUBS: tuple[tuple[Any, str, Any], ...] = (
    *collectives.STUBS,
    (engine, "StageSequence", _Stages),
    (resume_file.CheckpointContent, "read", staticmethod(_read_whole)),
    (resume_file, "newest_valid", newest_valid),
    (resume_file, "read_state", _read_state),
    (resume_file, "slices_of", lambda *_: {}),
    (resume_file, "read_tensors", _read_tensors),
    (sharded_saves, "send_state", send_state),
    (sharded_saves, "HostCopies", StateCopies),
    # Polls every 10 ms of virtual time would take most of the real one.
    (sharded_saves, "_POLL_SECONDS", 0.5),
    (sharded_saves, "_LISTEN_SECONDS", 1.0),
    (sharded_saves, "_TICK_SECONDS", 2.0),
)
