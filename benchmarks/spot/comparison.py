"""Policies side by side on the same traces, with the same restart and the same notices.

Two questions: how much of the paid time is training (on Spot alone, over the whole trace), and what
does a job with a deadline cost (from many starts in the trace, decided at the Guard's ticks).
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from scipy.special import lambertw

from benchmarks.spot.oracle import best_goodput, least_usd
from benchmarks.spot.placements import Greedy, OnDemandOnly, UniformProgress
from contract.auto_interval import MIN_SECONDS, choose_interval, expected_life_seconds
from contract.notice import idle_seconds
from sizing.fallback.decision import Fallback
from sizing.fallback.situation import PRIOR_WEIGHT
from sizing.spot.interruptions import interruptions
from sizing.spot.pattern import NEVER, NOTICE_ARRIVES
from sizing.spot.replay import Clock, Placement, Prices, Replay, ReplayJob, ReplayOutcome, Saving
from sizing.spot.traces import SpotLife, Trace, statistics

# Reserve after the last save of a notice, in case it takes longer than the ones before.
_MARGIN_SECONDS = 10.0
ORACLE = "oracle"
_OURS = "ours"
_TODAY = "the trainer today"
_STOPPING = "the trainer, stopping at the notice"
# The step that the trainer allows for at a notice; this project's steps are shorter.
_STEP_SECONDS = 1.0
_UNIFORM = "Uniform Progress, saving as ours"
_GREEDY = "greedy, saving as ours"
_ON_DEMAND = "on demand"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is compared: the job, its overheads in seconds, and prices per hour.

    `checkpoint` is what a periodic save keeps the GPU waiting, `save` a whole commit at a notice.
    """

    work_hours: float = 48.0
    deadline_hours: float = 72.0
    restart: float = 180.0
    checkpoint: float = 1.0
    save: float = 15.0
    notice: float = 120.0
    notice_arrives: float = NOTICE_ARRIVES
    spot_per_hour: float = 0.49
    on_demand_per_hour: float = 1.0
    num_starts: int = 25
    # Longest and usual time from one decision to the next: the Guard's schedule with a deadline.
    tick: float = 120.0

    def job(self, *, has_deadline: bool) -> ReplayJob:
        """Return the job; without a deadline it is endless."""
        endless = ReplayJob(
            restart=self.restart, checkpoint=self.checkpoint, save=self.save, notice=self.notice
        )
        if not has_deadline:
            return endless
        return replace(endless, work=self.work_hours * 3600, deadline=self.deadline_hours * 3600)

    @property
    def full_price(self) -> float:
        """Dollars of the work alone on demand: no restart, no save."""
        return self.work_hours * self.on_demand_per_hour

    @property
    def prices(self) -> Prices:
        """Dollars per hour of both markets."""
        return Prices(spot=self.spot_per_hour, on_demand=self.on_demand_per_hour)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How one policy saves, and where it runs with and without a deadline."""

    name: str
    saving: Saving
    under_deadline: Callable[[], Placement] | None
    replays_on_spot: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRow:
    """One policy on one trace, as shares of 1; `behind` is the distance from the oracle."""

    trace: str
    policy: str
    goodput: float | None
    goodput_behind: float | None
    cost: float | None
    cost_behind: float | None
    in_time: float | None


def policies(question: Question, trace: Trace) -> list[Policy]:
    """Return every policy. Young/Daly is given the trace's rate; ours knows nothing of it."""
    prior = interruptions(pools=1).rate_per_hour
    # With a notice long enough to save in, only the losses without one count.
    counts = 1 - question.notice_arrives if question.save <= question.notice else 1.0

    def retune(losses: int, spot_seconds: float) -> float:
        rate = (losses + PRIOR_WEIGHT) / (spot_seconds / 3600 + PRIOR_WEIGHT / prior)
        seconds = daly_interval(checkpoint_seconds=question.checkpoint, rate_per_hour=rate * counts)
        return max(MIN_SECONDS, seconds)

    # A save at the notice (written while training continues) and a last one, with a margin.
    last = min(question.checkpoint + question.save + _MARGIN_SECONDS, question.notice)
    interval = retune(0, 0.0)
    ours = Saving(interval=interval, notice_idle=last, retune=retune)
    today = Saving(
        interval=interval,
        notice_idle=idle_seconds(
            save_seconds=question.save, step_seconds=_STEP_SECONDS, notice_seconds=question.notice
        ),
        retune=lambda losses, spot_seconds: _as_the_trainer(question, losses, spot_seconds),
    )
    daly = daly_interval(
        checkpoint_seconds=question.checkpoint,
        rate_per_hour=max(statistics([trace]).rate_per_hour, 1e-6),
    )

    return [
        Policy(name=_OURS, saving=ours, under_deadline=Fallback),
        Policy(
            name="ours, but stopping at the notice",
            saving=replace(ours, notice_idle=question.notice),
            under_deadline=None,
        ),
        Policy(name=_TODAY, saving=today, under_deadline=None),
        Policy(
            name=_STOPPING,
            saving=replace(today, notice_idle=question.notice),
            under_deadline=None,
        ),
        Policy(name=_UNIFORM, saving=ours, under_deadline=UniformProgress, replays_on_spot=False),
        Policy(name=_GREEDY, saving=ours, under_deadline=Greedy, replays_on_spot=False),
        Policy(name="Young/Daly, no notice", saving=_every(daly), under_deadline=Greedy),
        Policy(name="every 30 min", saving=_every(1800), under_deadline=Greedy),
        Policy(name="every 60 min", saving=_every(3600), under_deadline=Greedy),
        Policy(
            name=_ON_DEMAND,
            saving=_every(3600),
            under_deadline=OnDemandOnly,
            replays_on_spot=False,
        ),
    ]


def daly_interval(*, checkpoint_seconds: float, rate_per_hour: float) -> float:
    """Return the useful seconds between saves that lose least under Poisson interruptions.

    The exact optimum of Daly (2006): x = interval / MTBF solves (1 - x) exp(x + c) = 1 with
    c = checkpoint / MTBF. For c much below 1 it is Young's sqrt(2 * checkpoint * MTBF).
    """
    if rate_per_hour < NEVER:
        return math.inf
    if not checkpoint_seconds:
        return 0.0
    mean = 3600 / rate_per_hour
    return float(1 + lambertw(-math.exp(-1 - checkpoint_seconds / mean)).real) * mean


def _as_the_trainer(question: Question, losses: int, spot_seconds: float) -> float:
    """Return the interval that the trainer's `auto` would choose by now."""
    return choose_interval(
        cost_seconds=question.checkpoint,
        durable_seconds=question.save,
        life_seconds=expected_life_seconds(spent_seconds=spot_seconds, interruptions=losses),
        epoch_seconds=None,
    ).seconds


def _every(seconds: float) -> Saving:
    return Saving(interval=max(seconds, 60.0))


def compare(traces: Iterable[Trace], question: Question) -> list[PolicyRow]:
    """Replay every policy on every trace; the oracle's row is the last of each trace."""
    return [row for trace in traces for row in _compare(trace, question)]


def _compare(trace: Trace, question: Question) -> list[PolicyRow]:
    # For every policy the same machines end without a notice.
    luck = random.Random(trace.name)
    warned = [luck.random() < question.notice_arrives for _ in trace.lives]
    cuts = [_cut(trace.lives, warned, begin) for begin in _starts(trace, question)]
    best = best_goodput(trace.lives, restart=question.restart)
    least = _mean([_least(cut, question) / question.full_price for cut, _ in cuts])
    rows = []
    for policy in policies(question, trace):
        spot = _on_spot(trace, warned, policy, question)
        done = [_by_deadline(*cut, policy, question) for cut in cuts if policy.under_deadline]
        cost = _mean([each.usd(question.prices) / question.full_price for each in done])
        rows.append(
            PolicyRow(
                trace=trace.name,
                policy=policy.name,
                goodput=spot.goodput if spot else None,
                goodput_behind=best - spot.goodput if spot else None,
                cost=cost,
                cost_behind=None if cost is None or least is None else cost - least,
                in_time=_mean([each.is_done_by(question.deadline_hours) for each in done]),
            )
        )
    oracle = PolicyRow(
        trace=trace.name, policy=ORACLE, goodput=best, goodput_behind=0.0, cost=least,
        cost_behind=None if least is None else 0.0, in_time=None if least is None else 1.0,
    )  # fmt: skip
    return [*rows, oracle]


def _starts(trace: Trace, question: Question) -> list[float]:
    """Return starts spread over the trace, each deadline inside it; none if it is too short."""
    last = trace.seconds - question.deadline_hours * 3600
    if last < 0:
        return []
    count = question.num_starts
    return [last * index / max(count - 1, 1) for index in range(count)]


def _cut(
    lives: Sequence[SpotLife], warned: Sequence[bool], begin: float
) -> tuple[list[SpotLife], list[bool]]:
    """Return the lives as a job that starts at `begin` sees them."""
    kept = [(life, is_warned) for life, is_warned in zip(lives, warned, strict=True)
            if life.end > begin]  # fmt: skip
    moved = [
        SpotLife(start=max(0.0, life.start - begin), end=life.end - begin, pool=life.pool)
        for life, _ in kept
    ]
    return moved, [is_warned for _, is_warned in kept]


def _least(cut: Sequence[SpotLife], question: Question) -> float:
    return least_usd(
        cut,
        work=question.work_hours * 3600,
        deadline=question.deadline_hours * 3600,
        restart=question.restart,
        spot_per_hour=question.spot_per_hour,
        on_demand_per_hour=question.on_demand_per_hour,
    )


def _on_spot(
    trace: Trace, warned: Sequence[bool], policy: Policy, question: Question
) -> ReplayOutcome | None:
    """Replay endless training on the whole trace."""
    if not policy.replays_on_spot:
        return None
    return Replay(
        lives=trace.lives,
        job=question.job(has_deadline=False),
        saving=policy.saving,
        horizon=trace.seconds,
        has_notice=warned,
    ).run()


def _by_deadline(
    lives: Sequence[SpotLife], warned: Sequence[bool], policy: Policy, question: Question
) -> ReplayOutcome:
    """Replay one job with its deadline; a late one continues until it is done."""
    assert policy.under_deadline is not None
    return Replay(
        lives=lives,
        job=question.job(has_deadline=True),
        saving=policy.saving,
        placement=policy.under_deadline(),
        prices=question.prices,
        clock=Clock(tick=question.tick),
        horizon=2 * question.deadline_hours * 3600 + 86_400,
        has_notice=warned,
    ).run()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
