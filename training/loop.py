"""The loop over one Train stage: steps, evaluations, commits. It knows no workload's name.

Every step boundary is a consistent state; the attempt is ended only there or between evaluation
batches, whose work is then thrown away and repeated.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from training.checkpoint import Snapshot, copy_tensors, put_together, take_apart
from training.errors import RunFailedError
from training.head import Kind
from training.interruption import InterruptedRunError
from training.position import Attempt, Position
from training.progress import Bar
from training.randomness import derive_seed, seed_torch
from training.saver import Saver
from training.workload import Batch, Inputs, Samples, Settings, Train


class StageLoop:
    """Trains one stage from `position`, with the tensors of `snapshot` if it had begun before."""

    def __init__(
        self,
        attempt: Attempt,
        saver: Saver,
        stage: Train,
        inputs: Inputs,
        position: Position,
        snapshot: Snapshot | None,
    ) -> None:
        self._attempt = attempt
        self._saver = saver
        self._stage = stage
        self._inputs = inputs
        self._settings = stage.settings
        self._position = position
        self._samples = stage.samples(inputs, "train")
        if len(self._samples) < 1:
            raise RunFailedError(f"stage {stage.name!r} has no training samples")
        self._steps_per_epoch = math.ceil(len(self._samples) / self._settings.global_batch)
        self._num_steps = self._steps_per_epoch * self._settings.epochs
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._rng = torch.Generator()
        self._build(snapshot)

    def run(self) -> Position:
        """Train and commit the end of the stage; InterruptedRunError after a save otherwise."""
        try:
            with Bar(self._stage.name, self._num_steps, self._position.stage_step) as bar:
                while True:
                    self._attempt.check()
                    self._evaluate_if_due()
                    if self._position.stage_step == self._num_steps:
                        break
                    self._step(bar)
                    self._commit_if_due()
        except InterruptedRunError:
            self._save_and_release()
            raise
        self._position = replace(
            self._position,
            has_ended=True,
            results={**self._position.results, self._stage.name: self._position.metrics},
        )
        self._saver.commit(self._snapshot(), self._position, self._epoch, "stage-end")
        return self._position

    @property
    def _epoch(self) -> int:
        """Epochs that are complete, which is also the number of the current one, from 0."""
        return self._position.stage_step // self._steps_per_epoch

    def _build(self, snapshot: Snapshot | None) -> None:
        stage, inputs = self._stage, self._inputs
        seed_torch(self._inputs.device, "model", inputs.seed, stage.name)
        model = stage.model(inputs)
        if snapshot is None:
            seed_torch(self._inputs.device, "start", inputs.seed, stage.name)
            start = stage.start(model, inputs)
            if start.failures:
                raise RunFailedError(f"stage {stage.name!r} cannot start: {start.failures[0]}")
            if start.facts:
                facts = dict(start.facts)
                self._attempt.metrics.write("start", stage=stage.name, facts=facts)
        else:
            model.load_state_dict(dict(snapshot.tensors["model"]))
        self._model = model.to(inputs.device)
        self._model.train()
        self._optimizer = stage.optimizer(self._model)
        for group in self._optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        if snapshot is not None:
            kept = put_together(snapshot.state["optimizer"], snapshot.tensors["optimizer"])
            self._optimizer.load_state_dict(kept)

    def _snapshot(self) -> Snapshot:
        tensors: dict[str, Tensor] = {}
        skeleton = take_apart(self._optimizer.state_dict(), tensors)
        return Snapshot(
            tensors={
                "model": copy_tensors(self._model.state_dict()),
                "optimizer": copy_tensors(tensors),
            },
            state={"position": self._position.to_json(), "optimizer": skeleton},
        )

    def _step(self, bar: Bar) -> None:
        began = time.monotonic()
        ids = self._ids()
        epoch, step = self._epoch, self._position.stage_step
        batches = [self._batch(self._samples, ids_m, epoch) for ids_m in self._micro(ids)]
        weight = sum(self._stage.weight(batch) for batch in batches)
        factor = schedule_factor(self._settings, step, self._num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self._optimizer.zero_grad(set_to_none=True)
        loss, metrics = self._backward(batches, weight, step)
        if not math.isfinite(loss):
            raise RunFailedError(
                f"stage {self._stage.name!r}, step {self._position.step + 1}: the loss is {loss}; "
                "nothing was published, lower the learning rate or clip the gradients"
            )
        if self._settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip_norm)
        self._optimizer.step()
        self._position = replace(self._position, stage_step=step + 1, step=self._position.step + 1)
        rate = len(ids) / max(time.monotonic() - began, 1e-9)
        self._record(bar, epoch, loss, metrics, rate, ids)

    def _backward(
        self, batches: Sequence[Batch], weight: float, step: int
    ) -> tuple[float, dict[str, float]]:
        losses: list[Tensor] = []
        sums: dict[str, tuple[float, float]] = {}
        for number, batch in enumerate(batches):
            seed, rank = self._inputs.seed, self._inputs.rank
            seed_torch(self._inputs.device, "noise", seed, self._stage.name, step, number, rank)
            with self._autocast():
                loss = self._stage.loss(self._model, batch, step)
                scaled = loss.total / weight
                if loss.mean is not None:
                    scaled = scaled + loss.mean / len(batches)
            scaled.backward()  # type: ignore[no-untyped-call]
            losses.append(scaled.detach())
            for name, (value, count) in loss.metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(value), before[1] + count)
        total = float(torch.stack(losses).sum())
        return total, {name: value / count for name, (value, count) in sums.items() if count}

    def _record(
        self,
        bar: Bar,
        epoch: int,
        loss: float,
        metrics: Mapping[str, float],
        rate: float,
        ids: Sequence[int],
    ) -> None:
        rates = self._optimizer.param_groups[0]["lr"]
        extra: dict[str, Any] = {"metrics": metrics} if metrics else {}
        self._attempt.metrics.write(
            "step",
            stage=self._stage.name,
            step=self._position.step,
            stage_step=self._position.stage_step,
            epoch=epoch,
            loss=loss,
            lr=rates,
            samples_per_second=round(rate, 2),
            ids=list(ids),
            **extra,
        )
        if bar.is_due or self._position.stage_step == self._num_steps:
            text = f"epoch {epoch + 1}/{self._settings.epochs} loss {loss:.4f} lr {rates:.2e}"
            bar.show(self._position.stage_step, f"{text} {rate:.0f} samples/s")

    def _ids(self) -> Sequence[int]:
        epoch = self._epoch
        if self._order[0] != epoch:
            self._order = (epoch, self._samples.order(epoch, self._inputs.seed))
        first = self._position.stage_step % self._steps_per_epoch * self._settings.global_batch
        return self._order[1][first : first + self._settings.global_batch]

    def _micro(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        size = self._settings.micro_batch
        return (ids[first : first + size] for first in range(0, len(ids), size))

    def _batch(self, samples: Samples, ids: Sequence[int], epoch: int) -> Batch:
        items = []
        for index in ids:
            self._rng.manual_seed(derive_seed("sample", self._inputs.seed, epoch, index))
            items.append(samples.get(index, self._rng))
        return to_device(samples.collate(items), self._inputs.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._inputs.device.type,
            dtype=torch.bfloat16,
            enabled=self._settings.precision == "bfloat16",
        )

    def _evaluate_if_due(self) -> None:
        step, every = self._position.stage_step, self._settings.evaluate_every_epochs
        is_end = step == self._num_steps
        is_epoch = step > 0 and step % self._steps_per_epoch == 0
        is_due = is_end or (is_epoch and every > 0 and self._epoch % every == 0)
        if not is_due or self._position.evaluated_step == step:
            return
        self._model.eval()
        try:
            metrics = self._evaluate()
        finally:
            self._model.train()
        self._position = replace(self._position, evaluated_step=step, metrics=metrics)
        self._attempt.metrics.write(
            "evaluation",
            stage=self._stage.name,
            step=self._position.step,
            epoch=self._epoch,
            metrics=metrics,
        )
        values = ", ".join(f"{name} {value:.4f}" for name, value in list(metrics.items())[:3])
        print(f"[{self._stage.name}] after epoch {self._epoch}: {values}", flush=True)

    def _evaluate(self) -> dict[str, float]:
        samples = self._stage.samples(self._inputs, "validation")
        size = self._settings.eval_batch
        parts = []
        for first in range(0, len(samples), size):
            self._attempt.check()
            batch = self._batch(samples, range(first, min(first + size, len(samples))), -1)
            seed_torch(self._inputs.device, "evaluate", self._inputs.seed, self._stage.name, first)
            with torch.no_grad(), self._autocast():
                parts.append(self._stage.evaluate(self._model, batch))
        name = f"{self._stage.name}-{self._position.stage_step}"
        out = self._attempt.scratch / "evaluation" / name
        out.mkdir(parents=True, exist_ok=True)
        return dict(self._stage.summarize(parts, out)) if parts else {}

    def _commit_if_due(self) -> None:
        kind: Kind = "periodic"
        if self._attempt.interruption.take_rebalance():
            kind = "rebalance"
        elif not self._is_commit_due():
            return
        self._saver.commit(self._snapshot(), self._position, self._epoch, kind)

    def _is_commit_due(self) -> bool:
        interval, step = self._attempt.interval, self._position.stage_step
        if interval.unit == "s":
            return time.monotonic() - self._saver.last_commit >= interval.value
        if interval.unit == "steps":
            return self._position.step % interval.value == 0
        return step % self._steps_per_epoch == 0 and self._epoch % interval.value == 0

    def _save_and_release(self) -> None:
        notice = self._attempt.interruption.notice
        assert notice is not None
        if self._saver.holds(self._position):
            print("[emergency] nothing changed since the last commit; only releasing", flush=True)
        else:
            self._saver.emergency(self._snapshot(), self._position, self._epoch, notice)


def schedule_factor(settings: Settings, step: int, num_steps: int) -> float:
    """What every group's own learning rate is multiplied by at `step` (from 0) of `num_steps`."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, num_steps - 1 - settings.warmup_steps)
    low = settings.final_lr_fraction
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move every tensor of a pytree; on the CPU nothing is touched."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
