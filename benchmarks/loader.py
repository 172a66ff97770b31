"""Images per second of our loader beside others, and beside what the cores can decode at all.

Images are JPEGs of the size of ImageNet's, made here; each loader decodes, crops, resizes and flips
them in the same way, with as many worker processes. Nothing is trained: who consumes batches does
nothing else. A loader is a function in LOADERS.
"""

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from training.engine.batches import BatchPlan
from training.engine.loader import Loader
from training.randomness import shuffled
from training.stacking import stack
from training.workload import Order, Settings

_HEIGHT, _WIDTH, _SIDE = 375, 500, 224
_QUALITY = 92  # about 110 KB an image, as ImageNet's


@dataclass(frozen=True, slots=True)
class Images:
    """The samples: encoded images, decoded and augmented when they are fetched."""

    encoded: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.encoded)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> dict[str, Any]:
        area, top, left, flip = torch.rand(4, generator=rng).tolist()
        side = _HEIGHT * (0.3 + 0.7 * area)
        top, left = top * (_HEIGHT - side), left * (_WIDTH - side)
        image = decoded(self.encoded[index]).resize(
            (_SIDE, _SIDE), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side)
        )
        pixels = np.asarray(image)
        return {"images": pixels[:, ::-1].copy() if flip < 0.5 else pixels.copy(), "labels": index}

    collate = staticmethod(stack)

    def order(self, epoch: int, seed: int) -> Order:
        return shuffled(len(self), epoch, seed)


class WithOwnCollate(Images):
    """The same for samples whose batches only the workload can make."""

    def collate(self, items: Sequence[Any]) -> Any:
        return stack(items)


class _Indexed(Dataset[dict[str, Any]]):
    def __init__(self, images: Images) -> None:
        self._images = images

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._images.get(index, 0, torch.Generator().manual_seed(index))

    def __len__(self) -> int:
        return len(self._images)


def ours(images: Images, batch: int, workers: int) -> Iterator[Any]:
    """The engine's loader."""
    settings = Settings(epochs=1, global_batch=batch, micro_batch=batch)
    plan = BatchPlan(images, settings, 0, 1)
    loader = Loader(images, 0, plan.shares(0, 0), num_workers=workers, device=torch.device("cpu"))
    try:
        for _ in range(plan.num_steps):
            yield loader.next()
    finally:
        loader.close()


def ours_with_own_collate(images: Images, batch: int, workers: int) -> Iterator[Any]:
    """The engine's loader where each worker makes whole batches."""
    return ours(WithOwnCollate(images.encoded), batch, workers)


def data_loader(images: Images, batch: int, workers: int) -> Iterator[Any]:
    """torch's DataLoader, as the engine used it before."""
    yield from DataLoader(
        _Indexed(images),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


Run = Callable[[Images, int, int], Iterator[Any]]
LOADERS: Mapping[str, Run] = MappingProxyType(
    {
        "torch DataLoader": data_loader,
        "ours, stacked": ours,
        "ours, own collate": ours_with_own_collate,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    rate: float
    cpu_seconds: float  # per 1,000 images
    first_seconds: float


def measure(*, rounds: int, images: int, batch: int, workers: int | None) -> list[dict[str, Any]]:
    """Alternate the loaders; one row each, as medians, and the limits: what all cores could do."""
    if rounds < 1:
        raise ValueError(f"give at least one round, got {rounds}")
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    made = make_images(images)
    rounds_of: dict[str, list[_Round]] = {name: [] for name in LOADERS}
    alone: dict[str, list[float]] = {"decoded by one core": [], "made by one core": []}
    for _ in range(rounds):
        alone["decoded by one core"].append(_rate_alone(made, _decoded))
        alone["made by one core"].append(_rate_alone(made, _made))
        for name, run in LOADERS.items():
            rounds_of[name].append(_round(run, made, batch, workers or cores))
    limits = {name: cores * statistics.median(rates) for name, rates in alone.items()}
    rows = [_row(name, found, list(limits.values())) for name, found in rounds_of.items()]
    for name, limit in limits.items():
        best = _Round(rate=limit, cpu_seconds=1000 * cores / limit, first_seconds=batch / limit)
        rows.append(_row(f"{cores} x {name}", [best], list(limits.values())))
    return rows


def make_images(count: int) -> Images:
    """Images with edges and noise, in JPEG."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[0:_HEIGHT, 0:_WIDTH]
    encoded = []
    for _ in range(count):
        waves = [np.sin(x * fx + y * fy + c) for fx, fy, c in generator.uniform(-0.3, 0.3, (3, 3))]
        noise = generator.normal(0, 18, (_HEIGHT, _WIDTH, 3))
        pixels = (128 + 80 * np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)
        stream = BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=_QUALITY)
        encoded.append(stream.getvalue())
    return Images(encoded)


def decoded(encoded: bytes) -> Image.Image:
    """The image in memory, in RGB."""
    return Image.open(BytesIO(encoded)).convert("RGB")


def _decoded(images: Images, index: int) -> Any:
    return decoded(images.encoded[index])


def _made(images: Images, index: int) -> Any:
    return images.get(index, 0, torch.Generator().manual_seed(index))


def _rate_alone(images: Images, act: Callable[[Images, int], Any]) -> float:
    """Images per second of CPU time of one core, which other processes do not slow down."""
    began = time.process_time()
    for index in range(len(images)):
        act(images, index)
    return len(images) / (time.process_time() - began)


def _round(run: Run, images: Images, batch: int, workers: int) -> _Round:
    cpu, began, first, count = _cpu_seconds(), time.monotonic(), 0.0, 0
    for made in run(images, batch, workers):
        first = first or time.monotonic() - began
        count += len(made["labels"])
    seconds = time.monotonic() - began
    if count != len(images):
        raise RuntimeError(f"{count} images of {len(images)} came")
    return _Round(
        rate=count / seconds,
        cpu_seconds=1000 * (_cpu_seconds() - cpu) / count,
        first_seconds=first,
    )


def _cpu_seconds() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _row(name: str, rounds: Sequence[_Round], limits: Sequence[float]) -> dict[str, Any]:
    median = {
        field: statistics.median(getattr(one, field) for one in rounds)
        for field in ("rate", "cpu_seconds", "first_seconds")
    }
    return {
        "loader": name,
        "images/s": median["rate"],
        "x decoded": median["rate"] / limits[0],
        "x made": median["rate"] / limits[1],
        "CPU s/1000": median["cpu_seconds"],
        "first batch s": median["first_seconds"],
    }
