"""A training job of SageMaker's, with its hosts: what happens to it, and what it promises.

SageMaker starts all containers, and again those of a lost instance, or all; a container that ends
otherwise than with 0 fails the job, which a person submits again, at times with other hosts.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from contract.keys import FINAL
from contract.verify import broken_rules
from tests.simulation.clock import CLOCK, Process
from tests.simulation.collectives import Meeting
from tests.simulation.containers import NOTICE_SECONDS, Container
from tests.simulation.plan import SLOWEST, Happening, Plan
from tests.simulation.promises import Promised
from tests.simulation.ranks import LOSS_SECONDS
from tests.simulation.record import trace_of
from tests.simulation.sockets import Network
from tests.stacks.guard.world import HOUR, MINUTE, Machine

# How an attempt may end for what happens to hosts: also killed, or before it could hear SIGTERM.
_KNOWN = (1, 2, 74, 76, -9, -15)
# Of a host that is cut off from S3; no other one knows of it.
OUTAGE = Happening(at=-math.inf, what="s3", how="outage", whose="guard")


@dataclass(frozen=True, kw_only=True)
class JobPlan(Plan):
    """A run's plan, with its job's."""

    hosts: int
    restarts: Literal["all", "one"]  # what SageMaker starts again once it has lost an instance
    ends_others: Literal["notice", "kill", "late"]  # and how it ends the others before

    at_the_end: Happening | None = None  # so many seconds after the run has finished

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
    next_data: str = "d"  # the fingerprint of what the next container finds
    writer: tuple[float, str] = (0.0, "")  # of the head, and since when
    cuts: dict[frozenset[str], float] = field(default_factory=dict)  # between two, and until when
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
        container.data, self.next_data = self.next_data, "d"
        self.hosts[machine.id] = self.network.hosts[name] = container
        self.calm_since = CLOCK.now
        self.tell(f"{name} starts")
        container.start()
        CLOCK.start(self.process, lambda: self._await(container))

    @property
    def running(self) -> list[Container]:
        return [one for one in self.network.hosts.values() if one.is_running]

    def _await(self, container: Container) -> None:
        container.process.ended.wait()
        code = container.process.code
        if container.is_gone or container.is_given_up:
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
        failed = [each for each in container.codes if each not in (0, 75)]
        has_waited = CLOCK.now - container.noticed_at > NOTICE_SECONDS + 29.0
        is_troubled = 74 in failed or any(each.what == "s3" for each in self.plan.happenings)
        many = len(failed) >= 3 and (container.num_own >= 3 or is_troubled)
        if not (code == 143 and has_waited) and not many and 2 not in failed:
            self.breaks("a job fails for a cause", f"{container.name} with {code} of {failed}")
        self.tell("the job has failed")
        self._end_all()
        self._submit_again()

    def _submit_again(self) -> None:
        again = CLOCK.now + CLOCK.luck.uniform(2 * MINUTE, 30 * MINUTE)
        number = len(self.names)
        if CLOCK.luck.random() < 0.4:
            number = CLOCK.luck.choice([*range(1, self.plan.hosts + 1)])
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

    def lose(self, container: Container, late: float = 0.0) -> None:
        """SageMaker finds that an instance is gone, or believes it, and ends it late."""
        if self.network.hosts.get(container.name) is not container or self.completed_at:
            return
        container.is_given_up = True
        CLOCK.start(self.process, lambda: self._kill(container), at=CLOCK.now + late)
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
        elif self.plan.ends_others == "kill":
            self._end_all()
            epoch = self.epoch
        CLOCK.start(self.process, restart, at=CLOCK.now + seconds + delay)

    def notice(self, hosts: list[Container], *, is_stopped: bool = False) -> None:
        """SIGTERM, and 120 s later, or a little more, the end."""
        step = max((one.step or 0 for one in self.running), default=0)
        at, epoch = CLOCK.now, self.epoch
        for one in hosts:
            one.is_noticed, one.noticed_at = True, min(one.noticed_at, CLOCK.now)
            one.signal()

        def end() -> None:
            self._judge_owed(step, at, hosts)
            if is_stopped and not self.completed_at and epoch == self.epoch:
                self.tell("the job is stopped")
                self._end_all()
                self._submit_again()
            for one in hosts:
                self.lose(one)

        late = CLOCK.luck.choice([0.0, 0.0, 4.0, 4.0, 40.0])
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
        self.calm_since = CLOCK.now
        if each.how == "other data":
            self.next_data = "e"
        elif each.how.startswith("notice"):
            self.notice(live if each.how == "notice to all" else [host])
        elif each.how == "stop":
            self.notice(live, is_stopped=True)
        else:
            self._disturb(host, each)

    def _disturb(self, host: Container, each: Happening) -> None:
        """What leaves no time to save."""
        self.disturbed_at = CLOCK.now
        if each.how == "power off":
            host.is_off = True
            host.power_off()
            host.is_gone, host.machine.ended = True, CLOCK.now
            self._lost(host)
            found = CLOCK.now + CLOCK.luck.choice([5.0, 60.0, 300.0])
            CLOCK.start(self.process, lambda: self.lose(host), at=found)
        elif each.how in ("cut", "cut from all", "pause"):
            self._isolate(host, each)
        elif each.how == "cut between two":
            self._part(host, each)
        else:
            self._hit_rank(host, each)

    def _isolate(self, host: Container, each: Happening) -> None:
        """Cut it off from the others, or from S3, too; or let it stand still."""
        host.num_own += each.how != "cut"
        host.unreachable_until = CLOCK.now + each.seconds
        if each.how == "cut from all":
            host.dark_until = host.unreachable_until
        if each.how == "pause":
            host.pause(each.seconds)
        self._lost(host, each.seconds)
        CLOCK.start(self.process, self._heal, at=host.unreachable_until)
        if each.share < 1.0 and each.seconds > MINUTE:  # SageMaker takes it for lost
            at = CLOCK.now + each.share * each.seconds
            CLOCK.start(self.process, lambda: self.lose(host, late=5 * MINUTE), at=at)

    def _part(self, host: Container, each: Happening) -> None:
        """Cut two that do not lead off from each other, of which nobody hears: all wait."""
        others = [one for one in self.running if one.name not in (host.name, self.names[0])]
        if host.name == self.names[0] or not others:
            return
        until = CLOCK.now + each.seconds
        self.cuts[frozenset({host.name, others[0].name})] = until
        for one in self.running:
            one.num_own += 3
        self._changed()
        CLOCK.start(self.process, self._heal, at=until)

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
                CLOCK.start(self.process, partial(self._judge_loss, other, own))

    def _judge_loss(self, host: Container, trainer: Process) -> None:
        began, seconds, ends = CLOCK.now, LOSS_SECONDS, "ends the attempt"
        if self.ended_at:
            seconds, ends = 11 * MINUTE, "keeps nobody after the end"
        has_ended = trainer.ended.wait(seconds)
        is_excused = host.is_noticed or trainer.paused_until > began or self.was_troubled()
        if not (has_ended or is_excused):
            self.breaks(f"a lost host {ends}", f"{host.name} waits {seconds:.0f} s after it")

    def _hit_rank(self, host: Container, each: Happening) -> None:
        processes = host.rank_processes
        if not processes:
            return
        process = processes[int(each.whose or 0) % len(processes)]
        for one in self.running if each.how.startswith("hang") else [host]:
            one.num_own += 1
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
                    CLOCK.start(self.process, partial(self._judge_loss, one, own))

    def trouble(self, who: str) -> Happening | None:
        host: Any = self.hosts[who]
        return OUTAGE if CLOCK.now < host.dark_until else super().trouble(who)

    # -- what is judged

    def has_progressed(self, machine: Machine, what: str) -> None:
        super().has_progressed(machine, what)
        self.progressed_at = CLOCK.now
        if what != "step":
            return
        self.reached = self.hosts[machine.id].step or 0
        since, writer = self.writer
        if machine.id != writer and CLOCK.now - since > MINUTE + 2 * self.plan.step_seconds:
            self.breaks("nothing trains twice at once", f"{machine.id} beside {writer}")

    def judge_code(self, host: Container, code: int) -> None:
        """How a trainer ended."""
        if code not in (0, 75):
            self.facts["failures"] += 1
        since = CLOCK.now - max(self.calm_since, self.disturbed_at)
        is_known = since < 20 * MINUTE or self.was_troubled() or self.hangs_now or not self.is_whole
        if code == 2:
            is_known = self.facts["other data"] > 0
        # Who has been told to end, or has lost another host, exits with 75; not after the end.
        is_failure = code not in (0, 75) or (code == 75 and self.ended_at and not host.is_noticed)
        if is_failure and not (is_known and code in (*_KNOWN, 75)):
            self.breaks("an attempt fails for a cause", f"{host.name} exited with {code}")
        host.codes.append(code)
        # An end waits ten minutes for a host that is lost.
        last = max(self.ended_at, self.disturbed_at)
        is_late = self.ended_at and CLOCK.now - last > 12 * MINUTE
        if is_late and code not in (0, 75) and not self.was_troubled():
            self.breaks("a finished run is met for by nobody", f"{host.name} exited with {code}")
        if host.is_excused:  # it hung
            self.calm_since = self.disturbed_at = CLOCK.now
            for one in self.running:
                one.is_excused = False
        if code not in (0, 75):
            self.reached = min(self.reached, self.committed_step)

    def judge_named(self, host: Container, step: int) -> None:
        """A container names the last commit, and waits for its end."""
        if self.committed_step < step:
            how = f"{host.name} names {step}, and {self.committed_step} is committed"
            self.breaks("a commit that is named is one", how)

    def _judge_owed(self, step: int, since: float, hosts: list[Container]) -> None:
        """A notice to one host is answered for all."""
        # A vote that has begun does not ask again: one more step for a notice to another host.
        answer = self.plan.answer_seconds + 2.2 * self.plan.step_seconds + self._piece
        has_time = answer < NOTICE_SECONDS
        is_excused = self.disturbed_at > since - MINUTE or self.was_troubled() or self.hangs_now
        if not has_time or is_excused or self.ended_at:
            return
        self.facts["owed"] += 1
        if self.committed_step < step:
            self.breaks("a notice loses no step", f"{step} after {self.committed_step}")
        for one in hosts:
            if one.step is not None and not one.is_gone:
                self.breaks("a notice ends the attempt", one.name)

    @property
    def is_whole(self) -> bool:
        """Whether all hosts are there, and reach each other."""
        there = [one for one in self.running if CLOCK.now >= one.unreachable_until]
        is_cut = any(CLOCK.now < until for until in self.cuts.values())
        return len(there) == len(self.names) and not is_cut

    @property
    def _piece(self) -> float:
        return min(30.0, self.plan.evaluation_seconds)

    @property
    def hangs_now(self) -> bool:
        return any(one.hanging or one.is_excused for one in self.running)

    def _judge(self, seconds: float) -> None:
        """Whether work goes on wherever nothing keeps it from that."""
        plan, live = self.plan, self.running
        since = max(self.calm_since, self.progressed_at)
        if not self.is_whole or self.was_troubled():
            return
        most = 5 * MINUTE + SLOWEST * (plan.life.first_step + 2 * plan.step_seconds)
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
        if head["writer"] != self.writer[1]:
            self.writer = CLOCK.now, head["writer"]
        if head["state"] == "finished" and (last := self.plan.at_the_end):
            at = CLOCK.now + last.seconds
            CLOCK.start(self.process, lambda: self.happen(last), at=at)
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
        # Rank 0 hears of one to another host at the next vote, as late as that is.
        excused = ("notices-answered",) * (self.plan.troubled_until > 0)
        for line in broken_rules(trace_of(self.bucket, self.prefix))[:4] if head else ():
            if not line.startswith(excused or "-"):
                self.breaks("verify", line)

    def live_on(self, until: float) -> None:
        CLOCK.start(self.process, lambda: self.submit(self.plan.hosts))
        for each in self.plan.happenings:
            CLOCK.start(self.process, partial(self.happen, each), at=self.began + each.at)
        while CLOCK.now < until and not self.completed_at:
            CLOCK.run(CLOCK.now + 20)
            self._judge(20.0)
