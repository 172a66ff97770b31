"""Pictures of an evaluation: a contact sheet, the confusion matrix, the reliability diagram.

They need matplotlib; without it the numbers are still written, and one line says what is missing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from training.workloads.trajectory.clips import Frames

_log = logging.getLogger(__name__)

Counts = npt.NDArray[np.int64]

_DPI = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """The caption of one clip in the contact sheet."""

    true: str
    predicted: str
    confidence: float


def draw_pictures(
    out: Path,
    title: str,
    classes: Sequence[str],
    confusion_KK: Counts,
    reliability: Sequence[tuple[int, float, float]],
    frames_NTHWC: Frames,
    captions: Sequence[Caption],
) -> None:
    """Write confusion.png, reliability.png and clips.jpg to `out`."""
    if find_spec("matplotlib") is None:
        _log.warning("[pictures] matplotlib is not installed; the numbers are in confusion.json")
        return
    _draw_confusion(out / "confusion.png", title, classes, confusion_KK)
    _draw_reliability(out / "reliability.png", title, reliability)
    # Noisy frames are ten times smaller as JPEG than as PNG, small enough for the report.
    _draw_contact_sheet(out / "clips.jpg", title, frames_NTHWC, captions)


def draw_reconstructions(path: Path, truth_NTHWC: Frames, reconstructed_NTHWC: Frames) -> None:
    """Write clips, each above the tokenizer's reconstruction of it."""
    if find_spec("matplotlib") is None:
        _log.warning("[pictures] matplotlib is not installed; no picture of the reconstructions")
        return
    pairs = [
        np.concatenate([np.concatenate(list(clip), axis=1) for clip in pair], axis=0)
        for pair in zip(truth_NTHWC, reconstructed_NTHWC, strict=True)
    ]
    num_rows = -(-len(pairs) // 2)
    figure = _figure(12.0, 0.4 + 2.1 * num_rows)
    figure.suptitle("clips, each above its reconstruction")
    grid = figure.subplots(num_rows, 2, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, pair in zip(grid.flat, pairs, strict=False):
        axes.imshow(pair)
    figure.savefig(path)


def _figure(width: float, height: float) -> Any:
    # Not pyplot: it keeps every figure, and wants a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def _draw_confusion(path: Path, title: str, classes: Sequence[str], confusion_KK: Counts) -> None:
    shares = confusion_KK / confusion_KK.sum(axis=1, keepdims=True)
    figure = _figure(6.5, 5.8)
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    ticks = range(len(classes))
    axes.set_xticks(ticks, classes, rotation=45, ha="right")
    axes.set_yticks(ticks, classes)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(f"{title}: share of each true class")
    for row in ticks:
        for column in ticks:
            if shares[row, column] >= 0.005:
                color = "white" if shares[row, column] > 0.5 else "black"
                text = f"{100 * shares[row, column]:.0f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(image, shrink=0.8)
    figure.savefig(path)


def _draw_reliability(path: Path, title: str, bins: Sequence[tuple[int, float, float]]) -> None:
    figure = _figure(4.2, 4.0)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="gray", linewidth=1, linestyle="--", label="calibrated")
    filled = [(sure, right, count) for count, sure, right in bins if count]
    sure, right, counts = zip(*filled, strict=True)
    axes.plot(sure, right, marker="o", color="tab:blue")
    for x, y, count in zip(sure, right, counts, strict=True):
        axes.annotate(str(count), (x, y), textcoords="offset points", xytext=(5, -9), fontsize=7)
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy", title=title)
    axes.legend(fontsize=8)
    figure.savefig(path)


def _draw_contact_sheet(
    path: Path, title: str, frames_NTHWC: Frames, captions: Sequence[Caption]
) -> None:
    """Draw the clips in two columns, each a row of its frames below its caption.

    With Pillow: matplotlib takes ten times as long, at the end of every stage.
    """
    from PIL import Image, ImageDraw, ImageFont

    num_columns, line = 2, 16
    strips = [np.concatenate(list(frames), axis=1) for frames in frames_NTHWC]
    height, width, _ = strips[0].shape
    num_rows = -(-len(strips) // num_columns)
    cell_height, cell_width = height + line + 4, width + line
    size = (num_columns * cell_width + line, num_rows * cell_height + 2 * line)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=12)
    heading = f"{title}: clips in order, with true and predicted class"
    draw.text((line, 4), heading, fill="black", font=font)
    for index, (strip, caption) in enumerate(zip(strips, captions, strict=True)):
        row, column = divmod(index, num_columns)
        left, top = line + column * cell_width, 2 * line + row * cell_height
        is_right = caption.true == caption.predicted
        predicted = "" if is_right else f" predicted {caption.predicted}"
        text = f"{caption.true},{predicted} {caption.confidence:.2f}"
        draw.text((left, top), text, fill="black" if is_right else "red", font=font)
        sheet.paste(Image.fromarray(strip), (left, top + line))
    sheet.save(path)
