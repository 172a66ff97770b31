"""Images per second of our loader, of others, and of what the cores can decode and crop.

Images are JPEGs of the size of ImageNet's, made here, in files, in our shards and in mosaicml's,
all in the page cache. Each loader runs in a process of its own, and who consumes its batches does
nothing else. Peers that are not in .venv come from `make peers`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks import REPOSITORY
from benchmarks.loader.contenders import CONTENDERS, SIDE, our_samples
from training.workloads.imagenet.samples import decode

_HEIGHT, _WIDTH = 375, 500
_QUALITY = 92  # about 110 KB an image, as ImageNet's
_CLASSES = 8
# Made once each, and then copied: making one takes longer than ten are loaded.
_DIFFERENT = 512
# Batches at both ends that the rate leaves out: until queues are full, and when they run empty.
_EDGE = 4
_MISSING = "not installed: make peers"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Round:
    rate: float  # images per second between the edges
    cpu_seconds: float  # per 1,000 images
    first_seconds: float


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = command.add_argument
    add("--rounds", type=int, default=5, help="alternating, default: %(default)s")
    add("--images", type=int, default=4000, help="a round, default: %(default)s")
    add("--batch", type=int, default=64, help="default: %(default)s")
    add("--workers", type=int, help="processes (default: one per core)")
    add("--only", nargs="+", default=[], metavar="NAME", help="default: all")


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Alternate the loaders; one row each, as medians, and the limits: what all cores could do."""
    rounds, images, batch, workers = given.rounds, given.images, given.batch, given.workers
    only = given.only
    if rounds < 1:
        raise ValueError(f"give at least one round, got {rounds}")
    if images < (2 * _EDGE + 2) * batch:
        raise ValueError(f"give at least {(2 * _EDGE + 2) * batch} images, got {images}")
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    names = [name for name in CONTENDERS if not only or name in only]
    found: dict[str, list[_Round]] = {name: [] for name in names}
    alone: dict[str, list[float]] = {"decoded": [], "decoded and cropped": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_data(folder, images)
        jpegs = sorted((folder / "images" / "train").rglob("*.jpg"))
        samples, rng = our_samples(folder), torch.Generator()
        for _ in range(rounds):
            rate = _rate_alone(lambda i: decode(jpegs[i].read_bytes()), images)
            alone["decoded"].append(rate)
            rate = _rate_alone(lambda i: samples.get(i, 0, rng.manual_seed(i)), images)
            alone["decoded and cropped"].append(rate)
            for name in names:
                if (one := _round(name, folder, batch, workers or cores)) is not None:
                    found[name].append(one)
    limits = {name: cores * statistics.median(rates) for name, rates in alone.items()}
    return [
        *(_row(name, found[name], limits, cores) for name in names),
        *_limit_rows(limits, cores),
    ]


def make_data(folder: Path, images: int) -> None:
    """Write the images as files, as our shards and, if the peers are there, as mosaicml's."""
    encoded = [_make_image(number) for number in range(min(images, _DIFFERENT))]
    splits = {"train": images, "validation": _CLASSES}
    for split, count in splits.items():
        for number in range(count):
            of_class = folder / "images" / split / f"class{number % _CLASSES}"
            of_class.mkdir(parents=True, exist_ok=True)
            (of_class / f"{number:06d}.jpg").write_bytes(encoded[number % len(encoded)])
    imported = ["data", "import", "--workload=imagenet", str(folder / "images")]
    _run(".venv", "training", *imported, f"--out={folder / 'shards'}")
    if _interpreter(".venv-peers").exists():
        _run(".venv-peers", "benchmarks.loader.mds", str(folder))


def _make_image(seed: int) -> bytes:
    """A JPEG with edges and noise."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:_HEIGHT, 0:_WIDTH]
    waves = [np.sin(x * fx + y * fy + c) for fx, fy, c in generator.uniform(-0.3, 0.3, (3, 3))]
    noise = generator.normal(0, 18, (_HEIGHT, _WIDTH, 3))
    pixels = (128 + 80 * np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8)
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=_QUALITY)
    return stream.getvalue()


def _rate_alone(act: Callable[[int], Any], count: int) -> float:
    """Images per second of CPU time of one core, which other processes do not slow down."""
    began = time.process_time()
    for number in range(count):
        act(number)
    return count / (time.process_time() - began)


def _round(name: str, folder: Path, batch: int, workers: int) -> _Round | None:
    environment = CONTENDERS[name].environment
    if not _interpreter(environment).exists():
        return None
    options = (f"--batch={batch}", f"--workers={workers}")
    said = _run(environment, "benchmarks.loader.contenders", name, str(folder), *options)
    lines: dict[str, Any] = json.loads(said.splitlines()[-1])
    arrived, sizes = lines["arrived"], lines["sizes"]
    inside = slice(_EDGE + 1, len(sizes) - _EDGE)
    seconds = arrived[len(sizes) - _EDGE - 1] - arrived[_EDGE]
    return _Round(
        rate=sum(sizes[inside]) / seconds,
        cpu_seconds=1000 * lines["cpu_seconds"] / sum(sizes),
        first_seconds=arrived[0],
    )


def _run(environment: str, module: str, *arguments: str) -> str:
    command = [str(_interpreter(environment)), "-W", "ignore", "-m", module, *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stderr[-2000:]}")
    return ended.stdout


def _interpreter(environment: str) -> Path:
    return (
        REPOSITORY / environment / "bin" / "python"
        if environment != ".venv"
        else Path(sys.executable)
    )


def _row(
    name: str, rounds: Sequence[_Round], limits: Mapping[str, float], cores: int
) -> dict[str, Any]:
    if not rounds:
        return {"loader": name, "images/s": _MISSING} | dict.fromkeys(_COLUMNS, "")
    rate, cpu, first = (
        statistics.median(getattr(one, field) for one in rounds)
        for field in ("rate", "cpu_seconds", "first_seconds")
    )
    limit = limits["decoded and cropped"]
    values = (rate / limit, cpu, 1000 * cores / cpu / limit, first)
    return {"loader": name, "images/s": rate} | dict(zip(_COLUMNS, values, strict=True))


# By CPU time: what the loader would reach if nothing else ran, start and end included.
_COLUMNS = ("x limit", "CPU s/1000", "x limit by CPU time", "first batch s")


def _limit_rows(limits: Mapping[str, float], cores: int) -> list[dict[str, Any]]:
    whole = limits["decoded and cropped"]
    return [
        {"loader": f"{cores} x {name} by one core, {SIDE} pixels", "images/s": limit}
        | dict(zip(_COLUMNS, (limit / whole, 1000 * cores / limit, limit / whole, ""), strict=True))
        for name, limit in limits.items()
    ]
