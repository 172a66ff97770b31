"""The built-in workload: takes seconds, and has everything that resuming can get wrong.

Derived data, two Train stages of which the second grows from the first, augmentation, dropout,
BatchNorm, accumulation, an odd last batch, warm-up, an optimizer with state; by recipe a moving
average, the best metric's checkpoints, autocast, a loss scaler, or more weights than one bucket of
gradients that ranks reduce (1 MB) holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training import (
    Batch,
    Inputs,
    Loss,
    Partial,
    Prepare,
    Progress,
    Samples,
    Settings,
    Start,
    Train,
    Workload,
    changed,
)

_NUM_INPUTS = 8
_NUM_CLASSES = 3
# The last step of an epoch takes 14 of the other 62: no micro-batch of one, for BatchNorm.
_NUM_HELD_OUT = 15
_SETTINGS = Settings(
    epochs=6, global_batch=16, micro_batch=4, eval_batch=6, warmup_steps=3, clip_norm=1.0
)
# Limits the loss, so that the initial scale, 2 ** 16, stays above 1.
_MOST_DOUBLINGS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class _SmallConfig:
    """Everything that a recipe decides."""

    seed: int = 11
    num_threads: int = 1
    deterministic: bool = True
    # 16 samples a step: up to four ranks get whole micro-batches, which BatchNorm needs.
    settings: Settings = _SETTINGS
    width: int = 16
    has_hidden_layer: bool = False
    learning_rate: float = 0.02
    # Steps after which the loss doubles: float16 overflows again and again, so that a loss scaler
    # that loses its scale skips other steps. 0: never.
    loss_doubles_every: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _ScaledInputs(Prepare):
    """Derived data: the inputs divided by their spread, with noise from the shard's own seed."""

    name: str = "scaled"
    num_shards: int = 4

    def key(self, i: Inputs) -> str:
        return f"scaled-{i.dataset.fingerprint[:16]}"

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        data = load_file(i.dataset.folder / "rows.safetensors")
        rows = range(shard, len(data["x"]), self.num_shards)
        x = data["x"][rows] / data["x"].std()
        return {"x": x + 0.01 * torch.randn(x.shape), "y": data["y"][rows].clone()}


class _JitteredRows(Samples):
    """Rows of the derived data, with jitter."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return self.x[index] + 0.1 * torch.randn(_NUM_INPUTS, generator=rng), self.y[index]

    def collate(self, items: Sequence[Any]) -> Batch:
        x, y = zip(*items, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Classify(Train):
    """A small classifier; a wider one starts with the columns of the previous one."""

    name: str
    config: _SmallConfig
    width: int

    @property
    def settings(self) -> Settings:
        return self.config.settings

    def model(self, i: Inputs) -> nn.Module:
        return nn.Sequential(
            nn.Linear(_NUM_INPUTS, self.width),
            nn.BatchNorm1d(self.width),
            nn.ReLU(),
            nn.Dropout(0.1),
            *([nn.Linear(self.width, self.width), nn.ReLU()] * self.config.has_hidden_layer),
            nn.Linear(self.width, _NUM_CLASSES),
        )

    def start(self, m: nn.Module, i: Inputs) -> Start:
        if i.prior is not None:
            grown, before = m.state_dict()["0.weight"], i.prior.model["0.weight"]
            with torch.no_grad():
                grown[: len(before)].copy_(before)
        return Start(facts={"width": self.width})

    def optimizer(self, m: nn.Module) -> Optimizer:
        return AdamW(m.parameters(), lr=self.config.learning_rate)

    def samples(self, i: Inputs, split: str) -> _JitteredRows:
        shards = i.artifact("scaled")
        x, y = torch.cat([s["x"] for s in shards]), torch.cat([s["y"] for s in shards])
        part = slice(_NUM_HELD_OUT, None) if split == "train" else slice(_NUM_HELD_OUT)
        return _JitteredRows(x[part], y[part])

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        every = self.config.loss_doubles_every
        unit = 2.0 ** min(step // every, _MOST_DOUBLINGS) if every else 1.0
        return Loss(total=unit * F.cross_entropy(m(b["x"]), b["y"], reduction="sum"))

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        correct = int((m(b["x"]).argmax(1) == b["y"]).sum())
        return Partial(sums={"accuracy": (correct, self.weight(b))})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Small(Workload[_SmallConfig]):
    """The workload `training.proof.torture.small_workload:SMALL`."""

    name: str = "small"

    @property
    def recipes(self) -> Mapping[str, Callable[[], _SmallConfig]]:
        changes: dict[str, dict[str, Any]] = {
            "plain": {},
            "average": {"ema_decay": 0.9, "best_metric": "accuracy"},
            "bfloat16": {"precision": "bfloat16", "ema_decay": 0.9},
            "float16": {"precision": "float16", "loss_doubles_every": 2},
            "large": {"width": 384, "has_hidden_layer": True, "learning_rate": 0.002},
            "sharded": {"sharding": "full", "ema_decay": 0.9, "best_metric": "accuracy"},
        }
        return {name: partial(changed, _SmallConfig(), **own) for name, own in changes.items()}

    def stages(self, c: _SmallConfig) -> Sequence[Prepare | Train]:
        return (
            _ScaledInputs(),
            _Classify(name="narrow", config=c, width=c.width),
            _Classify(name="wide", config=c, width=2 * c.width),
        )

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        rng = torch.Generator().manual_seed(seed)
        y = torch.randint(_NUM_CLASSES, (count,), generator=rng)
        x = torch.randn(count, _NUM_INPUTS, generator=rng)
        x[:, :_NUM_CLASSES] += 2 * F.one_hot(y, _NUM_CLASSES)
        save_file({"x": x, "y": y}, out / "rows.safetensors")
        progress(count, count)
        return {"rows": count}


SMALL = _Small()
