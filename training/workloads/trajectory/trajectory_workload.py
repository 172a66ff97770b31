"""The trajectory workload: clips of a moving ball, classified by how it moves.

There are two kinds of recipes: a frozen ResNet-18 with a Transformer over time, and a small MAGVIT.

The tracker, a baseline without learned features: it sees what differs from the background.

It undoes the camera's motion (phase correlation), takes the centroid of what differs from the
median, and classifies that by the head's Transformer. It does not know the marked ball.
T frames, H, W pixels, C channels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from training import (
    Inputs,
    Prepare,
    Progress,
    Rung,
    Train,
    Workload,
    autocast_rungs,
    micro_batch_rungs,
)
from training.durable import SourceFile
from training.workloads.trajectory.clip_dataset import make_dataset
from training.workloads.trajectory.clips import FRAME_SIZE, NUM_FRAMES, Frames
from training.workloads.trajectory.config import (
    ClipOptions,
    MagvitConfig,
    RecipeConfig,
    TrajectoryConfig,
    as_row,
    demo,
    full,
    laptop,
    magvit_b,
    magvit_full,
    magvit_laptop,
    reference,
)
from training.workloads.trajectory.features import Features, MeanImages, PreparedClips
from training.workloads.trajectory.imported import import_dataset
from training.workloads.trajectory.magvit.model import TrainTransformer
from training.workloads.trajectory.magvit.stages import Tokens, TrainTokenizer
from training.workloads.trajectory.model import (
    TimeTransformer,
    TrainHead,
    TrainTimeAverage,
    TrainTimeTransformer,
)

# x and y in half frames from the picture's centre, the camera's x and y, and the size.
_NUM_TRACKED = 5
# A pixel moves if it differs by this many grey levels, and by this many times the usual difference.
_MOVING, _TIMES_USUAL = 25.0, 4.0
_NUM_PEAKS = 4
# A shift must reduce the frames' difference to this share, or the camera counts as still.
_MORE_EQUAL = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracks(PreparedClips):
    """The tracks that the tracker sees in each clip."""

    config: TrajectoryConfig
    name: str = "tracks"

    def of_clips(self, i: Inputs, frames: Frames) -> Mapping[str, Tensor]:
        """Return {"tracks": (clips, T, _NUM_TRACKED) float32}."""
        return {"tracks": torch.stack([_track(torch.from_numpy(clip.copy())) for clip in frames])}


@torch.inference_mode()
def _track(frames_THWC: Tensor) -> Tensor:
    """Return where the moving pixels are in each frame, (T, _NUM_TRACKED)."""
    frames_TCHW = frames_THWC.permute(0, 3, 1, 2).float()
    middle = len(frames_TCHW) // 2
    level_TC11 = frames_TCHW.mean(dim=(2, 3), keepdim=True) + 1.0
    frames_TCHW = frames_TCHW * (level_TC11[middle] / level_TC11)
    camera_T2 = _camera(frames_TCHW, middle)
    # Pixels that the camera did not see are unknown.
    is_seen_T1HW = _shifted(torch.ones_like(frames_TCHW[:, :1]), camera_T2, "zeros") > 0.99
    still_TCHW = _shifted(frames_TCHW, camera_T2).where(is_seen_T1HW, torch.nan)
    background_CHW = still_TCHW.nanmedian(dim=0).values
    away_THW = (still_TCHW - background_CHW).abs().amax(dim=1).nan_to_num(0.0)
    usual = away_THW.median()
    moving_THW = (away_THW - torch.clamp(_TIMES_USUAL * usual, min=_MOVING)).clamp(min=0.0)
    mass_T = moving_THW.sum(dim=(1, 2)) + 1e-3
    axis = (torch.arange(FRAME_SIZE) + 0.5) * 2.0 / FRAME_SIZE - 1.0
    x_T = (moving_THW.sum(dim=1) * axis).sum(dim=1) / mass_T
    y_T = (moving_THW.sum(dim=2) * axis).sum(dim=1) / mass_T
    moved_T2 = camera_T2 * 2.0 / FRAME_SIZE
    place_T2 = torch.stack([x_T, y_T], dim=1) + moved_T2
    return torch.cat([place_T2, moved_T2, mass_T.log()[:, None]], dim=1)


def _camera(frames_TCHW: Tensor, middle: int) -> Tensor:
    """Return the scene's shift from its place in the frame `middle`, in pixels (T, 2)."""
    window = torch.hann_window(FRAME_SIZE, periodic=False)
    grey_THW = frames_TCHW.mean(dim=1)
    grey_THW = (grey_THW - grey_THW.mean(dim=(1, 2), keepdim=True)) * window * window[:, None]
    waves = torch.fft.fft2(grey_THW)
    product = waves * waves[middle].conj()
    peaks_THW = torch.fft.ifft2(product / (product.abs() + 1e-3)).real
    is_peak_THW = F.max_pool2d(peaks_THW[:, None], 3, 1, 1)[:, 0] == peaks_THW
    # The highest peak may be a ball's own motion.
    at_TP = (peaks_THW * is_peak_THW).flatten(1).topk(_NUM_PEAKS).indices
    shifts = [torch.zeros(len(grey_THW), 2)]
    shifts += [_summit(peaks_THW, at_T) for at_T in at_TP.unbind(1)]
    differences_PT = torch.stack(
        [_difference(_shifted(frames_TCHW, by_T2), frames_TCHW[middle]) for by_T2 in shifts]
    )
    differences_PT[0] *= _MORE_EQUAL
    best_T = differences_PT.argmin(dim=0)
    return torch.stack(shifts)[best_T, torch.arange(len(best_T))]


def _difference(frames_TCHW: Tensor, other_CHW: Tensor) -> Tensor:
    """Return the mean difference in grey levels, in which a ball counts little."""
    return (frames_TCHW - other_CHW).abs().clamp(max=_MOVING).mean(dim=(1, 2, 3))


def _summit(peaks_THW: Tensor, at_T: Tensor) -> Tensor:
    """Return the subpixel x and y of the peak at `at_T`, by parabolas; over half is negative."""
    lines = torch.arange(len(at_T))
    y_T, x_T = at_T // FRAME_SIZE, at_T % FRAME_SIZE
    places = []
    for values_TN, place_T in ((peaks_THW[lines, y_T], x_T), (peaks_THW[lines, :, x_T], y_T)):
        before, peak, after = (
            values_TN[lines, (place_T + step) % FRAME_SIZE] for step in (-1, 0, 1)
        )
        curve = (before - 2.0 * peak + after).clamp(max=-1e-9)
        exact_T = place_T + (0.5 * (before - after) / curve).clamp(-0.5, 0.5)
        places.append(torch.where(exact_T > FRAME_SIZE / 2, exact_T - FRAME_SIZE, exact_T))
    return torch.stack(places, dim=1)


def _shifted(frames_TCHW: Tensor, by_T2: Tensor, beyond: str = "border") -> Tensor:
    """Return frames read `by_T2` pixels further; `beyond` them is the nearest pixel, or zeros."""
    theta_T23 = torch.eye(2, 3).repeat(len(by_T2), 1, 1)
    theta_T23[:, :, 2] = by_T2 * 2.0 / FRAME_SIZE
    grid = F.affine_grid(theta_T23, list(frames_TCHW.shape), align_corners=False)
    return F.grid_sample(frames_TCHW, grid, padding_mode=beyond, align_corners=False)


class _TrackerNet(TimeTransformer):
    """Maps tracks (B, T, _NUM_TRACKED) to class logits (B, K) and futures (B, T, 2)."""

    def forward(self, tracks_BT5: Tensor) -> tuple[Tensor, Tensor]:
        place_BT2, camera_BT2, mass_BT1 = torch.split(tracks_BT5, [2, 2, 1], dim=-1)
        # The place as a camera that stands still would see it.
        world_BT2 = place_BT2 - camera_BT2
        step_BT2 = F.pad(world_BT2[:, 1:] - world_BT2[:, :-1], (0, 0, 1, 0))
        tokens = [2.0 * world_BT2, 4.0 * step_BT2, camera_BT2, mass_BT1 / 4.0]
        return self.outputs(torch.cat(tokens, dim=-1), place_BT2)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTracker(TrainTimeTransformer):
    """The head's Transformer over the tracks of all frames."""

    @property
    def num_frames(self) -> int:
        return NUM_FRAMES

    def model_input(self, size: int) -> Tensor:
        return torch.zeros(size, self.num_frames, _NUM_TRACKED)

    def model(self, i: Inputs) -> TimeTransformer:
        return _TrackerNet(
            self.config,
            num_inputs=_NUM_TRACKED + 2,
            num_frames=self.num_frames,
            num_layers=self.config.num_layers,
        )


def _frozen_stages(c: TrajectoryConfig) -> Sequence[Prepare | Train]:
    """Return the stages: baselines, frozen ResNet-18 per frame, a Transformer over time."""
    epochs, single, mixed = c.settings.epochs, c.single_frame_epochs, c.shuffled_epochs
    head = TrainHead(config=c, name="head", view="clip", epochs=epochs)
    if not c.baselines:
        return (Features(config=c), head)
    return (
        *_time_average(c),
        Tracks(config=c),
        TrainTracker(config=c, name="tracker", view="tracker", epochs=c.tracker_epochs),
        Features(config=c),
        TrainHead(config=c, name="single_frame", view="single_frame", epochs=single),
        *([TrainHead(config=c, name="shuffled", view="shuffled", epochs=mixed)] if mixed else []),
        head,
    )


def _magvit_stages(c: MagvitConfig) -> Sequence[Prepare | Train]:
    """Return the stages: time-average baseline, tokenizer, tokens, masked Transformer over them."""
    return (
        *(_time_average(c) if c.baselines else ()),
        TrainTokenizer(config=c),
        Tokens(config=c),
        TrainTransformer(config=c, name="transformer", view="tokens", epochs=c.settings.epochs),
    )


def _time_average(c: RecipeConfig) -> Sequence[Prepare | Train]:
    """Return the baseline's stages; it sees everything except the order of the frames."""
    epochs = c.time_average_epochs
    if not epochs:
        return ()
    return (
        MeanImages(config=c),
        TrainTimeAverage(config=c, name="time_average", view="time_average", epochs=epochs),
    )


_AnyConfig: TypeAlias = TrajectoryConfig | MagvitConfig

RECIPES: Mapping[str, Callable[[], _AnyConfig]] = MappingProxyType(
    {
        "demo": demo,
        "laptop": laptop,
        "full": full,
        "reference": reference,
        "magvit_laptop": magvit_laptop,
        "magvit_full": magvit_full,
        "magvit_b": magvit_b,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trajectory(Workload[_AnyConfig]):
    """The workload that the registry imports; its stages are defined in the other files here."""

    name: str = "trajectory"
    data_options: ClipOptions = field(default_factory=ClipOptions)
    recipes = RECIPES
    # The datasets for which the recipes are made: 264, 1,000, 4,000 and 10,000 clips.
    nominal_samples = MappingProxyType(
        {
            **{name: {"train": 8_000, "validation": 1_000} for name in RECIPES},
            "laptop": {"train": 800, "validation": 100},
            "demo": {"train": 165, "validation": 77},
            "magvit_laptop": {"train": 3_200, "validation": 400},
        }
    )

    def stages(self, c: _AnyConfig) -> Sequence[Prepare | Train]:
        return _magvit_stages(c) if isinstance(c, MagvitConfig) else _frozen_stages(c)

    def fitted(self, c: _AnyConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """Use the dataset's own classes; do not learn positions if they are unknown."""
        names = as_row(meta.get("classes", ())) or c.classes
        found = {"classes": names} if names != c.classes else {}
        return found if meta.get("tracks") != "none" else {**found, "position_weight": "0.0"}

    def rungs(self, c: _AnyConfig) -> Sequence[Rung]:
        least = c.least_micro_batch if isinstance(c, MagvitConfig) else 1
        return [*micro_batch_rungs(c, least), *autocast_rungs(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        o = self.data_options
        return make_dataset(out, count, seed, progress, o.difficulty, o.validation_share)

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return import_dataset(files, out, seed, progress, self.data_options)


TRAJECTORY = _Trajectory()
