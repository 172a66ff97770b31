"""Files that an evaluation writes for people and the report shows: tables, sheets of pictures."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LINE = 16  # pixels


def write_table(path: Path, names: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a CSV; None becomes an empty cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([f"{v:.4f}" if isinstance(v, float) else v for v in row] for row in rows)


class Captioned(NamedTuple):
    """A picture (height, width, 3) in uint8, and the caption above it."""

    pixels: NDArray[Any]
    caption: str = ""
    color: str = "black"


def write_sheet(path: Path, heading: str, pictures: Sequence[Captioned], num_columns: int) -> None:
    """Write the pictures in rows, in the format that the suffix names.

    Uses Pillow: matplotlib would take ten times as long at the end of every stage.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=12)
    height, width = np.max([each.pixels.shape[:2] for each in pictures], axis=0).tolist()
    # A caption may be wider than its picture, and the heading than all of them.
    widths = [width, *(math.ceil(font.getlength(each.caption)) for each in pictures)]
    cell_height, cell_width = height + _LINE + 4, max(widths) + _LINE
    num_rows = -(-len(pictures) // num_columns)
    across = max(num_columns * cell_width, math.ceil(font.getlength(heading)) + _LINE)
    size = (across + _LINE, num_rows * cell_height + 2 * _LINE)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((_LINE, 4), heading, fill="black", font=font)
    for number, each in enumerate(pictures):
        row, column = divmod(number, num_columns)
        left, top = _LINE + column * cell_width, 2 * _LINE + row * cell_height
        draw.text((left, top), each.caption, fill=each.color, font=font)
        sheet.paste(Image.fromarray(each.pixels), (left, top + _LINE))
    sheet.save(path)


def write_moving(path: Path, rows: Sequence[NDArray[Any]], milliseconds: int) -> None:
    """Write clips, each row (clips, frames, height, width, 3) in uint8, as one animation."""
    from PIL import Image

    sheet = np.concatenate([np.concatenate(list(row), axis=2) for row in rows], axis=1)
    first, *others = [Image.fromarray(frame) for frame in sheet]
    first.save(path, save_all=True, append_images=others, duration=milliseconds, loop=0, quality=40)
