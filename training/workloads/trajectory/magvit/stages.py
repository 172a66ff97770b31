"""The first stages of the MAGVIT recipes: Train `tokenizer`, Prepare `tokens`.

The tokenizer: causal 3-D convolutions, finite scalar quantization, a decoder to pixels.

A token sees no later frame: convolutions only look back in time, and norms are per position. It is
evaluated by PSNR of clips and of the crop around the ball, because on a plain background even a
constant frame scores well. B clips, C channels, T frames, H height, W width, t token steps in time,
h and w sides of the token grid, D dimensions of a code, V the sum of a code's levels.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from training import (
    Captioned,
    Inputs,
    Loss,
    Partial,
    Prior,
    Probe,
    Settings,
    Start,
    Train,
    write_sheet,
)
from training.workloads.trajectory.clip_dataset import (
    NUM_STRIPS,
    STRIP_FRAMES,
    Batch,
    FrameSamples,
    open_dataset,
)
from training.workloads.trajectory.clips import CLIP_SHAPE, NUM_FRAMES, TRACK_SHAPE, Frames
from training.workloads.trajectory.config import MagvitConfig
from training.workloads.trajectory.features import (
    PreparedClips,
    build_backbone,
    calibrate,
    normalised,
)
from training.workloads.trajectory.model import parameter_groups

# Each stage's width, in widths of the first, and the stride into it.
_STEMS: Mapping[str, Sequence[tuple[int, tuple[int, int, int]]]] = MappingProxyType(
    {
        "patch": ((1, (2, 4, 4)),),
        "full": ((1, (1, 1, 1)), (1, (1, 2, 2)), (2, (2, 2, 2)), (4, (2, 2, 2))),
    }
)
# This many frames of a judged clip, evenly spaced, are compared.
_NUM_COMPARED = 4
_CRITIC_WIDTH = 32


class _CausalConv(nn.Module):
    """3x3 in space, then 3 back in time: 90 % cheaper than 3x3x3 at equal width."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(before, after, (1, 3, 3), padding=(0, 1, 1))
        self.time = nn.Conv3d(after, after, (3, 1, 1))

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        out: Tensor = self.time(F.pad(self.space(x_BCTHW), (0, 0, 0, 0, 2, 0)))
        return out


class _ChannelNorm(nn.Module):
    """RMS norm over channels, separately at each position."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        return x_BCTHW * (x_BCTHW.square().mean(dim=1, keepdim=True) + 1e-6).rsqrt() * self.gain


class _ResidualBlock(nn.Module):
    """Norm, ReLU and causal convolution, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _ChannelNorm(channels)
        self.conv = _CausalConv(channels, channels)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        out: Tensor = x_BCTHW + self.conv(F.relu(self.norm(x_BCTHW)))
        return out


class Quantizer(nn.Module):
    """Finite scalar quantization: each dimension is rounded to one of its levels.

    It has no codebook that could collapse. The gradient is straight-through. arXiv:2309.15505, 3.1.
    """

    levels: Tensor
    basis: Tensor

    def __init__(self, levels: Sequence[int]) -> None:
        super().__init__()
        basis = [math.prod(levels[:place]) for place in range(len(levels))]
        self.num_levels = tuple(levels)
        self.num_codes = math.prod(levels)
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        self.register_buffer("basis", torch.tensor(basis), persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        """Round z (..., D) to values in [-1, 1], (..., D)."""
        half = (self.levels - 1) * (1.0 - 1e-3) / 2.0
        offset = 0.5 * (self.levels % 2 == 0)
        bounded = torch.tanh(z + torch.atanh(offset / half)) * half - offset
        rounded = bounded + (bounded.round() - bounded).detach()
        quantized: Tensor = rounded / (self.levels // 2)
        return quantized

    def indices(self, quantized: Tensor) -> Tensor:
        """Return codes (...) from 0 to num_codes - 1 of what `forward` returned (..., D)."""
        half = self.levels // 2
        digits = (quantized * half + half).round().long()
        return (digits * self.basis).sum(dim=-1)

    def values(self, codes: Tensor) -> Tensor:
        """Undo `indices`: (...) -> (..., D)."""
        half = self.levels // 2
        return (codes[..., None] // self.basis % self.levels - half) / half

    def distances(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return all levels' weighted squared distances from values: twice (..., D) to (..., V)."""
        half = self.levels // 2
        levels = torch.cat([torch.arange(n, device=values.device) for n in self.num_levels])
        here, weights = (
            each.repeat_interleave(self.levels, dim=-1, output_size=len(levels))
            for each in (values * half + half, weights)
        )
        return weights * (levels - here).square()


class Tokenizer(nn.Module):
    """Maps clips (B, T, H, W, 3) in uint8 to codes and back to pixels in 0 .. 1."""

    def __init__(self, *, stem: str, width: int, levels: Sequence[int]) -> None:
        super().__init__()
        stages = [(multiple * width, stride) for multiple, stride in _STEMS[stem]]
        self.quantizer = Quantizer(levels)
        down: list[nn.Module] = []
        up: list[nn.Module] = []
        before = 3
        for channels, stride in stages:
            # Patches do not overlap, so a stride in time sees no later token's frames.
            down += [nn.Conv3d(before, channels, stride, stride), _ResidualBlock(channels)]
            up[:0] = [
                _ResidualBlock(channels),
                nn.ConvTranspose3d(channels, before, stride, stride),
            ]
            before = channels
        # No norm before the codes, because it would remove the brightness of a plain patch.
        self.encoder = nn.Sequential(*down, nn.Conv3d(before, len(levels), 1))
        self.decoder = nn.Sequential(nn.Conv3d(len(levels), before, 1), *up)
        with torch.no_grad():
            last = up[-1]
            assert isinstance(last, nn.ConvTranspose3d) and last.bias is not None
            last.bias.fill_(0.5)

    def encode(self, clips_BTHW3: Tensor) -> Tensor:
        """Return the values (B, t, h, w, D) of the quantized codes of uint8 clips."""
        x_BCTHW = clips_BTHW3.permute(0, 4, 1, 2, 3).float() / 255.0 - 0.5
        quantized: Tensor = self.quantizer(self.encoder(4.0 * x_BCTHW).permute(0, 2, 3, 4, 1))
        return quantized

    def decode(self, quantized_BthwD: Tensor) -> Tensor:
        """Return pixels (B, T, H, W, 3), about 0 .. 1."""
        pixels: Tensor = self.decoder(quantized_BthwD.permute(0, 4, 1, 2, 3))
        return pixels.permute(0, 2, 3, 4, 1)

    def forward(self, clips_BTHW3: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reconstruction (B, T, H, W, 3) and the codes' values (B, t, h, w, D)."""
        quantized = self.encode(clips_BTHW3)
        return self.decode(quantized), quantized


def to_uint8(pixels: Tensor) -> Tensor:
    """Convert pixels of about 0 .. 1 to uint8."""
    return (pixels.float().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)


class JudgedTokenizer(Tokenizer):
    """A tokenizer judged while it trains, by a frozen network's features and by a critic."""

    def __init__(self, *, seed: int, **shape: Any) -> None:
        super().__init__(**shape)
        self.seen = build_backbone("random", seed, "layer2")
        widths = (3, *(multiple * _CRITIC_WIDTH for multiple in (1, 2, 4)))
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Conv3d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.critic = nn.Sequential(*layers, nn.Conv3d(widths[-1], 1, 3, padding=1))

    def train(self, mode: bool = True) -> "JudgedTokenizer":
        """Set training mode, but keep the frozen network in eval mode, independent of the batch."""
        super().train(mode)
        self.seen.eval()
        return self

    def start_judging(self, weights: str, clips_BTHW3: Tensor) -> None:
        """Take ImageNet's weights, or set the statistics of random ones from training clips."""
        if weights == "pretrained":
            self.seen.load_state_dict(build_backbone(weights, 0, "layer2").state_dict())
        else:
            every = clips_BTHW3.shape[1] // _NUM_COMPARED
            calibrate(self.seen, normalised(clips_BTHW3[:, ::every].flatten(0, 1)))

    def judge(self, pixels_BTHW3: Tensor, clips_BTHW3: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each clip (B): the features' distance, the critic's verdict, and its own loss.

        The distance is that of Johnson et al. 2016 (arXiv:1603.08155); the critic has the hinge
        loss and judges patch by patch (Isola et al. 2017, arXiv:1611.07004).
        """
        every = clips_BTHW3.shape[1] // _NUM_COMPARED
        found, truth = (
            self.seen(normalised(each[:, ::every].flatten(0, 1)))
            for each in (255.0 * pixels_BTHW3.float(), clips_BTHW3)
        )
        apart_B = (found - truth).square().mean(dim=(1, 2, 3)).view(len(clips_BTHW3), -1).mean(1)
        fake_BCTHW = 2.0 * pixels_BTHW3.permute(0, 4, 1, 2, 3) - 1.0
        real_BCTHW = clips_BTHW3.permute(0, 4, 1, 2, 3).float() / 127.5 - 1.0
        # The tokenizer's loss sees a constant critic; only the critic's own loss changes it.
        as_it_is = {name: p.detach() for name, p in self.critic.named_parameters()}
        praise = torch.func.functional_call(self.critic, as_it_is, (fake_BCTHW,))
        mistaken = F.relu(1.0 - self.critic(real_BCTHW)) + F.relu(
            1.0 + self.critic(fake_BCTHW.detach())
        )
        return apart_B, -praise.flatten(1).mean(1), mistaken.flatten(1).mean(1)

    def forward(self, clips_BTHW3: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Do what a tokenizer does; in training, also return the results of `judge`."""
        pixels_BTHW3, quantized_BthwD = super().forward(clips_BTHW3)
        if not self.training:
            return pixels_BTHW3, quantized_BthwD
        return pixels_BTHW3, quantized_BthwD, *self.judge(pixels_BTHW3, clips_BTHW3)


_NUM_CALIBRATING = 32  # clips
# A pixel moves if it differs from the clip's mean image by this share of the range, which is more
# than flicker and noise.
_MOVING = 0.15
# Half the side of the crop around the ball, in radii of the ball.
_CROP_RADII = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTokenizer(Train):
    """Training of a tokenizer to reconstruct clips from their codes."""

    config: MagvitConfig
    name: str = "tokenizer"

    @property
    def settings(self) -> Settings:
        c = self.config
        return replace(
            c.settings,
            epochs=c.tokenizer_epochs,
            global_batch=c.tokenizer_batch,
            micro_batch=c.tokenizer_batch,
            eval_batch=c.tokenizer_batch,
            evaluate_every_epochs=1,
        )

    def example(self, size: int) -> Batch:
        """Return a batch with the shapes of `collate`'s."""
        return {
            "frames": torch.zeros((size, *CLIP_SHAPE), dtype=torch.uint8),
            "tracks": torch.zeros((size, *TRACK_SHAPE)),
            "clips": torch.zeros(size, dtype=torch.long),
            "shown": torch.zeros(size, dtype=torch.bool),
        }

    def model(self, i: Inputs) -> nn.Module:
        c = self.config
        if c.perceptual_weight or c.adversarial_weight:
            return JudgedTokenizer(seed=c.seed, **_shape(c))
        return build_tokenizer(c)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        if isinstance(m, JudgedTokenizer):
            samples = self.samples(i, "train")
            num = min(_NUM_CALIBRATING, len(samples))
            items = [samples.get(k, -1, torch.Generator()) for k in range(num)]
            m.start_judging(self.config.weights, samples.collate(items)["frames"])
        return Start(facts={"codes": self.config.num_codes})

    def optimizer(self, m: nn.Module) -> Optimizer:
        c = self.config
        groups = parameter_groups(m, c.weight_decay)
        return AdamW(groups, lr=c.tokenizer_learning_rate, fused=c.fused_optimizer or None)

    def samples(self, i: Inputs, split: str) -> FrameSamples:
        data = open_dataset(i.dataset.folder)
        indices = data.splits[split]
        return FrameSamples(data=data, indices=indices, shown=frozenset(indices[:NUM_STRIPS]))

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Return the squared error, with more weight for moving pixels, and the judges' losses."""
        start = 4 * (step % ((NUM_FRAMES - self.config.tokenizer_frames) // 4 + 1))
        frames_BTHW3 = b["frames"][:, start : start + self.config.tokenizer_frames]
        pixels_BTHW3, _, *judged = m(frames_BTHW3)
        truth_BTHW3 = frames_BTHW3.float() / 255.0
        moving_BTHW1 = _moving(truth_BTHW3)
        weight_BTHW1 = 1.0 + self.config.motion_weight * moving_BTHW1
        squared = (pixels_BTHW3.float() - truth_BTHW3).square() * weight_BTHW1
        total = squared.mean(dim=(1, 2, 3, 4)).sum()
        if not judged:
            return Loss(total=total)
        apart, displeased, mistaken = (each.float().sum() for each in judged)
        c, count = self.config, len(b["frames"])
        return Loss(
            total=total
            + c.perceptual_weight * apart
            + c.adversarial_weight * displeased
            + mistaken,
            metrics={"perceptual": (apart.detach(), count), "critic": (mistaken.detach(), count)},
        )

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Return squared errors, code counts and a few clips to show."""
        assert isinstance(m, Tokenizer)
        frames, shown, strip = b["frames"], b["shown"], list(STRIP_FRAMES)
        pixels_BTHW3, quantized = m(frames)
        pixels_BTHW3 = pixels_BTHW3.float().clamp(0.0, 1.0)
        truth_BTHW3 = frames.float() / 255.0
        squared = (pixels_BTHW3 - truth_BTHW3).square()
        of_mean = (truth_BTHW3.mean(dim=1, keepdim=True) - truth_BTHW3).square()
        crop = _crop_mask(b["tracks"][:, :-1], *frames.shape[2:4])
        codes = m.quantizer.indices(quantized).flatten()
        return Partial(
            sums={
                "squared": (float(squared.sum()), squared.numel()),
                "squared_crop": (float((squared * crop).sum()), 3.0 * float(crop.sum())),
                "squared_mean_crop": (float((of_mean * crop).sum()), 3.0 * float(crop.sum())),
            },
            tensors={
                "codes": codes.cpu(),
                "truth": frames[shown][:, strip].cpu(),
                "reconstructed": to_uint8(pixels_BTHW3[shown][:, strip]).cpu(),
            },
        )

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Return PSNR in dB of all pixels and of the crops, and the codes' perplexity."""
        codes = torch.cat([part.tensors["codes"] for part in parts]).numpy()
        shares = np.unique(codes, return_counts=True)[1] / len(codes)
        has_ball = any(part.sums["squared_crop"][1] for part in parts)
        # For the crops, also the PSNR of the clip's mean image.
        of_ball = {"psnr_ball": "squared_crop", "mean_image_psnr_ball": "squared_mean_crop"}
        return {
            "psnr": psnr(parts, "squared"),
            **({name: psnr(parts, sums) for name, sums in of_ball.items()} if has_ball else {}),
            "code_perplexity": float(np.exp(-(shares * np.log(shares)).sum())),
        }

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Draw clips, each above its reconstruction."""
        pictures = []
        for part in parts:
            for pair in zip(part.tensors["truth"], part.tensors["reconstructed"], strict=True):
                rows = [np.concatenate(list(clip_THW3.numpy()), axis=1) for clip_THW3 in pair]
                pictures.append(Captioned(np.concatenate(rows)))
        if pictures:
            heading = "clips, each above its reconstruction"
            write_sheet(out / "reconstructions.png", heading, pictures, num_columns=2)


def psnr(parts: Sequence[Partial], name: str) -> float:
    """Compute PSNR in dB for pixels of 0 .. 1 whose squared errors are the sums `name`."""
    total = sum(part.sums[name][0] for part in parts)
    count = sum(part.sums[name][1] for part in parts)
    return float(-10.0 * torch.log10(torch.tensor(max(total / max(count, 1.0), 1e-12))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens(PreparedClips):
    """The codes of every clip, from the tokenizer of the previous stage."""

    config: MagvitConfig
    name: str = "tokens"

    def facts(self, i: Inputs) -> Mapping[str, Any]:
        assert i.prior is not None
        digest = hashlib.sha256()
        for name in sorted(i.prior.model):
            digest.update(name.encode())
            digest.update(i.prior.model[name].contiguous().numpy().tobytes())
        return {
            "tokenizer": digest.hexdigest(),
            "stem": self.config.stem,
            "levels": self.config.levels,
        }

    def probe(self) -> Probe:
        """Probe the complete tokenizer with one clip, although `make` needs only its encoder."""
        return Probe(
            build=lambda: build_tokenizer(self.config),
            batch=torch.zeros((1, *CLIP_SHAPE), dtype=torch.uint8),
            size=1,
        )

    @torch.inference_mode()
    def of_clips(self, i: Inputs, frames: Frames) -> Mapping[str, Tensor]:
        """Return {"tokens": (clips, t + 1, cells) int32}.

        The last row has the last step's tokens if only its and the first step's frames are known.
        """
        assert i.prior is not None
        tokenizer = build_tokenizer(self.config, i.prior)
        tokenizer.to(i.device).eval()
        of_step = NUM_FRAMES // self.config.token_shape[0]
        # Clip by clip, so a clip's codes cannot depend on its neighbours in a shard.
        tokens = []
        for clip in frames:
            clip_1THW3 = torch.from_numpy(clip[None].copy()).to(i.device)
            codes_1tG, hints_1tG = (
                tokenizer.quantizer.indices(tokenizer.encode(each)).flatten(2)
                for each in (clip_1THW3, _blended(clip_1THW3, of_step))
            )
            tokens.append(torch.cat([codes_1tG, hints_1tG[:, -1:]], dim=1).to("cpu", torch.int32))
        return {"tokens": torch.cat(tokens)}


def _blended(clips_BTHW3: Tensor, num_given: int) -> Tensor:
    """Keep the first and last `num_given` frames of clips, and fade between them."""
    first_B1HW3 = clips_BTHW3[:, num_given - 1 : num_given].float()
    last_B1HW3 = clips_BTHW3[:, -num_given:][:, :1].float()
    num_between = clips_BTHW3.shape[1] - 2 * num_given
    share_T111 = torch.arange(1, num_between + 1, device=clips_BTHW3.device).view(-1, 1, 1, 1)
    between = torch.lerp(first_B1HW3, last_B1HW3, share_T111 / (num_between + 1)).round().byte()
    return torch.cat([clips_BTHW3[:, :num_given], between, clips_BTHW3[:, -num_given:]], dim=1)


def _moving(clips_BTHW3: Tensor) -> Tensor:
    """Return 1 where a pixel (of 0 .. 1) differs from its clip's mean image, (B, T, H, W, 1)."""
    away = (clips_BTHW3 - clips_BTHW3.mean(dim=1, keepdim=True)).abs()
    return (away.amax(dim=4, keepdim=True) > _MOVING).float()


def _crop_mask(tracks_BT3: Tensor, height: int, width: int) -> Tensor:
    """Return 1 in a square around the ball in each frame, (B, T, H, W, 1)."""
    x, y, radius = (tracks_BT3[..., k, None, None] for k in range(3))
    half = _CROP_RADII * radius
    rows = torch.arange(height, device=tracks_BT3.device)[:, None] + 0.5
    columns = torch.arange(width, device=tracks_BT3.device)[None, :] + 0.5
    inside = ((rows - y).abs() <= half) & ((columns - x).abs() <= half)
    return inside[..., None].float()


def build_tokenizer(c: MagvitConfig, prior: Prior | None = None) -> Tokenizer:
    """Return a newly initialized tokenizer, or the one that was trained, without its judges."""
    tokenizer = Tokenizer(**_shape(c))
    if prior is not None:
        tokenizer.load_state_dict({name: prior.model[name] for name in tokenizer.state_dict()})
    return tokenizer


def _shape(c: MagvitConfig) -> dict[str, Any]:
    return {"stem": c.stem, "width": c.tokenizer_width, "levels": c.num_levels}
