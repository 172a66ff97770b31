"""The one stage of the workload: trains a classifier, evaluates it, shows what it confuses."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from training.interchange import Writer
from training.workload import Batch, Inputs, Loss, Partial, Settings, Start, Train
from training.workloads.imagenet import evaluation
from training.workloads.imagenet.config import BASE_BATCH, ImagenetConfig
from training.workloads.imagenet.interchange import from_resnet, write_program, write_resnet
from training.workloads.imagenet.model import Classifier
from training.workloads.imagenet.samples import ImageSamples, image_samples

_log = logging.getLogger(__name__)
# More of the first weights in an average than this costs it accuracy.
_MOST_LEFT = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainClassifier(Train):
    """Trains one ResNet; `name` is what metrics and reports call the stage."""

    config: ImagenetConfig
    name: str = "classifier"

    @property
    def settings(self) -> Settings:
        """Length, batches, precision; the warm-up is a part of the learning rate's schedule."""
        c = self.config
        return replace(
            c.settings,
            schedule=self._schedule if c.warmup_epochs else c.settings.schedule,
            ema_buffers=c.settings.ema_decay is not None,
        )

    def _schedule(self, step: int, num_steps: int) -> float:
        """Up linearly over the warm-up's epochs, then down to 0, linearly or by half a cosine."""
        c = self.config
        warmup = num_steps * min(c.warmup_epochs / c.epochs, 1.0)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = (num_steps - step) / max(num_steps - warmup, 1.0)
        if c.settings.schedule == "linear":
            return left
        return 0.5 - 0.5 * float(torch.cos(torch.tensor(left * torch.pi, dtype=torch.float64)))

    def model(self, i: Inputs) -> Classifier:
        c = self.config
        return Classifier(c.architecture, c.num_classes, blur_pool=c.blur_pool)

    def from_foreign(
        self, m: nn.Module, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | None:
        """torchvision's and timm's ResNets."""
        return from_resnet(m, tensors)

    def formats(self) -> Mapping[str, Writer]:
        """torchvision's names, which are timm's, and a program without our code."""
        return {"torchvision": write_resnet, "timm": write_resnet, "torch.export": write_program}

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Another number of classes."""
        num, mine = len(meta.get("classes", ())), self.config.num_classes
        if num in (0, mine):
            return ()
        return [
            f"the dataset has {num} classes and num_classes is {mine}; give --override "
            f"num_classes={num}"
        ]

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits."""
        classes, splits = i.dataset.meta["classes"], i.dataset.meta["splits"]
        if (left := self.first_weights_left(splits["train"])) > _MOST_LEFT:
            _log.warning(
                "the average ends with %.0f%% of the weights before training: give a lower "
                "ema_decay or ema_every_steps",
                100 * left,
            )
        facts = {f"{split}_images": float(count) for split, count in splits.items()}
        return Start(facts={**facts, "chance": 1 / len(classes)})

    def first_weights_left(self, num_images: int) -> float:
        """Their share in the moving average at the end of a training on so many images."""
        settings = self.settings
        if settings.ema_decay is None:
            return 0.0
        num_updates: int = settings.num_steps(num_images) // settings.ema_every_steps
        return settings.ema_decay**num_updates

    def optimizer(self, m: nn.Module) -> Optimizer:
        """SGD with momentum; norms and biases do not decay."""
        c = self.config
        decayed = [p for p in m.parameters() if p.ndim > 1]
        others = [p for p in m.parameters() if p.ndim <= 1]
        return SGD(
            [
                {"params": decayed, "weight_decay": c.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=c.learning_rate * c.settings.global_batch / BASE_BATCH,
            momentum=c.momentum,
        )

    def samples(self, i: Inputs, split: str) -> ImageSamples:
        c = self.config
        return image_samples(i.dataset, split, c.image_size, window=c.shuffle_window, seed=i.seed)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        logits_BK: Tensor = m(b["images"]).float()
        total = F.cross_entropy(
            logits_BK, b["labels"], reduction="sum", label_smoothing=self.config.label_smoothing
        )
        num = self.weight(b)
        right = (logits_BK.argmax(dim=1) == b["labels"]).sum()
        return Loss(total=total, metrics={"top1": (right, num)})

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        return evaluation.partial(m, b, self.config.evaluate_flips)

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """The five most probable classes of each image, by number, and the true one."""
        return evaluation.predictions(m, b)

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        samples = self.samples(i, "validation")
        evaluation.show_confusions(parts, i.dataset.meta["classes"], samples, out)

    def example(self, size: int) -> Batch:
        """A batch of the largest images that are trained on."""
        c = self.config
        numbers = torch.zeros(size, dtype=torch.long)
        return {
            "images": torch.zeros(size, c.train_size, c.train_size, 3, dtype=torch.uint8),
            "labels": numbers,
            "ids": numbers,
            "replaced": numbers,
        }

    def work(self, epoch: int) -> tuple[str, float]:
        """A convolution's work grows with the pixels."""
        c, side = self.config, self.config.image_size(epoch)
        passes = 2 if epoch < 0 and c.evaluate_flips else 1
        return f"{side} pixels", passes * (side / c.train_size) ** 2

    def shape_key(self, b: Batch) -> int:
        """The side of the images: the last batch of an evaluation is smaller, its code is not."""
        return int(b["images"].shape[1])
