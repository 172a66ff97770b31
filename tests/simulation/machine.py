"""One machine: its boot, services and handler, and the trainer's real attempt over a stubbed GPU.

Stubbed are arithmetic (a step is time that passes), tensors (a state is a size) and the shell
scripts of userdata/, whose decisions `_Service` repeats. All else that decides is the project's.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from contract.grammar import parse_interval
from contract.keys import EVENTS, checkpoint_prefix, progress_key
from contract.progress import progress_record
from rehearsal.machines.services import load_units
from tests.simulation.bucket import GuardService, SimulatedStore
from tests.simulation.clock import CLOCK, Event, PoweredOffError, Process, sleep
from tests.simulation.ends import Ends
from tests.simulation.shortcuts import QuietPings
from tests.simulation.stubs import SizedState, is_intact, mixed_ids, newest_valid, place_of
from tests.simulation.versions import OLDER
from tests.stacks.guard.world import MINUTE, Machine
from training.durable.attempt.attempt import AttemptOptions, HeldRun, run_attempt
from training.durable.attempt.resume_point import DamagedCheckpointError, read_twice
from training.durable.attempt.supervisor import Supervisor
from training.durable.attempt.world import AttemptContext, RankEnvironment, World
from training.durable.errors import InterruptedRunError, exit_code_of
from training.durable.record.head import CheckpointEntry, Position, Retention
from training.durable.record.run import RunConfig
from training.durable.report.receipt import RunResult
from training.durable.save.tensors import checkpointer as checkpointer_file
from training.durable.save.tensors.checkpointer import Checkpointer
from training.durable.save.tensors.policy import CheckpointPolicy
from training.durable.save.tensors.state import LiveState
from training.durable.store.protocol import Store
from training.engine.step_log import Pace, TimesSoFar, evaluations_ahead
from userdata.interruption_handler import NOTICE, POLL_SECONDS, REBALANCE, InterruptionHandler

if TYPE_CHECKING:
    from tests.simulation.world import Universe

TTL_SECONDS = 30.0  # of the lease (training/cli/run.py)
WATCHDOG_SECONDS = 600.0
UNIT = load_units(Path(__file__).parents[2] / "userdata/units")["training.service"]
_CPU = torch.device("cpu")
_EVALUATION_PIECE = 30.0
_WEIGHTS = (1.0,) * 8  # of a step's shares (training/engine/reduction.py)


class Host(Ends):
    """What runs on one machine."""

    def __init__(self, world: "Universe", machine: Machine) -> None:
        self.world, self.machine = world, machine
        drift = CLOCK.luck.uniform(-2, 2) + world.clock_off
        self.process = Process(name=machine.id, clock_off=drift, supervisor=self)
        self.folder: Path = world.folder / machine.id
        self.metadata: dict[str, str] = {}
        self.changed = Event()
        self.spool: list[tuple[str, bytes]] = []
        self.spooled = Event()
        self.trainer: Process | None = None
        self.pings: QuietPings | None = None  # of its watchdog
        self.hangs = self.is_stopping = self.is_noticed = False
        self.told_seconds = math.inf  # how long before its end it had a notice
        self.idles_since = math.inf  # it trains no more
        self.step: int | None = None  # what its trainer has reached
        self.saved_at = -math.inf  # when its script last ended a save
        self.owed, self.owed_until = 0, 0.0  # what a notice leaves time to save, and until when
        self.fault = ""  # what the next attempt meets
        self.attempt: type[Attempt] = Attempt  # or a program's
        self.disk: Any = None  # of a program's folder
        self.is_excused = False  # the next failed attempt is no fault of the trainer
        self.cli = {
            name: GuardService(world=world, who=machine.id, connect_seconds=5, read_seconds=32)
            for name in ("ec2", "s3", "autoscaling", "ssm")
        }

    def start(self) -> None:
        CLOCK.start(self.process, self._boot)

    def begin(self, trainer: Process) -> int:
        return self.attempt(self, trainer).run()

    @property
    def seems_to_save(self) -> bool:
        """Whether its script saved in place just now, which may be the middle of a save."""
        habit = self.world.plan.program
        if habit is None or habit.is_whole or habit.handler not in ("exit", "save"):
            return False
        return CLOCK.now - self.saved_at < habit.quiet_seconds / 5 + habit.look_seconds + 1.0

    # -- from outside

    def power_off(self) -> None:
        self.process.end()
        if self.trainer is not None:
            self.trainer.end()

    def notice(self, seconds: float) -> None:
        """EC2's two minutes, or what is left of them."""
        when = datetime.fromtimestamp(CLOCK.now + seconds, UTC)
        self.metadata[NOTICE] = json.dumps(
            {"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")}
        )
        self.changed.set()

    def recommend_rebalance(self) -> None:
        self.metadata[REBALANCE] = json.dumps({"noticeTime": "now"})
        self.changed.set()

    def shut_down(self) -> None:
        """EC2 ends it: systemd stops the services, the trainer first."""
        if self.is_stopping:
            return
        self.is_stopping = True
        trainer = self.trainer

        def stop() -> None:
            if trainer is not None and not trainer.is_dead:
                step, is_excused = self.step or 0, self.seems_to_save
                self._signal("SIGTERM")
                has_ended = trainer.ended.wait(UNIT.stop_timeout_seconds) and trainer.code == 75
                if has_ended and not is_excused:
                    self.world.judge_shutdown(self.machine, step)
            self.power_off()

        CLOCK.start(self.world.process, stop)

    def pause(self, seconds: float) -> None:
        if self.pings is not None:
            self.pings.pause()
        for process in self.processes:
            process.paused_until = max(process.paused_until, CLOCK.now + seconds)

    @property
    def processes(self) -> list[Process]:
        """Its own, its trainer's, and a program's."""
        trainer = self.trainer
        return [self.process, *([trainer, *trainer.ranks, *trainer.children] if trainer else [])]

    # -- events and signals

    def leave_event(self, name: str, status: str, **fields: Any) -> None:
        now = datetime.fromtimestamp(CLOCK.now + self.process.clock_off, UTC)
        event = {
            "time": now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "instance_id": self.machine.id,
            "name": name,
            "status": status,
            **fields,
        }
        key = f"{EVENTS}{now:%Y%m%dT%H%M%S.%fZ}-{self.machine.id}-{name}.json"
        self.spool.append((key, json.dumps(event).encode()))
        self.spooled.set()

    def _send_events(self) -> None:
        """As training-events.service does."""
        while True:
            self.spooled.wait()
            sleep(2.8)
            self.send_once()

    def send_once(self) -> None:
        self.spooled.clear()
        while self.spool:
            key, data = self.spool[0]
            try:
                self._s3("put_object", Key=self.world.prefix + key, Body=data)
                self.spool.pop(0)
                if "-boot-" in key:
                    self.world.has_progressed(self.machine, "boot")
            except Exception:
                sleep(5)
                self.spooled.set()
                return

    def systemctl(self, command: Sequence[str]) -> Any:
        name = next(each for each in command if each.startswith("--signal="))
        self._signal(name.partition("=")[2])
        return SimpleNamespace(returncode=0, stderr="")

    def _signal(self, name: str) -> None:
        trainer = self.trainer
        if trainer is None or trainer.is_dead or trainer.supervisor is None:
            return  # run_training.sh ignores it, and the trainer reads the file
        interruption = trainer.supervisor.interruption
        act = {
            "SIGUSR1": lambda: interruption.record("notice"),
            "SIGUSR2": interruption.recommend_rebalance,
            "SIGTERM": lambda: interruption.record("shutdown"),
        }[name]

        def hear() -> None:
            act()
            if trainer.program is not None:
                trainer.program.poke()

        CLOCK.start(trainer, hear)

    # -- a boot, and the services after it

    def _boot(self) -> None:
        world, life = self.world, self.world.plan.life
        if world.is_mute(self.machine):
            return
        CLOCK.start(self.process, self._send_events)
        slow = world.slow_boots.pop(0) if world.slow_boots else 0.0
        before = life.boot / 2 + slow
        sleep(min(MINUTE, before))
        if world.is_denied:  # the step run-state
            self._terminate_self()
            return
        if before > 10 * MINUTE:
            self.leave_event("boot-fetch", "ok")
        sleep(max(before - MINUTE, 0.0))
        self.leave_event("boot-run-env", "ok")
        CLOCK.start(self.process, self._watch_metadata)
        if "" in world.dead_boots:
            world.dead_boots.remove("")
            sleep(20)
            self.leave_event("machine-failed", "failed", message="no data volume")
            self.send_once()
            self._terminate_self()
            return
        if world.ended_at and self.run_state() in ("finished", "failed"):
            self.fleet_to_zero()  # as bootstrap.sh does
            return
        self._work("program", life.build)
        self._work("dataset", life.sync)
        sleep(life.boot / 2)
        self.leave_event("boot-services", "ok")
        _Service(self).run()
        self.idles_since = CLOCK.now

    def _work(self, step: str, seconds: float) -> None:
        """A part of a boot that tells how far it is, each minute."""
        done = 0.0
        while done < seconds:
            piece = min(MINUTE, seconds - done)
            while self.world.is_troubled(self.machine.id):
                sleep(30)  # nothing arrives
            sleep(piece)
            done += piece
            key = self.world.prefix + progress_key(self.machine.id)
            with suppress(Exception):
                self._s3("put_object", Key=key, Body=progress_record(step, 0, int(done)))
                self.world.has_progressed(self.machine, step)

    def _watch_metadata(self) -> None:
        """Poll as the handler does, on its grid; polls that find nothing new are left out.

        `test_simulation.py` shows that a handler which makes every poll does the same.
        """
        handler = InterruptionHandler(metadata=self, folder=self.folder)  # type: ignore[arg-type]
        began = CLOCK.now
        while not handler.poll():
            if not self.world.sees_all:
                self.changed.wait()
                self.changed.clear()
                polls = math.ceil((CLOCK.now - began) / POLL_SECONDS)
                sleep(began + polls * POLL_SECONDS - CLOCK.now)
            else:
                sleep(POLL_SECONDS)

    def read(self, path: str) -> str | None:
        """The metadata, as the handler asks for it."""
        return self.metadata.get(path)


class _Service:
    """training.service: starts the trainer again as systemd would, and acts on how it ended."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def run(self) -> None:
        host, failures = self.host, list[float]()
        while not host.is_stopping:
            if (host.folder / "notice.json").exists():
                return
            code = self._attempt()
            sleep(1)
            state = host.run_state()
            if state in ("finished", "failed"):
                host.fleet_to_zero()
            if code in {0, *UNIT.success_statuses} or state in ("finished", "failed"):
                return
            since = CLOCK.now - UNIT.start_limit_seconds
            failures = [*(when for when in failures if when > since), CLOCK.now]
            if code in UNIT.prevent_statuses or len(failures) >= UNIT.start_limit_burst:
                how = "give up" if code == 2 else "terminate"
                host.end_as(how, f"training failed (exit status {code})")
                return
            sleep(UNIT.restart_seconds)

    def _attempt(self) -> int:
        host, world = self.host, self.host.world
        host.process.version = world.trainer_version
        trainer = Process(
            name=host.machine.id,
            clock_off=host.process.clock_off,
            version=world.trainer_version,
        )
        host.trainer = trainer
        CLOCK.start(trainer, lambda: trainer.end(host.begin(trainer)))
        trainer.ended.wait()
        host.step = None
        code = trainer.code if trainer.code is not None else 1
        # Patience with S3 lasts 90 s, and a save that has failed is read after what goes on.
        within = 20 * MINUTE + world.plan.evaluation_seconds + 2 * world.plan.step_seconds
        if code in (1, 74) and not (host.is_excused or world.was_troubled(60.0, within)):
            world.breaks("an attempt fails for a cause", f"{host.machine.id} exited with {code}")
        head = world.head_now
        is_refused = trainer.version == OLDER and head.get("format") == 6
        is_damaged = not head or world.facts["checkpoints damaged"]
        if code == 2 and not (is_refused or is_damaged or host.is_excused):
            world.breaks("an attempt fails for a cause", f"{host.machine.id} exited with 2")
        if code == 76 and not host.is_excused:
            writer = world.head_now.get("writer")
            if writer == host.machine.id:
                world.breaks("a lease is lost to another writer", f"{writer} had it")
        host.is_excused = False
        world.tell(f"{host.machine.id[-4:]} trainer ends: {code}")
        return code


class Attempt:
    """The trainer's process: `run_attempt` with a job whose steps are time."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host, self.process, self.world, self.plan = host, process, host.world, host.world.plan
        self.placement: frozenset[str] = frozenset()
        self.ranks: int | None = None

    def run(self) -> int:
        host, world = self.host, self.world
        supervisor = self.supervised(self.process)
        fault, host.fault = host.fault, ""
        if fault:
            host.is_excused = True
            return 4 if fault == "gpu fault" else 1
        store = SimulatedStore(world, host.machine.id)
        store.patience.deadline = supervisor.interruption.deadline
        self.options = self.attempt_options(store)
        try:
            return exit_code_of(lambda: self.lead(supervisor))
        except PoweredOffError:
            raise
        except Exception as error:
            world.breaks("a trainer crashed", place_of(error))
            return 1

    def lead(self, supervisor: Supervisor) -> int:
        return run_attempt(self.options, self, supervisor)

    def supervised(self, process: Process) -> Supervisor:
        """What a process does first."""
        host, longest = self.host, self.plan.step_seconds + self.plan.life.first_step
        process.supervisor = supervisor = Supervisor(
            budget_seconds=120,
            notice_file=host.folder / "notice.json",
            notice_policy=self.plan.policy,
            # Who has longer steps than the default allows for, says so.
            watchdog_seconds=max(WATCHDOG_SECONDS, 3 * longest),
        )
        supervisor.upload_rate, supervisor.host = self.plan.upload_rate, host  # type: ignore[attr-defined]
        if not self.world.sees_all and process is self.process:
            supervisor.watchdog._stop = host.pings = QuietPings(supervisor.watchdog)  # type: ignore[assignment]
        supervisor.watchdog.start()
        if (host.folder / "notice.json").exists():
            supervisor.interruption.record("notice")  # as `listen` does
        sleep(CLOCK.luck.uniform(3, 20))  # imports
        return supervisor

    def attempt_options(self, store: Store) -> AttemptOptions:
        return AttemptOptions(**self.about(store))

    def about(self, store: Store) -> dict[str, Any]:
        return {
            "store": store,
            "run_id": self.world.run_id,
            "writer": self.host.machine.id,
            "scratch": self.host.folder,
            "retention": Retention(newest=self.plan.keep),
            "lease_ttl_seconds": TTL_SECONDS,
            "usd_per_hour": 0.4,
            "prediction": self.plan.prediction,
        }

    def run_config(self) -> RunConfig:
        return self.options.run_config(
            workload="simulated", recipe="laptop", overrides={}, config={}, dataset="d",
            numerics_key={},
        )  # fmt: skip

    # -- as training/engine does it, with time for arithmetic

    def train(self, run: HeldRun) -> RunResult:
        context = AttemptContext(
            store=run.store,
            **run.of_rank_0,
            supervisor=run.supervisor,
            interval=parse_interval(self.plan.interval),
            retention=self.options.retention,
            scratch=self.host.folder,
            planned_evaluations=self.options.planned_evaluations,
            world=World(RankEnvironment(), _CPU),
        )
        hearing = run.supervisor.hearing(context.store)
        loaded, passed_over = newest_valid(hearing, context.lease, context.events, self._read)
        position = Position.from_json(loaded.content["position"]) if loaded else None
        where = {
            "step": position.step if position else 0,
            "stage": position.stage if position else None,
            "checkpoint": loaded.entry.name if loaded else None,
        }
        passed = [{"name": name, "why": why} for name, why in passed_over]
        if loaded:
            context.events.emit("resumed", "ok", **where, passed_over=passed)
        context.metrics.write("resume", **where, passed_over=passed, numerics_key={})
        self.world.tell(f"{self.host.machine.id[-4:]} g{run.generation} from step {where['step']}")
        context.lease.sweep()
        checkpointer = Checkpointer(context, position, loaded.content if loaded else {})
        context.supervisor.last_resort.staged_copy = checkpointer
        with closing(checkpointer):
            if position is None or not position.has_ended:
                _Loop(self, context, checkpointer, position or Position(stage="train")).run()
        return RunResult(steps=self.plan.steps, weights_sha256="0" * 64, stages={"train": {}})

    def _read(self, store: Store, entry: CheckpointEntry) -> Mapping[str, Any]:
        def read() -> Mapping[str, Any]:
            found = dict[str, bytes]()
            for file in entry.files:
                stored = store.get(checkpoint_prefix(entry.name) + file.name)
                if stored is None or not is_intact(stored.data, file):
                    raise DamagedCheckpointError(f"{file.name} is missing or damaged")
                found[file.name] = stored.data
            state: Mapping[str, Any] = json.loads(found[checkpointer_file.STATE])
            return state

        left = self.plan.state_bytes / self.plan.upload_rate
        while left > 0:
            store.uri  # noqa: B018 - each part that arrives is heard
            sleep(min(left, _EVALUATION_PIECE))
            left -= _EVALUATION_PIECE
        return read_twice(entry, read)


class _Loop:
    """TrainingLoop's order of votes, answers, evaluations, steps and saves (engine/loop.py)."""

    def __init__(
        self,
        attempt: Attempt,
        context: AttemptContext,
        checkpointer: Checkpointer | None,
        position: Position,
        num_shards: int = 1,
    ) -> None:
        self.attempt, self.context, self.plan = attempt, context, attempt.plan
        self.position = position
        self.num_shards = num_shards
        self.epoch_steps = max(2, self.plan.steps // 5)
        self.policy = CheckpointPolicy(
            context,
            checkpointer,
            self.epoch_steps,
            self._capture,
            is_sharded=num_shards > 1,
            num_steps=self.plan.steps,
            seconds_for=self._seconds_for,
        )
        self.pace = Pace()
        self.times = TimesSoFar(position.times.get("train", {}), 0)

    def _seconds_for(self, count: int) -> float | None:
        every, last, is_due = self.plan.evaluation_every, self.plan.steps, self._is_evaluation_due
        step, planned = self.position.stage_step, self.context.planned_evaluations
        ahead = evaluations_ahead(step, count, every=every, last=last, is_due=is_due)
        return self.times.seconds_for(
            count, self.pace, evaluations=ahead, every=every or last, planned=planned
        )

    def run(self) -> Position:
        context, work = self.context, self.context.supervisor.long_work
        with work.doing("model"):
            sleep(1)
        is_first = True
        context.consensus.begin_vote(_WEIGHTS)
        while True:
            if context.consensus.end_vote().is_noticed:
                self._answer_notice(self._next_seconds(is_first))
            self._evaluate_if_due()
            if self.position.stage_step == self.plan.steps:
                break
            context.consensus.begin_vote(_WEIGHTS)
            kind = "first step" if is_first else "step"
            with context.consensus.noting_divergence():
                self.policy.protect(self.position, kind)  # type: ignore[arg-type]
            with work.doing(kind):  # type: ignore[arg-type]
                self._step(self.plan.life.first_step if is_first else 0.0)
            is_first = False
            self._save_if_due()
        self.position = replace(self.position, has_ended=True)
        with context.consensus.noting_divergence():
            self.policy.save_stage_end(self.position)
        context.consensus.go_back_if_diverged()
        return self.position

    def _save_if_due(self) -> None:
        with self.context.consensus.noting_divergence():
            self.policy.save_if_due(self.position)

    def _answer_notice(self, seconds: float | None) -> None:
        self.context.consensus.go_back_if_diverged()
        self.policy.answer_notice(self.position, seconds)

    def _next_seconds(self, is_first: bool) -> float | None:
        if self._is_evaluation_due:
            return self.context.supervisor.long_work.measured_seconds("evaluation")
        if self.position.stage_step == self.plan.steps:
            return 0.0
        return None if is_first else self.plan.step_seconds * 1.02

    def _compute(self, more: float) -> None:
        sleep((self.plan.step_seconds + more) * CLOCK.luck.uniform(0.97, 1.02))
        if self.attempt.host.hangs:
            self.attempt.host.hangs = False
            sleep(math.inf)

    def _step(self, more: float) -> None:
        self._compute(more)
        self._advance()
        self._record(self.position)
        self._tell()

    def _advance(self) -> None:
        before = self.position
        self.position = replace(before, stage_step=before.stage_step + 1, step=before.step + 1)
        self.pace.next(0.0)

    def _record(self, position: Position) -> None:
        epoch, index = divmod(position.stage_step - 1, self.epoch_steps)
        self.context.metrics.write(
            "step", stage="train", step=position.step, stage_step=position.stage_step, epoch=epoch,
            num_samples=1, ids_sum=mixed_ids(index), split_samples=self.epoch_steps,
        )  # fmt: skip

    def _tell(self) -> None:
        if self.context.world.leads:
            self.attempt.host.step = self.position.step
            self.attempt.world.has_progressed(self.attempt.host.machine, "step")

    @property
    def _is_evaluation_due(self) -> bool:
        step, every = self.position.stage_step, self.plan.evaluation_every
        is_due = step == self.plan.steps or (every > 0 and step > 0 and step % every == 0)
        return is_due and self.position.evaluated_step != step

    def _evaluate_if_due(self) -> None:
        if not self._is_evaluation_due:
            return
        context, began = self.context, CLOCK.now
        while True:
            with context.consensus.noting_divergence():
                self.policy.protect(self.position, "evaluation")
            try:
                with context.supervisor.long_work.doing("evaluation"):
                    self._evaluate()
                break
            except InterruptedRunError:
                measured = context.supervisor.long_work.measured_seconds("evaluation")
                self._answer_notice(measured)
        self.times.add_evaluation(CLOCK.now - began)
        self.pace.pass_over(CLOCK.now - began)
        self.position = replace(self.position, evaluated_step=self.position.stage_step)
        if self.position.stage_step != self.plan.steps:
            self._save_if_due()

    def _evaluate(self) -> None:
        left = self.plan.evaluation_seconds
        while left > 0:
            sleep(min(left, _EVALUATION_PIECE))
            left -= _EVALUATION_PIECE
            self.context.consensus.stop_if_due(may_use_extra_time=True)
            self.attempt.world.has_progressed(self.attempt.host.machine, "evaluation")

    def _capture(self) -> LiveState:
        state = {"position": asdict(self.position.timed(self.times.to_json()))}
        size = round(self.plan.state_bytes / self.num_shards)
        return SizedState(size=size, state=state)  # type: ignore[return-value]
