"""What growing buys: the growth workload beside its last model trained from scratch.

Both get the FLOPs of the laptop recipe's three phases and the same stories; the model from scratch
has the best of several learning rates, the growing one the recipe's. Loss is of held-out text.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

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
PFLOP = 1e15


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
    """One run: the loss of held-out text after so many PFLOP."""

    name: str
    pflop: Sequence[float]
    loss: Sequence[float]
    ends: Sequence[float]  # of the phases, in PFLOP

    def loss_at(self, pflop: float) -> float:
        """The last loss that was measured by then."""
        return [loss for at, loss in zip(self.pflop, self.loss, strict=True) if at <= pflop][-1]


def measure(*, count: int, rates: Sequence[float], picture: Path | None) -> list[dict[str, Any]]:
    """Return a row for each evaluation of the growing model; write the curves to `picture`."""
    config = laptop()
    costs = [_pflop_per_step(stage, config) for stage in GROWTH.stages(config)]
    steps = [config.dense_steps, config.experts_steps, config.grown_steps]
    total = sum(cost * number for cost, number in zip(costs, steps, strict=True))
    scratch_steps = round(total / costs[-1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _python("training", "data", "make", "--workload=growth", f"--count={count}",
                f"--out={folder / 'data'}")  # fmt: skip
        grown = _trained(folder, "growth", "grown in three phases", costs, {})
        others = [
            _trained(
                folder,
                "benchmarks.growth:SCRATCH",
                f"the last model from scratch, learning rate {rate:g}",
                costs[-1:],
                {"learning_rate": rate, "grown_steps": scratch_steps},
            )
            for rate in rates
        ]
    best = min(others, key=lambda each: each.loss[-1])
    if picture is not None:
        curves = [Curve(name=each.name, x=each.pflop, y=each.loss) for each in (grown, best)]
        picture.write_text(draw_curves(curves, grown.ends[:-1], "PFLOP") + "\n")
    return [
        {
            "PFLOP": round(pflop, 3),
            "grown, loss": round(loss, 4),
            **{
                f"scratch at {rate:g}, loss": round(each.loss_at(pflop * 1.0001), 4)
                if pflop >= each.pflop[0] * 0.9999
                else None
                for rate, each in zip(rates, others, strict=True)
            },
        }
        for pflop, loss in zip(grown.pflop, grown.loss, strict=True)
    ]


def _pflop_per_step(stage: TrainPhase, config: GrowthConfig) -> float:
    flops = measure_step(stage, config, config.micro_batch).flops_per_sample
    return flops * config.global_batch / PFLOP


def _trained(
    folder: Path, workload: str, name: str, costs: Sequence[float], overrides: dict[str, Any]
) -> Trained:
    """Train in a process of its own, as users do; the losses of its evaluations."""
    uri = folder / str(len(list(folder.iterdir())))
    given = [f"--override={field}={value}" for field, value in overrides.items()]
    _python("training", "run", f"--workload={workload}", "--recipe=laptop", *given,
            f"--dataset-uri={folder / 'data'}", f"--run-uri={uri}")  # fmt: skip
    pflop, losses, ends, before, last = [], [], [], 0.0, 0
    for cost, lines in zip(costs, read_history(open_store(str(uri))).evaluations().values(),
                           strict=True):  # fmt: skip
        for line in lines:
            pflop.append(before + (line["step"] - last) * cost)
            losses.append(line["metrics"]["loss"])
        before, last = pflop[-1], lines[-1]["step"]
        ends.append(before)
    return Trained(name=name, pflop=pflop, loss=losses, ends=ends)


def _python(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{' '.join(arguments)} failed: {done.stderr[-2000:]}")
