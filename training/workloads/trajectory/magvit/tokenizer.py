"""The tokenizer: causal 3-D convolutions, finite scalar quantisation, and a decoder to pixels.

B clips, C channels, T frames, H height, W width, L levels of one dimension of a code. A token sees
no later frame: convolutions look back in time only, and norms are per position. It is evaluated by
PSNR of clips and of the crop around the ball: a constant frame scores well on a plain background.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workload import Partial
from training.workloads.trajectory.pictures import draw_reconstructions
from training.workloads.trajectory.samples import STRIP_FRAMES, Batch

# A pixel moves if it differs from the clip's mean image by this share of the range, more than
# flicker and noise do.
_MOVING = 0.15
# Half the side of the crop around the ball, in radii of the ball.
_CROP_RADII = 1.5


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
    """Finite scalar quantisation: each dimension is rounded to one of its levels.

    There is no codebook that could collapse. Straight-through gradient. arXiv:2309.15505, 3.1.
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
        """Codes (...) from 0 to num_codes - 1 of what `forward` returned (..., D)."""
        half = self.levels // 2
        digits = (quantized * half + half).round().long()
        return (digits * self.basis).sum(dim=-1)

    def values(self, codes: Tensor) -> Tensor:
        """Undo `indices`: (...) -> (..., D)."""
        half = self.levels // 2
        return (codes[..., None] // self.basis % self.levels - half) / half


class Tokenizer(nn.Module):
    """Clips (B, T, H, W, 3) in uint8 to codes and back to pixels in 0 .. 1."""

    def __init__(self, *, stem: str, width: int, levels: Sequence[int]) -> None:
        super().__init__()
        # Each stage: channels, and the stride into it.
        stages: list[tuple[int, tuple[int, int, int]]] = (
            [(width, (2, 4, 4))]
            if stem == "patch"
            else [
                (width, (1, 1, 1)),
                (width, (1, 2, 2)),
                (2 * width, (2, 2, 2)),
                (4 * width, (2, 2, 2)),
            ]
        )
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
        self.encoder = nn.Sequential(*down, _ChannelNorm(before), nn.Conv3d(before, len(levels), 1))
        self.decoder = nn.Sequential(nn.Conv3d(len(levels), before, 1), *up)
        with torch.no_grad():
            last = up[-1]
            assert isinstance(last, nn.ConvTranspose3d) and last.bias is not None
            last.bias.fill_(0.5)

    def encode(self, clips_BTHW3: Tensor) -> Tensor:
        """Quantised codes' values (B, t, h, w, D) of uint8 clips."""
        x_BCTHW = clips_BTHW3.permute(0, 4, 1, 2, 3).float() / 255.0 - 0.5
        quantized: Tensor = self.quantizer(self.encoder(4.0 * x_BCTHW).permute(0, 2, 3, 4, 1))
        return quantized

    def decode(self, quantized_BthwD: Tensor) -> Tensor:
        """Pixels (B, T, H, W, 3), about 0 .. 1."""
        pixels: Tensor = self.decoder(quantized_BthwD.permute(0, 4, 1, 2, 3))
        return pixels.permute(0, 2, 3, 4, 1)

    def forward(self, clips_BTHW3: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction (B, T, H, W, 3) and the codes' values (B, t, h, w, D)."""
        quantized = self.encode(clips_BTHW3)
        return self.decode(quantized), quantized


def moving(clips_BTHW3: Tensor) -> Tensor:
    """Return 1 where a pixel (of 0 .. 1) differs from its clip's mean image, (B, T, H, W, 1)."""
    away = (clips_BTHW3 - clips_BTHW3.mean(dim=1, keepdim=True)).abs()
    return (away.amax(dim=4, keepdim=True) > _MOVING).float()


def crop_mask(tracks_BT3: Tensor, height: int, width: int) -> Tensor:
    """Return 1 in a square around the ball in each frame, (B, T, H, W, 1)."""
    x, y, radius = (tracks_BT3[..., k, None, None] for k in range(3))
    half = _CROP_RADII * radius
    rows = torch.arange(height, device=tracks_BT3.device)[:, None] + 0.5
    columns = torch.arange(width, device=tracks_BT3.device)[None, :] + 0.5
    inside = ((rows - y).abs() <= half) & ((columns - x).abs() <= half)
    return inside[..., None].float()


def reconstruction_partial(model: nn.Module, batch: Batch) -> Partial:
    """Results of one evaluation batch: squared errors, code counts, a few clips to show."""
    assert isinstance(model, Tokenizer)
    frames = batch["frames"]
    pixels_BTHW3, quantized = model(frames)
    truth_BTHW3 = frames.float() / 255.0
    squared = (pixels_BTHW3.float().clamp(0.0, 1.0) - truth_BTHW3).square()
    crop = crop_mask(batch["tracks"][:, :-1], *frames.shape[2:4])
    codes = model.quantizer.indices(quantized).flatten()
    shown = batch["shown"]
    strip = list(STRIP_FRAMES)
    reconstructed = (pixels_BTHW3[shown][:, strip].float().clamp(0.0, 1.0) * 255.0).round()
    return Partial(
        sums={
            "squared": (float(squared.sum()), squared.numel()),
            "squared_crop": (float((squared * crop).sum()), 3.0 * float(crop.sum())),
        },
        tensors={
            "codes": torch.bincount(codes, minlength=model.quantizer.num_codes).cpu(),
            "truth": frames[shown][:, strip].cpu(),
            "reconstructed": reconstructed.to("cpu", torch.uint8),
        },
    )


def summarize_reconstructions(parts: Sequence[Partial]) -> Mapping[str, float]:
    """PSNR in dB of all pixels and of the crops; share of codes in use, and their perplexity."""
    counts = torch.stack([part.tensors["codes"] for part in parts]).sum(dim=0).double()
    shares = counts[counts > 0] / counts.sum()
    has_ball = any(part.sums["squared_crop"][1] for part in parts)
    return {
        "psnr": _psnr(parts, "squared"),
        **({"psnr_ball": _psnr(parts, "squared_crop")} if has_ball else {}),
        "code_usage": float((counts > 0).double().mean()),
        "code_perplexity": float((-shares * shares.log()).sum().exp()),
    }


def show_reconstructions(parts: Sequence[Partial], out: Path) -> None:
    """Write a picture of clips above their reconstructions."""
    truth = torch.cat([part.tensors["truth"] for part in parts]).numpy()
    reconstructed = torch.cat([part.tensors["reconstructed"] for part in parts]).numpy()
    draw_reconstructions(out / "reconstructions.png", truth, reconstructed)


def _psnr(parts: Sequence[Partial], name: str) -> float:
    total = sum(part.sums[name][0] for part in parts)
    count = sum(part.sums[name][1] for part in parts)
    return float(-10.0 * torch.log10(torch.tensor(max(total / max(count, 1.0), 1e-12))))
