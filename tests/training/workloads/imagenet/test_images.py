"""What users bring as images becomes JPEGs that every loader decodes; the rest is refused."""

import io

import numpy as np
import pytest
from PIL import Image

from tests.training.workloads.imagenet.photographs import photograph
from training.workloads.imagenet.packing import ImageOptions, NoImageError, encode


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_is_kept_byte_by_byte(mode: str) -> None:
    content = photograph(1, mode=mode)
    made = encode(content, 0, 90)
    assert (made.jpeg, made.is_converted, made.num_pixels) == (content, False, 25 * 25)
    assert encode(content, 25, 90).jpeg == content


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("PNG", "RGB"),
        ("PNG", "RGBA"),
        ("PNG", "P"),
        ("PNG", "LA"),
        ("PNG", "1"),
        ("WEBP", "RGB"),
        ("GIF", "P"),
        ("TIFF", "CMYK"),
        ("JPEG", "CMYK"),
        ("BMP", "L"),
    ],
)
def test_what_is_no_plain_jpeg_becomes_one(form: str, mode: str) -> None:
    made = encode(photograph(3, form, mode), 0, 95)
    assert made.is_converted
    with Image.open(io.BytesIO(made.jpeg)) as image:
        assert (image.format, image.size) == ("JPEG", (27, 27))
        assert image.mode in ("RGB", "L")


@pytest.mark.parametrize("form", ["PNG", "PPM"])
def test_sixteen_bits_of_grey_become_eight_and_not_white(form: str) -> None:
    grey = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    encoded = io.BytesIO()
    Image.fromarray(grey).save(encoded, form)
    with Image.open(io.BytesIO(encode(encoded.getvalue(), 0, 95).jpeg)) as image:
        assert np.abs(np.asarray(image) - (grey >> 8).astype(int)).max() <= 4


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_fails_for_32_bits_whose_black_and_white_are_not_known(kind: type) -> None:
    encoded = io.BytesIO()
    Image.fromarray(np.linspace(0, 1000, 64 * 64).reshape(64, 64).astype(kind)).save(
        encoded, "TIFF"
    )
    with pytest.raises(NoImageError, match="32 bits a pixel, of which nobody knows what is white"):
        encode(encoded.getvalue(), 0, 95)


@pytest.mark.parametrize(("shorter", "size"), [(16, (16, 18)), (24, (24, 27)), (25, (25, 28))])
def test_the_shorter_side_is_what_was_asked_for_and_never_larger(
    shorter: int, size: tuple[int, int]
) -> None:
    """Of a photograph of 25 x 28 pixels."""
    encoded = io.BytesIO()
    Image.new("RGB", (25, 28)).save(encoded, "JPEG")
    made = encode(encoded.getvalue(), shorter, 90)
    with Image.open(io.BytesIO(made.jpeg)) as image:
        assert image.size == size
    assert made.num_pixels == size[0] * size[1]


def test_less_quality_takes_fewer_bytes() -> None:
    content = photograph(1, side=64)
    assert len(encode(content, 32, 50).jpeg) < 0.8 * len(encode(content, 32, 95).jpeg)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot identify the image file"),
        (b"GIF89a", "."),
        (b"\0\0\0\x18ftypheic" + bytes(200), "is HEIC, Apple's format, which Pillow cannot read"),
        (b"<svg></svg>", "cannot identify the image file"),
        (photograph(1, side=64)[:-500], "truncated"),
        (photograph(1, "PNG", side=64)[:-500], "."),
    ],
)
def test_fails_for_what_is_no_image(content: bytes, why: str) -> None:
    with pytest.raises(NoImageError, match=why):
        encode(content, 0, 90)


def test_fails_for_an_image_whose_decoder_has_an_error_of_its_own() -> None:
    """Pillow raises RuntimeError for a torn AVIF."""
    content = photograph(1, "AVIF").replace(b"iloc", b"free")
    with pytest.raises(NoImageError, match="Missing or empty image item"):
        encode(content, 0, 90)


def test_fails_for_an_image_that_would_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 250)
    with pytest.raises(NoImageError, match="decompression bomb"):
        encode(photograph(1), 0, 90)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shorter_side": -1}, "shorter_side is -1; use at least 0"),
        ({"quality": 0}, "quality is 0; give 1 to 100"),
        ({"left_out_share": 1.0}, "left_out_share is 1.0; use at least 0 and less than 1"),
    ],
)
def test_fails_for_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageOptions(**options)  # type: ignore[arg-type]
