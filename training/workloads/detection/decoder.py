"""Encoder and decoder: tokens read points of all levels; queries read tokens and move boxes.

B images, S tokens of all levels in one row, Q queries, D width, C classes, M heads, P points, L
levels (in the decoder l, as L are its layers), d width of a head.

Boxes: centre x, centre y, width, height, relative to the valid image (0 to 1), as in DETR.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from training.workloads.detection.attention import Implementation, constant, deformable_attention
from training.workloads.detection.config import Architecture

# As in the reference, a box closer to 0 or 1 has no gradient and is moved starting from here.
_NEAREST = 1e-3


def corners(boxes_4: Tensor) -> Tensor:
    """Return left, top, right, bottom."""
    centre_2, size_2 = boxes_4[..., :2], boxes_4[..., 2:]
    return torch.cat([centre_2 - size_2 / 2, centre_2 + size_2 / 2], dim=-1)


def from_corners(corners_4: Tensor) -> Tensor:
    """Return centre and size."""
    low_2, high_2 = corners_4[..., :2], corners_4[..., 2:]
    return torch.cat([(low_2 + high_2) / 2, high_2 - low_2], dim=-1)


def giou(first_4: Tensor, second_4: Tensor) -> Tensor:
    """Compute the generalized IoU (arXiv:1902.09630), -1 to 1; leading dimensions broadcast."""
    one_4, other_4 = corners(first_4), corners(second_4)
    higher_4, lower_4 = torch.maximum(one_4, other_4), torch.minimum(one_4, other_4)
    shared = _area(lower_4[..., 2:] - higher_4[..., :2])
    hull = _area(higher_4[..., 2:] - lower_4[..., :2])
    union = _area(first_4[..., 2:]) + _area(second_4[..., 2:]) - shared
    # Without areas, union and hull may be 0, and 0 / 0 would be NaN.
    least = torch.finfo(union.dtype).tiny
    return shared / union.clamp(min=least) - (hull - union) / hull.clamp(min=least)


def inverse_sigmoid(share: Tensor) -> Tensor:
    """Invert the sigmoid; shares closer than 0.001 to 0 or 1 are clamped."""
    share = share.clamp(0, 1)
    return torch.log(share.clamp(min=_NEAREST) / (1 - share).clamp(min=_NEAREST))


def _area(size_2: Tensor) -> Tensor:
    # prod() would ask the device in its backward whether there are zeros.
    size_2 = size_2.clamp(min=0)
    return size_2[..., 0] * size_2[..., 1]


# A token of the first level proposes a box of this share of the image; each next level doubles it.
_PROPOSED_SIZE = 0.05
_LEVEL_TEMPERATURE = 20.0


class Pyramid(NamedTuple):
    """Tokens of all levels, finest first. `is_padding_BS` marks those outside the image."""

    tokens_BSD: Tensor
    positions_BSD: Tensor  # sines
    is_padding_BS: Tensor
    centres_BS2: Tensor  # x, y relative to the valid image
    sizes_S: Tensor  # of the box that a token proposes
    valid_BL2: Tensor  # share of each level's width and height that is not padding
    cells_L2: Tensor  # width and height of each level
    shapes: tuple[tuple[int, int], ...]  # height and width of each level


def pyramid(maps: Sequence[Tensor], sizes_B2: Tensor, padded: tuple[int, int]) -> Pyramid:
    """Make a pyramid from maps (B, D, h, w) of images of valid sizes, padded to `padded`."""
    shapes = tuple((x_BDhw.shape[2], x_BDhw.shape[3]) for x_BDhw in maps)
    device = sizes_B2.device
    rows, columns = (
        [_axis(shape[axis], padded[axis], sizes_B2[:, axis, None]) for shape in shapes]
        for axis in (0, 1)
    )
    levels = list(zip(rows, columns, strict=True))
    return Pyramid(
        tokens_BSD=_tokens(x_BDhw.movedim(1, -1) for x_BDhw in maps),
        positions_BSD=_tokens(_sines(y, x, maps[0].shape[1]) for y, x in levels),
        is_padding_BS=_tokens(
            ~(y.is_valid_Bn[:, :, None] & x.is_valid_Bn[:, None]) for y, x in levels
        ),
        centres_BS2=_tokens(_grid(y.centre_Bn, x.centre_Bn).flip(-1) for y, x in levels),
        sizes_S=torch.cat(
            [
                torch.full((height * width,), _PROPOSED_SIZE * 2**number, device=device)
                for number, (height, width) in enumerate(shapes)
            ]
        ),
        valid_BL2=torch.stack(
            [torch.cat([x.share_B1, y.share_B1], dim=1) for y, x in levels], dim=1
        ),
        cells_L2=constant(shapes, device).flip(-1),
        shapes=shapes,
    )


def sines(x_n: Tensor, num: int, temperature: float) -> Tensor:
    """Return, for each x from 0 to 1, sine and cosine at num / 2 wavelengths: (..., n x num)."""
    pairs = torch.arange(num // 2, dtype=x_n.dtype, device=x_n.device)
    angles = x_n[..., None] * (2 * math.pi * temperature ** (-2 * pairs / num))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-3)


class _Axis(NamedTuple):
    """The cells along one side of a level."""

    is_valid_Bn: Tensor
    centre_Bn: Tensor  # relative to the valid cells
    end_Bn: Tensor
    share_B1: Tensor  # of the cells that are valid


def _axis(num_cells: int, padded: int, size_B1: Tensor) -> _Axis:
    """Make an axis; a cell is valid if its first pixel is, as in torch's nearest sampling."""
    number_n = torch.arange(num_cells, device=size_B1.device)
    is_valid_Bn = number_n * padded // num_cells < size_B1
    num_valid_B1 = is_valid_Bn.sum(dim=1, keepdim=True)
    return _Axis(
        is_valid_Bn=is_valid_Bn,
        centre_Bn=(number_n + 0.5) / num_valid_B1,
        end_Bn=((number_n + 1) / num_valid_B1).clamp(max=1),
        share_B1=num_valid_B1 / num_cells,
    )


def _sines(y: _Axis, x: _Axis, width: int) -> Tensor:
    """Encode y in half of the width and x in the other; as in the reference, by a cell's end."""
    sines_Bhn, sines_Bwn = (
        sines(axis.end_Bn[..., None], width // 2, _LEVEL_TEMPERATURE) for axis in (y, x)
    )
    shape = (len(sines_Bhn), sines_Bhn.shape[1], sines_Bwn.shape[1], -1)
    return torch.cat(
        [sines_Bhn[:, :, None].expand(shape), sines_Bwn[:, None].expand(shape)], dim=-1
    )


def _grid(y_Bh: Tensor, x_Bw: Tensor) -> Tensor:
    """Return every pair of y and x, (B, h, w, 2)."""
    shape = (len(y_Bh), y_Bh.shape[1], x_Bw.shape[1])
    return torch.stack([y_Bh[:, :, None].expand(shape), x_Bw[:, None].expand(shape)], dim=-1)


def _tokens(levels: Iterable[Tensor]) -> Tensor:
    """Join levels (B, h, w, ...) into one row (B, S, ...)."""
    return torch.cat([level.flatten(1, 2) for level in levels], dim=1)


_QUERY_TEMPERATURE = 10_000.0
# The initial probability that a query is an object, with which focal loss starts out stable.
_PRIOR = 0.01


class Encoder(nn.Module):
    """Maps a pyramid to a refined one of the same places."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.recompute = a.recompute_encoder
        self.level_embed = nn.Parameter(torch.empty(a.num_levels, a.width))
        self.layers = nn.ModuleList(_EncoderLayer(a) for _ in range(a.encoder_layers))

    def forward(self, pyramid: Pyramid) -> Pyramid:
        level_SD = torch.cat(
            [
                each_D.expand(height * width, -1)
                for each_D, (height, width) in zip(self.level_embed, pyramid.shapes, strict=True)
            ]
        )
        places_BSD = pyramid.positions_BSD + level_SD
        anchors_BSL2 = pyramid.centres_BS2[:, :, None] * pyramid.valid_BL2[:, None]
        keep_all = not (self.recompute and torch.is_grad_enabled())
        for layer in self.layers:
            arguments = (pyramid, places_BSD, anchors_BSL2)
            x_BSD = (
                layer(*arguments)
                if keep_all
                else checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            )
            pyramid = pyramid._replace(tokens_BSD=x_BSD)
        return pyramid


class _EncoderLayer(nn.Module):
    """Attention, then the feed-forward network, each followed by a norm."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.self_attn = MultiScaleAttention(a)
        self.self_attn_norm = nn.LayerNorm(a.width)
        self.ffn = _FeedForward(a)
        self.ffn_norm = nn.LayerNorm(a.width)

    def forward(self, pyramid: Pyramid, places_BSD: Tensor, anchors_BSL2: Tensor) -> Tensor:
        x_BSD = pyramid.tokens_BSD
        y_BSD = self.self_attn(x_BSD + places_BSD, anchors_BSL2, pyramid)
        x_BSD = self.self_attn_norm(x_BSD + y_BSD)
        return cast(Tensor, self.ffn_norm(x_BSD + self.ffn(x_BSD)))


class _FeedForward(nn.Module):
    """Two layers."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.linear1 = nn.Linear(a.width, a.feed_forward)
        self.linear2 = nn.Linear(a.feed_forward, a.width)

    def forward(self, x_D: Tensor) -> Tensor:
        return cast(Tensor, self.linear2(F.relu(self.linear1(x_D))))


class MultiScaleAttention(nn.Module):
    """Deformable attention with its projections (arXiv:2010.04159).

    With each head, a query reads `num_points` points of each level, at its own offsets from its
    anchor: a point (x, y) with offsets in pixels of the level, or a box (x, y, w, h) with offsets
    as fractions of it.
    """

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.implementation: Implementation = "deterministic"
        self.heads = (a.num_heads, a.num_levels, a.num_points)
        per_point = math.prod(self.heads)
        self.sampling_offsets = nn.Linear(a.width, 2 * per_point)
        self.attention_weights = nn.Linear(a.width, per_point)
        self.value_proj = nn.Linear(a.width, a.width)
        self.output_proj = nn.Linear(a.width, a.width)

    @torch.no_grad()
    def initialize(self) -> None:
        """Let each head look in its own direction, each point further away, with equal weights."""
        num_heads, num_levels, num_points = self.heads
        angles_M = torch.arange(num_heads) * (2 * math.pi / num_heads)
        step_M2 = torch.stack([angles_M.cos(), angles_M.sin()], dim=-1)
        step_M2 = step_M2 / step_M2.abs().amax(dim=-1, keepdim=True)
        steps_P1 = torch.arange(1, num_points + 1)[:, None]
        offsets_MLP2 = (step_M2[:, None] * steps_P1)[:, None].expand(-1, num_levels, -1, -1)
        self.sampling_offsets.bias.copy_(offsets_MLP2.flatten())
        for zero in (self.sampling_offsets.weight, *self.attention_weights.parameters()):
            zero.zero_()
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            projection.bias.zero_()

    def forward(self, query_BQD: Tensor, anchors_BQL: Tensor, read: Pyramid) -> Tensor:
        num_heads, _, num_points = self.heads
        value_BSD = self.value_proj(read.tokens_BSD)
        value_BSD = value_BSD.masked_fill(read.is_padding_BS[..., None], 0)
        offsets_BQMLP2 = self.sampling_offsets(query_BQD).unflatten(-1, (*self.heads, 2))
        weights_BQMz = self.attention_weights(query_BQD).unflatten(-1, (num_heads, -1)).softmax(-1)
        anchors_BQ1L14 = anchors_BQL[:, :, None, :, None]
        if anchors_BQL.shape[-1] == 2:
            locations = anchors_BQ1L14 + offsets_BQMLP2 / read.cells_L2[:, None]
        else:
            centre, size = anchors_BQ1L14[..., :2], anchors_BQ1L14[..., 2:]
            locations = centre + offsets_BQMLP2 * size * (0.5 / num_points)
        read_BQD = deformable_attention(
            value_BSD.unflatten(-1, (num_heads, -1)),
            read.shapes,
            locations,
            weights_BQMz.unflatten(-1, self.heads[1:]),
            self.implementation,
        )
        return cast(Tensor, self.output_proj(read_BQD))


class Decoder(nn.Module):
    """Maps queries and boxes to each layer's class logits (L, B, Q, C) and boxes (L, B, Q, 4)."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.place_head = _Perceptron(2 * a.width, a.width, a.width)
        self.layers = nn.ModuleList(_DecoderLayer(a) for _ in range(a.decoder_layers))
        self.norm = nn.LayerNorm(a.width)
        self.class_head = class_head(a)
        self.box_head = box_head(a)

    def forward(
        self, x_BQD: Tensor, anchors_BQ4: Tensor, read: Pyramid, hidden_QQ: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply "look forward twice": a layer's loss also moves the previous layer's boxes.

        The layers themselves see those boxes detached, so no gradient goes further back through
        boxes.
        """
        states, before = [], []
        moved_BQ4 = anchors_BQ4
        for number, layer in enumerate(self.layers):
            if number:
                moved_BQ4 = (self.box_head(x_BQD) + inverse_sigmoid(anchors_BQ4)).sigmoid()
                anchors_BQ4 = moved_BQ4.detach()
            x_BQD = layer(x_BQD, self._place(anchors_BQ4), anchors_BQ4, read, hidden_QQ)
            states.append(self.norm(x_BQD))
            before.append(inverse_sigmoid(moved_BQ4))
        states_LBQD = torch.stack(states)
        boxes_LBQ4 = (self.box_head(states_LBQD) + torch.stack(before)).sigmoid()
        return self.class_head(states_LBQD), boxes_LBQ4

    def _place(self, boxes_BQ4: Tensor) -> Tensor:
        """Encode a query's box for it: sines of y, x, w and h, in the reference's order.

        The reference takes them relative to the padded image, so padding changes its results;
        without padding, both are the same.
        """
        x, y, w, h = boxes_BQ4.unbind(-1)
        sines_BQz = sines(
            torch.stack([y, x, w, h], dim=-1),
            self.norm.normalized_shape[0] // 2,
            _QUERY_TEMPERATURE,
        )
        return cast(Tensor, self.place_head(sines_BQz))


class _DecoderLayer(nn.Module):
    """Attention among queries, then to the image, then the feed-forward network; norms follow."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(a.width, a.num_heads, batch_first=True)
        self.self_attn_norm = nn.LayerNorm(a.width)
        self.cross_attn = MultiScaleAttention(a)
        self.cross_attn_norm = nn.LayerNorm(a.width)
        self.ffn = _FeedForward(a)
        self.ffn_norm = nn.LayerNorm(a.width)

    def forward(
        self,
        x_BQD: Tensor,
        place_BQD: Tensor,
        anchors_BQ4: Tensor,
        read: Pyramid,
        hidden_QQ: Tensor | None,
    ) -> Tensor:
        query_BQD = x_BQD + place_BQD
        y_BQD, _ = self.self_attn(
            query_BQD, query_BQD, x_BQD, attn_mask=hidden_QQ, need_weights=False
        )
        x_BQD = self.self_attn_norm(x_BQD + y_BQD)
        # Boxes are relative to the valid image, locations to the padded one.
        valid_B1l4 = read.valid_BL2.repeat(1, 1, 2)[:, None]
        y_BQD = self.cross_attn(x_BQD + place_BQD, anchors_BQ4[:, :, None] * valid_B1l4, read)
        x_BQD = self.cross_attn_norm(x_BQD + y_BQD)
        return cast(Tensor, self.ffn_norm(x_BQD + self.ffn(x_BQD)))


class _Perceptron(nn.Module):
    """Linear layers with ReLU in between."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))

    def forward(self, x_D: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x_D = F.relu(layer(x_D))
        return cast(Tensor, self.layers[-1](x_D))


def class_head(a: Architecture) -> nn.Linear:
    """Make the head from states to class logits, which start at the prior plus noise."""
    head = nn.Linear(a.width, a.num_classes)
    nn.init.constant_(head.bias, math.log(_PRIOR / (1 - _PRIOR)))
    return head


def box_head(a: Architecture) -> _Perceptron:
    """Make the head from states to box movements, which start at zero."""
    head = _Perceptron(a.width, a.width, a.width, 4)
    for parameter in head.layers[-1].parameters():
        nn.init.zeros_(parameter)
    return head
