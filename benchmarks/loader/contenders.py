"""One epoch of one loader, in a process of its own: `python -m benchmarks.loader.contenders NAME`.

Prints when each batch came and what CPU time all took. Each decodes, takes a random part of 224
pixels, mirrors and makes batches as its users would; nobody trains. Runs in both environments, so
nothing is imported before it is needed.
"""

import argparse
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

SIDE = 224


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """`folder` has images/ (a folder for each class), shards/ (imported), mds/."""

    folder: Path
    batch: int
    workers: int

    @property
    def shards(self) -> list[str]:
        """The tar files of the training split."""
        return sorted(map(str, (self.folder / "shards").glob("train-*.tar")))


def ours(given: Given) -> Iterator[Any]:
    """The imagenet workload's samples through the engine's loader."""
    import torch

    from training.engine.batches import BatchPlan
    from training.engine.loader import Loader
    from training.workload import Settings

    samples = our_samples(given.folder)
    settings = Settings(epochs=1, global_batch=given.batch, micro_batch=given.batch)
    plan = BatchPlan(samples, settings, 0, 1)
    micro_batches, device = plan.shares(0, 0), torch.device("cpu")
    loader = Loader(samples, 0, micro_batches, num_workers=given.workers, device=device)
    try:
        for _ in range(plan.num_steps):
            yield loader.next()["labels"]
    finally:
        loader.close()


def our_samples(folder: Path) -> Any:
    """The training split as the workload's own stage gives it, at 224 pixels."""
    import torch

    from training.registry import load_workload, resolve_config
    from training.store.local_dataset import open_dataset
    from training.workload import Inputs, Train

    workload = load_workload("imagenet")
    config = resolve_config(workload, "full", {})
    inputs = Inputs(
        config=config,
        dataset=open_dataset(folder / "shards"),
        artifact=lambda name: [],
        prior=None,
        device=torch.device("cpu"),
        rank=0,
        world=1,
        seed=0,
        scratch=folder,
    )
    stage = workload.stages(config)[0]
    assert isinstance(stage, Train)
    return stage.samples(inputs, "train")


def data_loader(given: Given) -> Iterator[Any]:
    """The same samples through torch's DataLoader: what the loader itself is worth."""
    import torch

    samples = our_samples(given.folder)

    class Images:
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            sample = samples.get(index, 0, torch.Generator().manual_seed(index))
            return sample["images"], sample["labels"]

    return _data_loader(given, Images())


def torchvision_uint8(given: Given) -> Iterator[Any]:
    """torchvision's ImageFolder, decoder and crop, left in uint8."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    crop = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])
    folder = ImageFolder(
        given.folder / "images" / "train",
        crop,
        loader=lambda path: decode_image(path, mode=ImageReadMode.RGB),
    )
    return _data_loader(given, folder)


def streaming(given: Given) -> Iterator[Any]:
    """mosaicml-streaming from shards of its own, decoded by torchvision into uint8."""
    import torch
    from streaming import StreamingDataset
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    crop = v2.Compose([v2.RandomResizedCrop(SIDE, antialias=True), v2.RandomHorizontalFlip()])

    class Images(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            jpeg = torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8)
            return crop(decode_jpeg(jpeg, mode=ImageReadMode.RGB)), sample["cls"]

    dataset = Images(local=str(given.folder / "mds"), shuffle=True, batch_size=given.batch)
    return _data_loader(given, dataset, shuffle=None)


def dali(given: Given) -> Iterator[Any]:
    """DALI on the CPU from our shards: it decodes no more than the part that is wanted."""
    from nvidia.dali import fn, pipeline_def
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    def images() -> Any:
        jpegs, labels = fn.readers.webdataset(
            paths=given.shards, ext=["jpg", "cls"], random_shuffle=True, name="reader"
        )
        part = fn.decoders.image_random_crop(jpegs, random_area=[0.08, 1.0])
        pixels = fn.resize(part, size=[SIDE, SIDE], antialias=True)
        return fn.flip(pixels, horizontal=fn.random.coin_flip()), fn.pad(labels)

    pipeline = pipeline_def(
        batch_size=given.batch, num_threads=given.workers, device_id=None, seed=0
    )
    batches = DALIGenericIterator(
        pipeline(images)(),
        ["images", "labels"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )
    for (batch,) in batches:
        yield batch["labels"]


def _data_loader(given: Given, dataset: Any, shuffle: bool | None = True) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    batches: Any = DataLoader(
        dataset,
        batch_size=given.batch,
        shuffle=shuffle,
        num_workers=given.workers,
        # `spawn` and `forkserver` cannot pickle what is defined in a function.
        multiprocessing_context="fork" if given.workers else None,
    )
    for _, labels in batches:
        yield labels


@dataclass(frozen=True, slots=True)
class LoaderContender:
    """A loader, the environment that has it, and what it imports: that is not measured."""

    run: Callable[[Given], Iterator[Any]]
    environment: str
    imports: tuple[str, ...]


_OURS = (
    "training.engine.loader",
    "training.workloads.imagenet.workload",
    "training.store.local_dataset",
)
_TORCHVISION = ("torchvision.datasets", "torchvision.transforms.v2", "torch.utils.data")
CONTENDERS: Mapping[str, LoaderContender] = MappingProxyType(
    {
        "ours": LoaderContender(ours, ".venv", _OURS),
        "DataLoader, our samples": LoaderContender(
            data_loader, ".venv", (*_OURS, "torch.utils.data")
        ),
        "torchvision, uint8": LoaderContender(torchvision_uint8, ".venv", _TORCHVISION),
        "mosaicml-streaming, uint8": LoaderContender(
            streaming, ".venv-peers", (*_TORCHVISION, "streaming")
        ),
        "DALI on the CPU": LoaderContender(dali, ".venv-peers", ("nvidia.dali.plugin.pytorch",)),
    }
)


def main() -> int:
    """Run one epoch; print seconds by batch, images by batch and CPU seconds as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parsed = parser.parse_args()
    given = Given(folder=parsed.folder, batch=parsed.batch, workers=parsed.workers)
    print(json.dumps(epoch(CONTENDERS[parsed.name], given)), flush=True)
    # Some loaders' threads outlive them, and abort an interpreter that ends in order.
    os._exit(0)


def epoch(contender: LoaderContender, given: Given) -> dict[str, Any]:
    """One epoch: when each batch came and of how many images, and the CPU seconds of all."""
    import torch

    torch.set_num_threads(1)
    for name in contender.imports:
        importlib.import_module(name)
    arrived, sizes = [], []
    cpu, began = _cpu_seconds(), time.monotonic()
    for labels in contender.run(given):
        arrived.append(time.monotonic() - began)
        sizes.append(len(labels))
    return {"arrived": arrived, "sizes": sizes, "cpu_seconds": _cpu_seconds() - cpu}


def _cpu_seconds() -> float:
    """Of this process and those of its children that have ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


if __name__ == "__main__":
    sys.exit(main())
