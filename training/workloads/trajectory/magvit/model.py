"""The Transformer over a clip's tokens: finds the ball and the class, and fills in what is hidden.

Attention alternates between the places of one step and the steps of one place. B clips, M masked
ones, T frames, t token steps in time, G cells of the token grid, P places (squares of cells), D
dimensions of a code, E width, K classes, L levels of a dimension, V the sum of a code's levels.

Stage `transformer` of the MAGVIT recipes: learns to fill in tokens, and the class of a clip.

It draws what it generates: the second half of a clip from its first, the frames between its ends,
and clips of a class. B clips, M masked ones, t token steps in time (s: plus the row of hints after
them), G cells of the token grid, T frames, K classes, V the sum of a code's levels.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import Captioned, Inputs, Loss, Partial, Start, write_moving, write_sheet
from training.workloads.trajectory.clip_dataset import STRIP_FRAMES, Batch
from training.workloads.trajectory.clips import FRAME_SIZE, NUM_FRAMES
from training.workloads.trajectory.config import MagvitConfig
from training.workloads.trajectory.forecast import PathFlow
from training.workloads.trajectory.magvit.stages import (
    Quantizer,
    Tokenizer,
    build_tokenizer,
    psnr,
    to_uint8,
)
from training.workloads.trajectory.model import (
    NUM_TOLD,
    PlaceTransformer,
    TrainClipClassifier,
    cell_centers,
)

# The number of blocks that know where the ball is.
_NUM_PAINT_LAYERS = 2
# The inputs known per cell: its last value, its mean, and the clip's mean.
_NUM_KNOWN = 3
# A cell knows how far away the ball is, up to this many cells.
_FAR = 2.0


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
        """Attend over N, for each of M sequences."""
        sizes = x_BMNE.shape
        heads = (*sizes[:3], 3, self.num_heads, sizes[3] // self.num_heads)
        q, k, v = self.qkv[number](x_BMNE).view(heads).permute(3, 0, 1, 4, 2, 5).unbind(0)
        # On the CPU in five dimensions: the plain formula, on whose bits runs there depend.
        attend = F.scaled_dot_product_attention if q.device.type == "cpu" else _folded_attention
        x_BMHNd = attend(q, k, v)
        out: Tensor = self.out[number](x_BMHNd.transpose(2, 3).reshape(sizes))
        return out


def _folded_attention(q_BMHNd: Tensor, k_BMHNd: Tensor, v_BMHNd: Tensor) -> Tensor:
    """Attend in four dimensions, as the fast kernels require; equal except for rounding."""
    q, k, v = (x_BMHNd.flatten(0, 1) for x_BMHNd in (q_BMHNd, k_BMHNd, v_BMHNd))
    return F.scaled_dot_product_attention(q, k, v).view(q_BMHNd.shape)


class _Painter(nn.Module):
    """Guesses the digits of codes (M, t, G, V) from the ball's place and what is known of tokens.

    There is a guess per dimension of a code: 96 logits instead of 2^24. It includes the distance to
    everything known, because levels are ordered.
    """

    def __init__(self, quantizer: Quantizer, c: MagvitConfig) -> None:
        super().__init__()
        self.quantizer, self.merged, width = quantizer, c.merged, c.width
        self.num_frames = NUM_FRAMES // c.token_shape[0]
        num_levels = quantizer.num_levels
        # The ball's distance in each frame of a step, whether that is given, and its look.
        inputs = 2 * self.num_frames + 1 + len(num_levels)
        self.embed_path = nn.Sequential(
            nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width)
        )
        self.blocks = nn.ModuleList(
            _AxialBlock(width, c.num_heads, c.dropout) for _ in range(_NUM_PAINT_LAYERS)
        )
        self.norm = nn.LayerNorm(width)
        self.guess = nn.Linear(width, c.merged**2 * sum(num_levels))
        self.nearness = nn.Linear(width, c.merged**2 * (_NUM_KNOWN + 1) * len(num_levels))

    def forward(
        self,
        x_MtPE: Tensor,
        path_MT2: Tensor,
        values_MtGD: Tensor,
        is_seen_MtG: Tensor,
        known: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        # The ball's look: the mean of what is seen at its place.
        ball_MtG1 = (near_ball(path_MT2, is_seen_MtG.shape[1:]) ** 8 * is_seen_MtG)[..., None]
        sum_M111 = ball_MtG1.sum(dim=(1, 2), keepdim=True)
        look_M11D = (ball_MtG1 * values_MtGD).sum(dim=(1, 2), keepdim=True)
        look_M11D = look_M11D / sum_M111.clamp(min=0.1)
        x_MtPE = x_MtPE + self._path(path_MT2, look_M11D, x_MtPE.shape)
        for block in self.blocks:
            x_MtPE = block(x_MtPE)
        x_MtPE = self.norm(x_MtPE)
        guesses_MtGV, near_MtGD = (
            _split_cells(layer(x_MtPE), self.merged) for layer in (self.guess, self.nearness)
        )
        known = (*known, (look_M11D, sum_M111 > 0.1))
        of_each = F.softplus(near_MtGD - 2.0).chunk(len(known), dim=-1)
        for weight_MtGD, (values, is_known) in zip(of_each, known, strict=True):
            away_MtGV = self.quantizer.distances(values, weight_MtGD * is_known)
            guesses_MtGV = guesses_MtGV - away_MtGV
        return guesses_MtGV

    def _path(self, path_MT2: Tensor, look_M11D: Tensor, shape: Sequence[int]) -> Tensor:
        """Embed the ball's place and look for each cell of each step (M, t, P, E)."""
        _, num_steps, num_places, _ = shape
        side = math.isqrt(num_places)
        away_MTP2 = path_MT2[:, :, None] - cell_centers(side, path_MT2.device)
        away_MTP2 = (away_MTP2 * (side / 2.0)).clamp(-_FAR, _FAR)
        by_step = away_MTP2.view(len(path_MT2), num_steps, self.num_frames, num_places, 2)
        away_MtPF = by_step.transpose(2, 3).flatten(3)
        is_known_MtP1 = ~away_MtPF.isnan().any(dim=3, keepdim=True)
        parts = (away_MtPF.nan_to_num(0.0), is_known_MtP1, look_M11D.expand(*shape[:3], -1))
        embedded: Tensor = self.embed_path(torch.cat([each.to(path_MT2) for each in parts], dim=3))
        return embedded * is_known_MtP1


class TokenTransformer(nn.Module):
    """Maps tokens (B, t + 1, G) to class logits (B, K), each frame's future position and the
    ball's place (B, T, 2) and, for the first M clips, the digits of their codes (M, t, G, V).

    It contains its frozen tokenizer, so it can draw what it decodes.
    """

    def __init__(self, tokenizer: Tokenizer, c: MagvitConfig) -> None:
        super().__init__()
        self.tokenizer = tokenizer.requires_grad_(False)
        self.quantizer = tokenizer.quantizer
        self.merged, self.num_classes = c.merged, len(c.class_names)
        (num_steps, num_cells), width = c.token_shape, c.width
        levels = self.quantizer.num_levels
        # Per cell: its code's values, how they differ from the clip's own background, and how much
        # of it is hidden.
        self.embed_cells = nn.Linear(c.merged**2 * (2 * len(levels) + 1), width)
        # For clips to generate; the last embedding means that the class is not given.
        self.embed_class = nn.Embedding(self.num_classes + 1, width)
        self.time_tE = nn.Parameter(0.02 * torch.randn(num_steps, 1, width))
        self.place_PE = nn.Parameter(0.02 * torch.randn(num_cells // c.merged**2, width))
        self.blocks = nn.ModuleList(
            _AxialBlock(width, c.num_heads, c.dropout) for _ in range(c.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        # A step has several frames, for each of which a cell has its own output.
        self.tell_cell = nn.Linear(width, NUM_FRAMES // num_steps * NUM_TOLD)
        self.over_time = PlaceTransformer(c, num_frames=NUM_FRAMES, num_layers=2)
        # If places are learned, hidden tokens are filled in around the ball.
        has_places = c.position_weight > 0.0
        flow = PathFlow(num_frames=NUM_FRAMES, num_classes=self.num_classes) if has_places else None
        self.flow = flow
        self.painter = _Painter(self.quantizer, c)

    def forward(
        self,
        tokens_BsG: Tensor,
        hidden_MtG: Tensor | None = None,
        is_hinted_M: Tensor | None = None,
        classes_M: Tensor | None = None,
        path_MT2: Tensor | None = None,
        true: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Guess the hidden codes of the first M clips; without a mask, of none.

        What is known of a hidden token is shown in its place: MAGVIT's COMMIT, Yu et al. 2022
        (arXiv:2212.05199), 3.2. That is the cell's last visible code, carried forward, and, for the
        last step of a hinted clip, the row after the codes. Guesses assume that the ball follows
        the path, unless that is NaN: the true path in training, otherwise one that the flow draws.
        With true places (B, T, 2) and labels (B), the flow's loss of unmasked clips comes last.
        """
        codes_BtG = tokens_BsG[:, :-1].long()
        values_BtGD = self.quantizer.values(codes_BtG)
        is_seen_BtG = torch.ones_like(codes_BtG, dtype=torch.bool)
        flags_BtG = torch.zeros(codes_BtG.shape, device=codes_BtG.device)
        classes_B = torch.full_like(codes_BtG[:, 0, 0], self.num_classes)
        num_masked = 0 if hidden_MtG is None else len(hidden_MtG)
        if hidden_MtG is not None:
            is_seen_BtG[:num_masked] = ~hidden_MtG
        # A cell's background is the mean of what is seen of it.
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
        told_BtPFE = self.tell_cell(self.norm(x_BtPE)).view(*x_BtPE.shape[:3], -1, NUM_TOLD)
        found = self.over_time.tell_cells(told_BtPFE.transpose(2, 3).flatten(1, 2))
        if hidden_MtG is None:
            return found
        sum_M11D, num_M111 = (
            each[:num_masked].sum(dim=2, keepdim=True) for each in (sum_B1GD, num_B1G1)
        )
        known = (
            (shown_MtGD, is_known_MtG[..., None]),
            (mean_B1GD[:num_masked], num_B1G1[:num_masked] > 0),
            (sum_M11D / num_M111.clamp(min=1), num_M111 > 0),
        )
        if path_MT2 is None:
            path_MT2 = torch.full_like(found[2][:num_masked], torch.nan)
        guesses_MtGV = self.painter(
            x_BtPE[:num_masked], path_MT2, values_BtGD[:num_masked], ~hidden_MtG, known
        )
        if true is None:
            return *found, guesses_MtGV
        whole = (each[num_masked:] for each in (found[2], *true))
        loss = self.flow.loss(*whole) if self.flow else torch.zeros_like(guesses_MtGV[0, 0, 0, 0])
        return *found, guesses_MtGV, loss

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
        """Draw the hidden codes; return all codes (B, t, G).

        Each step keeps more of the surest codes (MaskGIT, Chang et al. 2022, arXiv:2202.04200,
        3.2), with its cubic schedule, because the first few decide the clip's colours, and a choice
        temperature that falls to 0. Temperature 0 takes the likeliest codes. The ball's path is
        drawn first, from the places in steps that are entirely visible.
        """
        codes_BtG, hint_B1G = tokens_BsG[:, :-1].long(), tokens_BsG[:, -1:].long()
        path_BT2 = None
        if self.flow is not None:
            found_BT2 = self(tokens_BsG, hidden_BtG, is_hinted_B, classes_B)[2]
            is_seen_Bt = ~hidden_BtG.any(dim=2)
            is_seen_Bt[:, -1] |= is_hinted_B
            is_seen_BT = is_seen_Bt.repeat_interleave(NUM_FRAMES // is_seen_Bt.shape[1], dim=1)
            path_BT2 = self.flow.draw(found_BT2, is_seen_BT, classes_B, temperature)
        num_hidden_B = hidden_BtG.flatten(1).sum(dim=1)
        for step in range(1, num_steps + 1):
            tokens_BsG = torch.cat([codes_BtG, hint_B1G], dim=1)
            drawn = self(tokens_BsG, hidden_BtG, is_hinted_B, classes_B, path_BT2)
            # The first codes drawn decide the look of the clip; the last must fit it.
            warmth = temperature * (1.0 - (step - 1) / num_steps)
            drawn_BtG, sure_BtG = _draw(self.quantizer, drawn[-1].float(), warmth)
            codes_BtG = torch.where(hidden_BtG, drawn_BtG, codes_BtG)
            sure_BtG += temperature * (1.0 - step / num_steps) * _gumbel(sure_BtG)
            order_BN = sure_BtG.masked_fill(~hidden_BtG, torch.inf).flatten(1).argsort(dim=1)
            num_left_B = (num_hidden_B * (1.0 - (step / num_steps) ** 3)).long()
            hidden_BtG = (order_BN.argsort(dim=1) < num_left_B[:, None]).view(hidden_BtG.shape)
        return codes_BtG

    @torch.no_grad()
    def draw(self, codes_BtG: Tensor) -> Tensor:
        """Return the frames (B, T, H, W, 3) in uint8 that the codes represent."""
        side = math.isqrt(codes_BtG.shape[2])
        codes_Bthw = codes_BtG.long().view(*codes_BtG.shape[:2], side, side)
        return to_uint8(self.tokenizer.decode(self.quantizer.values(codes_Bthw)))


def near_ball(path_BT2: Tensor, token_shape: Sequence[int]) -> Tensor:
    """Return the ball's nearness to tokens in their steps, 1 to 0, (B, t, G); 0 if unknown."""
    num_steps, num_cells = token_shape
    side = math.isqrt(num_cells)
    away_BTG = (path_BT2[:, :, None] - cell_centers(side, path_BT2.device)).norm(dim=3)
    near_BTG = (-(away_BTG * (side / 3.0)).square()).exp().nan_to_num(0.0)
    num_clips, num_frames, _ = path_BT2.shape
    by_step = near_BTG.view(num_clips, num_steps, num_frames // num_steps, num_cells)
    near_BtG: Tensor = by_step.amax(dim=2)
    return near_BtG


def _gumbel(like: Tensor) -> Tensor:
    return -torch.empty_like(like).exponential_().log()


def _draw(quantizer: Quantizer, guesses_BtGV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw a code for each token from its digits' guesses; return codes and log probabilities."""
    code_BtG = torch.zeros(guesses_BtGV.shape[:-1], dtype=torch.long, device=guesses_BtGV.device)
    sure_BtG = torch.zeros_like(guesses_BtGV[..., 0])
    of_digits = torch.split(guesses_BtGV, list(quantizer.num_levels), dim=-1)
    for basis, guess_BtGL in zip(quantizer.basis, of_digits, strict=True):
        digit_BtG1 = (guess_BtGL + temperature * _gumbel(guess_BtGL)).argmax(dim=-1, keepdim=True)
        code_BtG += basis * digit_BtG1[..., 0]
        sure_BtG += guess_BtGL.log_softmax(dim=-1).gather(-1, digit_BtG1)[..., 0]
    return code_BtG, sure_BtG


def _carried(codes_MtG: Tensor, is_seen_MtG: Tensor) -> tuple[Tensor, Tensor]:
    """Return each cell's last visible code, (M, t, G), and where there is one."""
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


# The extra weight of a token that the ball covers in the masked loss, as most are background.
_BALL_WEIGHT = 10.0
# The number of clips for which generated ones are drawn, and their heading.
_NUM_DRAWN = 4
_GENERATED = "clips, and what decoding in 12 steps makes of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainTransformer(TrainClipClassifier):
    """Training on masked tokens, and on class and places of unmasked clips."""

    config: MagvitConfig

    def model_input(self, size: int) -> Tensor:
        num_steps, num_cells = self.config.token_shape
        return torch.zeros((size, num_steps + 1, num_cells), dtype=torch.int32)

    def example(self, size: int) -> Batch:
        places = torch.zeros(size, NUM_FRAMES, 2)
        batch = TrainClipClassifier.example(self, size)
        return {**batch, "places": places, "futures": places}

    def model(self, i: Inputs) -> nn.Module:
        return TokenTransformer(build_tokenizer(self.config), self.config)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """Check the splits and take the tokenizer trained in the previous stage."""
        assert isinstance(m, TokenTransformer) and i.prior is not None
        m.tokenizer.load_state_dict(build_tokenizer(self.config, i.prior).state_dict())
        # dataclass(slots=True) creates a new class, which super() does not know.
        return TrainClipClassifier.start(self, m, i)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        """Return the loss of unmasked clips' class and places, and of the others' masked tokens."""
        tokens_BsG, num_masked = b["x"].long(), int(self.config.masked_share * len(b["x"]))
        codes_MtG = tokens_BsG[:num_masked, :-1]
        hidden_MtG, is_hinted_M = _hidden(codes_MtG)
        # A tenth of the classes is not given, as in classifier-free guidance.
        is_told_M = torch.rand(num_masked, device=codes_MtG.device) > 0.1
        classes_M = torch.where(is_told_M, b["labels"][:num_masked], len(self.classes))
        # Nor is a tenth of the paths, which are then NaN, as for clips without a track.
        is_told_M = torch.rand(num_masked, device=codes_MtG.device) > 0.1
        path_MT2 = b["places"][:num_masked].where(is_told_M[:, None, None], torch.nan)
        *found, guesses_MtGV, path_loss = m(
            *(tokens_BsG, hidden_MtG, is_hinted_M, classes_M, path_MT2), (b["places"], b["labels"])
        )
        whole = {name: b[name][num_masked:] for name in ("labels", "futures", "places")}
        loss = self.loss_of(whole, *(each[num_masked:].float() for each in found))
        total = loss.total + self.config.position_weight * path_loss
        guess_MtG = _digits_loss(self.config.num_levels, guesses_MtGV.float(), codes_MtG)
        # Visible tokens have weight 0, so no shape depends on the data.
        ball_MtG = near_ball(b["places"][:num_masked], codes_MtG.shape[1:])
        weight_MtG = hidden_MtG * (1.0 + _BALL_WEIGHT * ball_MtG)
        guess = (guess_MtG * weight_MtG).sum() / weight_MtG.sum().clamp(min=1)
        # The ball's place behind the mask shows where its tokens are.
        place = self.place_loss(b["places"][:num_masked], found[2][:num_masked].float())
        return Loss(
            total=total * (len(tokens_BsG) / len(whole["labels"])),
            mean=self.config.masked_weight * (guess + place / max(num_masked, 1)),
            metrics={**loss.metrics, "masked_loss": (guess.detach(), 1.0)},
        )

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Evaluate like other classifiers, and also predict the end of the clips shown."""
        # dataclass(slots=True) creates a new class, which super() does not know.
        part = TrainClipClassifier.evaluate(self, m, b)
        if "strips" not in b:
            return part
        assert isinstance(m, TokenTransformer)
        is_shown = torch.isin(b["clips"], b["strip_clips"])
        tokens_BsG, truth_BTHW3 = b["x"][is_shown], b["strips"]
        hidden_BtG = torch.zeros_like(tokens_BsG[:, :-1], dtype=torch.bool)
        num_steps = hidden_BtG.shape[1]
        hidden_BtG[:, -(num_steps // 4) :] = True
        codes_BtG = _decoded(m, tokens_BsG, hidden_BtG, temperature=0.0)
        found = m(torch.cat([codes_BtG, tokens_BsG[:, -1:].long()], dim=1))
        first = NUM_FRAMES - NUM_FRAMES // 4
        pictures = {
            "predicted": m.draw(codes_BtG)[:, first:],
            "copied": truth_BTHW3[:, first - 1 : first],
        }
        true_BT2 = b["places"][is_shown]
        places = {"predicted": found[2][:, first:], "copied": true_BT2[:, first - 1 : first]}
        sums: dict[str, tuple[float, float]] = {}
        for name, drawn_BTHW3 in pictures.items():
            away = (drawn_BTHW3.float() - truth_BTHW3[:, first:].float()) / 255.0
            sums[f"squared_{name}"] = (float(away.square().sum()), away.numel())
            error_BT = FRAME_SIZE / 2 * (places[name] - true_BT2[:, first:]).norm(dim=2)
            sums[f"away_{name}"] = (float(error_BT.nansum()), float((~error_BT.isnan()).sum()))
        strips = part.tensors["strips"][:, list(STRIP_FRAMES)]
        return replace(part, sums=sums, tensors={**part.tensors, "strips": strips})

    def summarize(self, parts: Sequence[Partial], out: Path) -> Mapping[str, float]:
        """Return a classifier's metrics, and PSNR and ball error of predicted and copied ends."""
        metrics = dict(TrainClipClassifier.summarize(self, parts, out))
        shown = [part for part in parts if part.sums]
        for name in ("predicted", "copied") if shown else ():
            metrics[f"{name}_psnr"] = psnr(shown, f"squared_{name}")
            away, count = (sum(part.sums[f"away_{name}"][k] for part in shown) for k in (0, 1))
            if count:
                metrics[f"{name}_ball_error_pixels"] = away / count
        return metrics

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Draw clips.jpg and generated clips: generated.jpg, and animated in generated.webp."""
        TrainClipClassifier.show(self, m, i, parts, out)
        assert isinstance(m, TokenTransformer)
        samples = self.samples(i, "validation")
        rng, num = torch.Generator(), min(_NUM_DRAWN, len(samples))
        batch = samples.collate([samples.get(k, -1, rng) for k in range(num)])
        labels_B, tokens_BsG = batch["labels"], batch["x"].to(i.device)
        clips = {
            "true": batch["strips"],
            **_generated(m, tokens_BsG, labels_B.to(i.device), self.config.temperature),
        }
        write_moving(out / "generated.webp", [clip.numpy() for clip in clips.values()], 125)
        pictures = [
            Captioned(
                np.concatenate(list(clips[name][number, list(STRIP_FRAMES)].numpy()), axis=1),
                caption=f"{self.classes[int(label)]}: {name}",
            )
            for number, label in enumerate(labels_B)
            for name in clips
        ]
        write_sheet(out / "generated.jpg", _GENERATED, pictures, num_columns=len(clips))


def _digits_loss(levels: Sequence[int], guesses_MtGV: Tensor, codes_MtG: Tensor) -> Tensor:
    """Return the cross-entropy of guessed codes, (M, t, G), summed over a code's dimensions."""
    losses = []
    rest = codes_MtG.flatten()
    for level, logits_MtGL in zip(levels, torch.split(guesses_MtGV, list(levels), -1), strict=True):
        logits = logits_MtGL.flatten(0, 2)
        losses.append(F.cross_entropy(logits, rest % level, reduction="none"))
        rest = rest // level
    return torch.stack(losses).sum(dim=0).view(codes_MtG.shape)


def _hidden(codes_MtG: Tensor) -> tuple[Tensor, Tensor]:
    """Draw which tokens to hide, (M, t, G), and which clips get a hint of the last step, (M).

    As in MaskGIT, the share is cos(u pi / 2), with u uniform per clip. It applies to the entire
    clip, to what follows its first steps (frame prediction, half of the clips) or to what follows
    the first step alone (interpolation).
    """
    num_clips, num_steps, _ = codes_MtG.shape
    device = codes_MtG.device
    share_M = torch.cos(torch.rand(num_clips, device=device) * (math.pi / 2))
    hidden_MtG = torch.rand(codes_MtG.shape, device=device) < share_M[:, None, None]
    # 0: the entire clip, 1 (twice as likely): frame prediction, 2: interpolation.
    task_M = (torch.randint(0, 4, (num_clips,), device=device) + 1) // 2
    given_M = torch.randint(1, num_steps, (num_clips,), device=device)
    given_M = torch.stack([torch.zeros_like(given_M), given_M, torch.ones_like(given_M)])[
        task_M, torch.arange(num_clips, device=device)
    ]
    is_given_Mt = torch.arange(num_steps, device=device) < given_M[:, None]
    return hidden_MtG & ~is_given_Mt[..., None], task_M == 2


def _decoded(
    m: TokenTransformer,
    tokens_BsG: Tensor,
    hidden_BtG: Tensor,
    *,
    temperature: float,
    is_hinted: bool = False,
    classes_B: Tensor | None = None,
) -> Tensor:
    """Return all codes, the hidden ones drawn; all clips have hints or none, classes or none."""
    same_B = torch.zeros_like(tokens_BsG[:, 0, 0], dtype=torch.long)
    classes_B = same_B + m.num_classes if classes_B is None else classes_B
    return m.decode(tokens_BsG, hidden_BtG, (same_B + is_hinted).bool(), classes_B, temperature)


def _generated(
    m: TokenTransformer, tokens_BsG: Tensor, labels_B: Tensor, temperature: float
) -> dict[str, Tensor]:
    """Return clips (B, T, H, W, 3) in uint8 on the CPU, by the way they are drawn."""
    nothing_BtG = torch.zeros_like(tokens_BsG[:, :-1], dtype=torch.bool)
    steps = torch.arange(nothing_BtG.shape[1], device=tokens_BsG.device)[:, None]
    decoded = partial(_decoded, m, tokens_BsG, temperature=temperature)
    codes = {
        "reconstructed": tokens_BsG[:, :-1].long(),
        "second half predicted": decoded(nothing_BtG | (steps >= len(steps) // 2)),
        "all but the ends interpolated": decoded(nothing_BtG | (steps >= 1), is_hinted=True),
        "generated from its class": decoded(~nothing_BtG, classes_B=labels_B),
    }
    return {name: m.draw(each).cpu() for name, each in codes.items()}
