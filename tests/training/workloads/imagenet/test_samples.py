"""A damaged image is replaced by a rule, counted and bounded; a read that fails is not."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.loading import CPU, assert_same
from tests.training.workloads.imagenet.photographs import fill
from training.cli.main import main
from training.engine.batches import MicroBatch
from training.engine.loader import Loader
from training.errors import UserError
from training.randomness import derive_seed
from training.store.local_dataset import open_dataset, write_manifest
from training.tally import taken
from training.workloads.imagenet import samples as module
from training.workloads.imagenet import shards as shards_module
from training.workloads.imagenet.samples import ImageSamples, image_samples

SEED = 7


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty photographs."""
    folder = tmp_path_factory.mktemp("photographs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        source, out = str(fill(folder / "own", 40)), str(folder / "out")
        assert main(["data", "import", source, "--workload=imagenet", f"--out={out}"]) == 0
    return folder / "out"


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Callable[..., ImageSamples]:
    """The samples of a dataset in which some images are none, with checksums that hold."""

    def damage(*numbers: int) -> ImageSamples:
        folder = tmp_path / "damaged"
        folder.mkdir()
        for path in packed.glob("*.*"):
            if path.name.startswith(("train", "validation")):
                (folder / path.name).write_bytes(path.read_bytes())
        index = np.load(folder / "train.index.npy")
        for number in numbers:
            with (folder / f"train-{index[number]['shard']:05d}.tar").open("r+b") as shard:
                shard.seek(int(index[number]["offset"]))
                shard.write(bytes(100))
        write_manifest(folder, "imagenet", open_dataset(packed).meta)
        return image_samples(open_dataset(folder), "train", lambda _: 32, window=2, seed=SEED)

    return damage


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_damaged_image_is_replaced_by_the_one_that_seed_and_index_name(
    damaged: Callable[..., ImageSamples], capsys: pytest.CaptureFixture[str]
) -> None:
    samples, expected = damaged(5), derive_seed("replacement", SEED, 5, 0) % 40
    assert expected != 5
    taken()
    first, again = samples.get(5, 0, rng()), samples.get(5, 0, rng())
    assert_same(first, again)
    assert (first["ids"], first["replaced"]) == (expected, 1)
    assert first["labels"] == samples.shards.label(expected)
    assert torch.equal(first["images"], samples.get(expected, 0, rng())["images"])
    assert taken().counts == {"replaced": 2}
    said = capsys.readouterr().out
    assert said.count("00001-00000.jpg of train-00001.tar cannot be decoded (") == 1


def test_batches_are_the_same_on_any_number_of_workers(
    damaged: Callable[..., ImageSamples],
) -> None:
    samples = damaged(3, 17)
    order = np.asarray(samples.order(0, SEED))
    batches = [
        MicroBatch(number=at // 8, epoch=0, ids=order[at : at + 8].tolist())
        for at in range(0, 40, 8)
    ]

    def loaded(num_workers: int) -> list[object]:
        loader = Loader(samples, SEED, batches, num_workers=num_workers, device=CPU)
        made = [loader.next() for _ in batches]
        loader.close()
        return made

    alone = loaded(0)
    assert_same(alone, loaded(3))
    assert sum(int(batch["replaced"].sum()) for batch in alone) == 2  # type: ignore[index]


def test_fails_if_many_images_are_damaged(
    damaged: Callable[..., ImageSamples], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ALWAYS_REPLACED", 2)
    samples = damaged(1, 11, 21)
    samples.get(1, 0, rng())
    samples.get(11, 0, rng())
    with pytest.raises(UserError, match="3 of 3 images that a process read cannot be decoded, the"):
        samples.get(21, 0, rng())


def test_fails_if_no_image_can_stand_in(damaged: Callable[..., ImageSamples]) -> None:
    samples = damaged(*range(40))
    with pytest.raises(UserError, match=r"00000-00000\.jpg of train-00000\.tar and 4 images drawn"):
        samples.get(0, 0, rng())


def test_a_read_that_fails_is_never_replaced(
    damaged: Callable[..., ImageSamples], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shards_module, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(OSError, match="cannot be read: Input/output error"):
        damaged().get(0, 0, rng())


def test_each_epoch_has_every_image_once_in_an_order_of_its_own(
    damaged: Callable[..., ImageSamples],
) -> None:
    samples = damaged()
    orders = [np.asarray(samples.order(epoch, SEED)) for epoch in (0, 0, 1)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert all(sorted(order.tolist()) == list(range(40)) for order in orders)
    names = samples.files(orders[0])
    assert sorted(names) == [f"train-{number:05d}.tar" for number in range(8)]
    assert names[0] == f"train-{samples.shards.index['shard'][orders[0][0]]:05d}.tar"
    assert set(samples.files(orders[0][-5:])) <= set(names[-2:])
