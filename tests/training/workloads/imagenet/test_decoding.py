"""Whichever decoder a machine has, an image has the same bits, and what is no image is refused."""

import io
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from training.workloads.imagenet import samples
from training.workloads.imagenet.samples import decode, decode_with_pillow

SIZES = ((375, 500), (17, 33), (1, 1), (224, 160))


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
        assert np.array_equal(decoded.numpy(), decode_with_pillow(image))


def damaged() -> bytes:
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
    assert np.array_equal(decode(damaged()).numpy(), decode_with_pillow(damaged()))
    png = io.BytesIO()
    Image.new("RGB", (9, 9)).save(png, "PNG")
    # 15,000 x 15,000 pixels, by its header: more than Pillow makes.
    place = whole.index(b"\xff\xc0") + 5
    endless = whole[:place] + struct.pack(">HH", 15_000, 15_000) + whole[place + 4 :]
    if has_simplejpeg:
        endless = b""  # it would take seconds
    for broken in (b"", b"no image", whole[: len(whole) // 2], png.getvalue(), endless):
        with pytest.raises(ValueError, match="no JPEG"):
            decode(broken)
