"""Evaluation of clip classifiers: accuracy by class, calibration, position error; and a picture.

It refuses a split that lacks a class, on which accuracy is meaningless (see model.py).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import Captioned, Inputs, Partial, Train, write_sheet, write_table
from training.workloads.trajectory.clip_dataset import Batch
from training.workloads.trajectory.clips import FRAME_SIZE, Float32s, Frames
from training.workloads.trajectory.config import RecipeConfig

_NUM_BINS = 10
# The columns that `evaluate` returns for each clip.
_ROWS = (
    *("labels", "predicted", "confidence", "loss", "clips"),
    *("position_error", "standstill_error", "steady_error"),
)
# The colours of dots where the ball is, and where it was found.
_DOTS = {"true_places": (0, 255, 0), "found_places": (255, 0, 255)}
_HEADING = (
    "clips in order, with true and predicted class; for a head, the ball's place (green) and where "
    "it was found (magenta)"
)
# Count, mean confidence and accuracy.
_Bin = tuple[int, float, float]


class ClipEvaluation(Train):
    """The evaluation that all stages which classify clips share."""

    config: RecipeConfig

    @property
    def classes(self) -> Sequence[str]:
        return self.config.class_names

    def answer(self, m: nn.Module, b: Batch) -> tuple[Tensor, ...]:
        """Return in float32: class logits (B, K), each frame's future position (B, T, 2), the last
        being the clip's, and, for some stages, places (B, T, 2).

        A stage whose model sees more than `x` overrides this to pass it.
        """
        return tuple(each.float() for each in m(b["x"]))

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        logits_BK, futures_BT2, *places = self.answer(m, b)
        future_B2, true_B2 = futures_BT2[:, -1], b["futures"][:, -1]
        confidence_B, predicted_B = logits_BK.softmax(dim=1).max(dim=1)
        to_pixels = FRAME_SIZE / 2
        tensors = {
            "labels": b["labels"],
            "predicted": predicted_B,
            "confidence": confidence_B,
            "loss": F.cross_entropy(logits_BK, b["labels"], reduction="none"),
            "position_error": to_pixels * (future_B2 - true_B2).norm(dim=1),
            "standstill_error": to_pixels * (b["last"] - true_B2).norm(dim=1),
            "steady_error": to_pixels * (b["steady"] - true_B2).norm(dim=1),
            "clips": b["clips"],
        }
        if "strips" in b:
            shown = torch.isin(b["clips"], b["strip_clips"])
            tensors |= {name: b[name] for name in ("strips", "strip_clips")}
            if places and "places" in b:
                tensors["true_places"] = to_pixels * (b["places"][shown] + 1.0)
                tensors["found_places"] = to_pixels * (places[0][shown] + 1.0)
        return Partial(tensors={name: tensor.cpu() for name, tensor in tensors.items()})

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """Return predicted class, its probability, true class, and future positions in pixels."""
        logits_BK, futures_BT2, *_ = self.answer(m, b)
        confidence_B, predicted_B = logits_BK.softmax(dim=1).max(dim=1)
        futures = (each_BT2[:, -1] for each_BT2 in (futures_BT2, b["futures"]))
        columns = (b["clips"], predicted_B, confidence_B, b["labels"], *futures)
        found: list[dict[str, Any]] = []
        for clip, predicted, confidence, label, future, true_future in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            found.append(
                {
                    "clip": clip,
                    "class": self.classes[predicted],
                    "probability": confidence,
                    "true_class": self.classes[label],
                }
            )
            if not math.isnan(true_future[0]):  # NaN: the clip has no track
                places = {"future_position": future, "true_future_position": true_future}
                for name, place in places.items():
                    found[-1][name] = [(value + 1.0) * FRAME_SIZE / 2 for value in place]
        return found

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Return an evaluation's metrics; write confusion.csv and reliability.csv to `out`."""
        rows, classes = _joined(parts), self.classes
        is_right = rows["labels"] == rows["predicted"]
        pairs = rows["labels"] * len(classes) + rows["predicted"]
        confusion_KK = pairs.bincount(minlength=len(classes) ** 2).view(len(classes), -1)
        of_class = confusion_KK.sum(dim=1)
        missing = [name for name, n in zip(classes, of_class.tolist(), strict=True) if n == 0]
        if missing:
            raise ValueError(
                f"the evaluated clips lack {', '.join(missing)}, so their accuracy is "
                "meaningless; make the dataset again with a stratified split"
            )
        bins = _reliability(rows["confidence"], is_right)
        metrics = {
            "accuracy": float(is_right.float().mean()),
            "loss": float(rows["loss"].mean()),
            "calibration_error": _calibration_error(bins),
        }
        if not rows["standstill_error"].isnan().all():  # some clips have a track
            metrics["position_error_pixels"] = float(rows["position_error"].nanmean())
            # References that know the true last places, and keep the place or the velocity.
            metrics["standstill_error_pixels"] = float(rows["standstill_error"].nanmean())
            metrics["constant_velocity_error_pixels"] = float(rows["steady_error"].nanmean())
        by_class = (confusion_KK.diagonal() / of_class).tolist()
        metrics |= {f"accuracy_{n}": a for n, a in zip(classes, by_class, strict=True)}
        taken_for = zip(classes, confusion_KK.tolist(), strict=True)
        write_table(out / "confusion.csv", ["clips of", *classes], ([n, *k] for n, k in taken_for))
        write_table(out / "reliability.csv", ["clips", "confidence", "accuracy"], bins)
        return metrics

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Draw the first clips, each as a row of its frames: clips.jpg."""
        rows = _joined(parts) if parts else {}
        strips = [part.tensors for part in parts if "strips" in part.tensors]
        if not strips:
            return
        row_of = {clip: row for row, clip in enumerate(rows["clips"].tolist())}
        frames_NTHWC = torch.cat([tensors["strips"] for tensors in strips]).numpy()
        for name, color in _DOTS.items() if "found_places" in strips[0] else ():
            tracks_NT2 = torch.cat([tensors[name] for tensors in strips]).numpy()
            frames_NTHWC = _with_tracks(frames_NTHWC, tracks_NT2, color)
        clips = torch.cat([tensors["strip_clips"] for tensors in strips]).tolist()
        pictures = []
        for clip, frames_THWC in zip(clips, frames_NTHWC, strict=True):
            true, predicted = (int(rows[name][row_of[clip]]) for name in ("labels", "predicted"))
            answer = "" if true == predicted else f" predicted {self.classes[predicted]}"
            confidence = float(rows["confidence"][row_of[clip]])
            pictures.append(
                Captioned(
                    pixels=np.concatenate(list(frames_THWC), axis=1),
                    caption=f"{self.classes[true]},{answer} {confidence:.2f}",
                    color="red" if answer else "black",
                )
            )
        # Noisy frames are ten times smaller as JPEG than as PNG, small enough for the report.
        write_sheet(out / "clips.jpg", f"{self.name}: {_HEADING}", pictures, num_columns=2)


def _joined(parts: Sequence[Partial]) -> dict[str, Tensor]:
    """Return the evaluated clips, one row each."""
    return {name: torch.cat([part.tensors[name] for part in parts]) for name in _ROWS}


def _reliability(confidence: Tensor, is_right: Tensor) -> list[_Bin]:
    """Return bins of confidence of equal width, some perhaps empty."""
    place = (confidence * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
    bins = []
    for number in range(_NUM_BINS):
        inside = place == number
        means = (each[inside].float().mean().nan_to_num(0.0) for each in (confidence, is_right))
        sure, right = map(float, means)
        bins.append((int(inside.sum()), sure, right))
    return bins


def _calibration_error(bins: Sequence[_Bin]) -> float:
    """Compute the expected calibration error: confidence's gaps to accuracy, by count.

    Naeini et al. 2015, https://ojs.aaai.org/index.php/AAAI/article/view/9602
    """
    total = sum(count for count, _, _ in bins)
    return sum(count * abs(sure - right) for count, sure, right in bins) / max(1, total)


def _with_tracks(frames_NTHWC: Frames, tracks_NT2: Float32s, color: Sequence[int]) -> Frames:
    """Draw a dot at each known place (in pixels) of the clip's track.

    Each frame has all places, so it shows how the ball moved and where it will be.
    """
    drawn = frames_NTHWC.copy()
    for clip, track_T2 in zip(drawn, tracks_NT2, strict=True):
        known_K2 = track_T2[~np.isnan(track_T2).any(axis=1)]
        x, y = np.clip(known_K2.astype(int), 0, FRAME_SIZE - 1).T
        clip[:, y, x] = color
    return drawn
