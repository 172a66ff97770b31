"""Train stages that classify clips: their common base, the head, and the baselines.

A stage refuses a split that lacks a class or has only one: accuracy on such a split is meaningless
(100 % was once reported on one).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training.workload import Inputs, Loss, Partial, Settings, Start, Train
from training.workloads.trajectory import evaluation
from training.workloads.trajectory.clips import FRAME_SIZE
from training.workloads.trajectory.config import RecipeConfig
from training.workloads.trajectory.dataset import open_dataset, split_failures
from training.workloads.trajectory.model import MeanImageNet, TransformerHead
from training.workloads.trajectory.recipes import CHANNELS, TrajectoryConfig
from training.workloads.trajectory.samples import Batch, ClipSamples, View, clip_samples

# Number of clips from which the scale of the features is estimated.
_NUM_STATISTICS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainClipClassifier(Train):
    """A Train stage without a model. Baselines differ in their `view`, which is what they see."""

    config: RecipeConfig
    name: str
    view: View
    epochs: int | None

    @property
    def settings(self) -> Settings:
        return replace(self.config.settings, epochs=self.epochs)

    @property
    def classes(self) -> Sequence[str]:
        return self.config.class_names

    def model_input(self, size: int) -> Tensor:
        """A dummy model input of `size` clips."""
        raise NotImplementedError

    def example(self, size: int) -> Batch:
        """A batch in the shapes that `collate` gives."""
        return {
            "x": self.model_input(size),
            "labels": torch.zeros(size, dtype=torch.long),
            "clips": torch.zeros(size, dtype=torch.long),
            "future": torch.zeros(size, 2),
            "last": torch.zeros(size, 2),
        }

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Other classes."""
        wanted = tuple(meta.get("classes", self.classes))
        if wanted == tuple(self.classes):
            return ()
        return [f"the dataset has other classes; give --override classes={','.join(wanted)}"]

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits."""
        data = open_dataset(i.dataset.folder)
        failures = [failure for split in data.splits for failure in split_failures(data, split)]
        facts = {"train_clips": len(data.splits["train"]), "chance": 1.0 / len(self.classes)}
        return Start(failures=failures, facts=facts)

    def optimizer(self, m: nn.Module) -> Optimizer:
        """AdamW without weight decay for biases, norms and scalars."""
        c = self.config
        groups = parameter_groups(m, c.weight_decay)
        # Not False, which would rule out torch's foreach as well.
        return AdamW(groups, lr=c.learning_rate, fused=c.fused_optimizer or None)

    def samples(self, i: Inputs, split: str) -> ClipSamples:
        return clip_samples(i, split, self.view)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        logits_BK, future_B2 = evaluation.classify(m, b)
        return self.loss_of(b, logits_BK, future_B2)

    def loss_of(self, b: Batch, logits_BK: Tensor, future_B2: Tensor) -> Loss:
        """Cross entropy, plus the error of the future position times `position_weight`."""
        total = F.cross_entropy(logits_BK, b["labels"], reduction="sum")
        # A clip without a track has NaN there: it counts as predicted exactly.
        place_B2 = torch.where(b["future"].isnan(), future_B2.detach(), b["future"])
        away = F.smooth_l1_loss(future_B2, place_B2, reduction="sum", beta=0.1)
        correct = (logits_BK.argmax(dim=1) == b["labels"]).sum()
        return Loss(
            total=total + self.config.position_weight * away,
            metrics={"accuracy": (correct, self.weight(b))},
        )

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        return evaluation.partial(m, b)

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """The predicted class, its probability, the true class, and future positions in pixels."""
        return evaluation.predictions(m, b, self.classes)

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        return evaluation.summarize(parts, out, self.classes)

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        if parts:
            evaluation.illustrate(parts, out, self.name, self.classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainHead(TrainClipClassifier):
    """The head on frozen features of whole or partial clips."""

    config: TrajectoryConfig

    @property
    def num_frames(self) -> int:
        """Frames of one sample."""
        return 1 if self.view == "single_frame" else self.config.num_frames

    def model_input(self, size: int) -> Tensor:
        c = self.config
        shape = (size, self.num_frames, c.grid**2, CHANNELS[c.backbone_layer])
        return torch.zeros(shape, dtype=torch.float16)

    def model(self, i: Inputs) -> TransformerHead:
        return self.build()

    def build(self) -> TransformerHead:
        """A newly initialised head; needs no data."""
        c = self.config
        return TransformerHead(
            num_frames=self.num_frames,
            grid=c.grid,
            channels=CHANNELS[c.backbone_layer],
            num_classes=len(self.classes),
            width=c.width,
            num_layers=c.num_layers,
            num_heads=c.num_heads,
            dropout=c.dropout,
        )

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits and estimate the features' scale from training clips."""
        # Not super(): dataclass(slots=True) creates a new class that super() does not know.
        start = TrainClipClassifier.start(self, m, i)
        if not start.failures:
            assert isinstance(m, TransformerHead)
            samples = self.samples(i, "train")
            rng = torch.Generator().manual_seed(i.seed)
            num = min(_NUM_STATISTICS, len(samples))
            m.set_statistics(torch.stack([samples.get(k, 0, rng)[0] for k in range(num)]))
        return start


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTimeAverage(TrainClipClassifier):
    """A small network trained on the pixels of the clips' mean images."""

    def model_input(self, size: int) -> Tensor:
        return torch.zeros((size, 3, FRAME_SIZE, FRAME_SIZE), dtype=torch.uint8)

    def model(self, i: Inputs) -> nn.Module:
        return MeanImageNet(num_classes=len(self.classes), width=self.config.baseline_width)


def parameter_groups(m: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups with weight decay for matrices, without it for biases, norms and scalars."""
    decayed = [p for p in m.parameters() if p.ndim >= 2]
    others = [p for p in m.parameters() if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
