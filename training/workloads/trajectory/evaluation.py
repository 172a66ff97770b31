"""Evaluation of clip classifiers: accuracy by class, calibration, position error; and its pictures.

Refuses a split that lacks a class: accuracy on such a split is meaningless (see model.py). Without
matplotlib the numbers are still written, and one line says what is missing.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workload import Partial
from training.workloads.trajectory.clips import FRAME_SIZE, Float32s, Frames
from training.workloads.trajectory.dataset import Batch

NUM_BINS = 10
# What `partial` returns for each clip.
_ROWS = (
    *("labels", "predicted", "confidence", "loss", "clips"),
    *("position_error", "standstill_error", "steady_error"),
)


def classify(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return class logits (B, K) and future positions (B, 2) in float32."""
    logits_BK, future_B2, *_ = model(batch["x"])
    return logits_BK.float(), future_B2.float()


def partial(model: nn.Module, batch: Batch) -> Partial:
    """Results of one evaluation batch."""
    logits_BK, future_B2, *places = model(batch["x"])
    logits_BK, future_B2 = logits_BK.float(), future_B2.float()
    probabilities_BK = logits_BK.softmax(dim=1)
    confidence_B, predicted_B = probabilities_BK.max(dim=1)
    to_pixels = FRAME_SIZE / 2
    tensors = {
        "labels": batch["labels"],
        "predicted": predicted_B,
        "confidence": confidence_B,
        "loss": F.cross_entropy(logits_BK, batch["labels"], reduction="none"),
        "position_error": to_pixels * (future_B2 - batch["future"]).norm(dim=1),
        "standstill_error": to_pixels * (batch["last"] - batch["future"]).norm(dim=1),
        "steady_error": to_pixels * (batch["steady"] - batch["future"]).norm(dim=1),
        "clips": batch["clips"],
    }
    if "strips" in batch:
        shown = torch.isin(batch["clips"], batch["strip_clips"])
        tensors |= {name: batch[name] for name in ("strips", "strip_clips")}
        if places and "places" in batch:
            tensors["true_places"] = to_pixels * (batch["places"][shown] + 1.0)
            tensors["found_places"] = to_pixels * (places[0][shown].float() + 1.0)
    return Partial(tensors={name: tensor.cpu() for name, tensor in tensors.items()})


def predictions(model: nn.Module, batch: Batch, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The model's prediction for each clip, with the true values."""
    logits_BK, future_B2 = classify(model, batch)
    confidence_B, predicted_B = logits_BK.softmax(dim=1).max(dim=1)
    found: list[dict[str, Any]] = []
    for clip, predicted, confidence, label, future, true_future in zip(
        batch["clips"].tolist(),
        predicted_B.tolist(),
        confidence_B.tolist(),
        batch["labels"].tolist(),
        future_B2.tolist(),
        batch["future"].tolist(),
        strict=True,
    ):
        found.append(
            {
                "clip": clip,
                "class": classes[predicted],
                "probability": confidence,
                "true_class": classes[label],
            }
        )
        if not math.isnan(true_future[0]):  # of a clip with a track
            places = {"future_position": future, "true_future_position": true_future}
            for name, place in places.items():
                found[-1][name] = [(value + 1.0) * FRAME_SIZE / 2 for value in place]
    return found


def summarize(parts: Sequence[Partial], out: Path, classes: Sequence[str]) -> Mapping[str, float]:
    """Metrics of one evaluation; writes confusion.json (rows true, columns predicted) to `out`."""
    scores = Scores.of(parts, len(classes))
    of_class = scores.confusion_KK.sum(dim=1)
    missing = [name for name, n in zip(classes, of_class.tolist(), strict=True) if n == 0]
    if missing:
        raise ValueError(
            f"the evaluated clips lack {', '.join(missing)}, so their accuracy is meaningless; "
            "make the dataset again with a stratified split"
        )
    metrics = {
        "accuracy": float(scores.is_right.float().mean()),
        "loss": float(scores["loss"].mean()),
        "calibration_error": calibration_error(scores.reliability),
    }
    if not scores["standstill_error"].isnan().all():  # of clips with a track
        metrics["position_error_pixels"] = float(scores["position_error"].nanmean())
        # Of whoever knows the true last places, and takes place or velocity to stay as it is.
        metrics["standstill_error_pixels"] = float(scores["standstill_error"].nanmean())
        metrics["constant_velocity_error_pixels"] = float(scores["steady_error"].nanmean())
    by_class = (scores.confusion_KK.diagonal() / of_class).tolist()
    metrics |= {f"accuracy_{n}": a for n, a in zip(classes, by_class, strict=True)}
    table = {
        "classes": list(classes),
        "confusion": scores.confusion_KK.tolist(),
        "reliability": scores.reliability,
        "metrics": metrics,
    }
    (out / "confusion.json").write_text(json.dumps(table, indent=1) + "\n")
    return metrics


def illustrate(parts: Sequence[Partial], out: Path, title: str, classes: Sequence[str]) -> None:
    """Pictures of a stage's last evaluation."""
    scores = Scores.of(parts, len(classes))
    strips = [part.tensors for part in parts if "strips" in part.tensors]
    row_of = {clip: row for row, clip in enumerate(scores["clips"].tolist())}
    rows = [row_of[int(clip)] for tensors in strips for clip in tensors["strip_clips"]]
    captions = [
        Caption(
            true=classes[int(scores["labels"][row])],
            predicted=classes[int(scores["predicted"][row])],
            confidence=float(scores["confidence"][row]),
        )
        for row in rows
    ]
    frames = torch.cat([tensors["strips"] for tensors in strips]).numpy()
    if "found_places" in strips[0]:
        for name, color in (("true_places", _TRUE), ("found_places", _FOUND)):
            tracks_NT2 = torch.cat([tensors[name] for tensors in strips]).numpy()
            frames = with_tracks(frames, tracks_NT2, color)
    confusion_KK = scores.confusion_KK.numpy()
    draw_pictures(out, title, classes, confusion_KK, scores.reliability, frames, captions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The evaluated clips, one row each, and statistics over them."""

    tensors: Mapping[str, Tensor]
    num_classes: int

    @classmethod
    def of(cls, parts: Sequence[Partial], num_classes: int) -> "Scores":
        """Concatenate the results of `partial`."""
        joined = {name: torch.cat([part.tensors[name] for part in parts]) for name in _ROWS}
        return cls(tensors=joined, num_classes=num_classes)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def is_right(self) -> Tensor:
        """Whether each clip was classified correctly."""
        return self["labels"] == self["predicted"]

    @property
    def confusion_KK(self) -> Tensor:
        """Counts: rows true, columns predicted."""
        num = self.num_classes
        counts = torch.bincount(self["labels"] * num + self["predicted"], minlength=num**2)
        return counts.view(num, num)

    @property
    def reliability(self) -> list[tuple[int, float, float]]:
        """Count, mean confidence and accuracy of NUM_BINS equally wide bins, some perhaps empty."""
        return reliability(self["confidence"], self.is_right)


def reliability(confidence: Tensor, correct: Tensor) -> list[tuple[int, float, float]]:
    """Return (count, mean confidence, accuracy) of each bin."""
    place = (confidence * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    bins = []
    for number in range(NUM_BINS):
        inside = place == number
        count = int(inside.sum())
        means = (
            (float(confidence[inside].mean()), float(correct[inside].float().mean()))
            if count
            else (0.0, 0.0)
        )
        bins.append((count, *means))
    return bins


def calibration_error(bins: Sequence[tuple[int, float, float]]) -> float:
    """Expected calibration error: mean gap between confidence and accuracy, weighted by count.

    Naeini et al. 2015, https://ojs.aaai.org/index.php/AAAI/article/view/9602
    """
    total = sum(count for count, _, _ in bins)
    return sum(count * abs(sure - right) for count, sure, right in bins) / max(1, total)


_log = logging.getLogger(__name__)

_Counts = npt.NDArray[np.int64]

_DPI = 110
# Of the dots where the ball is, and where it was found.
_TRUE, _FOUND = (0, 255, 0), (255, 0, 255)


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
    confusion_KK: _Counts,
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


def with_tracks(frames_NTHWC: Frames, tracks_NT2: Float32s, color: Sequence[int]) -> Frames:
    """The frames with a dot at each place (in pixels) of their clip's track; unknown ones without.

    All places are in each frame: how it moved and where it will be.
    """
    drawn = frames_NTHWC.copy()
    for clip, track_T2 in zip(drawn, tracks_NT2, strict=True):
        known_K2 = track_T2[~np.isnan(track_T2).any(axis=1)]
        x, y = np.clip(known_K2.astype(int), 0, FRAME_SIZE - 1).T
        clip[:, y, x] = color
    return drawn


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


def _draw_confusion(path: Path, title: str, classes: Sequence[str], confusion_KK: _Counts) -> None:
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
    heading = (
        f"{title}: clips in order, with true and predicted class; of a head, where the ball is "
        "(green) and where it was found (magenta)"
    )
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
