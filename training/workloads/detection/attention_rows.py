"""Deformable attention as sums of a table's rows: the same bits every time, on a GPU too.

The levels lie on one canvas of zeros: a point's four pixels are rows at fixed distances. Backward
sorts the points by their rows once, and sums as forward does: no atomics, no copy of any row.
N bags (a query's head), E points of a bag (of all levels), R rows, d width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from training.workloads.detection.constants import constant


def by_rows(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """Keep the inputs alone for backward, which places the points again."""
    num_images, _, num_heads, width = value_BSMd.shape
    canvas = _Canvas(tuple(shapes), num_images, num_heads)
    out_Nd = _RowSums.apply(value_BSMd, locations_BQMLP2, weights_BQMLP, canvas)
    return cast(Tensor, out_Nd).view(num_images, -1, num_heads * width)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """The levels below one another, zeros around each; a row of the table per pixel and head."""

    shapes: tuple[tuple[int, int], ...]
    num_images: int
    num_heads: int

    @property
    def width(self) -> int:
        return 2 + max(width for _, width in self.shapes)

    @property
    def tops(self) -> list[int]:
        """Where each level begins, and behind the last where the canvas ends."""
        return [1 + sum(h + 1 for h, _ in self.shapes[:k]) for k in range(len(self.shapes) + 1)]

    @property
    def distances(self) -> tuple[int, ...]:
        """From a point's upper left pixel to the four around it, in rows of the table."""
        return tuple(self.num_heads * pixels for pixels in (0, 1, self.width, self.width + 1))

    def table(self, value_BSMd: Tensor) -> Tensor:
        """The rows: (R, d)."""
        tops, width = self.tops, value_BSMd.shape[3]
        size = (self.num_images, tops[-1], self.width, self.num_heads, width)
        canvas_BhwMd = value_BSMd.new_zeros(size)
        for level_BhwMd, tokens_BsMd in zip(
            self._levels(canvas_BhwMd), self._tokens(value_BSMd), strict=True
        ):
            level_BhwMd.copy_(tokens_BsMd.view(level_BhwMd.shape))
        return canvas_BhwMd.view(-1, width)

    def tokens(self, table_Rd: Tensor) -> Tensor:
        """What the table has of the levels: (B, S, M, d)."""
        size = (self.num_images, self.tops[-1], self.width, self.num_heads, -1)
        return torch.cat([level.flatten(1, 2) for level in self._levels(table_Rd.view(size))], 1)

    def place(self, locations_BQMLP2: Tensor) -> tuple[Tensor, Tensor]:
        """Each point's upper left row, (N, E), and its way from there in pixels, (N, E, 2).

        A point outside its level, or nowhere (NaN), is put where it reads only zeros.
        """
        device, num_points = locations_BQMLP2.device, locations_BQMLP2.shape[4]
        size_F = _sizes(self.shapes, locations_BQMLP2)
        at_BQMF = (locations_BQMLP2.flatten(3) * size_F).sub_(0.5)
        # Not fmin, which knows NaN, but is not vectorized.
        at_BQMF = torch.minimum(at_BQMF, size_F, out=at_BQMF).clamp_(min=-1).nan_to_num_(nan=-1.0)
        low_BQMF = at_BQMF.floor().minimum(size_F - 1)
        way_BQMF = at_BQMF.sub_(low_BQMF)
        low_BQMF = low_BQMF.to(torch.int32)
        row_BQME = torch.add(low_BQMF[..., 0::2], low_BQMF[..., 1::2], alpha=self.width)
        first_E = [top * self.width + 1 for top in self.tops[:-1] for _ in range(num_points)]
        image_B11 = torch.arange(self.num_images, device=device).view(-1, 1, 1)
        head_M1 = torch.arange(self.num_heads, device=device).view(-1, 1)
        first_BME = image_B11 * (self.tops[-1] * self.width) + constant(first_E, device)
        first_BME = (first_BME * self.num_heads + head_M1).to(torch.int32)
        row_BQME.mul_(self.num_heads).add_(first_BME[:, None])
        return row_BQME.flatten(0, 2), way_BQMF.view(*row_BQME.shape, 2).flatten(0, 2)

    def _levels(self, canvas_BhwMd: Tensor) -> list[Tensor]:
        found = zip(self.shapes, self.tops, strict=False)
        return [canvas_BhwMd[:, top : top + h, 1 : 1 + w] for (h, w), top in found]

    def _tokens(self, value_BSMd: Tensor) -> tuple[Tensor, ...]:
        return torch.split(value_BSMd, [height * width for height, width in self.shapes], dim=1)


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value_BSMd: Tensor, locations: Tensor, weights: Tensor, canvas: _Canvas
    ) -> Tensor:
        ctx.save_for_backward(value_BSMd, locations, weights)
        ctx.canvas = canvas
        row_NE, way_NE2 = canvas.place(locations)
        table_Rd, out_Nd = canvas.table(value_BSMd), None
        corners = _corner_weights(way_NE2, weights.reshape(row_NE.shape))
        for corner_NE, distance in zip(corners, canvas.distances, strict=True):
            part_Nd = _sum_rows(row_NE, table_Rd[distance:], corner_NE)
            out_Nd = part_Nd if out_Nd is None else out_Nd.add_(part_Nd)
        assert out_Nd is not None
        return out_Nd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_Nd: Tensor) -> tuple[Tensor | None, ...]:
        value_BSMd, locations, weights = ctx.saved_tensors
        canvas: _Canvas = ctx.canvas
        row_NE, way_NE2 = canvas.place(locations)
        weights_NE = weights.reshape(row_NE.shape)
        table_Rd, dout_Nd = canvas.table(value_BSMd), dout_Nd.contiguous()
        corners = _corner_weights(way_NE2, weights_NE)
        dvalue_BSMd = canvas.tokens(_table_gradient(canvas, row_NE, corners, dout_Nd))
        dcorners = []
        for corner_NE, distance in zip(corners, canvas.distances, strict=True):
            with torch.enable_grad():
                part_Nd = _sum_rows(row_NE, table_Rd[distance:], corner_NE.requires_grad_())
            dcorners.append(torch.autograd.grad(part_Nd, corner_NE, dout_Nd)[0])
        dweights_NE, dway_NE2 = _way_gradients(dcorners, way_NE2, weights_NE)
        size_F = _sizes(canvas.shapes, locations)
        at_NF = (locations.reshape(-1, len(size_F)) * size_F).sub_(0.5)
        dway_NF = dway_NE2.flatten(1).mul_(size_F).mul_((at_NF > -1) & (at_NF < size_F))
        return dvalue_BSMd, dway_NF.view(locations.shape), dweights_NE.view(weights.shape), None


def _table_gradient(
    canvas: _Canvas, row_NE: Tensor, corners: Sequence[Tensor], dout_Nd: Tensor
) -> Tensor:
    """Each row's sum over the points that read it: the sums of forward, the other way round."""
    sorted_X, point_X = row_NE.flatten().sort(stable=True)
    num_rows = canvas.num_images * canvas.tops[-1] * canvas.width * canvas.num_heads
    row_R = torch.arange(num_rows, device=row_NE.device, dtype=torch.int32)
    start_R = torch.searchsorted(sorted_X, row_R, out_int32=True)
    bag_X = point_X.div(row_NE.shape[1], rounding_mode="floor").to(torch.int32)
    dtable_Rd: Tensor | None = None
    for corner_NE, distance in zip(corners, canvas.distances, strict=True):
        part_Rd = _sum_rows(bag_X, dout_Nd, corner_NE.flatten()[point_X], start_R)
        if dtable_Rd is None:
            dtable_Rd = part_Rd
        else:
            dtable_Rd[distance:] += part_Rd[:-distance]
    assert dtable_Rd is not None
    return dtable_Rd


def _sum_rows(
    rows: Tensor, table_Rd: Tensor, weights: Tensor, starts: Tensor | None = None
) -> Tensor:
    """The weighted sum of each bag's rows; with `starts`, where each bag begins."""
    return F.embedding_bag(rows, table_Rd, starts, mode="sum", per_sample_weights=weights)


def _corner_weights(way_NE2: Tensor, weights_NE: Tensor) -> tuple[Tensor, ...]:
    """The weights of upper left, upper right, lower left and lower right: (N, E) each."""
    x_NE, y_NE = way_NE2.unbind(-1)
    right_NE = weights_NE * x_NE
    left_NE = weights_NE - right_NE
    low_left_NE, low_right_NE = left_NE * y_NE, right_NE * y_NE
    return left_NE.sub_(low_left_NE), right_NE.sub_(low_right_NE), low_left_NE, low_right_NE


def _way_gradients(
    dcorners: Sequence[Tensor], way_NE2: Tensor, weights_NE: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a point's weight and of its way, from those of its corners' weights."""
    x_NE, y_NE = way_NE2.unbind(-1)
    upper_left, upper_right, low_left, low_right = dcorners
    along_upper, along_low = upper_right - upper_left, low_right - low_left
    upper_NE = torch.addcmul(upper_left, x_NE, along_upper)
    down_NE = torch.addcmul(low_left, x_NE, along_low).sub_(upper_NE)
    dweights_NE = torch.addcmul(upper_NE, y_NE, down_NE)
    along_NE = along_upper.lerp_(along_low, y_NE)
    return dweights_NE, torch.stack([along_NE, down_NE], dim=-1).mul_(weights_NE[..., None])


def _sizes(shapes: Sequence[tuple[int, int]], locations_BQMLP2: Tensor) -> Tensor:
    """(width, height) of each point's level, in the order of the points' coordinates."""
    num_points = locations_BQMLP2.shape[4]
    sizes = [(width, height) for height, width in shapes for _ in range(num_points)]
    return constant(sizes, locations_BQMLP2.device, locations_BQMLP2.dtype).flatten()
