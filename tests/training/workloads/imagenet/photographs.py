"""Small images in folders of classes, as users have them, and the datasets made of them."""

import io
import json
from collections.abc import Mapping
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


def command(source: Path | str, out: Path, *more: str) -> list[str]:
    return ["data", "import", str(source), "--workload=imagenet", f"--out={out}", *more]


def content(folder: Path) -> Mapping[str, bytes]:
    """All that is there, but the record of what was verified on this machine."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".verified.jsonl"
    }


def manifest(folder: Path) -> Mapping[str, object]:
    loaded: Mapping[str, object] = json.loads((folder / "manifest.json").read_text())
    return loaded
