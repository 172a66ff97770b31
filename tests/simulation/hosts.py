"""A run of two to four hosts, as a SageMaker job: python -m tests.simulation.hosts 1..200.

Real are the restart rules of the container's entry point (training/cli/sagemaker.py), the meeting
of the hosts with its probes, and all that an attempt of several ranks is (ranks.py); `JobWorld`
stands for SageMaker, and for the person who submits a failed job again.
"""

import io
import logging
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from contract.keys import FINAL
from contract.verify import broken_rules
from tests.simulation import plan as plan_file
from tests.simulation.account import Account
from tests.simulation.clock import CLOCK, Process
from tests.simulation.collectives import Meeting
from tests.simulation.containers import NOTICE_SECONDS, STUBS, Container
from tests.simulation.life import BEGIN, Outcome, _memory, simulated
from tests.simulation.plan import SLOWEST, Happening, Plan
from tests.simulation.promises import Promised
from tests.simulation.ranks import LOSS_SECONDS
from tests.simulation.record import trace_of
from tests.simulation.sockets import Network
from tests.simulation.story import shortened, shrink
from tests.simulation.stubs import place_of, stubbed
from tests.stacks.guard.world import HOUR, MINUTE, Machine


@dataclass(frozen=True, kw_only=True)
class JobPlan(Plan):
    """A run's plan, with its job's."""

    hosts: int
    restarts: Literal["all", "one"]  # what SageMaker starts again once it has lost an instance
    ends_others: Literal["notice", "kill"]  # and how it ends the others before

    @property
    def most_seconds(self) -> float:
        """How long it may take, with all that happens to it."""
        waits = self.saving_share * self.work_seconds
        interval = max(10 * MINUTE, math.sqrt(2 * self.save_seconds * 2.1 * HOUR))
        lost = interval + 2 * self.save_seconds + 8 * SLOWEST * self.step_seconds + 2 * HOUR
        return (
            1.5 * waits
            + (len(self.happenings) + 1) * (lost + self.evaluation_seconds)
            + sum(each.seconds for each in self.happenings)
        )


@dataclass(kw_only=True)
class JobWorld(Promised):
    """SageMaker with one job at a time, and who submits the next."""

    plan: JobPlan
    names: tuple[str, ...] = ()
    ranks_each: int = 1
    number: int = 0  # of the job
    epoch: int = 0  # of its start
    completed_at: float = 0.0
    calm_since: float = 0.0  # nothing has happened to the run
    reached: int = 0  # by the present attempt
    progressed_at: float = 0.0  # when its present attempt last did something
    disturbed_at: float = 0.0
    meetings: dict[str, Meeting] = field(default_factory=dict)
    network: Network = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.network = Network(self.process)

    # -- SageMaker

    def submit(self, num_hosts: int) -> None:
        self.number += 1
        total = self.plan.hosts * self.plan.ranks
        self.names = tuple(f"algo-{k}" for k in range(1, num_hosts + 1))
        self.ranks_each = min(self.plan.ranks, total // num_hosts)
        self.tell(f"job {self.number} of {num_hosts} hosts, {self.ranks_each} ranks each")
        self._start_all()

    def _start_all(self) -> None:
        self.epoch += 1
        for name in self.names:
            self._start_later(name, CLOCK.luck.uniform(20, 5 * MINUTE))

    def _start_later(self, name: str, seconds: float) -> None:
        epoch = self.epoch

        def begin() -> None:
            if epoch == self.epoch:
                self._start(name)

        CLOCK.start(self.process, begin, at=CLOCK.now + seconds)

    def _start(self, name: str) -> None:
        boot = CLOCK.luck.randbytes(4).hex()
        machine = Machine(
            id=f"job-{self.number}/{name}-{boot}", market="spot", habit="works", launched=CLOCK.now
        )
        self.machines.append(machine)
        container = Container(self, name, machine)
        self.hosts[machine.id] = self.network.hosts[name] = container
        self.calm_since = CLOCK.now
        self.tell(f"{name} starts")
        container.start()
        CLOCK.start(self.process, lambda: self._await(container))

    @property
    def running(self) -> list[Container]:
        return [one for one in self.network.hosts.values() if not one.is_gone and not one.is_done]

    def _await(self, container: Container) -> None:
        container.process.ended.wait()
        code = container.process.code
        if container.is_gone:
            return
        self.tell(f"{container.name} exits with {code}")
        if code == 0:
            container.is_done, container.machine.ended = True, CLOCK.now
            done = [one for one in self.network.hosts.values() if one.is_done]
            if len(done) == len(self.names):
                self.completed_at = CLOCK.now
                self.tell("the job is completed")
                if self.state_now != "finished":
                    self.breaks("a job that completes has finished its run", self.state_now)
            return
        self.facts["failed jobs"] += 1
        self.tell("the job has failed")
        self._end_all()
        again = CLOCK.now + CLOCK.luck.uniform(2 * MINUTE, 30 * MINUTE)
        number = len(self.names)
        if CLOCK.luck.random() < 0.4:
            number = CLOCK.luck.choice([n for n in (1, 2, 4) if n <= self.plan.hosts])
        CLOCK.start(self.process, lambda: self.submit(number), at=again)

    def _end_all(self) -> None:
        self.epoch += 1
        for one in [*self.network.hosts.values()]:
            self._kill(one)
        self.network.hosts.clear()

    def _kill(self, container: Container) -> None:
        if not container.is_gone:
            container.is_gone = True
            container.machine.ended = container.machine.ended or CLOCK.now
            container.power_off()
            self.network.has_changed()
            self.calm_since = CLOCK.now

    def lose(self, container: Container) -> None:
        """SageMaker finds that an instance is gone."""
        if self.network.hosts.get(container.name) is not container or self.completed_at:
            return
        self._kill(container)
        del self.network.hosts[container.name]
        delay = CLOCK.luck.choice([1.0, 1.0, 6.0]) * CLOCK.luck.uniform(MINUTE, 5 * MINUTE)
        if self.plan.restarts == "one":
            self._start_later(container.name, delay)
            return
        self.epoch += 1
        epoch = self.epoch

        def restart() -> None:
            if epoch == self.epoch:
                self._end_all()
                self._start_all()

        seconds = 0.0
        if self.plan.ends_others == "notice":
            seconds = NOTICE_SECONDS
            self.notice(self.running)
        CLOCK.start(self.process, restart, at=CLOCK.now + seconds + delay)

    def notice(self, hosts: list[Container]) -> None:
        """SIGTERM, and 120 s later, or a little more, the end."""
        step = max((one.step or 0 for one in self.running), default=0)
        at = CLOCK.now
        for one in hosts:
            one.is_noticed = True
            one.signal()

        def end() -> None:
            self._judge_owed(step, at)
            for one in hosts:
                self.lose(one)

        late = CLOCK.luck.choice([0.0, 0.0, 4.0, 40.0])
        CLOCK.start(self.process, end, at=at + NOTICE_SECONDS + late)

    # -- what happens

    def happen(self, each: Happening) -> None:
        live = self.running
        if not live or self.completed_at:
            return
        self.tell(str(each))
        self.facts[each.how or each.what] += 1
        if each.what == "s3":
            return
        host = live[int(each.whose) % len(live)]
        self.disturbed_at = self.calm_since = CLOCK.now
        if each.how.startswith("notice"):
            self.notice(live if each.how == "notice to all" else [host])
        elif each.how == "power off":
            host.is_off = True
            host.power_off()
            host.is_gone, host.machine.ended = True, CLOCK.now
            self._lost(host)
            found = CLOCK.now + CLOCK.luck.choice([5.0, 60.0, 300.0])
            CLOCK.start(self.process, lambda: self.lose(host), at=found)
        elif each.how in ("cut", "pause"):
            self._isolate(host, each)
        else:
            self._hit_rank(host, each)

    def _isolate(self, host: Container, each: Happening) -> None:
        """Cut it off from the others, but not from S3; or let it stand still."""
        host.unreachable_until = CLOCK.now + each.seconds
        if each.how == "pause":
            host.pause(each.seconds)
        self._lost(host, each.seconds)
        CLOCK.start(self.process, self._heal, at=host.unreachable_until)

    def _heal(self) -> None:
        self.disturbed_at = self.calm_since = CLOCK.now
        self._changed()

    def _changed(self) -> None:
        self.network.has_changed()
        for meeting in self.meetings.values():
            meeting.look_again()

    def _lost(self, host: Container, seconds: float = math.inf) -> None:
        """A host is lost, or cut off: the others' attempts end soon."""
        self._changed()
        trainer = host.trainer
        if trainer is None or trainer.meeting is None or seconds < LOSS_SECONDS:
            return
        for other in self.running:
            own = other.trainer
            if other is not host and own is not None and own.meeting is trainer.meeting:
                CLOCK.start(self.process, lambda other=other, own=own: self._judge_loss(other, own))

    def _judge_loss(self, host: Container, trainer: Process) -> None:
        is_excused = host.is_noticed or trainer.paused_until > CLOCK.now
        if not trainer.ended.wait(LOSS_SECONDS) and not (is_excused or self.was_troubled()):
            how = f"{host.name} trains on {LOSS_SECONDS:.0f} s after it"
            self.breaks("a lost host ends the attempt", how)

    def _hit_rank(self, host: Container, each: Happening) -> None:
        processes = host.rank_processes
        if not processes:
            return
        process = processes[int(each.whose or 0) % len(processes)]
        if each.how == "slow":
            host.slow = process.rank, CLOCK.now + each.seconds, SLOWEST
        elif each.how.startswith("hang"):
            host.hanging[process.rank] = each.how.removeprefix("hang in ")
        elif not process.is_dead:
            meeting = process.meeting
            process.end(-9)
            for one in self.running if meeting is not None else ():
                own = one.trainer
                if own is not None and own.meeting is meeting:
                    CLOCK.start(self.process, lambda one=one, own=own: self._judge_loss(one, own))

    # -- what is judged

    def hangs(self) -> None:
        self.disturbed_at = CLOCK.now

    def has_progressed(self, machine: Machine, what: str) -> None:
        super().has_progressed(machine, what)
        self.progressed_at = CLOCK.now
        if what == "step":
            self.reached = self.hosts[machine.id].step or 0

    def has_begun(self, step: int) -> None:
        self.reached = step

    def judge_code(self, host: Container, code: int) -> None:
        """How a trainer ended."""
        if code not in (0, 75):
            self.facts["failures"] += 1
        if code in (2, 4, 76) and not self.facts["pause"]:
            self.breaks("an attempt fails for a cause", f"{host.name} exited with {code}")
        if code not in (0, 75):
            self.reached = min(self.reached, self.committed_step)

    def judge_saved(self, host: Container) -> None:
        """A container says that the run is saved, and waits for its end."""
        if self.committed_step < self.reached:
            by = "its last resort" if host.has_last_resort else "the main thread"
            how = f"{host.name} at {self.reached}, and {self.committed_step} is committed, by {by}"
            self.breaks("what is called saved is saved", how)

    def _judge_owed(self, step: int, since: float) -> None:
        """A notice to one host is answered for all."""
        has_time = self.plan.answer_seconds < NOTICE_SECONDS
        is_excused = self.disturbed_at > since - MINUTE or self.was_troubled() or self.hangs_now
        is_excused |= self.disturbed_at > since - 15 * MINUTE and self.facts["slow"] > 0
        if has_time and self.committed_step < step and not is_excused:
            self.breaks("a notice loses no step", f"{step} after {self.committed_step}")

    @property
    def hangs_now(self) -> bool:
        return any(one.hanging or one.is_excused for one in self.running)

    def _judge(self, seconds: float) -> None:
        """Whether work goes on wherever nothing keeps it from that."""
        plan, live = self.plan, self.running
        since = max(self.calm_since, self.progressed_at)
        is_whole = len(self.network.hosts) == len(self.names) and len(live) == len(self.names)
        is_whole &= not any(CLOCK.now < one.unreachable_until for one in live)
        if not is_whole or self.was_troubled():
            return
        most = 5 * MINUTE + plan.life.first_step + 2 * SLOWEST * plan.step_seconds
        most += 4 * plan.save_seconds + plan.evaluation_seconds
        longest = max(60.0, 10 * plan.step_seconds, plan.evaluation_seconds)
        most += (600.0 + 20 * longest) * self.hangs_now
        if CLOCK.now - since > most:
            how = f"nothing for {(CLOCK.now - since) / MINUTE:.0f} minutes"
            self.breaks("work goes on once all hosts are there", how)
            self.calm_since = CLOCK.now
        for one in live:
            self._judge_repeat(one.machine)

    def _new_head(self, head: dict[str, Any]) -> None:
        super()._new_head(head)
        if head["state"] == "finished":
            self.bucket.write(self.prefix + FINAL, b"weights")

    def judge_end(self) -> None:
        head = self.head_now
        state = head.get("state", "")
        if state != "finished" or not self.completed_at:
            why = head.get("reason") or f"at step {self.committed_step} of {self.plan.steps}"
            self.breaks("a job ends finished", f"{state or 'no head'}, {why}")
        elif self.committed_step != self.plan.steps:
            self.breaks("all steps are done", f"{self.committed_step} of {self.plan.steps}")
        excused = ("notices-answered",) * (self.plan.troubled_until > 0)
        for line in broken_rules(trace_of(self.bucket, self.prefix))[:4] if head else ():
            if not line.startswith(excused or "-"):
                self.breaks("verify", line)

    def live_on(self, until: float) -> None:
        CLOCK.start(self.process, lambda: self.submit(self.plan.hosts))
        for each in self.plan.happenings:
            CLOCK.start(self.process, lambda each=each: self.happen(each), at=self.began + each.at)
        while CLOCK.now < until and not self.completed_at:
            CLOCK.run(CLOCK.now + 20)
            self._judge(20.0)


@contextmanager
def simulated_job() -> Iterator[None]:
    """Context in which the project's code knows the simulation alone."""
    with simulated(), stubbed(STUBS):
        yield


def live_through_job(plan: Any) -> Outcome:
    """Let a plan happen, within `simulated_job`; return what came of it."""
    began = time.process_time()
    CLOCK.restart(BEGIN, plan.seed)
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=_memory()))
    account = Account()
    troubles = [each for each in plan.happenings if each.what == "s3"]
    world = JobWorld(
        account=account, plan=plan, folder=folder, prefix="runs/run-1/", troubles=troubles
    )

    def died(task: Any, error: BaseException) -> None:
        if task.process is world.process:
            raise error
        world.breaks("a thread died", f"{task.process.name}: {place_of(error)}")

    CLOCK.died = died
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        world.live_on(BEGIN + plan.most_seconds)
        world.judge_end()
        CLOCK.died = lambda task, error: None
        for process in {task.process for _, _, task, _ in CLOCK.queue}:
            process.end()
        for container in world.hosts.values():
            for process in container.processes:
                process.end()
        world.process.end()
        CLOCK.run(CLOCK.now)
    shutil.rmtree(folder, ignore_errors=True)
    hours = sum((each.ended or CLOCK.now) - each.launched for each in world.machines) / HOUR
    return Outcome(
        plan=plan,
        broken=tuple(world.broken),
        story=tuple(world.story),
        state=world.state_now or "none",
        hours=hours,
        days=(CLOCK.now - BEGIN) / plan_file.DAY,
        cpu_seconds=time.process_time() - began,
        attempts=int(world.head_now.get("generation", 0)),
        facts=world.facts,
    )


_HOWS = (
    "notice to one", "notice to one", "notice to all", "power off", "power off", "cut", "cut",
    "kill", "pause", "hang in a step", "hang in an evaluation", "slow",
)  # fmt: skip


def draw(seed: int) -> JobPlan:
    """Draw a job's plan: a shorter run than a fleet's, its hosts and what happens to them."""
    luck = random.Random(f"{seed}-hosts")
    found = plan_file._one(luck.randrange(10**9))
    work = plan_file._log(luck, 0.3 * HOUR, 8 * HOUR)
    step = min(found.step_seconds, work / 20)
    steps = max(4, min(600, round(work / step)))
    happenings = list[Happening]()
    for _ in range(luck.choice([0, 1, 2, 3, 5, 8])):
        at = luck.uniform(0, 1.2 * steps * step + 10 * MINUTE)
        if luck.random() < 0.25:
            trouble = luck.choice(["outage", "throttle", "slow", "lost"])
            seconds, share = plan_file._log(luck, 20, 20 * MINUTE), luck.choice([1.0, 0.5, 0.1])
            one = Happening(
                at=at, what="s3", how=trouble, whose="all", seconds=seconds, share=share
            )
        else:
            how = luck.choice(_HOWS)
            lasting = how in ("cut", "pause", "slow")
            seconds = plan_file._log(luck, 1, 30 * MINUTE) if lasting else 0.0
            one = Happening(
                at=at, what="host", how=how, whose=f"{luck.randrange(8)}", seconds=seconds
            )
        happenings.append(one)
    own = {each.name: getattr(found, each.name) for each in fields(Plan)}
    own |= {
        "seed": seed,
        "steps": steps,
        "step_seconds": step,
        "evaluation_every": luck.choice([0, max(2, steps // 7)]),
        "happenings": tuple(sorted(happenings, key=lambda each: each.at)),
        "deadline_hours": 0.0,
        "max_usd": 0.0,
        "max_hours": 1e4,
        "ranks": luck.choice([1, 1, 2]),
        "is_sharded": luck.random() < 0.4,
        "is_gpu": luck.random() < 0.5,
    }
    return JobPlan(
        **own,
        hosts=luck.choice([2, 2, 4]),
        restarts=luck.choice(["all", "all", "one"]),
        ends_others=luck.choice(["notice", "kill"]),
    )


def main() -> int:
    """Live through the seeds; tell what broke a promise, in short."""
    first, _, last = sys.argv[1].partition("..")
    logging.disable(logging.CRITICAL)
    cpu, hours, failed, num = time.process_time(), 0.0, list[int](), 0
    with simulated_job():
        for seed in range(int(first), int(last or first) + 1):
            found = live_through_job(draw(seed))
            hours, num = hours + found.hours, num + 1
            if found.broken:
                failed.append(seed)
                found = shrink(found, live_through_job)
            if found.broken or "--story" in sys.argv:
                print("\n".join(shortened(found)), flush=True)
    cpu = time.process_time() - cpu
    print(f"{num} seeds, {len(failed)} failed {failed}: {hours:.0f} machine hours in {cpu:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
