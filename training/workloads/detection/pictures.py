"""Pictures of an evaluation: images with their objects, next to what the detector finds.

They need matplotlib; without it the figures are still there, and one line says what is missing.
"""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from training.workload import Partial
from training.workloads.detection.evaluation import DetectionsAndTruth

_log = logging.getLogger(__name__)

PICTURES_FILE = "detections.jpg"
# Weaker detections are not drawn, as a detector always makes many of them.
_LEAST_SCORE = 0.3
_MOST_DRAWN = 100
_DPI = 100
_NUM_COLORS = 10  # of matplotlib's own; more classes share them


def draw_pictures(parts: Sequence[Partial], out: Path) -> None:
    """Write PICTURES_FILE to `out`: on the left what is there, on the right what is found."""
    if find_spec("matplotlib") is None:
        _log.warning("[pictures] matplotlib is not installed; the figures are in classes.csv")
        return
    shown = [part.tensors for part in parts if "pictures" in part.tensors]
    if not shown:
        return
    # Not pyplot: it keeps every figure, and wants a display.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    detections = DetectionsAndTruth.of(parts)
    pictures = [
        (image[:, :height, :width], int(image_id))
        for tensors in shown
        for image, (height, width), image_id in zip(
            tensors["pictures"],
            tensors["picture_sizes"].tolist(),
            tensors["picture_ids"],
            strict=True,
        )
    ]
    num_rows = -(-len(pictures) // 2)
    figure = Figure(figsize=(12, 3.1 * num_rows), dpi=_DPI, layout="constrained")
    figure.suptitle(f"truth | found with a score of at least {_LEAST_SCORE}", fontsize=10)
    colors = [
        Patch(color=_color(label), label=category.name)
        for label, category in enumerate(detections.categories[:_NUM_COLORS])
    ]
    figure.legend(handles=colors, loc="upper right", ncols=len(colors), fontsize=8)
    grid = figure.subplots(num_rows, 4, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    panels = iter(grid.flat)
    for image, image_id in pictures:
        for rows in _panels(detections, image_id):
            _draw(next(panels), image, rows, detections.size(image_id))
    figure.savefig(out / PICTURES_FILE)


_Rows = list[tuple[int, tuple[float, ...], str]]


def _panels(detections: DetectionsAndTruth, image_id: int) -> tuple[_Rows, _Rows]:
    """What is there and what is found: label, box as x, y, width, height, and caption."""
    truth, found = detections.truth, detections.found
    there = (truth["images"] == image_id).nonzero().flatten().tolist()
    objects: _Rows = [
        (int(truth["labels"][k]), tuple(truth["boxes"][k].tolist()), "") for k in there
    ]
    row = int((found["image_ids"] == image_id).nonzero()[0])
    strong = found["scores"][row].argsort(descending=True)[:_MOST_DRAWN].tolist()
    detected: _Rows = []
    for k in strong:
        score = float(found["scores"][row, k])
        if score >= _LEAST_SCORE:
            x, y, right, bottom = found["boxes"][row, k].tolist()
            box = (x, y, right - x, bottom - y)
            detected.append((int(found["labels"][row, k]), box, f"{score:.2f}"))
    return objects, detected


def _draw(axes: Any, image: Tensor, rows: _Rows, size: tuple[int, int]) -> None:
    from matplotlib.patches import Rectangle

    height, width = size
    axes.imshow(image.permute(1, 2, 0).numpy(), extent=(0, width, height, 0), aspect="equal")
    for label, (x, y, w, h), caption in rows:
        color = _color(label)
        axes.add_patch(Rectangle((x, y), w, h, fill=False, edgecolor=color, linewidth=1.2))
        if caption:
            axes.text(x, y, caption, fontsize=5, color=color, va="bottom")


def _color(label: int) -> str:
    return f"C{label % _NUM_COLORS}"
