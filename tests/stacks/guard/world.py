"""A stack on a clock, with machines that work or misbehave; answers.py shows it to the Guard."""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from botocore.exceptions import ClientError

from contract.keys import progress_key
from contract.progress import progress_record

Habit = Literal["works", "hangs", "dies", "fails", "idles", "stalls"]
Market = Literal["spot", "on-demand"]
PREFIX = "runs/run-1/"
# Of each kind: the fleet's id, and the tag of its machines.
FLEETS = {
    "spot": ("sfr-1", "aws:ec2spot:fleet-request-id"),
    "asg": ("TrainingStack-run-1", "aws:autoscaling:groupName"),
}
MINUTE, HOUR = 60.0, 3600.0
NOTICE_SECONDS = 120.0
BOOT_SECONDS = 300.0
COMMIT_SECONDS = 900.0
# From the first heartbeat of machines that hang to their last; from the boot of those that stall to
# the last byte of their sync; of those that die or fail, until they end themselves or say so.
HANG_SECONDS, STALL_SECONDS, DIE_SECONDS = 1200.0, 1200.0, 480.0
# The market of a world: dollars an hour.
ON_DEMAND_USD = 1.0
VOLUME_USD = 0.05
# EC2's StateReason: somebody called, Spot took it back, the machine shut itself down.
USERS = "Client.UserInitiatedShutdown"
SPOTS = "Server.SpotInstanceTermination"
ITS_OWN = "Client.InstanceInitiatedShutdown"


def error(code: str, operation: str = "Call", status: int = 400) -> ClientError:
    answer: Any = {
        "Error": {"Code": code, "Message": f"{code} by the model"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, operation)


@dataclass(frozen=True, kw_only=True)
class Life:
    """How long what the machines of a run do takes; none of it is a fault."""

    boot: float = BOOT_SECONDS  # to the end of the last step without progress, half of it the first
    wait: float = 0.0  # for a dataset that is still uploaded, without a word
    build: float = 0.0  # requirements that compile
    sync: float = 0.0
    first_step: float = 0.0  # until it is compiled; heartbeats go on, as in all that follows
    commit_every: float = COMMIT_SECONDS
    step: float = 0.0  # a save waits for its end
    save: float = 0.0
    evaluation: float = 0.0  # once before each commit

    @property
    def ready(self) -> float:
        """Seconds from launch to the first heartbeat."""
        return self.boot + self.wait + self.build + self.sync

    @property
    def between_commits(self) -> float:
        return self.commit_every + self.step + self.save + self.evaluation


@dataclass(kw_only=True)
class Machine:
    id: str
    market: Market
    habit: Habit
    launched: float
    ends: float | None = None  # when EC2 will have ended it
    ended: float | None = None
    why: str = ""  # EC2's StateReason, and whose doing it was
    tags: dict[str, str] = field(default_factory=dict)
    committed: float = 0.0  # when
    lived: float = 0.0  # seconds of its life so far; a boot stands still without S3
    progressed: float = 0.0  # when S3 last heard that its boot got something done
    has_spoken: bool = False  # S3 has its first word
    failed: float = 0.0  # when S3 heard its event machine-failed
    began: float = 0.0  # what it commits next
    reported: dict[str, int] = field(default_factory=dict)  # the most of each step
    trained: float | None = None  # seconds of the run's work, with what it resumed from

    @property
    def is_seen(self) -> bool:
        """Whether EC2 lists it as the stack's."""
        return "Stack" in self.tags

    @property
    def is_live(self) -> bool:
        return self.ended is None


@dataclass(kw_only=True)
class World:
    """One stack with its fleet; `advance` lets machines live, `client` answers the Guard."""

    now: float = 1_700_000_000.0
    prefix: str = PREFIX
    kind: Literal["spot", "asg"] = "spot"
    target: int = 1
    on_demand: int = 0
    is_cancelled: bool = False
    # Of groups: MinSize and MaxSize of each market's, and those that are deleted.
    sizes: dict[Market, tuple[int, int]] = field(default_factory=dict)
    deleted: set[Market] = field(default_factory=set)
    has_capacity: bool = True
    # Since when Spot costs how many dollars an hour.
    spot_prices: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.4)])
    life: Life = Life()
    # Until when the machines do not reach S3, and the Guard does not.
    trouble_ends: float = 0.0
    guard_trouble_ends: float = 0.0
    clock_off: float = 0.0  # seconds that the machines' clocks are ahead
    habits: list[Habit] = field(default_factory=lambda: ["works"])
    machines: list[Machine] = field(default_factory=list)
    # Each object's versions, the newest last; None is a delete marker.
    objects: dict[str, list[tuple[float, bytes | None]]] = field(default_factory=dict)
    mails: list[str] = field(default_factory=list)
    denied: set[str] = field(default_factory=set)
    # The next calls of an operation: that fail; that are done, but whose answer is lost.
    failing: Counter[str] = field(default_factory=Counter)
    losing: Counter[str] = field(default_factory=Counter)
    # What happens just before the next call of an operation: another call of the Guard.
    between: dict[str, Callable[[], None]] = field(default_factory=dict)
    # The run's stages with the seconds that each takes; none is a run without an end.
    stages: Mapping[str, float] = field(default_factory=dict)
    committed_work: float = 0.0
    state: str = "running"
    head_written: float = 0.0
    spent: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "asg":
            self.target, self.sizes = 0, {"spot": (0, 2), "on-demand": (0, 1)}

    @property
    def fleet_id(self) -> str:
        return FLEETS[self.kind][0]

    # -- how time passes

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            step = min(MINUTE, end - self.now)
            self.now += step
            self._bill(step)
            for machine in self.live:
                self._live(machine, step)
            self._maintain()

    @property
    def live(self) -> list[Machine]:
        return [each for each in self.machines if each.is_live]

    def _bill(self, seconds: float) -> None:
        for machine in self.live:
            price = self.spot_prices[-1][1] if machine.market == "spot" else ON_DEMAND_USD
            self.spent += (price + VOLUME_USD) * seconds / HOUR

    def _live(self, machine: Machine, seconds: float) -> None:
        age = self.now - machine.launched
        if not self.in_trouble or machine.lived >= self.life.ready:
            machine.lived += seconds
        if not (machine.has_spoken or self.in_trouble):
            machine.has_spoken, machine.progressed = True, self.now
            self._leave_event(machine, "boot-fetch", {})
        if machine.ends is not None and self.now >= machine.ends:
            self.end(machine, machine.why, saves=True)
        elif machine.habit == "dies" and age >= DIE_SECONDS:
            self.end(machine, ITS_OWN)
        elif machine.habit == "fails" and age >= DIE_SECONDS:
            self._fail(machine)
        elif machine.habit == "stalls" or machine.lived < self.life.ready:
            self._boot(machine, seconds)
        elif self.state == "running" and machine is self.holder:
            self._beat(machine, seconds)

    @property
    def in_trouble(self) -> bool:
        return self.now < self.trouble_ends

    def _fail(self, machine: Machine) -> None:
        """Its event is sent once S3 takes it; it hangs, and does not end itself."""
        if not machine.failed and not self.in_trouble:
            machine.failed = self.now
            self._leave_event(machine, "machine-failed", {"message": "no disk"})

    def _leave_event(self, machine: Machine, name: str, event: dict[str, str]) -> None:
        when = datetime.fromtimestamp(self.now + self.clock_off, UTC)
        key = f"events/{when:%Y%m%dT%H%M%S.%fZ}-{machine.id}-{name}.json"
        self.put(key, json.dumps(event).encode())

    def _boot(self, machine: Machine, seconds: float) -> None:
        """Tell of steps that are done, and of what is built and synced."""
        if self.in_trouble:
            return
        life, before = self.life, machine.lived - seconds
        for name, end in (("boot-run-env", life.boot / 2), ("boot-services", life.boot)):
            if before < end <= machine.lived:
                self._leave_event(machine, name, {})
                machine.progressed = self.now
        built = life.boot + life.build
        self._report(machine, "program", life.boot, built)
        most = built + life.wait + STALL_SECONDS if machine.habit == "stalls" else life.ready
        self._report(machine, "dataset", built + life.wait, most)

    def _report(self, machine: Machine, step: str, start: float, end: float) -> None:
        if machine.lived < start or start == end:
            return
        done = int(min(machine.lived, end) - start)
        if done > machine.reported.get(step, 0):
            machine.reported[step], machine.progressed = done, self.now
        self.put(progress_key(machine.id), progress_record(step, 0, machine.reported.get(step, 0)))

    @property
    def holder(self) -> Machine | None:
        """Who has the lease: the first that has booted and wants it."""
        booted = (each for each in self.live if each.lived >= self.life.ready)
        return next(
            (each for each in booted if each.habit == "works" or self.hangs_later(each)), None
        )

    def hangs_later(self, machine: Machine) -> bool:
        return machine.habit == "hangs" and machine.lived - self.life.ready < HANG_SECONDS

    def is_healthy(self, machine: Machine) -> bool:
        """Whether it does what it is there for, however long it says nothing."""
        return machine.habit in ("works", "dies") or self.hangs_later(machine)

    def _beat(self, machine: Machine, seconds: float) -> None:
        """The trainer's heartbeat, and a commit now and then."""
        life = self.life
        if machine.trained is None:
            if self.in_trouble:
                return
            if self.is_headless and self.has_checkpoints:
                self.end(machine, ITS_OWN)  # the trainer refuses to begin
                return
            machine.trained = self.committed_work
            machine.began = self.now + life.first_step
        elif machine.habit == "works" and self.now > machine.began:
            machine.trained += seconds  # saves and evaluations are part of a stage's time
        if self.in_trouble:
            return
        is_due = self.now - machine.began >= life.between_commits
        if machine.habit == "works" and is_due:
            self.commit(machine)
        else:
            self.write_head()
        if self.stages and machine.trained >= sum(self.stages.values()):
            self.state = "finished"
            self.commit(machine)

    @property
    def is_headless(self) -> bool:
        return self.get("head.json") is None

    @property
    def has_checkpoints(self) -> bool:
        return any(key.startswith(f"{self.prefix}checkpoints/") for key in self.objects)

    def delete_head(self) -> None:
        """Whoever held the lease has lost it."""
        if self.holder is not None:
            self.holder.habit = "idles"
        self.put("head.json", None)

    def commit(self, machine: Machine) -> None:
        machine.committed = machine.began = self.now
        self.committed_work = machine.trained or 0.0
        name = f"{int(self.now):08d}-g0001-0000000000000000"
        self.put(f"checkpoints/{name}/state.json", b"{}")
        left, entry = self.committed_work, {"name": name}
        for stage, seconds in self.stages.items():
            entry |= {"stage": stage, "seconds_left": max(0.0, seconds - left)}
            if left < seconds:
                break
            left -= seconds
        self.write_head(entry)

    def write_head(self, *entries: dict[str, Any]) -> None:
        found = self.get("head.json")
        before = json.loads(found)["checkpoints"][-1:] if found else []
        head = {"state": self.state, "nonce": str(self.now), "checkpoints": [*before, *entries]}
        self.put("head.json", json.dumps(head).encode())
        self.head_written = self.now

    def _maintain(self) -> None:
        if self.is_cancelled:
            return
        wanted: dict[Market, int] = {"on-demand": self.on_demand}
        if self.has_capacity:
            wanted["spot"] = self.target - self.on_demand
        for market, count in wanted.items():
            have = [each for each in self.live if each.market == market and each.ends is None]
            for _ in range(count - len(have)):
                self.launch(market)

    def launch(self, market: Market) -> Machine:
        habit = self.habits.pop(0) if len(self.habits) > 1 else self.habits[0]
        if market == "on-demand":
            habit = "works"
        fleet, tag = FLEETS[self.kind]
        fleet += ".on-demand" if self.kind == "asg" and market == "on-demand" else ""
        tags = {"Stack": "TrainingStack", "RunId": self.prefix.split("/")[1], tag: fleet}
        machine = Machine(
            id=f"i-{len(self.machines):017x}",
            market=market,
            habit=habit,
            launched=self.now,
            tags=tags,
        )
        self.machines.append(machine)
        return machine

    def end(self, machine: Machine, why: str, *, saves: bool = False) -> None:
        """With a notice, or shut down in order, a trainer saves."""
        works = machine is self.holder and machine.habit == "works" and self.state == "running"
        can_save = machine.trained is not None and not (self.is_headless or self.in_trouble)
        if saves and works and can_save and self.life.step + self.life.save <= NOTICE_SECONDS:
            self.commit(machine)
        machine.ended, machine.why = self.now, why

    # -- S3

    def put(self, name: str, data: bytes | None) -> None:
        self.objects.setdefault(self.prefix + name, []).append((self.now, data))

    def get(self, name: str) -> bytes | None:
        versions = self.objects.get(self.prefix + name)
        return versions[-1][1] if versions else None

    # -- what the Guard sees

    def allow(self, operation: str) -> None:
        if self.now < self.guard_trouble_ends and "object" in operation:
            raise error("SlowDown", operation, 503)
        if operation in self.between:
            self.between.pop(operation)()
        if self.failing[operation] > 0:
            self.failing[operation] -= 1
            raise error("InternalError", operation, 500)
        if operation in self.denied:
            raise error("UnauthorizedOperation", operation, 403)
