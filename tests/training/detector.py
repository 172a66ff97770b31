"""A detector of seconds: images of any size, with any number of objects, also none.

Of the six steps of an epoch one has no object at all, and two have none on one of two ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tests.training.tiny import Tiny, TinyConfig, reached
from training.proxies import WorkloadProxy
from training.randomness import shuffled
from training.workload import Batch, Inputs, Loss, Partial, Prepare, Samples, Settings, Train

# Two micro-batches of two images each: e without objects, o with one to three.
STEPS = ("oooo", "eeoo", "oeoo", "eeee", "ooee", "oooo")
PATTERN = "".join(STEPS)
EMPTY = range(PATTERN.count("e"))  # these images have no objects
NUM_QUERIES = 4


class Sample(NamedTuple):
    image: Tensor  # (1, H, W)
    points: Tensor  # (N, 2), in shares of the image


@dataclass(frozen=True, kw_only=True, slots=True)
class Images(Samples):
    """An image is a function of its index; it is flipped at random."""

    def __len__(self) -> int:
        return len(PATTERN)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Sample:
        own = torch.Generator().manual_seed(index)
        height, width = torch.randint(8, 33, (2,), generator=own).tolist()
        points = torch.rand(0 if index in EMPTY else 1 + index % 3, 2, generator=own)
        image = 0.1 * torch.rand(1, height, width, generator=own)
        for x, y in points.tolist():
            image[0, int(y * height), int(x * width)] = 1.0
        if torch.rand((), generator=rng) < 0.5:
            return Sample(image.flip(-1), torch.stack([1 - points[:, 0], points[:, 1]], dim=1))
        return Sample(image, points)

    def collate(self, items: Sequence[Sample]) -> Batch:
        height, width = (max(item.image.shape[dim] for item in items) for dim in (1, 2))
        images, points = torch.zeros(len(items), 1, height, width), []
        for padded, item in zip(images, items, strict=True):
            _, h, w = item.image.shape
            padded[:, :h, :w] = item.image
            points.append(item.points * torch.tensor([w / width, h / height]))
        return {"images": images, "points": points}

    def order(self, epoch: int, seed: int) -> Sequence[int]:
        order = shuffled(len(self), epoch, seed).tolist()
        kinds = {
            "e": iter([index for index in order if index in EMPTY]),
            "o": iter([index for index in order if index not in EMPTY]),
        }
        return [next(kinds[kind]) for kind in PATTERN]


class Detector(nn.Module):
    """A score and a point for each quarter of the image, which may be of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 8, 5, stride=2, padding=2)
        self.head = nn.Linear(8, 3)
        self.known = nn.Linear(2, 1)  # takes part only where there are objects

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pooled = F.adaptive_avg_pool2d(F.relu(self.features(images)), 2).flatten(2)
        found = self.head(pooled.transpose(1, 2))
        return found[..., 0], found[..., 1:].sigmoid()


def matched(found: Tensor, points: Tensor) -> list[int]:
    """For each point the nearest query that is left, chosen on the host."""
    distances = torch.cdist(found.detach(), points).numpy()
    chosen: list[int] = []
    for column in distances.T:
        chosen.append(min(set(range(NUM_QUERIES)) - set(chosen), key=lambda row: column[row]))
    return chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class Detect(Train):
    config: TinyConfig
    name: str = "first"

    @property
    def settings(self) -> Settings:
        return Settings(
            epochs=self.config.settings.epochs,
            global_batch=4,
            micro_batch=2,
            eval_batch=4,
            clip_norm=0.1,
            find_unused_parameters=True,
        )

    def model(self, i: Inputs) -> nn.Module:
        return Detector()

    def optimizer(self, m: nn.Module) -> Optimizer:
        return AdamW(m.parameters(), lr=0.01)

    def samples(self, i: Inputs, split: str) -> Images:
        return Images()

    def weight(self, b: Batch) -> float:
        return float(sum(len(points) for points in b["points"]))

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        reached(self.name, step)
        scores, found = m(b["images"])
        total = F.softplus(scores).sum()
        for own_scores, own, points in zip(scores, found, b["points"], strict=True):
            chosen = matched(own, points)
            total = total - own_scores[chosen].sum() + (own[chosen] - points).abs().sum()
            if len(points):
                total = total + 1e-3 * m.known(points).square().sum()
        metrics = {"objects": (self.weight(b), 1.0)}
        return Loss(total=total, mean=1e-3 * found.square().mean(), metrics=metrics)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        reached(f"{self.name}-evaluation", len(b["points"]))
        scores, _ = m(b["images"])
        return Partial(sums={"score": (float(scores.sum()), float(scores.numel()))})


class Detection(WorkloadProxy):
    """On the tiny workload's dataset, of which it reads nothing."""

    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return (Detect(config=c),)


DETECTION = Detection(Tiny())
