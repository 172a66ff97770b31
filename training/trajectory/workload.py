"""The trajectory workload: Prepare `features` -> Train `single_frame` (baseline) -> Train `head`.

Train stages refuse a split with one class only or with a class missing: an accuracy measured on
such a split means nothing (100 % were once reported on one).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training.trajectory.clips import NUM_FRAMES
from training.trajectory.dataset import make_dataset, open_dataset, split_failures
from training.trajectory.features import Features
from training.trajectory.model import Head
from training.trajectory.paths import CLASSES
from training.trajectory.recipes import CHANNELS, NOMINAL_SAMPLES, RECIPES, TrajectoryConfig
from training.trajectory.samples import Batch, FeatureSamples, feature_samples
from training.workload import Inputs, Loss, Partial, Prepare, Progress, Rung, Settings, Start, Train

# Clips that the scale of the features is taken from.
_NUM_STATISTICS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainHead:
    """Trains the head on whole clips or, as the honest baseline, on their middle frame."""

    config: TrajectoryConfig
    name: str
    epochs: int
    single_frame: bool

    @property
    def settings(self) -> Settings:
        c = self.config
        return Settings(
            epochs=self.epochs,
            global_batch=c.global_batch,
            micro_batch=c.micro_batch,
            eval_batch=c.eval_batch,
            schedule="cosine",
            warmup_steps=c.warmup_steps,
            clip_norm=c.clip_norm,
            evaluate_every_epochs=c.evaluate_every_epochs,
            precision=c.precision,
        )

    @property
    def num_frames(self) -> int:
        """Frames of one sample."""
        return 1 if self.single_frame else -(-NUM_FRAMES // self.config.frame_stride)

    def example(self, size: int) -> Batch:
        """A batch in the shapes that `collate` gives."""
        c = self.config
        shape = (size, self.num_frames, c.grid * c.grid, CHANNELS[c.backbone_layer])
        return {
            "features": torch.zeros(shape, dtype=torch.float16),
            "labels": torch.zeros(size, dtype=torch.long),
        }

    def model(self, i: Inputs) -> nn.Module:
        c = self.config
        return Head(
            num_frames=self.num_frames,
            grid=c.grid,
            channels=CHANNELS[c.backbone_layer],
            num_classes=len(CLASSES),
            width=c.width,
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            dropout=c.dropout,
        )

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits and take the features' scale from training clips."""
        assert isinstance(m, Head)
        data = open_dataset(i.dataset.folder)
        failures = split_failures(data, "train") + split_failures(data, "validation")
        if failures:
            return Start(failures=failures)
        samples = self.samples(i, "train")
        seen = samples.indices[:_NUM_STATISTICS]
        m.set_statistics(torch.stack([samples.features(clip) for clip in seen]))
        return Start(facts={"train_clips": len(samples), "chance": 1.0 / len(CLASSES)})

    def optimizer(self, m: nn.Module) -> Optimizer:
        """AdamW; biases, norms and the sharpness are not decayed."""
        decayed = [p for p in m.parameters() if p.ndim >= 2]
        others = [p for p in m.parameters() if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.config.learning_rate)

    def samples(self, i: Inputs, split: str) -> FeatureSamples:
        data = open_dataset(i.dataset.folder)
        return feature_samples(
            i.artifact("features"), data.labels, data.splits[split], self.single_frame
        )

    def weight(self, b: Batch) -> float:
        return float(len(b["labels"]))

    def loss(self, m: nn.Module, b: Batch, step: int) -> Loss:
        total, logits_BK = _cross_entropy(m, b)
        correct = (logits_BK.argmax(dim=1) == b["labels"]).sum()
        return Loss(total=total, metrics={"accuracy": (correct, self.weight(b))})

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        total, logits_BK = _cross_entropy(m, b)
        num_classes = logits_BK.shape[1]
        cell = b["labels"] * num_classes + logits_BK.argmax(dim=1)
        confusion = torch.bincount(cell.cpu(), minlength=num_classes * num_classes)
        return Partial(
            sums={"loss": (total.item(), self.weight(b))},
            tensors={"confusion": confusion.view(num_classes, num_classes)},
        )

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """The likeliest class, its probability, and the true one."""
        probability_B, said_B = m(b["features"]).float().softmax(dim=1).max(dim=1)
        rows = zip(said_B.tolist(), probability_B.tolist(), b["labels"].tolist(), strict=True)
        return [
            {"class": CLASSES[said], "probability": probability, "true_class": CLASSES[label]}
            for said, probability, label in rows
        ]

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Accuracy, each class's accuracy, and confusion.json (rows true, columns said)."""
        confusion = torch.stack([part.tensors["confusion"] for part in parts]).sum(dim=0)
        of_class = confusion.sum(dim=1)
        missing = [name for name, n in zip(CLASSES, of_class.tolist(), strict=True) if n == 0]
        if missing:
            raise ValueError(
                f"the evaluated clips lack {', '.join(missing)}: an accuracy over them means "
                "nothing; make the dataset again with a stratified split"
            )
        loss_sum = sum(part.sums["loss"][0] for part in parts)
        count = sum(part.sums["loss"][1] for part in parts)
        by_class = (confusion.diagonal() / of_class).tolist()
        metrics = {"accuracy": float(confusion.trace() / of_class.sum()), "loss": loss_sum / count}
        metrics |= {f"accuracy_{n}": a for n, a in zip(CLASSES, by_class, strict=True)}
        out.mkdir(parents=True, exist_ok=True)
        table = {"classes": CLASSES, "confusion": confusion.tolist(), **metrics}
        (out / "confusion.json").write_text(json.dumps(table, indent=1) + "\n")
        return metrics


def _cross_entropy(m: nn.Module, b: Batch) -> tuple[Tensor, Tensor]:
    logits_BK = m(b["features"]).float()
    return F.cross_entropy(logits_BK, b["labels"], reduction="sum"), logits_BK


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """What the registry imports; the functions it offers stand in the files beside this one."""

    name: str = "trajectory"

    @property
    def recipes(self) -> Mapping[str, Callable[[], TrajectoryConfig]]:
        return RECIPES

    @property
    def placement_fields(self) -> frozenset[str]:
        return frozenset()

    @property
    def nominal_samples(self) -> Mapping[str, Mapping[str, int]]:
        return NOMINAL_SAMPLES

    def stages(self, c: TrajectoryConfig) -> Sequence[Prepare | Train]:
        return (
            Features(config=c),
            TrainHead(
                config=c, name="single_frame", epochs=c.single_frame_epochs, single_frame=True
            ),
            TrainHead(config=c, name="head", epochs=c.epochs, single_frame=False),
        )

    def rungs(self, c: TrajectoryConfig) -> Sequence[Rung]:
        return ()

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress)


TRAJECTORY = Trajectory()
