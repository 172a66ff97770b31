"""The tokenizer (causal 3-D convolutions, finite scalar quantisation, a decoder to pixels), and the
Transformer over a clip's tokens: predicts masked tokens and the clip's class.

B clips, C channels, T frames, H height, W width, L levels of one dimension of a code. A token sees
no later frame: convolutions look back in time only, and norms are per position. The tokenizer is
evaluated by PSNR of clips and of the crop around the ball: a constant frame scores well on a plain
background. M masked clips, t token steps in time, G cells of the token grid, P places (squares of
cells), D dimensions of a code, E width, K classes, V the sum of a code's levels. Attention
alternates between the places of one step and the steps of one place.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.trajectory.model import motion_tokens

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


class _AxialBlock(nn.Module):
    """Attention within each step, then along each cell, then a feed-forward layer; pre-norm."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BtPE: Tensor) -> Tensor:
        x_BtPE = x_BtPE + self.dropout(self._attend(0, self.norms[0](x_BtPE)))
        x_BPtE = self.norms[1](x_BtPE).transpose(1, 2)
        x_BtPE = x_BtPE + self.dropout(self._attend(1, x_BPtE).transpose(1, 2))
        out: Tensor = x_BtPE + self.dropout(self.feed(self.norms[2](x_BtPE)))
        return out

    def _attend(self, number: int, x_BMNE: Tensor) -> Tensor:
        """Attention over N, for each of M sequences."""
        sizes = x_BMNE.shape
        heads = (*sizes[:3], 3, self.num_heads, sizes[3] // self.num_heads)
        q, k, v = self.qkv[number](x_BMNE).view(heads).permute(3, 0, 1, 4, 2, 5).unbind(0)
        # On the CPU in five dimensions: the plain formula, whose bits the runs there have.
        attend = F.scaled_dot_product_attention if q.device.type == "cpu" else _folded_attention
        x_BMHNd = attend(q, k, v)
        out: Tensor = self.out[number](x_BMHNd.transpose(2, 3).reshape(sizes))
        return out


def _folded_attention(q_BMHNd: Tensor, k_BMHNd: Tensor, v_BMHNd: Tensor) -> Tensor:
    """Attention in four dimensions, as the fast kernels need it; equal but for rounding."""
    q, k, v = (x_BMHNd.flatten(0, 1) for x_BMHNd in (q_BMHNd, k_BMHNd, v_BMHNd))
    return F.scaled_dot_product_attention(q, k, v).view(q_BMHNd.shape)


class TokenTransformer(nn.Module):
    """Codes (B, t, G) to class logits (B, K), future position (B, 2), their digits (M, t, G, V).

    The class is predicted from where something moves: at each step, cells are pooled by how much
    their code differs from its own mean over time, as in the head on frozen features.
    """

    def __init__(
        self,
        *,
        quantizer: Quantizer,
        num_steps: int,
        num_cells: int,
        merged: int,
        num_classes: int,
        width: int,
        num_layers: int,
        num_heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.merged = merged
        num_dimensions = len(quantizer.num_levels)
        # Per cell: its code's values, their motion, and whether they are masked.
        self.embed_cells = nn.Linear(merged**2 * (2 * num_dimensions + 1), width)
        self.time_tE = nn.Parameter(0.02 * torch.randn(num_steps, 1, width))
        self.place_PE = nn.Parameter(0.02 * torch.randn(num_cells // merged**2, width))
        self.blocks = nn.ModuleList(
            _AxialBlock(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        # One guess per dimension of a code: 35 logits instead of 15,360.
        self.guess = nn.Linear(width, merged**2 * sum(quantizer.num_levels))
        self.sharpness = nn.Parameter(torch.tensor(4.0))
        self.embed_motion = nn.Linear(5, width)
        self.embed_pooled = nn.Linear(width, width, bias=False)
        # Motion is known from the first step on, appearance must be learned.
        nn.init.zeros_(self.embed_pooled.weight)
        self.over_time = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm_class = nn.LayerNorm(width)
        self.classify = nn.Linear(width, num_classes)
        self.predict = nn.Linear(width, 2)

    def forward(self, codes_BtG: Tensor, masked_MtG: Tensor | None = None) -> tuple[Tensor, ...]:
        """Codes are guessed for the first M clips, those of the mask; without a mask, for none."""
        codes_BtG = codes_BtG.long()
        masked_BtG = torch.zeros_like(codes_BtG, dtype=torch.bool)
        num_masked = 0
        if masked_MtG is not None:
            num_masked = len(masked_MtG)
            masked_BtG[:num_masked] = masked_MtG
        values_BtGD = self.quantizer.values(codes_BtG) * ~masked_BtG[..., None]
        shown_B1G1 = (~masked_BtG).sum(dim=1, keepdim=True)[..., None].clamp(min=1)
        motion_BtGD = values_BtGD - values_BtGD.sum(dim=1, keepdim=True) / shown_B1G1
        motion_BtGD = motion_BtGD * ~masked_BtG[..., None]
        cells_BtGC = torch.cat([values_BtGD, motion_BtGD, masked_BtG[..., None].float()], dim=-1)
        x_BtPE = self.embed_cells(_merge_cells(cells_BtGC, self.merged))
        x_BtPE = x_BtPE + self.time_tE + self.place_PE
        for block in self.blocks:
            x_BtPE = block(x_BtPE)
        x_BtPE = self.norm(x_BtPE)
        logits_BK, future_B2 = self._tell(x_BtPE, motion_BtGD)
        if masked_MtG is None:
            return logits_BK, future_B2
        guesses_MtPV = self.guess(x_BtPE[:num_masked])
        return logits_BK, future_B2, _split_cells(guesses_MtPV, self.merged)

    def _tell(self, x_BtPE: Tensor, motion_BtGD: Tensor) -> tuple[Tensor, Tensor]:
        # Not the energy map: next to it the five numbers would be lost.
        share_BtG, (place_Bt2, step_Bt2, size_Bt1, _) = motion_tokens(motion_BtGD, self.sharpness)
        share_BtP = _merge_cells(share_BtG[..., None], self.merged).sum(dim=-1)
        pooled_BtE = (share_BtP[..., None] * x_BtPE).sum(dim=2)
        motion_Bt5 = torch.cat([place_Bt2, step_Bt2, size_Bt1], dim=-1)
        y_BtE = self.embed_motion(motion_Bt5) + self.embed_pooled(pooled_BtE) + self.time_tE[:, 0]
        for layer in self.over_time:
            y_BtE = layer(y_BtE)
        y_BtE = self.norm_class(y_BtE)
        last_B2 = 0.5 * place_Bt2[:, -1]
        return self.classify(y_BtE.mean(dim=1)), last_B2 + self.predict(y_BtE[:, -1])


def _merge_cells(x_BtGC: Tensor, merged: int) -> Tensor:
    """Join squares of `merged` x `merged` cells: (B, t, G, C) to (B, t, P, merged^2 C)."""
    num_clips, num_steps, num_cells, channels = x_BtGC.shape
    side = math.isqrt(num_cells) // merged
    squares = x_BtGC.view(num_clips, num_steps, side, merged, side, merged, channels)
    joined = squares.permute(0, 1, 2, 4, 3, 5, 6)
    return joined.reshape(num_clips, num_steps, side * side, merged**2 * channels)


def _split_cells(x_BtPC: Tensor, merged: int) -> Tensor:
    """Undo `_merge_cells`."""
    num_clips, num_steps, num_places, channels = x_BtPC.shape
    side, of_cell = math.isqrt(num_places), channels // merged**2
    squares = x_BtPC.view(num_clips, num_steps, side, side, merged, merged, of_cell)
    rows = squares.permute(0, 1, 2, 4, 3, 5, 6)
    return rows.reshape(num_clips, num_steps, num_places * merged**2, of_cell)
