"""Stages `features` and `mean_images`: what is derived from each clip once.

A frozen ResNet-18 sees each frame; its spatial grid is kept as float16, because pooling would lose
the ball's position. torchvision is imported only when shards are made (it takes 5 to 8 seconds).
Weights are drawn from a seed ("random", needs no network) or are ImageNet's ("pretrained", fetched
by torchvision), with no silent fallback.
"""

import sys
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contract.errors import UserError
from training import Inputs, Prepare, Probe, derive_seed, key_of
from training.durable import RunFailedError
from training.workloads.trajectory.clip_dataset import open_dataset, shard_frames
from training.workloads.trajectory.config import LAYERS, RecipeConfig, TrajectoryConfig

if TYPE_CHECKING:
    from training.workloads.trajectory.clips import Frames

# torchvision's enum name; the file name contains the checksum that torchvision verifies.
_PRETRAINED = "ResNet18_Weights.IMAGENET1K_V1 resnet18-f37072fd.pth"
# ImageNet's statistics, for pixels from 0 to 255.
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)
_CALIBRATION_CLIPS = 32


class PreparedClips(Prepare):
    """Data derived from each clip once: shard s of S has clips s*N/S to (s+1)*N/S, in order."""

    config: RecipeConfig
    is_shareable = True
    version = 1  # to be incremented when the results change

    @property
    def num_shards(self) -> int:
        return self.config.num_shards

    def facts(self, i: Inputs) -> Mapping[str, Any]:
        """Return what else determines the results."""
        return {"what": self.name}

    def of_clips(self, i: Inputs, frames: "Frames") -> Mapping[str, Tensor]:
        """Return the tensors of one clip or more, a row for each."""
        raise NotImplementedError

    def make(self, i: Inputs, shard: int) -> Mapping[str, Tensor]:
        """Return the tensors of one shard; those of a shard without clips have no rows."""
        frames, first, end = shard_frames(i.dataset.folder, shard, self.num_shards)
        made = self.of_clips(i, frames[first:end] if end > first else frames[:1])
        return {name: rows[: end - first] for name, rows in made.items()}

    def key(self, i: Inputs) -> str:
        """Hash code, data and other facts; this needs neither torchvision nor weights."""
        of_all = {
            "version": self.version,
            "num_shards": self.num_shards,
            "data": i.dataset.fingerprint,
        }
        return key_of({**of_all, **self.facts(i)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Features(PreparedClips):
    """ResNet-18's features of each frame."""

    config: TrajectoryConfig
    name: str = "features"

    def facts(self, i: Inputs) -> Mapping[str, Any]:
        c = self.config
        return {
            "weights": f"random {c.backbone_seed}" if c.weights == "random" else _PRETRAINED,
            "layer": c.backbone_layer,
            "image_size": c.image_size,
            "frame_stride": c.frame_stride,
            "grid": c.grid,
        }

    def of_clips(self, i: Inputs, frames: "Frames") -> Mapping[str, Tensor]:
        """Return {"features": (clips, T, G, C) float16}."""
        c = self.config
        backbone = _load_backbone(c, i.dataset.folder, i.device)
        # Clip by clip, so that a clip's bits cannot depend on its neighbours in a shard.
        clips = [_clip_features(backbone, clip, c, i.device) for clip in frames]
        return {"features": torch.stack(clips)}

    def probe(self) -> Probe:
        """Probe the backbone with one clip's frames as images (weights do not matter)."""
        c = self.config
        return Probe(
            build=lambda: build_backbone("random", c.backbone_seed, c.backbone_layer),
            batch=torch.zeros(c.num_frames, 3, c.image_size, c.image_size),
            size=1,
        )


@torch.inference_mode()
def _clip_features(
    backbone: nn.Module, frames: "Frames", c: TrajectoryConfig, device: torch.device
) -> Tensor:
    """Return one clip's features (T, G, C) as float16 on the CPU."""
    maps = F.adaptive_avg_pool2d(backbone(_to_images(frames[:: c.frame_stride], c, device)), c.grid)
    return maps.flatten(2).transpose(1, 2).to("cpu", torch.float16).contiguous()


def _to_images(frames: "Frames", c: TrajectoryConfig, device: torch.device) -> Tensor:
    """Return frames (T, 64, 64, 3) as normalized images (T, 3, size, size), channels-last."""
    images = normalised(torch.from_numpy(frames.copy()).to(device))
    if c.image_size != images.shape[-1]:
        images = F.interpolate(images, size=c.image_size, mode="bilinear", antialias=True)
    return images


def normalised(frames_THWC: Tensor) -> Tensor:
    """Normalize frames of 0 .. 255 for ImageNet's networks, (T, C, H, W)."""
    pixels = frames_THWC.float()
    # Stored as T, H, W, channel: this view is already channels-last, the fast layout.
    return ((pixels - pixels.new_tensor(_MEAN)) / pixels.new_tensor(_STD)).permute(0, 3, 1, 2)


@lru_cache(maxsize=1)
def _load_backbone(c: TrajectoryConfig, folder: Path, device: torch.device) -> nn.Module:
    """Return the backbone for a dataset folder, calibrated if its weights are random."""
    backbone: nn.Module = build_backbone(c.weights, c.backbone_seed, c.backbone_layer)
    backbone = backbone.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if c.weights == "random":
        data = open_dataset(folder)
        clips = [data.frames[k] for k in data.splits["train"][:_CALIBRATION_CLIPS]]
        calibrate(backbone, torch.cat([_to_images(clip[::8], c, device) for clip in clips]))
    return backbone


@torch.inference_mode()
def calibrate(backbone: nn.Module, images: Tensor) -> None:
    """Set batch norm's statistics from `images`; without this, accuracy is 0.12 lower (LOG.md)."""
    norms = [module for module in backbone.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the plain mean over batches, of which there is one
    backbone.train()
    backbone(images)
    backbone.eval()


def build_backbone(weights: str, seed: int, layer: str) -> nn.Module:
    """Return ResNet-18 up to and including `layer`, frozen, in eval mode."""
    try:
        from torchvision.models import ResNet18_Weights, resnet18
    except ModuleNotFoundError as error:
        raise UserError(
            f"ResNet-18 needs the package {error.name}, which {sys.executable} lacks; use an "
            "image that has it, or install the torchvision that matches torch "
            f"{torch.__version__.partition('+')[0]}"
        ) from error
    if weights == "random":
        # torchvision initializes from the global generator, which must stay unchanged.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("backbone", seed))
            net = resnet18(weights=None)
    else:
        try:
            net = resnet18(weights=ResNet18_Weights.IMAGENET1K_V1)
        except (urllib.error.URLError, OSError) as error:
            raise RunFailedError(
                f"the pretrained ResNet-18 could not be fetched ({error}); allow the download "
                "or start a run with --override weights=random"
            ) from error
    layers = [getattr(net, name) for name in LAYERS[: LAYERS.index(layer) + 1]]
    backbone = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, *layers)
    backbone.requires_grad_(False).eval()
    return backbone


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanImages(PreparedClips):
    """Each clip's mean over time, which removes the order of its frames, for a baseline."""

    config: RecipeConfig
    name: str = "mean_images"

    def of_clips(self, i: Inputs, frames: "Frames") -> Mapping[str, Tensor]:
        """Return {"mean_image": (clips, 3, 64, 64) uint8}."""
        means_NHWC = np.stack([np.rint(clip.mean(axis=0, dtype=np.float32)) for clip in frames])
        images = torch.from_numpy(means_NHWC.astype(np.uint8)).permute(0, 3, 1, 2)
        return {"mean_image": images.contiguous()}
