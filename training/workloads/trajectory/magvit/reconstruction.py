"""Evaluation of the tokenizer: PSNR of clips and of the crop around the ball, and code usage.

A mean over all pixels hides the ball (a constant frame scores well on a plain background), so the
crop around it is measured separately.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from training.workload import Partial
from training.workloads.trajectory.magvit.tokenizer import Tokenizer
from training.workloads.trajectory.pictures import draw_reconstructions
from training.workloads.trajectory.samples import STRIP_FRAMES, Batch

# A pixel moves if it differs from the clip's mean image by this share of the range, more than
# flicker and noise do.
_MOVING = 0.15
# Half the side of the crop around the ball, in radii of the ball.
_CROP_RADII = 1.5


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


def partial(model: nn.Module, batch: Batch) -> Partial:
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


def summarize(parts: Sequence[Partial]) -> Mapping[str, float]:
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


def illustrate(parts: Sequence[Partial], out: Path) -> None:
    """Write a picture of clips above their reconstructions."""
    truth = torch.cat([part.tensors["truth"] for part in parts]).numpy()
    reconstructed = torch.cat([part.tensors["reconstructed"] for part in parts]).numpy()
    draw_reconstructions(out / "reconstructions.png", truth, reconstructed)


def _psnr(parts: Sequence[Partial], name: str) -> float:
    total = sum(part.sums[name][0] for part in parts)
    count = sum(part.sums[name][1] for part in parts)
    return float(-10.0 * torch.log10(torch.tensor(max(total / max(count, 1.0), 1e-12))))
