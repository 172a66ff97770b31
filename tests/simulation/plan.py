"""What a seed draws: one run's work, its machines' lives, its limits, and what happens to it when.

A plan is data: shrinking drops its happenings one by one, and what is left fails alike or does not.
"""

import math
import random
from dataclasses import dataclass, replace
from typing import Literal

from contract.goodput import PLANNED, USEFUL
from tests.simulation.habits import Habit, draw_habit
from tests.simulation.habits import log_uniform as _log
from tests.stacks.guard.world import HOUR, MINUTE, Life

Kind = Literal[
    "takeback", "s3", "no capacity", "price", "pause", "hang", "crash", "failed start", "dead boot",
    "guard off", "guard twice", "guard call fails", "clock", "rebalance", "slow boot",
    "ledger damaged", "gpu fault", "person stops", "checkpoints damaged", "head deleted", "deploy",
    "power off", "new version", "budget damaged", "rank", "diverge", "host",
]  # fmt: skip
# What Spot does, and what is known to happen to a call: under these alone a deadline is kept.
MARKET = ("takeback", "power off", "no capacity", "price", "rebalance", "guard twice")
# How many times longer a slow rank's steps take.
SLOWEST = 2.5
Trouble = Literal["outage", "throttle", "slow", "lost", "denied"]
DAY = 24 * HOUR


@dataclass(frozen=True, kw_only=True)
class Happening:
    """One thing, `at` seconds after the deploy; what its other figures mean depends on it."""

    at: float
    what: Kind
    seconds: float = 0.0
    share: float = 1.0
    how: str = ""
    whose: str = ""  # all, machines, guard; a rank's number

    def __str__(self) -> str:
        of = " ".join(filter(None, (self.how, self.whose)))
        figures = f" for {self.seconds / MINUTE:.1f} min" if self.seconds else ""
        share = f", {self.share:.2g}" if self.share != 1.0 else ""
        return f"{self.what}{' ' + of if of else ''}{figures}{share}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that a seed decides but the small luck of latencies and names."""

    seed: int
    fleet: Literal["spot", "asg"]
    life: Life
    steps: int
    step_seconds: float
    evaluation_every: int  # steps, and at the end; 0: only there
    evaluation_seconds: float
    state_bytes: float
    upload_rate: float  # bytes a second
    latency: float  # logarithm of seconds
    interval: str
    policy: Literal["train-on", "stop"]
    keep: int
    slow_seconds: float  # how long a fleet takes to replace a machine
    max_hours: float
    max_usd: float
    deadline_hours: float  # 0: none
    forecast_share: float  # what the plan says of the work's time, as a share of it
    happenings: tuple[Happening, ...]
    beside: tuple["Plan", ...] = ()  # other runs of the account
    budget_usd: float = 0.0  # of all of them together; 0: none
    budget_period: Literal["day", "month"] = "month"
    after_seconds: float = 0.0  # from the world's begin (life.py) to the life's
    has_pools: bool = False  # two zones, of which Spot leaves one at times
    ranks: int = 1
    is_sharded: bool = False
    is_gpu: bool = False  # NCCL's calls wait for a rank that is lost
    mixes_ranks: bool = False  # each machine has 1, 2, 4 or 8
    hears: Literal["first", "all", "other"] = "first"  # which ranks a notice reaches
    program: Habit | None = None  # the run is of a program, not of a workload
    raises: int = 0  # how often a person deploys with twice the budget, once it is spent

    @property
    def has_engine(self) -> bool:
        """Whether the engine's own job trains, which knows ranks and divergence."""
        return self.ranks > 1 or any(each.what == "diverge" for each in self.happenings)

    @property
    def usd(self) -> float:
        """What its work costs about, on Spot."""
        return 0.45 * (self.work_seconds + 4 * self.restart_seconds) / HOUR

    @property
    def work_seconds(self) -> float:
        evaluations = math.ceil(self.steps / (self.evaluation_every or self.steps))
        return self.steps * self.step_seconds + evaluations * self.evaluation_seconds

    @property
    def prediction(self) -> dict[str, float | str]:
        """What a plan says of the run: as much of evaluations as of steps."""
        training = self.steps * self.step_seconds
        evaluating = self.work_seconds - training
        return {PLANNED + USEFUL: training, f"{PLANNED}evaluation": evaluating}

    @property
    def restart_seconds(self) -> float:
        """From a request for a machine to its first new step, as a plan says it."""
        reading = self.state_bytes / self.upload_rate
        return self.slow_seconds + self.life.ready + self.life.first_step + reading + 2 * MINUTE

    @property
    def save_seconds(self) -> float:
        return self.state_bytes / self.upload_rate + self.state_bytes / 4e9 + 5.0

    @property
    def answer_seconds(self) -> float:
        """A notice as long as this leaves time for the step under way and its save, for certain."""
        if self.program:
            saving = self.program.saving_seconds + 1.1 * self.step_seconds
            saving *= self.program.handler == "save"
            # What is sent from where it lies may change, until the program has ended.
            is_in_place = not (self.program.has_room or self.program.says_when)
            saving += 1e9 * (self.program.seems_to_save or is_in_place)
            return 60.0 + 1.2 * saving + 2.5 * self.save_seconds
        held = self.state_bytes < 40e9  # memory holds a copy: no save is streamed
        slowest = SLOWEST if any(each.how == "slow" for each in self.happenings) else 1.0
        return 45.0 + 1.1 * slowest * self.step_seconds + 2 * self.save_seconds if held else 1e9

    @property
    def is_calm(self) -> bool:
        """Whether all that happens is Spot's doing."""
        return all(each.what in MARKET for each in self.happenings)

    def most_hours(self, machines: int) -> float:
        """What a run takes of which each machine loses a restart and an interval of Young's."""
        life = 2.1 * HOUR  # what the trainer assumes at first (contract/auto_interval.py)
        interval = math.sqrt(2 * self.save_seconds * life) if self.interval == "auto" else 600.0
        last = 0.0
        if self.program:
            if self.program.begins == "from scratch" or self.program.is_silent:
                return math.inf
            interval = self.program.most_unsaved + self.program.start_seconds
            last = self.program.keep_last * self.save_seconds  # all that a slow link still owes
        steps = 7 * self.step_seconds if self.interval == "7steps" else 2 * self.step_seconds
        lost = self.restart_seconds + interval + 2 * self.save_seconds + steps + 20 * MINUTE
        return (
            1.15 * self.saving_share * self.work_seconds
            + last
            + machines * (lost + self.evaluation_seconds)
        ) / HOUR

    @property
    def saving_share(self) -> float:
        """How much longer steps take where training waits for saves."""
        if self.program:
            waits = self.program.says_when or not self.program.has_room
            saving = self.program.saving_seconds + waits * (self.save_seconds + 2.0)
            return 1.15 + saving / self.program.save_every
        waits = self.state_bytes >= 40e9 or self.interval == "7steps"
        return 1.0 + waits * self.save_seconds / min(600.0, 7 * self.step_seconds)

    @property
    def is_deadline_fair(self) -> bool:
        """Whether the Guard can keep the deadline, whatever Spot does."""
        least = (
            1.1 * self.work_seconds * self.saving_share
            + 3 * (self.restart_seconds + self.save_seconds)
            + HOUR
        )
        return self.deadline_hours * HOUR > least and self.forecast_share >= 1.0 and self.is_calm

    @property
    def troubled_until(self) -> float:
        return max((each.at + each.seconds for each in self.happenings), default=0.0)

    @property
    def parts(self) -> tuple["Happening | Plan", ...]:
        """What may be dropped: other runs first."""
        of_others = (part for each in self.beside for part in each.parts)
        return (*self.beside, *of_others, *self.happenings)

    def without(self, *gone: "Happening | Plan") -> "Plan":
        return replace(
            self,
            happenings=tuple(each for each in self.happenings if each not in gone),
            beside=tuple(each.without(*gone) for each in self.beside if each not in gone),
        )


def draw(seed: int, fleet: Literal["spot", "asg"] | None = None) -> Plan:
    """Draw a plan: most seeds are mild, some have everything at once.

    What came into the world later has a stream of its own: a seed without it is as it was.
    """
    plan = _with_deploys(random.Random(f"{seed}-deploy"), _one(seed, fleet))
    plan = _with_others(random.Random(f"{seed}-beside"), plan)
    plan = _at_months_end(random.Random(f"{seed}-month"), plan)
    plan = _with_ranks(random.Random(f"{seed}-ranks"), plan)
    plan = _with_other_run(random.Random(f"{seed}-other-run"), plan)
    plan = _with_divergence(random.Random(f"{seed}-diverge"), plan)
    plan = _with_program(random.Random(f"{seed}-program"), plan)
    plan = _with_long_waits(random.Random(f"{seed}-long"), plan)
    return _with_denial(random.Random(f"{seed}-denial"), plan)


def _with_deploys(luck: random.Random, plan: Plan) -> Plan:
    """Deploy what is new in mid-life, once to three times, of a quarter of the runs."""
    if luck.random() >= 0.25:
        return plan
    ways = luck.choices(["template", "template in place", "kind", "guard", "trainer"], k=3)
    duration = 1.3 * plan.work_seconds + plan.life.ready
    found = [
        Happening(
            at=luck.uniform(0, duration),
            what="new version",
            how=how,
            seconds=_log(luck, 10 * MINUTE, 8 * HOUR) if how in ("guard", "trainer") else 0.0,
        )
        for how in ways[: luck.randint(1, 3)]
    ]
    happenings = sorted([*plan.happenings, *found], key=lambda each: each.at)
    return replace(plan, happenings=tuple(happenings))


def _with_others(luck: random.Random, plan: Plan) -> Plan:
    """Give a quarter of the runs one or two others beside them, and most of those a budget."""
    if luck.random() >= 0.25:
        return plan
    others = [_one(luck.randrange(10**6, 10**9)) for _ in range(luck.choice([1, 1, 2]))]
    plans = [plan, *others]
    period, usd = luck.choice(_PERIODS), luck.uniform(0.4, 2.5) * sum(each.usd for each in plans)
    if period == "day":  # of which each run can begin alone
        most = max(1.4 * each.forecast_share * each.usd for each in plans)
        usd = max(luck.uniform(2, 12) * len(plans), most + len(plans) * 0.3)
    has_one = luck.random() < 0.7
    happenings = list(plan.happenings)
    for _ in range(luck.choice([0, 0, 1, 3])):
        at = luck.uniform(0, 1.3 * plan.work_seconds)
        happenings.append(Happening(at=at, what="budget damaged"))
    return replace(
        plan,
        happenings=tuple(sorted(happenings, key=lambda each: each.at)),
        beside=tuple(others),
        budget_usd=usd * has_one,
        budget_period=period,
        raises=luck.choice([0, 1, 3]),
        has_pools=luck.random() < 0.5,
    )


def _with_other_run(luck: random.Random, plan: Plan) -> Plan:
    """Deploy another run_id in a tenth of the lives, and after minutes or days this run's again."""
    if luck.random() >= 0.1:
        return plan
    at, seconds = luck.uniform(0, 1.2 * plan.work_seconds), _log(luck, 10 * MINUTE, 5 * DAY)
    other = Happening(at=at, what="new version", how="other run", seconds=seconds)
    happenings = sorted([*plan.happenings, other], key=lambda each: each.at)
    return replace(plan, happenings=tuple(happenings))


def _with_ranks(luck: random.Random, plan: Plan) -> Plan:
    """Give the first run of a sixth of the lives several ranks, to which something happens."""
    if luck.random() >= 1 / 6:
        return plan
    hows = luck.choices(["crash", "hang in a step", "hang in an evaluation", "slow"], k=3)
    found = [
        Happening(
            at=luck.uniform(0, 1.2 * plan.work_seconds + plan.life.ready),
            what="rank",
            how=how,
            whose=str(luck.randrange(8)),
            seconds=_log(luck, MINUTE, 4 * HOUR) if how == "slow" else 0.0,
            share=luck.choice([1.0, -9.0, -11.0]) if how == "crash" else 1.0,
        )
        for how in hows[: luck.randint(0, 3)]
    ]
    at = luck.uniform(0, plan.work_seconds)
    found.append(Happening(at=at, what="rebalance"))
    return replace(
        plan,
        happenings=tuple(sorted([*plan.happenings, *found], key=lambda each: each.at)),
        ranks=luck.choice([2, 2, 4, 8]),
        is_sharded=luck.random() < 0.4,
        is_gpu=luck.random() < 0.5,
        mixes_ranks=luck.random() < 0.25,
        hears=luck.choice(["first", "first", "first", "all", "other"]),
    )


def _with_divergence(luck: random.Random, plan: Plan) -> Plan:
    """Let steps of half of the runs with several ranks diverge, and of a tenth of the others."""
    if luck.random() >= (0.5 if plan.ranks > 1 else 0.1):
        return plan
    found = [
        Happening(at=at, what="diverge", how=luck.choice(["once", "data"]))
        for at in (luck.uniform(0, plan.work_seconds + plan.life.ready) for _ in range(6))
    ]
    happenings = sorted([*plan.happenings, *found[: luck.randint(1, 6)]], key=lambda each: each.at)
    return replace(plan, happenings=tuple(happenings))


def _with_program(luck: random.Random, plan: Plan) -> Plan:
    """Make a fifth of the lives a program's: alone, without a deadline, and mostly shorter."""
    if luck.random() >= 0.2:
        return plan
    work = _log(luck, 0.4 * HOUR, 10 * HOUR)
    habit = draw_habit(luck, work, plan.state_bytes)
    work = min(work, max(0.4 * HOUR, 500 * habit.save_every))
    step_seconds = min(plan.step_seconds, max(1.0, habit.save_every), work / 20)
    happenings = tuple(
        _sooner(each, work / plan.work_seconds)
        for each in plan.happenings
        if each.what not in ("hang", "budget damaged", "rank", "diverge")
    )
    return replace(
        plan,
        program=habit,
        steps=max(4, round(work / step_seconds)),
        step_seconds=step_seconds,
        evaluation_every=0,
        evaluation_seconds=0.0,
        happenings=happenings,
        beside=(),
        budget_usd=0.0,
        deadline_hours=0.0,
        after_seconds=0.0,
        raises=0,
        has_pools=False,
        ranks=1,
        is_sharded=False,
        mixes_ranks=False,
        hears="first",
    )


def _with_long_waits(luck: random.Random, plan: Plan) -> Plan:
    """Let a twelfth of the lives have boots, or an outage of S3, of hours."""
    if luck.random() >= 1 / 12:
        return plan
    at, seconds = luck.uniform(0, plan.work_seconds), _log(luck, 1.5 * HOUR, 6 * HOUR)
    if luck.random() < 0.5:
        return replace(plan, life=replace(plan.life, boot=_log(luck, HOUR, 3 * HOUR)))
    outage = Happening(at=at, what="s3", how="outage", whose="all", seconds=seconds)
    happenings = sorted([*plan.happenings, outage], key=lambda each: each.at)
    return replace(plan, happenings=tuple(happenings))


def _with_denial(luck: random.Random, plan: Plan) -> Plan:
    """Let a policy deny a twentieth of the lives their bucket, for up to a day."""
    if luck.random() >= 1 / 20:
        return plan
    at, seconds = luck.uniform(0, plan.work_seconds), _log(luck, 0.5 * HOUR, 24 * HOUR)
    denial = Happening(at=at, what="s3", how="denied", whose="all", seconds=seconds)
    happenings = sorted([*plan.happenings, denial], key=lambda each: each.at)
    return replace(plan, happenings=tuple(happenings))


def _sooner(each: Happening, share: float) -> Happening:
    """Let it happen in the program's shorter life, if that is shorter."""
    return replace(each, at=each.at * min(1.0, share))


def _at_months_end(luck: random.Random, plan: Plan) -> Plan:
    """Let half of the lives with a month's budget begin in its last days, and go on in the next."""
    if not plan.budget_usd or plan.budget_period != "month" or luck.random() >= 0.5:
        return plan
    longest = max(each.work_seconds for each in (plan, *plan.beside))
    return replace(plan, after_seconds=29 * DAY - luck.uniform(0.1, 1.2) * longest)


_PERIODS: tuple[Literal["day", "month"], ...] = ("day", "month")


def _one(seed: int, fleet: Literal["spot", "asg"] | None = None) -> Plan:
    luck = random.Random(seed)
    kind: Literal["spot", "asg"] = luck.choice(["spot", "asg"])
    step_seconds = _log(luck, 2, 1200)
    work = _log(luck, 1 * HOUR, 40 * HOUR)
    steps = max(4, min(3000, round(work / step_seconds)))
    size = _log(luck, 1e6, 60e9)
    life = Life(
        boot=_log(luck, MINUTE, 15 * MINUTE),
        build=luck.choice([0.0, 0.0, _log(luck, MINUTE, 40 * MINUTE)]),
        sync=luck.choice([0.0, _log(luck, MINUTE, 5 * HOUR)]),
        first_step=luck.choice([0.0, _log(luck, 5, 10 * MINUTE)]),
    )
    duration = steps * step_seconds + life.ready
    mildness = luck.choice([0.2, 1.0, 3.0])
    plan = Plan(
        seed=seed,
        fleet=fleet or kind,
        life=life,
        steps=steps,
        step_seconds=step_seconds,
        evaluation_every=luck.choice([0, max(2, steps // 7)]),
        evaluation_seconds=_log(luck, 5, 30 * MINUTE),
        state_bytes=size,
        upload_rate=_log(luck, 20e6, 1e9),
        latency=luck.uniform(-4.5, -1.5),
        interval=luck.choice(["auto", "auto", "auto", "600s", "7steps"]),
        policy=luck.choice(["train-on", "train-on", "stop"]),
        keep=luck.choice([1, 3, 3]),
        slow_seconds=_log(luck, 10, 8 * MINUTE),
        max_hours=luck.choice([1e4, 1e4, 1e4, max(2.0, luck.uniform(0.3, 1.5) * duration / HOUR)]),
        max_usd=luck.choice([0.0, 0.0, max(1.0, luck.uniform(0.3, 2) * duration / HOUR * 0.5)]),
        deadline_hours=0.0,
        forecast_share=1.0,
        happenings=tuple(_happenings(luck, 1.5 * duration, mildness)),
    )
    return _with_market(luck, plan) if luck.random() < 0.35 else plan


def _with_market(luck: random.Random, plan: Plan) -> Plan:
    """Give it a deadline; of half of them Spot is all that happens, and often away for hours."""
    found = [each for each in plan.happenings if each.what in MARKET]
    for _ in range(luck.randint(0, 6)):
        at, seconds = luck.uniform(0, 1.5 * plan.work_seconds), _log(luck, 10 * MINUTE, 20 * HOUR)
        found.append(Happening(at=at, what="no capacity", seconds=seconds))
    others = luck.choice([(), plan.happenings])
    happenings = sorted({*found, *others}, key=lambda each: (each.at, each.what))
    seconds = plan.work_seconds + 4 * (plan.restart_seconds + plan.save_seconds) + HOUR
    return replace(
        plan,
        deadline_hours=luck.uniform(0.9, 3.0) * seconds / HOUR,
        forecast_share=luck.uniform(0.8, 1.4),
        happenings=tuple(happenings),
        max_usd=0.0,
        max_hours=1e4,
    )


def _happenings(luck: random.Random, duration: float, mildness: float) -> list[Happening]:
    """Draw losses at Spot's rates, and a few of everything else."""
    found: list[Happening] = []
    at, mean = 0.0, _log(luck, 1 * HOUR, 30 * HOUR)
    while (at := at + luck.weibullvariate(mean, 0.6)) < duration and len(found) < 40:
        seconds = luck.choice([120.0, 120.0, 120.0, luck.uniform(5, 119), 0.0, -1.0])
        what: Kind = "takeback" if seconds >= 0 else "power off"
        found.append(Happening(at=at, what=what, seconds=max(0.0, seconds)))
    for _ in range(min(30, round(mildness * luck.uniform(0, 6)))):
        found.append(_trouble(luck, luck.uniform(0, duration)))
    return sorted(found, key=lambda each: each.at)


def _trouble(luck: random.Random, at: float) -> Happening:
    what: Kind = luck.choice(
        [
            "s3", "s3", "s3", "no capacity", "price", "pause", "hang", "crash", "failed start",
            "dead boot", "guard off", "guard twice", "guard call fails", "clock", "rebalance",
            "slow boot", "ledger damaged", "gpu fault", "person stops", "checkpoints damaged",
            "head deleted", "deploy",
        ]
    )  # fmt: skip
    if what == "s3":
        return Happening(
            at=at,
            what=what,
            how=luck.choice(["outage", "throttle", "slow", "lost"]),
            whose=luck.choice(["all", "all", "machines", "guard"]),
            seconds=_log(luck, 20, 40 * MINUTE),
            share=luck.choice([1.0, 0.5, 0.1]),
        )
    seconds = {
        "no capacity": lambda: _log(luck, 10 * MINUTE, 12 * HOUR),
        "pause": lambda: _log(luck, 20, 2 * HOUR),
        "guard off": lambda: _log(luck, 10 * MINUTE, 3 * HOUR),
        "slow boot": lambda: _log(luck, 10 * MINUTE, HOUR),
        "person stops": lambda: _log(luck, MINUTE, 8 * HOUR),
        "head deleted": lambda: _log(luck, MINUTE, 8 * HOUR),
    }.get(what, float)()
    share = {
        "price": lambda: luck.uniform(0.15, 0.95),
        "clock": lambda: luck.uniform(-26, 26),
        "guard call fails": lambda: float(luck.randint(1, 6)),
        "checkpoints damaged": lambda: luck.choice([0.1, 0.1, 0.5, 1.0]),
        "deploy": lambda: luck.choice([0.5, 2.0]),
    }.get(what, lambda: 1.0)()
    how = {
        "guard call fails": lambda: luck.choice(_CALLS),
        "dead boot": lambda: random.Random(at).choice(["", "silent"]),
    }.get(what, str)()
    return Happening(at=at, what=what, seconds=seconds, share=share, how=how)


_CALLS = (
    "describe_instances", "describe_spot_fleet_requests", "modify_spot_fleet_request", "publish",
    "get_parameter", "describe_auto_scaling_groups", "update_auto_scaling_group",
)  # fmt: skip
