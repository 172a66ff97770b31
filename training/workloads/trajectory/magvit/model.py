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
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.workloads.trajectory.clips import NUM_FRAMES
from training.workloads.trajectory.model import NUM_TOLD, PlaceTransformer

# Each stage's width, in widths of the first, and the stride into it.
_STEMS: Mapping[str, Sequence[tuple[int, tuple[int, int, int]]]] = MappingProxyType(
    {
        "patch": ((1, (2, 4, 4)),),
        "full": ((1, (1, 1, 1)), (1, (1, 2, 2)), (2, (2, 2, 2)), (4, (2, 2, 2))),
    }
)


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

    def distances(self, values: Tensor, weights: Tensor) -> Tensor:
        """Squared distances of all levels from values, weighted: twice (..., D) to (..., V)."""
        half = self.levels // 2
        levels = torch.cat([torch.arange(n, device=values.device) for n in self.num_levels])
        here, weights = (
            each.repeat_interleave(self.levels, dim=-1, output_size=len(levels))
            for each in (values * half + half, weights)
        )
        return weights * (levels - here).square()


class Tokenizer(nn.Module):
    """Clips (B, T, H, W, 3) in uint8 to codes and back to pixels in 0 .. 1."""

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
        # No norm before the codes: it would take from a plain patch how bright it is.
        self.encoder = nn.Sequential(*down, nn.Conv3d(before, len(levels), 1))
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
    """Tokens (B, t + 1, G) to class logits (B, K), future position (B, 2), the ball's places
    (B, T, 2) and, for the first M clips, the digits of their codes (M, t, G, V).

    It holds its tokenizer, frozen, and so can draw what it decodes.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
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
        self.tokenizer = tokenizer.requires_grad_(False)
        self.quantizer = tokenizer.quantizer
        self.merged, self.num_classes = merged, num_classes
        levels = self.quantizer.num_levels
        # Per cell: its code's values, how they differ from the clip's own background, and how much
        # of it is hidden.
        self.embed_cells = nn.Linear(merged**2 * (2 * len(levels) + 1), width)
        # Of clips to generate; the last says that it is not told.
        self.embed_class = nn.Embedding(num_classes + 1, width)
        self.time_tE = nn.Parameter(0.02 * torch.randn(num_steps, 1, width))
        self.place_PE = nn.Parameter(0.02 * torch.randn(num_cells // merged**2, width))
        self.blocks = nn.ModuleList(
            _AxialBlock(width, num_heads, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        # One guess per dimension of a code: 96 logits instead of 2^24. And how near it is to what
        # the cell was last, to what it is on average, and to what the clip is: levels are in order.
        self.guess = nn.Linear(width, merged**2 * sum(levels))
        self.nearness = nn.Linear(width, merged**2 * 3 * len(levels))
        # A step is several frames, of each of which a cell tells its own.
        self.tell_cell = nn.Linear(width, NUM_FRAMES // num_steps * NUM_TOLD)
        self.over_time = PlaceTransformer(
            width=width,
            num_frames=NUM_FRAMES,
            num_classes=num_classes,
            num_layers=2,
            num_heads=num_heads,
            dropout=dropout,
        )

    def forward(
        self,
        tokens_BsG: Tensor,
        hidden_MtG: Tensor | None = None,
        is_hinted_M: Tensor | None = None,
        classes_M: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Codes are guessed for the first M clips, where hidden; without a mask, for none.

        What is known of a hidden token is seen in its place: MAGVIT's COMMIT, Yu et al. 2022
        (arXiv:2212.05199), 3.2. That is the cell's last visible code, carried forward, and of the
        last step of a clip that is hinted the row after the codes.
        """
        codes_BtG = tokens_BsG[:, :-1].long()
        values_BtGD = self.quantizer.values(codes_BtG)
        is_seen_BtG = torch.ones_like(codes_BtG, dtype=torch.bool)
        flags_BtG = torch.zeros(codes_BtG.shape, device=codes_BtG.device)
        classes_B = torch.full_like(codes_BtG[:, 0, 0], self.num_classes)
        num_masked = 0 if hidden_MtG is None else len(hidden_MtG)
        if hidden_MtG is not None:
            is_seen_BtG[:num_masked] = ~hidden_MtG
        # Of what is seen: the mean of each cell is its background.
        sum_B1GD = (values_BtGD * is_seen_BtG[..., None]).sum(dim=1, keepdim=True)
        num_B1G1 = is_seen_BtG.sum(dim=1, keepdim=True)[..., None]
        mean_B1GD = sum_B1GD / num_B1G1.clamp(min=1)
        if hidden_MtG is not None:
            assert is_hinted_M is not None and classes_M is not None
            codes_MtG, is_known_MtG = _carried(codes_BtG[:num_masked], ~hidden_MtG)
            is_hint_MG = hidden_MtG[:, -1] & is_hinted_M[:, None]
            hints_MG = tokens_BsG[:num_masked, -1].long()
            codes_MtG[:, -1] = torch.where(is_hint_MG, hints_MG, codes_MtG[:, -1])
            is_known_MtG[:, -1] |= is_hint_MG
            flags_BtG[:num_masked] = hidden_MtG * (1.0 - 0.5 * is_known_MtG)
            shown_MtGD = self.quantizer.values(codes_MtG) * is_known_MtG[..., None]
            values_BtGD = torch.cat([shown_MtGD, values_BtGD[num_masked:]])
            classes_B[:num_masked] = classes_M
        away_BtGD = 2.0 * (values_BtGD - mean_B1GD)
        cells_BtGC = torch.cat([values_BtGD, away_BtGD, flags_BtG[..., None]], dim=-1)
        x_BtPE = self.embed_cells(_merge_cells(cells_BtGC, self.merged))
        x_BtPE = x_BtPE + self.time_tE + self.place_PE + self.embed_class(classes_B)[:, None, None]
        for block in self.blocks:
            x_BtPE = block(x_BtPE)
        x_BtPE = self.norm(x_BtPE)
        told_BtPFE = self.tell_cell(x_BtPE).view(*x_BtPE.shape[:3], -1, NUM_TOLD)
        found = self.over_time.tell_cells(told_BtPFE.transpose(2, 3).flatten(1, 2))
        if hidden_MtG is None:
            return found
        guesses_MtGV, near_MtGD = (
            _split_cells(layer(x_BtPE[:num_masked]), self.merged)
            for layer in (self.guess, self.nearness)
        )
        sum_M11D, num_M111 = (
            each[:num_masked].sum(dim=2, keepdim=True) for each in (sum_B1GD, num_B1G1)
        )
        near_what = (
            (shown_MtGD, is_known_MtG[..., None]),
            (mean_B1GD[:num_masked], num_B1G1[:num_masked] > 0),
            (sum_M11D / num_M111.clamp(min=1), num_M111 > 0),
        )
        of_each = F.softplus(near_MtGD - 2.0).chunk(len(near_what), dim=-1)
        for weight_MtGD, (values, is_known) in zip(of_each, near_what, strict=True):
            away_MtGV = self.quantizer.distances(values, weight_MtGD * is_known)
            guesses_MtGV = guesses_MtGV - away_MtGV
        return *found, guesses_MtGV

    @torch.no_grad()
    def decode(
        self,
        tokens_BsG: Tensor,
        hidden_BtG: Tensor,
        is_hinted_B: Tensor,
        classes_B: Tensor,
        temperature: float = 1.0,
        num_steps: int = 12,
    ) -> Tensor:
        """Draw the hidden codes; all codes (B, t, G).

        The surest stay, more with each step: MaskGIT (Chang et al. 2022, arXiv:2202.04200), 3.2,
        by its cubic schedule, as the first few decide on the clip's colours; and with a temperature
        of the choice that falls to 0. At a temperature of 0 the likeliest codes are taken.
        """
        codes_BtG, hint_B1G = tokens_BsG[:, :-1].long(), tokens_BsG[:, -1:].long()
        num_hidden_B = hidden_BtG.flatten(1).sum(dim=1)
        for step in range(1, num_steps + 1):
            tokens_BsG = torch.cat([codes_BtG, hint_B1G], dim=1)
            guesses_BtGV = self(tokens_BsG, hidden_BtG, is_hinted_B, classes_B)[-1].float()
            drawn_BtG, sure_BtG = _draw(self.quantizer, guesses_BtGV, temperature)
            codes_BtG = torch.where(hidden_BtG, drawn_BtG, codes_BtG)
            sure_BtG += temperature * (1.0 - step / num_steps) * _gumbel(sure_BtG)
            order_BN = sure_BtG.masked_fill(~hidden_BtG, torch.inf).flatten(1).argsort(dim=1)
            num_left_B = (num_hidden_B * (1.0 - (step / num_steps) ** 3)).long()
            hidden_BtG = (order_BN.argsort(dim=1) < num_left_B[:, None]).view(hidden_BtG.shape)
        return codes_BtG

    @torch.no_grad()
    def draw(self, codes_BtG: Tensor) -> Tensor:
        """The frames (B, T, H, W, 3) in uint8 that codes stand for."""
        side = math.isqrt(codes_BtG.shape[2])
        codes_Bthw = codes_BtG.long().view(*codes_BtG.shape[:2], side, side)
        return to_uint8(self.tokenizer.decode(self.quantizer.values(codes_Bthw)))


def to_uint8(pixels: Tensor) -> Tensor:
    """Pixels of about 0 .. 1 as they are kept."""
    return (pixels.float().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)


def _gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()


def _draw(quantizer: Quantizer, guesses_BtGV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw a code for each token from the guesses of its digits; and its log probability."""
    code_BtG = torch.zeros(guesses_BtGV.shape[:-1], dtype=torch.long, device=guesses_BtGV.device)
    sure_BtG = torch.zeros_like(guesses_BtGV[..., 0])
    of_digits = torch.split(guesses_BtGV, list(quantizer.num_levels), dim=-1)
    for basis, guess_BtGL in zip(quantizer.basis, of_digits, strict=True):
        digit_BtG1 = (guess_BtGL + temperature * _gumbel(guess_BtGL)).argmax(dim=-1, keepdim=True)
        code_BtG += basis * digit_BtG1[..., 0]
        sure_BtG += guess_BtGL.log_softmax(dim=-1).gather(-1, digit_BtG1)[..., 0]
    return code_BtG, sure_BtG


def _carried(codes_MtG: Tensor, is_seen_MtG: Tensor) -> tuple[Tensor, Tensor]:
    """Each cell's last code that is seen, (M, t, G), and where there is one."""
    steps_MtG = torch.arange(codes_MtG.shape[1], device=codes_MtG.device)[:, None] * is_seen_MtG
    return codes_MtG.gather(1, steps_MtG.cummax(dim=1).values), is_seen_MtG.cumsum(dim=1) > 0


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
