"""The loop over one Train stage: steps, evaluations, commits. It knows no workload's name.

Every step boundary is a consistent state; the attempt is ended only there or between evaluation
batches, whose work is then thrown away and repeated. The numbers of a step are read one step late,
and before anything of that step is published.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Container, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, replace

from training.durable import (
    AttemptContext,
    CheckpointContent,
    Checkpointer,
    CheckpointPolicy,
    InterruptedRunError,
    LiveState,
    Position,
    RunFailedError,
    ShardedContent,
    Tally,
    Work,
)
from training.engine.batches import BatchPlan, CompiledShapes, MicroBatch, to_device
from training.engine.evaluation import evaluate
from training.engine.learner import Learner, StepResult
from training.engine.loader import Loader
from training.engine.reduction import SHARES, share_of, tree_sum
from training.engine.stage_checks import samples_of
from training.engine.step_log import (
    DeviceTime,
    Pace,
    StepLog,
    StepTime,
    TimesSoFar,
    evaluations_ahead,
)
from training.settings import schedule_factor
from training.workload import Batch, Inputs, Samples, Train, implements

_log = logging.getLogger(__name__)
# A larger share of the weights before training in an average costs accuracy.
_MOST_LEFT = 0.01

# The times of a whole step, and of its part without the other ranks, if there are any.
_DeviceTimes = tuple[DeviceTime, DeviceTime | None]
# A rank that takes this many times as long as the usual one slows all of them down.
_SLOW = 1.25


class StageLoop:
    """Trains one stage from `position`, with the tensors of `snapshot` if it resumes."""

    def __init__(
        self,
        context: AttemptContext,
        checkpointer: Checkpointer | None,
        stage: Train,
        inputs: Inputs,
        position: Position,
        snapshot: CheckpointContent | ShardedContent | None,
        skipped_steps: Container[int] = (),
    ) -> None:
        self._context = context
        self._stage = stage
        self._inputs = inputs
        self._settings = stage.settings
        self._skipped_steps = skipped_steps
        samples = samples_of(stage, inputs, "train")
        if len(samples) < 1:
            raise RunFailedError(f"stage {stage.name!r} has no training samples; add some")
        self._plan = BatchPlan(samples, self._settings, inputs.seed, context.world.size)
        left = self._settings.weights_left(self._plan.num_steps)
        if context.world.leads and left > _MOST_LEFT:
            _log.warning(
                f"[{stage.name}] the average ends with {left:.0%} of the weights before training: "
                "use a lower ema_decay or ema_every_steps"
            )
        is_ahead = position.stage_step < self._plan.num_steps  # else there is only an evaluation
        if context.world.begins_host and is_ahead and implements(samples, Samples.files):
            inputs.dataset.expect(samples.files(self._plan.rest_of_epoch(position.stage_step)))
        with context.supervisor.long_work.doing("model"):
            before = position.numerics.get(stage.name, {})
            self._learner = Learner(stage, inputs, context.world, snapshot, before)
        facts, chosen = dict(self._learner.start.facts), dict(self._learner.chosen)
        if facts or chosen:
            context.metrics.write("start", stage=stage.name, facts=facts, numerics=chosen)
        self._position = position.stating(facts).choosing(chosen)
        shares = self._plan.shares(position.stage_step, context.world.rank)
        self._loader = Loader.of_stage(samples, shares, self._settings, inputs)
        self._made: deque[Tally] = deque()  # what the loader did for each step that was fetched
        self._unread: tuple[Position, StepResult, StepTime, _DeviceTimes, Tally] | None = None
        self._pace = Pace()
        self._times = TimesSoFar(position.times.get(stage.name, {}), self._loader.num_workers)
        self._own_times = _OwnTimes(context)
        self._compiled = CompiledShapes(stage)
        self._policy = CheckpointPolicy(
            context,
            checkpointer,
            self._plan.steps_per_epoch,
            self._capture,
            unread=lambda: self._learner.capture({}),
            is_sharded=self._learner.is_sharded,
            num_steps=self._plan.num_steps,
            seconds_for=self._seconds_for,
        )
        self._steps = StepLog(context, stage, self._plan, position.stage_step)

    def run(self) -> Position:
        """Train and commit the end of the stage; after a notice raise InterruptedRunError."""
        with closing(self._loader), closing(self._policy), self._steps.bar:
            self._train()
        self._position = replace(
            self._position,
            has_ended=True,
            results={**self._position.results, self._stage.name: self._position.metrics},
        ).timed(self._times.to_json())
        with self._context.consensus.noting_divergence():
            self._policy.save_stage_end(self._position)
        self._context.consensus.go_back_if_diverged()
        # A reference cycle with this loop, which would keep the model until the next collection.
        del self._policy
        return self._position

    def _train(self) -> None:
        batches = self._fetch(self._position.stage_step)
        while True:
            vote = self._context.consensus.end_vote()
            if vote.is_noticed:
                self._answer_notice(self._next_seconds(batches))
            self._evaluate_if_due()
            if self._is_at_the_end:
                return
            # Fetched and voted on by the ranks while this step computes.
            following = self._fetch(self._position.stage_step + 1)
            if self._position.step + 1 in self._skipped_steps:
                self._skip()
            else:
                self._step(batches, tree_sum(vote.weights))
            self._save_if_due()
            batches = following

    @property
    def _epoch(self) -> int:
        """The number of complete epochs, which is also the current epoch's number, from 0."""
        return self._plan.epoch(self._position.stage_step)

    def _fetch(self, step: int) -> "list[tuple[MicroBatch, Batch]]":
        """Fetch this rank's batches of a step; none after the last."""
        batches: list[tuple[MicroBatch, Batch]] = []
        if step < self._plan.num_steps:
            share = self._plan.share(step, self._context.world.rank)
            batches = [(micro, self._loader.next()) for micro in share]
        self._made.append(self._loader.taken())
        weights = [0.0] * SHARES
        for micro, batch in batches:
            if micro.counts:
                place = share_of(micro.number, self._plan.num_micro_batches(step))
                weights[place] += self._stage.weight(batch)
        self._context.consensus.begin_vote(weights)
        return [(micro, to_device(batch, self._inputs.device)) for micro, batch in batches]

    def _step(self, batches: Sequence[tuple[MicroBatch, Batch]], weight: float) -> None:
        step, work = self._position.stage_step, self._work(batches)
        self._protect(work)
        device_time = DeviceTime(self._inputs.device)
        own_time = DeviceTime(self._inputs.device) if self._context.world.size > 1 else None
        with self._context.supervisor.long_work.doing(work):
            with device_time:
                result = self._learner.step(
                    batches,
                    weight=weight,
                    num_micro_batches=self._plan.num_micro_batches(step),
                    step=step,
                    num_steps=self._plan.num_steps,
                    lr_factor=schedule_factor(
                        self._settings, step, self._plan.num_steps, self._plan.steps_per_epoch
                    ),
                    own_time=own_time or nullcontext(),
                )
            self._read_last()
        self._advance()
        # A dataset that is arriving is what the watchdog excuses waiting for.
        is_arriving = self._context.supervisor.watchdog.excuse()
        time = self._pace.next(self._loader.wait_seconds, is_arriving=is_arriving)
        times = device_time, own_time
        self._unread = self._position, result, time, times, self._made.popleft()
        if work == "step":
            self._pace.remember()
        if self._context.profiler is not None:
            self._context.profiler.step()

    def _skip(self) -> None:
        """Leave out a step that diverged: its samples count as seen, nothing else changes."""
        self._read_last()
        self._advance()
        self._made.popleft()
        self._steps.record_skipped(self._position, self._pace.next(self._loader.wait_seconds))

    def _advance(self) -> None:
        before = self._position
        self._position = replace(before, stage_step=before.stage_step + 1, step=before.step + 1)

    def _work(self, batches: Sequence[tuple[MicroBatch, Batch]]) -> Work:
        is_known = self._compiled.have(batch for _, batch in batches)
        self._compiled.add(batch for _, batch in batches)
        if is_known:
            return "step"
        return "first step" if self._settings.compile_mode is None else "compilation"

    def _read(self) -> None:
        """Read and record the numbers of the last step, before anything of it is published."""
        if self._unread is None:
            return
        (position, result, time, (device_time, own_time), made), self._unread = self._unread, None
        self._steps.record(position, result, time, made.counts)
        num_samples = len(self._plan.ids(position.stage_step - 1))
        self._times.add(num_samples, time, device_time.seconds, made.seconds)
        if own_time is not None:
            self._own_times.add(time, own_time.seconds)

    def _read_last(self) -> None:
        with self._context.consensus.noting_divergence():
            self._read()

    def _read_together(self) -> None:
        """Read on all ranks alike, before anything that a diverged state must not reach."""
        self._read_last()
        self._context.consensus.go_back_if_diverged()

    def _answer_notice(self, work_seconds: float | None) -> None:
        """Commit; the next work starts only if it fits into the remaining time."""
        self._read_together()
        self._policy.answer_notice(self._position, work_seconds)
        self._pace.skip()

    def _next_seconds(self, batches: Sequence[tuple[MicroBatch, Batch]]) -> float | None:
        """The longest time to the next boundary; None if it is unknown."""
        if self._is_evaluation_due:
            return self._context.supervisor.long_work.measured_seconds("evaluation")
        if self._is_at_the_end:
            return 0.0  # only the commit of the stage end is left
        is_known = self._compiled.have(batch for _, batch in batches)
        return self._pace.longest_seconds if is_known else None

    def _seconds_for(self, num_steps: int) -> float | None:
        """Estimate the time of `num_steps` more steps, with what is evaluated among them."""
        every, last = self._plan.steps_per_evaluation, self._plan.num_steps
        step, is_due = self._position.stage_step, self._is_evaluation_due
        return self._times.seconds_for(
            num_steps,
            self._pace,
            evaluations=evaluations_ahead(step, num_steps, every=every, last=last, is_due=is_due),
            every=every or last,
            planned=self._context.planned_evaluations,
        )

    @property
    def _is_at_the_end(self) -> bool:
        return self._position.stage_step == self._plan.num_steps

    @property
    def _is_evaluation_due(self) -> bool:
        step, every = self._position.stage_step, self._plan.steps_per_evaluation
        is_due = self._is_at_the_end or (every > 0 and step > 0 and step % every == 0)
        return is_due and self._position.evaluated_step != step

    def _evaluated(self, *, is_last: bool) -> dict[str, float]:
        """Return the metrics; repeat the evaluation if a notice interrupts it."""
        name = f"{self._stage.name}-{self._position.stage_step}"
        while True:
            self._protect("evaluation")
            try:
                with self._context.supervisor.long_work.doing("evaluation"):
                    return evaluate(
                        *(self._context, self._stage, self._inputs, self._learner, name),
                        is_last=is_last,
                    )
            except InterruptedRunError:
                measured = self._context.supervisor.long_work.measured_seconds("evaluation")
                self._answer_notice(measured)

    def _evaluate_if_due(self) -> None:
        if not self._is_evaluation_due:
            return
        self._read_together()
        step, is_end = self._position.stage_step, self._is_at_the_end
        self._own_times.compare(self._position)
        began = time.monotonic()
        metrics = self._evaluated(is_last=is_end)
        seconds = time.monotonic() - began
        self._position = replace(
            self._position,
            evaluated_step=step,
            metrics=metrics,
            best=self._best(metrics),
        )
        self._context.metrics.write(
            "evaluation",
            stage=self._stage.name,
            step=self._position.step,
            epoch=self._epoch,
            metrics=metrics,
            seconds=round(seconds, 4),
        )
        self._times.add_evaluation(seconds)
        self._pace.pass_over(seconds)
        values = ", ".join(f"{name} {value:.4f}" for name, value in list(metrics.items())[:4])
        values = values or "nothing to evaluate: split 'validation' has no samples"
        _log.info("[%s] after %s: %s", self._stage.name, self._plan.describe(step), values)
        self._pace.skip()
        if not is_end:
            self._save_if_due()

    def _best(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Step and value of the best evaluation of this stage so far."""
        name, best = self._settings.best_metric, self._position.best
        if name is None or not metrics:
            return best
        if name not in metrics:
            raise RunFailedError(
                f"stage {self._stage.name!r}: best_metric is {name!r}, but the evaluation returned "
                f"{', '.join(metrics)}; name one of these"
            )
        if not math.isfinite(metrics[name]):
            line = "[%s] after epoch %d: %s is %s, which never counts as best"
            _log.warning(line, self._stage.name, self._epoch, name, metrics[name])
            return best
        sign = 1.0 if self._settings.best_mode == "max" else -1.0
        if best and sign * metrics[name] <= sign * best["value"]:
            return best
        return {"step": self._position.step, "value": metrics[name]}

    def _capture(self) -> LiveState:
        self._read()
        self._context.consensus.refuse_diverged()
        position = self._position.timed(self._times.to_json())
        return self._learner.capture(asdict(position))

    def _protect(self, work: Work) -> None:
        with self._context.consensus.noting_divergence():
            self._policy.protect(self._position, work)

    def _save_if_due(self) -> None:
        with self._context.consensus.noting_divergence():
            if self._policy.save_if_due(self._position):
                self._pace.skip()


class _OwnTimes:
    """Each rank's step times without waiting for the others: the slowest one holds up all.

    Covers data and arithmetic between two evaluations; ranks of a sharded stage still wait.
    """

    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._seconds: list[float] = []
        self._slow = self._named = -1  # the rank last found slow, and the one last named

    def add(self, time: StepTime, own: float) -> None:
        """Add a step's wait for data and its own work."""
        self._seconds.append(time.seconds * time.waited_share + own)

    def compare(self, position: Position) -> None:
        """Name a rank that is slow twice in a row, as once is chance; all ranks call it."""
        world = self._context.world
        if world.size == 1:
            return
        # The median, as a first step compiles and a step during a commit may be long.
        own, self._seconds = statistics.median(self._seconds or [0.0]), []
        of_rank = world.gather(round(own, 6))
        usual, slow = statistics.median_low(of_rank), of_rank.index(max(of_rank))
        if not world.leads:
            return
        where = {"stage": position.stage, "step": position.step}
        hosts, each = world.hosts.names if world.hosts else (), range(world.size)
        names = [f"rank {k}" for k in each]
        if hosts:
            names = [f"{names[k]} of host {hosts[k * len(hosts) // world.size]}" for k in each]
        self._context.metrics.write("ranks", **where, own_seconds=of_rank, names=names)
        was, self._slow = self._slow, slow if of_rank[slow] > _SLOW * usual else -1
        if self._slow != was or self._slow in (-1, self._named):
            return
        self._named = slow
        text = (
            f"all ranks wait for {names[slow]}: its own work and data take {of_rank[slow]:.3g} s a "
            f"step, those of the usual rank {usual:.3g} s"
        )
        _log.warning("[slow] %s", text)
        self._context.events.emit("slow-rank", "info", message=text, **where)
