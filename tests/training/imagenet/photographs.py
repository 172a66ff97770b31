"""Small images in folders of classes, as users have them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cats", "dogs", "häuser")


def photograph(number: int, form: str = "JPEG", mode: str = "RGB", side: int = 24) -> bytes:
    """An image of noise, of its own size and bytes for each number."""
    rng = np.random.default_rng(number)
    height, width = side + number % 5, side + number % 7
    pixels = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(encoded, form)
    return encoded.getvalue()


def fill(folder: Path, count: int, splits: tuple[str, ...] = ("train", "val")) -> Path:
    """`count` photographs in each split, or without splits, in classes in turn."""
    for place, split in enumerate(splits or ("",)):
        for number in range(count):
            path = folder / split / CLASSES[number % len(CLASSES)] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photograph(1000 * place + number))
    return folder
