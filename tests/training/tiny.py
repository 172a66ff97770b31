"""A workload of seconds with everything that resuming can get wrong.

Two Train stages, derived data, augmentation, dropout, BatchNorm, micro-batches, an odd last batch.

`HOOKS[name]` is called with a number at the places named in it: tests interrupt there.
`LOSSES[stage]` changes the loss of a micro-batch, given its step.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training.settings import changed
from training.workload import (
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
)

NUM_FEATURES = 6
SETTINGS = Settings(
    epochs=3, global_batch=8, micro_batch=4, eval_batch=5, warmup_steps=2, clip_norm=1.0
)
HOOKS: dict[str, Callable[[int], None]] = {}
LOSSES: dict[str, Callable[[int, Tensor], Tensor]] = {}


def reached(place: str, number: int) -> None:
    if place in HOOKS:
        HOOKS[place](number)


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyConfig:
    seed: int = 7
    num_threads: int = 1
    deterministic: bool = True
    settings: Settings = SETTINGS
    second_epochs: int | None = None
    second_steps: int | None = None  # instead of epochs
    learning_rate: float = 0.01
    step_seconds: float = 0.0
    nan_at_step: int = -1
    bad_start: bool = False
    batch_norm: bool = True
    dropout: float = 0.2
    double: bool = False
    blocks: bool = False  # of the sharded model, instead of all as one


def tiny_config(**values: Any) -> TinyConfig:
    """The config with these fields, those of its settings too."""
    return changed(TinyConfig(), **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Doubled(Prepare):
    name: str = "doubled"
    num_shards: int = 3
    is_shareable: bool = True

    def key(self, i: Inputs) -> str:
        # `make` draws, so the seed is part of it.
        return f"doubled-{i.seed}-{i.dataset.fingerprint[:16]}"

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        reached("shard", shard)
        time.sleep(i.config.step_seconds)
        x = load_file(i.dataset.file("x.safetensors"))["x"]
        first = shard * len(x) // self.num_shards
        last = (shard + 1) * len(x) // self.num_shards
        return {"x": 2 * x[first:last] + 0.01 * torch.randn(last - first, NUM_FEATURES)}


class Rows(Samples):
    """Rows of the derived data with a target that is a function of them."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __len__(self) -> int:
        return len(self._x)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        x = self._x[index]
        return x + 0.1 * torch.randn(x.shape, generator=rng, dtype=x.dtype), x.sum() > 0

    def collate(self, items: Sequence[Any]) -> Batch:
        x, y = zip(*items, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y).long()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyTrain(Train):
    config: TinyConfig
    name: str
    width: int
    epochs: int | None = None
    steps: int | None = None

    @property
    def settings(self) -> Settings:
        own = self.config.settings
        epochs = None if self.steps else self.epochs or own.epochs
        return replace(own, epochs=epochs, steps=self.steps or own.steps)

    def model(self, i: Inputs) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(NUM_FEATURES, self.width),
            nn.BatchNorm1d(self.width) if self.config.batch_norm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(self.config.dropout),
            nn.Linear(self.width, 2),
        )
        return model.double() if self.config.double else model

    def example(self, size: int) -> Batch:
        return {"x": torch.zeros(size, NUM_FEATURES), "y": torch.zeros(size, dtype=torch.long)}

    def sharded_modules(self, m: nn.Module) -> Sequence[nn.Module]:
        return [m[0], m[4]] if self.config.blocks else []  # type: ignore[index]

    def start(self, m: nn.Module, i: Inputs) -> Start:
        if self.config.bad_start:
            return Start(failures=("the outputs differ by 1.0",))
        if i.prior is not None:
            wide = m.state_dict()["0.weight"]
            narrow = i.prior.model["0.weight"]
            with torch.no_grad():
                wide[: len(narrow)].copy_(narrow)
        return Start(facts={"width": self.width})

    def optimizer(self, m: nn.Module) -> Optimizer:
        return AdamW(m.parameters(), lr=self.config.learning_rate)

    def samples(self, i: Inputs, split: str) -> Rows:
        x = torch.cat([shard["x"] for shard in i.artifact("doubled")])
        x = x.double() if self.config.double else x
        cut = len(x) - 12
        return Rows(x[:cut] if split == "train" else x[cut:])

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        reached(self.name, step)
        time.sleep(self.config.step_seconds)
        total = F.cross_entropy(m(b["x"]), b["y"], reduction="sum")
        if step == self.config.nan_at_step:
            total = total * float("nan")
        if self.name in LOSSES:
            total = LOSSES[self.name](step, total)
        if self.config.blocks:  # no longer, or not yet, gathered
            return Loss(total=total)
        norm = sum((p.square().sum() for p in m.parameters()), torch.zeros(()))
        return Loss(total=total, mean=1e-4 * norm, metrics={"norm": (norm.detach(), 1)})

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        reached(f"{self.name}-evaluation", len(b["y"]))
        time.sleep(self.config.step_seconds)
        correct = (m(b["x"]).argmax(1) == b["y"]).sum().item()
        return Partial(sums={"accuracy": (correct, self.weight(b))})

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        said = m(b["x"]).argmax(1) == 1
        return [
            {"positive": one, "right": one == bool(y)}
            for one, y in zip(said.tolist(), b["y"].tolist(), strict=True)
        ]

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        assert out.is_dir()
        (out / "parts.json").write_text(f'{{"parts": {len(parts)}}}')
        (out / "dot.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
        pairs = [part.sums["accuracy"] for part in parts]
        return {"accuracy": sum(s for s, _ in pairs) / sum(n for _, n in pairs)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiny(Workload[TinyConfig]):
    name: str = "tiny"

    @property
    def recipes(self) -> Mapping[str, Callable[[], TinyConfig]]:
        return {"quick": TinyConfig, "long": lambda: tiny_config(epochs=6)}

    @property
    def nominal_samples(self) -> Mapping[str, Mapping[str, int]]:
        return {"quick": {"train": 30, "validation": 12}}

    def stages(self, c: TinyConfig) -> Sequence[Prepare | Train]:
        return (
            Doubled(),
            TinyTrain(config=c, name="first", width=4),
            TinyTrain(
                config=c, name="second", width=8, epochs=c.second_epochs, steps=c.second_steps
            ),
        )

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        save_file(
            {"x": torch.randn(count, NUM_FEATURES, generator=generator)}, out / "x.safetensors"
        )
        (out / "notes").mkdir()
        (out / "notes" / "about.txt").write_text(f"{count} rows\n")
        progress(count, count)
        return {"rows": count}


TINY = Tiny()
