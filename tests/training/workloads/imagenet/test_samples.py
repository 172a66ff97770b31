"""A damaged image is replaced by a rule, counted and bounded; a read that fails is not."""

import io
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from contract.errors import UserError
from tests.training.loading import assert_same
from tests.training.workloads.imagenet.photographs import fill
from training.cli.main import main
from training.durable.store.local_dataset import LocalDataset
from training.durable.tally import Tally
from training.numerics import derive_seed
from training.workloads.imagenet import packing as shards_module
from training.workloads.imagenet import samples
from training.workloads.imagenet import samples as module
from training.workloads.imagenet.packing import Shards
from training.workloads.imagenet.samples import (
    ImageSamples,
    _decode_with_pillow,
    _eval_image,
    _random_box,
    decode,
)

SEED = 7
SIZES = ((375, 500), (17, 33), (1, 1), (224, 160))


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
        LocalDataset.complete(folder, "imagenet", LocalDataset.open(packed).meta)
        return ImageSamples(
            shards=Shards(LocalDataset.open(folder), "train"),
            size=lambda _: 32,
            window=2,
            seed=SEED,
        )

    return damage


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_damaged_image_is_replaced_by_the_one_that_seed_and_index_name(
    damaged: Callable[..., ImageSamples], capsys: pytest.CaptureFixture[str]
) -> None:
    samples, expected = damaged(5), derive_seed("replacement", SEED, 5, 0) % 40
    assert expected != 5
    Tally.taken()
    first, again = samples.get(5, 0, rng()), samples.get(5, 0, rng())
    assert_same(first, again)
    assert (first["ids"], first["replaced"]) == (expected, 1)
    assert first["labels"] == samples.shards.label(expected)
    assert torch.equal(first["images"], samples.get(expected, 0, rng())["images"])
    assert Tally.taken().counts == {"replaced": 2}
    said = capsys.readouterr().out
    assert said.count("00001-00000.jpg of train-00001.tar cannot be decoded (") == 1


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


def jpeg(height: int, width: int, mode: str = "RGB", **options: int | bool) -> bytes:
    pixels = np.random.default_rng(0).normal(128, 60, (height // 4 + 1, width // 4 + 1, 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    stream = io.BytesIO()
    image.resize((width, height), Image.Resampling.BICUBIC).convert(mode).save(
        stream, "JPEG", **options
    )
    return stream.getvalue()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("quality", [30, 75, 95])
@pytest.mark.parametrize("progressive", [False, True])
def test_both_decoders_give_the_same_bits(
    size: tuple[int, int], quality: int, progressive: bool
) -> None:
    pytest.importorskip("simplejpeg")
    kinds: list[dict[str, int]] = [{"subsampling": kind} for kind in range(3)]
    encoded = [jpeg(*size, quality=quality, progressive=progressive, **kind) for kind in kinds]
    for image in (*encoded, jpeg(*size, "L", quality=quality, progressive=progressive)):
        decoded = decode(image)
        assert (decoded.dtype, tuple(decoded.shape)) == (torch.uint8, (*size, 3))
        assert np.array_equal(decoded.numpy(), _decode_with_pillow(image))


def warned_of() -> bytes:
    """What libjpeg warns of, and decodes."""
    whole = jpeg(200, 200)
    return whole[:1500] + b"\xff\x00\xff\xd0" + whole[1504:]


@pytest.mark.parametrize("has_simplejpeg", [True, False])
def test_pillow_decides_what_is_damaged(
    has_simplejpeg: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_simplejpeg:
        monkeypatch.setattr(samples, "_simplejpeg", None)
    whole = jpeg(200, 200)
    assert np.array_equal(decode(warned_of()).numpy(), _decode_with_pillow(warned_of()))
    png = io.BytesIO()
    Image.new("RGB", (9, 9)).save(png, "PNG")
    # 15,000 x 15,000 pixels, by its header: more than Pillow makes.
    place = whole.index(b"\xff\xc0") + 5
    endless = whole[:place] + struct.pack(">HH", 15_000, 15_000) + whole[place + 4 :]
    if has_simplejpeg:
        endless = b""  # it would take seconds
    for broken in (b"", b"no image", whole[: len(whole) // 2], png.getvalue(), endless):
        with pytest.raises(ValueError, match="not a JPEG"):
            decode(broken)


def test_parts_have_the_areas_and_aspects_of_torchvision_s_default() -> None:
    height, width, count = 400, 500, 3000
    rng = torch.Generator().manual_seed(0)
    ours = torch.tensor([_random_box(height, width, rng)[2:] for _ in range(count)])
    crop, image = v2.RandomResizedCrop(224), torch.empty(3, height, width, dtype=torch.uint8)
    torch.manual_seed(0)
    drawn = [crop.make_params([image]) for _ in range(count)]
    theirs = torch.tensor([(part["height"], part["width"]) for part in drawn])
    levels = torch.tensor([0.01, 0.25, 0.5, 0.75, 0.99], dtype=torch.float64)
    found = [
        [quotient.double().quantile(levels) for quotient in (h * w / (height * width), w / h)]
        for h, w in (ours.T, theirs.T)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0.04, atol=0.01)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (301, 257), (224, 224)])
def test_an_evaluated_image_is_torchvision_s_resize_and_center_crop(
    height: int, width: int
) -> None:
    rng = torch.Generator().manual_seed(1)
    image_HWC = torch.randint(256, (height, width, 3), generator=rng, dtype=torch.uint8)
    theirs = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])
    expected_CHW = theirs(image_HWC.permute(2, 0, 1))
    torch.testing.assert_close(_eval_image(image_HWC, 224).permute(2, 0, 1), expected_CHW)


def test_an_image_is_augmented_from_its_own_generator_alone(packed: Path) -> None:
    dataset = LocalDataset.open(packed)
    plain = ImageSamples(shards=Shards(dataset, "train"), size=lambda _: 64, window=2, seed=SEED)
    augmented = replace(plain, augment=v2.RandAugment(magnitude=9))

    def image(samples: ImageSamples, seed: int, epoch: int = 0) -> torch.Tensor:
        found: torch.Tensor = samples.get(3, epoch, torch.Generator().manual_seed(seed))["images"]
        return found

    before = torch.default_generator.get_state()
    assert any(not torch.equal(image(augmented, n), image(plain, n)) for n in range(3))
    torch.manual_seed(11)
    again = image(augmented, 1)
    torch.manual_seed(12)
    torch.testing.assert_close(image(augmented, 1), again, rtol=0, atol=0)
    torch.testing.assert_close(image(augmented, 1, -1), image(plain, 1, -1), rtol=0, atol=0)
    torch.default_generator.set_state(before)
