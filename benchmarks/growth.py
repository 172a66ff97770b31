"""What growing buys: the growth workload beside its last model trained from scratch.

Both get the FLOPs of the laptop recipe's three phases, the same stories and the same choice of
learning rates. The loss is that of held-out text.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from training.growth.config import GrowthConfig
from training.growth.recipes import laptop
from training.growth.stages import TrainPhase
from training.growth.workload import GROWTH
from training.preflight.footprint import measure_step
from training.proxies import TrainProxy, WorkloadProxy
from training.record.history import read_history
from training.report.charts import Curve, draw_curves
from training.store.open import open_store
from training.workload import Inputs, Settings, Start, Train

ROOT = Path(__file__).parents[1]
TFLOP = 1e12


class _FromScratch(TrainProxy):
    """The last phase without those before it: its own warm-up, nothing to start from."""

    _inner: TrainPhase

    @property
    def settings(self) -> Settings:
        return replace(self._inner.settings, warmup_steps=self._inner.config.warmup_steps)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        return Start()


class _Scratch(WorkloadProxy):
    recipes: ClassVar = {"laptop": laptop}

    def stages(self, c: GrowthConfig) -> Sequence[Train]:
        return [_FromScratch(GROWTH.stages(c)[-1])]


SCRATCH = _Scratch(GROWTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """One run: the loss of held-out text after so many TFLOP, and where its phases end."""

    tflop: Sequence[float]
    loss: Sequence[float]
    ends: Sequence[float]

    def loss_at(self, tflop: float) -> float | None:
        """The loss between two evaluations on a straight line; None before the first."""
        if tflop < self.tflop[0]:
            return None
        return round(float(np.interp(tflop, self.tflop, self.loss)), 4)


def measure(
    *, count: int, rates: Sequence[float], folder: Path | None, picture: Path | None
) -> list[dict[str, Any]]:
    """Return a row for each evaluation of the growing model; write the best curves to `picture`.

    Runs stay in `folder` and are not made again: after an interruption the same call goes on.
    """
    config = laptop()
    costs = [_tflop_per_step(stage, config) for stage in GROWTH.stages(config)]
    steps = [config.dense_steps, config.experts_steps, config.grown_steps]
    total = sum(cost * number for cost, number in zip(costs, steps, strict=True))
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) if folder is None else folder.resolve()
        if not (place / "data").exists():
            _python("training", "data", "make", *("--workload", "growth"),
                    *("--count", str(count), "--out", str(place / "data")))  # fmt: skip
        grown, scratch = [], []
        for rate in rates:
            own = {} if rate == config.learning_rate else {"learning_rate": rate}
            uri = place / f"grown-{rate:g}"
            grown.append(_trained(uri, "growth", costs, own))
            length = {"learning_rate": rate, "grown_steps": round(total / costs[-1])}
            uri = place / f"scratch-{rate:g}"
            scratch.append(_trained(uri, "benchmarks.growth:SCRATCH", costs[-1:], length))
    if picture is not None:
        names = ("grown in three phases", "the last model from scratch")
        curves = [
            Curve(name=name, x=best.tflop, y=best.loss)
            for name, best in zip(names, (_best(grown), _best(scratch)), strict=True)
        ]
        picture.write_text(draw_curves(curves, grown[0].ends[:-1], "TFLOP") + "\n")
    return [_row(tflop, grown, scratch, rates) for tflop in grown[0].tflop]


def _best(runs: Sequence[Trained]) -> Trained:
    return min(runs, key=lambda run: run.loss[-1])


def _row(
    tflop: float, grown: Sequence[Trained], scratch: Sequence[Trained], rates: Sequence[float]
) -> dict[str, Any]:
    row: dict[str, Any] = {"TFLOP": round(tflop, 2)}
    for kind, runs in (("grown", grown), ("scratch", scratch)):
        for rate, run in zip(rates, runs, strict=True):
            row[f"{kind} at {rate:g}"] = run.loss_at(tflop)
    return row


def _tflop_per_step(stage: TrainPhase, config: GrowthConfig) -> float:
    flops = measure_step(stage, config, config.micro_batch).flops_per_sample
    return flops * config.global_batch / TFLOP


def _trained(
    uri: Path, workload: str, costs: Sequence[float], overrides: Mapping[str, Any]
) -> Trained:
    """Train in a process of its own, as users do; the losses of its evaluations."""
    given = [f"--override={field}={value}" for field, value in overrides.items()]
    dataset = f"--dataset-uri={uri.parent / 'data'}"
    where = ("--recipe=laptop", *given, dataset, f"--run-uri={uri}")
    _python("training", "run", f"--workload={workload}", *where)
    phases = read_history(open_store(str(uri))).evaluations().values()
    tflop, losses, ends, before, last = list[float](), list[float](), list[float](), 0.0, 0
    for cost, lines in zip(costs, phases, strict=True):
        for line in lines:
            tflop.append(before + (line["step"] - last) * cost)
            losses.append(line["metrics"]["loss"])
        before, last = tflop[-1], lines[-1]["step"]
        ends.append(before)
    return Trained(tflop=tflop, loss=losses, ends=ends)


def _python(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{' '.join(arguments)} failed: {done.stderr[-2000:]}")
