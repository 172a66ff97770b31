"""The tokenizer: causal 3-D convolutions, finite scalar quantization, a decoder to pixels.

A token sees no later frame: convolutions only look back in time, and norms are per position. It is
evaluated by PSNR of clips and of the crop around the ball, because on a plain background even a
constant frame scores well. B clips, C channels, T frames, H height, W width, t token steps in time,
h and w sides of the token grid, D dimensions of a code, V the sum of a code's levels.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.trajectory.features import build_backbone, calibrate, normalised

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
