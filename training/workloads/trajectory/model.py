"""The classifiers of clips: the head over a clip's features, the baselines, and their Train stages.

A stage refuses a split that lacks a class or has only one, on which accuracy is meaningless (100 %
was once reported on one).
B batch, T frames, G grid cells (side x side), C channels, K classes, D width, M maps.

Evaluation of clip classifiers: accuracy by class, calibration, position error; and a picture.

It refuses a split that lacks a class, on which accuracy is meaningless (see model.py).
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from contract.errors import UserError
from training import (
    Captioned,
    Inputs,
    Loss,
    Partial,
    Settings,
    Start,
    Train,
    write_sheet,
    write_table,
)
from training.workloads.trajectory.clip_dataset import (
    Batch,
    ClipSamples,
    View,
    open_dataset,
    split_failures,
)
from training.workloads.trajectory.clips import CLIP_SHAPE, FRAME_SIZE, Float32s, Frames
from training.workloads.trajectory.config import CHANNELS, RecipeConfig, TrajectoryConfig, as_row
from training.workloads.trajectory.forecast import FutureForecast, place_error

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


# The network over cells: its width, and how many numbers describe what is seen.
_CELL_WIDTH, _NUM_SEEN = 64, 16
# A cell's outputs: how likely the ball is there, where within it (x, y), and what is seen there.
NUM_TOLD = 3 + _NUM_SEEN
_FLOOR = 0.01
# How a path bends: its change of step (x, y), speed, turn, and distance from its middle.
_NUM_BENDS = 5
# How much a cell's motion counts at first: this times the logarithm of its mean square.
_MOTION_GAIN = 2.0


class TimeTransformer(nn.Module):
    """A Transformer over time, from a clip's tokens to its class, and a forecast of places."""

    def __init__(
        self, c: RecipeConfig, *, num_inputs: int, num_frames: int, num_layers: int
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(num_inputs, c.width)
        self.time_TD = nn.Parameter(0.02 * torch.randn(num_frames, c.width))
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                c.width,
                c.num_heads,
                4 * c.width,
                c.dropout,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(c.width)
        self.classify = nn.Linear(c.width, len(c.class_names))
        self.forecast = FutureForecast(num_frames=num_frames)

    def outputs(self, tokens_BTE: Tensor, place_BT2: Tensor) -> tuple[Tensor, Tensor]:
        """Return class logits (B, K), and each frame's future position, (B, T, 2)."""
        x_BTD = self.dropout(self.embed(tokens_BTE) + self.time_TD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        return self.classify(x_BTD.mean(dim=1)), self.forecast(place_BT2)


class PlaceTransformer(TimeTransformer):
    """A Transformer over time that sees, in each frame, where the ball is and what it looks like.

    The expected place is the spatial softmax of Finn et al. 2016 (arXiv:1509.06113) over a grid
    of cells, each of which says how likely the ball is there, where within, and what is seen.
    If it `is_guided`, it is also told how the path bends, which few clips do not teach it.
    """

    def __init__(self, c: RecipeConfig, *, num_frames: int, num_layers: int) -> None:
        num_inputs = 5 + _NUM_SEEN + _NUM_BENDS * c.is_guided
        super().__init__(c, num_inputs=num_inputs, num_frames=num_frames, num_layers=num_layers)
        self.is_guided = c.is_guided

    def tell_cells(self, told_BTGE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map each cell's NUM_TOLD numbers to class logits, futures and places (B, T, 2)."""
        side = math.isqrt(told_BTGE.shape[2])
        centers_G2 = cell_centers(side, told_BTGE.device)
        heat_BTG1, within_BTG2, seen_BTGS = torch.split(told_BTGE.float(), [1, 2, _NUM_SEEN], -1)
        share_BTG1 = heat_BTG1.softmax(dim=2)
        place_BT2 = (share_BTG1 * (centers_G2 + within_BTG2 * 2.0 / side)).sum(dim=2)
        sure_BT1 = share_BTG1.square().sum(dim=2)
        seen_BTS = (share_BTG1 * seen_BTGS.tanh()).sum(dim=2)
        step_BT2 = F.pad(place_BT2[:, 1:] - place_BT2[:, :-1], (0, 0, 1, 0))
        bent = _bends(place_BT2, step_BT2) if self.is_guided else ()
        tokens_BTE = torch.cat([2.0 * place_BT2, 4.0 * step_BT2, sure_BT1, seen_BTS, *bent], dim=-1)
        return *self.outputs(tokens_BTE, place_BT2), place_BT2


def _bends(place_BT2: Tensor, step_BT2: Tensor) -> Sequence[Tensor]:
    """Return how a path bends at each frame, in _NUM_BENDS numbers of about 1."""
    before_BT2 = F.pad(step_BT2[:, :-1], (0, 0, 1, 0))
    cross_BT = before_BT2[..., 0] * step_BT2[..., 1] - before_BT2[..., 1] * step_BT2[..., 0]
    turn_BT = torch.atan2(cross_BT, (before_BT2 * step_BT2).sum(dim=2) + 1e-3)
    away_BT2 = place_BT2 - place_BT2.mean(dim=1, keepdim=True)
    # A gradient of a length of zero would be NaN.
    speed_BT, away_BT = ((v_BT2.square().sum(2) + 1e-6).sqrt() for v_BT2 in (step_BT2, away_BT2))
    lengths_BT3 = torch.stack([8.0 * speed_BT, turn_BT, 2.0 * away_BT], dim=2)
    return [8.0 * (step_BT2 - before_BT2), lengths_BT3]


class _TransformerHead(PlaceTransformer):
    """Locates the ball in the grid's features, and classifies its path by a Transformer over time.

    It maps features (B, T, G, C) to class logits (B, K), and each frame's future position and place
    (B, T, 2), in half frames from the centre. T = 1 is the single-frame baseline.

    What to look for is learned from the class and, for clips with a track, from the place: a small
    network sees each cell's features, their difference from the clip's own background, and those of
    its neighbours. With `pixel_width`, a light path is also trained on the pixels and their change
    since the previous frame: fast motion is seen on a finer grid, as in SlowFast networks
    (Feichtenhofer et al. 2019, arXiv:1812.03982). A guided head begins by looking where the
    features differ most from the background.
    """

    feature_mean_GC: Tensor
    feature_std_GC: Tensor
    motion_std_C: Tensor

    def __init__(self, c: TrajectoryConfig, *, num_frames: int) -> None:
        super().__init__(c, num_frames=num_frames, num_layers=c.num_layers)
        channels = CHANNELS[c.backbone_layer]
        self.register_buffer("feature_mean_GC", torch.zeros(c.grid**2, channels))
        self.register_buffer("feature_std_GC", torch.ones(c.grid**2, channels))
        self.register_buffer("motion_std_C", torch.ones(channels))
        self.grid = c.grid
        self.mix = nn.Conv2d(2 * channels + 2, _CELL_WIDTH, 1)
        self.around = nn.Conv2d(_CELL_WIDTH, _CELL_WIDTH, 3, padding=1)
        self.tell_cell = nn.Conv2d(_CELL_WIDTH, NUM_TOLD, 1)
        self.on_pixels = _pixel_path(c.pixel_width) if c.pixel_width else None
        self.motion_gain = nn.Parameter(torch.tensor(_MOTION_GAIN)) if c.is_guided else None

    @torch.no_grad()
    def set_statistics(self, features_NTGC: Tensor) -> None:
        """Set the scale of the features, which is part of the state, from training clips."""
        features_NTGC = features_NTGC.float()
        self.feature_mean_GC.copy_(features_NTGC.mean(dim=(0, 1)))
        self.feature_std_GC.copy_(features_NTGC.std(dim=(0, 1)) + _FLOOR)
        motion_NTGC = features_NTGC - _background(features_NTGC)
        self.motion_std_C.copy_(motion_NTGC.flatten(0, 2).std(dim=0) + _FLOOR)

    def forward(
        self, features_BTGC: Tensor, frames_BTHW3: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        side, features_BTGC = self.grid, features_BTGC.float()
        standard_BTGC = (features_BTGC - self.feature_mean_GC) / self.feature_std_GC
        motion_BTGC = (features_BTGC - _background(features_BTGC)) / self.motion_std_C
        centers_G2 = cell_centers(side, features_BTGC.device)
        where_BTG2 = centers_G2.expand(*features_BTGC.shape[:3], 2)
        cells_NGC = torch.cat([standard_BTGC, motion_BTGC, where_BTG2], dim=-1).flatten(0, 1)
        cells_NCHW = cells_NGC.view(len(cells_NGC), side, side, -1).permute(0, 3, 1, 2)
        x_NDHW = F.gelu(self.mix(cells_NCHW))
        if self.on_pixels is not None:
            assert frames_BTHW3 is not None
            seen_NDHW = self.on_pixels(_pixels_and_change(frames_BTHW3))
            x_NDHW = F.interpolate(x_NDHW, size=seen_NDHW.shape[2:], mode="bilinear") + seen_NDHW
        x_NDHW = x_NDHW + F.gelu(self.around(x_NDHW))
        told_NEHW = self.tell_cell(x_NDHW)
        if self.motion_gain is not None:
            heat_BTG = self.motion_gain * (motion_BTGC.square().mean(dim=3) + _FLOOR).log()
            heat_N1HW = heat_BTG.view(-1, 1, side, side)
            if self.on_pixels is not None:
                heat_N1HW = F.interpolate(heat_N1HW, size=told_NEHW.shape[2:], mode="bilinear")
            told_NEHW = told_NEHW + F.pad(heat_N1HW, (0,) * 5 + (NUM_TOLD - 1,))
        told_NGE = told_NEHW.flatten(2).transpose(1, 2)
        return self.tell_cells(told_NGE.reshape(*features_BTGC.shape[:2], -1, NUM_TOLD))


def _pixel_path(width: int) -> nn.Sequential:
    """Make a network from (N, 6, H, W) to (N, _CELL_WIDTH, H / 4, W / 4)."""
    layers: list[nn.Module] = [nn.Conv2d(6, width, 5, stride=2, padding=2), nn.GELU()]
    layers += [nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU()]
    for before in (2 * width, _CELL_WIDTH):
        layers += [nn.Conv2d(before, _CELL_WIDTH, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers)


def _pixels_and_change(frames_BTHW3: Tensor) -> Tensor:
    """Return frames minus their mean colour, and the change since the previous: (N, 6, H, W)."""
    pixels_BTHW3 = frames_BTHW3.float() / 64.0
    pixels_BTHW3 = pixels_BTHW3 - pixels_BTHW3.mean(dim=(2, 3), keepdim=True)
    change_BTHW3 = F.pad(pixels_BTHW3[:, 1:] - pixels_BTHW3[:, :-1], (0, 0) * 3 + (1, 0))
    # A view in channels-last, the fast layout.
    return torch.cat([pixels_BTHW3, change_BTHW3], dim=4).flatten(0, 1).permute(0, 3, 1, 2)


def cell_centers(side: int, device: torch.device) -> Tensor:
    """Return the centres of the cells (G, 2), in half frames from the centre of the picture."""
    axis = (torch.arange(side, device=device) + 0.5) * 2.0 / side - 1.0
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)


def _background(features_BTGC: Tensor) -> Tensor:
    """Return the static part: the mean over time or, for a single frame, over its cells."""
    over = 1 if features_BTGC.shape[1] > 1 else 2
    return features_BTGC.mean(dim=over, keepdim=True)


class _MeanImageNet(nn.Module):
    """Maps mean images (B, 3, 64, 64) in uint8 to class logits (B, K) and futures (B, 1, 2).

    It is trained from scratch on the pixels, so that only the missing order limits it. With group
    norm, a sample's result does not depend on the rest of its batch.
    """

    def __init__(self, *, num_classes: int, width: int) -> None:
        super().__init__()
        widths = (3, width // 2, width, 2 * width, 2 * width)
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1),
                nn.GroupNorm(4, after),
                nn.ReLU(),
            ]
        self.layers = nn.Sequential(*layers)
        self.classify = nn.Linear(2 * width, num_classes)
        self.predict = nn.Linear(2 * width, 2)

    def forward(self, images_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        images_B3HW = images_B3HW.float() / 64.0
        # The difference from the image's own mean colour.
        contrast_B3HW = images_B3HW - images_B3HW.mean(dim=(2, 3), keepdim=True)
        x_BD = self.layers(contrast_B3HW).mean(dim=(2, 3))
        return self.classify(x_BD), self.predict(x_BD)[:, None]


# The number of clips from which the scale of the features is estimated.
_NUM_STATISTICS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainClipClassifier(ClipEvaluation):
    """A Train stage without a model. Baselines differ in their `view`: what they see."""

    config: RecipeConfig
    name: str
    view: View
    epochs: int | None

    @property
    def settings(self) -> Settings:
        return replace(self.config.settings, epochs=self.epochs)

    def model_input(self, size: int) -> Tensor:
        """Return a dummy model input of `size` clips."""
        raise NotImplementedError

    def example(self, size: int) -> Batch:
        """Return a batch with the shapes of `collate`'s."""
        return {
            "x": self.model_input(size),
            "labels": torch.zeros(size, dtype=torch.long),
            "clips": torch.zeros(size, dtype=torch.long),
            "futures": torch.zeros(size, 1, 2),
            "last": torch.zeros(size, 2),
            "steady": torch.zeros(size, 2),
        }

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Refuse other classes."""
        wanted = tuple(meta.get("classes", self.classes))
        if wanted == tuple(self.classes):
            return ()
        given = shlex.quote(f"classes={as_row(wanted)}")
        return [f"the dataset has other classes; pass --override {given}"]

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits."""
        data = open_dataset(i.dataset.folder)
        failures = [failure for split in data.splits for failure in split_failures(data, split)]
        num_clips = {f"{split}_clips": len(data.splits[split]) for split in ("train", "validation")}
        return Start(failures=failures, facts={**num_clips, "chance": 1.0 / len(self.classes)})

    def optimizer(self, m: nn.Module) -> Optimizer:
        """Return AdamW without weight decay for biases, norms and scalars."""
        c = self.config
        groups = parameter_groups(m, c.weight_decay)
        # None, because False would also rule out torch's foreach.
        return AdamW(groups, lr=c.learning_rate, fused=c.fused_optimizer or None)

    def samples(self, i: Inputs, split: str) -> ClipSamples:
        if self.refusals(i.dataset.meta):  # a finished run may be evaluated on other clips
            raise UserError(
                f"the dataset has other classes than the model, which tells {len(self.classes)} "
                "apart; use a dataset of the classes that it was trained on"
            )
        return ClipSamples.of(i, split, self.view)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return self.loss_of(b, *self.answer(m, b))

    def loss_of(
        self, b: Batch, logits_BK: Tensor, futures_BT2: Tensor, places_BT2: Tensor | None = None
    ) -> Loss:
        """Return the cross-entropy, plus the errors of each frame's future position and place,
        times `position_weight` and `place_weight`.
        """
        total = F.cross_entropy(logits_BK, b["labels"], reduction="sum")
        total = total + self.config.position_weight * place_error(futures_BT2, b["futures"])
        if places_BT2 is not None:
            total = total + self.place_loss(b["places"], places_BT2)
        correct = (logits_BK.argmax(dim=1) == b["labels"]).sum()
        return Loss(total=total, metrics={"accuracy": (correct, self.weight(b))})

    def place_loss(self, places_BT2: Tensor, found_BT2: Tensor) -> Tensor:
        """Return the places' error, times `place_weight`, summed over clips."""
        return self.config.place_weight * place_error(found_BT2, places_BT2)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTimeTransformer(TrainClipClassifier):
    """A Transformer over what is seen in the frames of complete or partial clips."""

    config: TrajectoryConfig

    @property
    def num_frames(self) -> int:
        """The number of frames of one sample."""
        return 1 if self.view == "single_frame" else self.config.num_frames

    def example(self, size: int) -> Batch:
        places = torch.zeros(size, self.num_frames, 2)
        batch = TrainClipClassifier.example(self, size)
        return {**batch, "places": places, "futures": places}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainHead(TrainTimeTransformer):
    """The head on frozen features."""

    def model_input(self, size: int) -> Tensor:
        c = self.config
        shape = (size, self.num_frames, c.grid**2, CHANNELS[c.backbone_layer])
        return torch.zeros(shape, dtype=torch.float16)

    def model(self, i: Inputs) -> _TransformerHead:
        return _TransformerHead(self.config, num_frames=self.num_frames)

    def example(self, size: int) -> Batch:
        batch = TrainTimeTransformer.example(self, size)
        if self.config.pixel_width:
            shape = (size, self.num_frames, *CLIP_SHAPE[1:])
            batch["frames"] = torch.zeros(shape, dtype=torch.uint8)
        return batch

    def samples(self, i: Inputs, split: str) -> ClipSamples:
        c = self.config
        return ClipSamples.of(
            *(i, split, self.view), frame_stride=c.frame_stride, has_frames=c.pixel_width > 0
        )

    def answer(self, m: nn.Module, b: Batch) -> tuple[Tensor, ...]:
        return tuple(each.float() for each in m(b["x"], b.get("frames")))

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits and estimate the features' scale from training clips."""
        # dataclass(slots=True) creates a new class, which super() does not know.
        start = TrainClipClassifier.start(self, m, i)
        if not start.failures:
            assert isinstance(m, _TransformerHead)
            samples = self.samples(i, "train")
            rng = torch.Generator().manual_seed(i.seed)
            num = min(_NUM_STATISTICS, len(samples))
            m.set_statistics(torch.stack([samples.get(k, 0, rng)[0] for k in range(num)]))
        return start


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTimeAverage(TrainClipClassifier):
    """A small network trained on the pixels of the clips' mean images."""

    def model_input(self, size: int) -> Tensor:
        return torch.zeros((size, 3, FRAME_SIZE, FRAME_SIZE), dtype=torch.uint8)

    def model(self, i: Inputs) -> nn.Module:
        return _MeanImageNet(num_classes=len(self.classes), width=self.config.baseline_width)


def parameter_groups(m: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters: matrices decay, biases, norms and scalars do not."""
    trained = [p for p in m.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    others = [p for p in trained if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
