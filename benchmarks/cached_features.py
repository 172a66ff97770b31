"""An epoch of the trajectory head on cached features beside one that runs the backbone each time.

Same clips, same order, same initial head; afterwards both heads' predictions are compared. The
cache is what stage `features` publishes.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.trajectory.classifier import TrainHead
from training.trajectory.dataset import TrajectoryData, make_dataset, open_dataset
from training.trajectory.features import clip_features, load_backbone
from training.trajectory.recipes import TrajectoryConfig, laptop
from training.trajectory.stages import frozen_stages

_BATCH = 16
_CPU = torch.device("cpu")
# Returns the head's input for the clips `ids`.
_Source = Callable[[Sequence[int]], Tensor]


def measure(rounds: int, clips: int) -> list[dict[str, Any]]:
    """Return medians of alternating epochs over `clips` clips on one thread, and their ratio."""
    if rounds < 1:
        raise ValueError(f"a benchmark needs at least one round, got {rounds}")
    torch.set_num_threads(1)
    config = laptop()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_dataset(folder, clips, 0, lambda done, total: None)
        data = open_dataset(folder)
        backbone = load_backbone(config, folder, _CPU)
        began = time.perf_counter()
        cache = _features(config, data, backbone, range(clips))
        caching = time.perf_counter() - began
        sources: Mapping[str, _Source] = {
            "backbone in every epoch": lambda ids: _features(config, data, backbone, ids),
            "cached features": lambda ids: cache[list(ids)],
        }
        seconds: dict[str, list[float]] = {source: [] for source in sources}
        heads = {source: _head(config, cache) for source in sources}
        for _ in range(rounds):
            for source, features_of in sources.items():
                seconds[source].append(_epoch(config, data, heads[source], features_of))
        said = [_predictions(head, cache) for head in heads.values()]
    uncached, cached = (statistics.median(times) for times in seconds.values())
    return [
        {
            "clips": clips,
            "rounds": rounds,
            "backbone in every epoch s": round(uncached, 3),
            "cached features s": round(cached, 3),
            "times faster": round(uncached / cached, 2),
            "making the cache s": round(caching, 3),
            "largest difference of a probability": float((said[0] - said[1]).abs().max()),
        }
    ]


def _features(
    config: TrajectoryConfig, data: TrajectoryData, backbone: nn.Module, ids: Sequence[int]
) -> Tensor:
    return torch.stack([clip_features(backbone, data.frames[k], config, _CPU) for k in ids])


def _stage(config: TrajectoryConfig) -> TrainHead:
    (stage,) = [s for s in frozen_stages(config) if s.name == "head"]
    assert isinstance(stage, TrainHead)
    return stage


def _head(config: TrajectoryConfig, cache: Tensor) -> nn.Module:
    torch.manual_seed(0)
    head = _stage(config).build()
    head.set_statistics(cache)
    return head.train()


def _epoch(
    config: TrajectoryConfig, data: TrajectoryData, head: nn.Module, features_of: _Source
) -> float:
    stage = _stage(config)
    optimizer = stage.optimizer(head)
    torch.manual_seed(1)
    began = time.perf_counter()
    for first in range(0, len(data.labels), _BATCH):
        ids = list(range(len(data.labels)))[first : first + _BATCH]
        track = torch.from_numpy(data.tracks[ids])[:, -1, :2] / 32.0 - 1.0
        batch = {
            "x": features_of(ids),
            "labels": torch.tensor([data.labels[k] for k in ids]),
            "future": track,
        }
        loss = stage.loss(head, batch, 0, 1)
        optimizer.zero_grad()
        (loss.total / len(ids)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.perf_counter() - began


@torch.no_grad()
def _predictions(head: nn.Module, cache: Tensor) -> Tensor:
    logits_BK, _ = head.eval()(cache)
    said: Tensor = logits_BK.softmax(dim=1)
    return said
