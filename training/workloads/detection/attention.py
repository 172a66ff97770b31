"""Multi-scale deformable attention (arXiv:2010.04159): a query reads a few points of each level.

B images, S tokens of all levels, Q queries, M heads, L levels, P points, d width of a head, D Md.
A point's value is bilinear between its four pixels; outside its level everything is zero.
"""

import logging
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_log = logging.getLogger(__name__)

Implementation: TypeAlias = Literal["triton", "reference", "deterministic"]
# (height, width) of each level, in the order of its tokens.
_Shapes: TypeAlias = Sequence[tuple[int, int]]
_Attend: TypeAlias = Callable[[Tensor, _Shapes, Tensor, Tensor], Tensor]
# Images with a longer side have enough points for sums of rows to pay on a CPU: benchmarks/LOG.md.
_SMALL_SIDE = 200
# The shapes of the small case on which Triton's kernel is tested.
_SHAPES = ((5, 7), (3, 2))
_GRADIENTS = tuple(f"the gradient of {name}" for name in ("value", "locations", "weights"))


def constant(
    values: Sequence[float] | Sequence[Sequence[float]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return constants as a tensor, copied from page-locked memory so the host does not wait."""
    is_gpu = device.type == "cuda" and not torch.compiler.is_compiling()
    here = torch.tensor(values, dtype=dtype, pin_memory=is_gpu)
    return here.to(device, non_blocking=True)


def deformable_attention(
    value_BSMd: Tensor,
    shapes: _Shapes,
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
    implementation: Implementation,
) -> Tensor:
    """Return each query's weighted sum over its points: (B, Q, D), in the type of `value_BSMd`.

    Locations are (x, y) relative to the level, 0 to 1 from border to border, and should be in
    float32: bfloat16 is off by half a pixel. The computation uses at least float32.
    """
    given = (value_BSMd, locations_BQMLP2, weights_BQMLP)
    if implementation != "triton":  # Triton's kernel reads lower precision directly
        dtype = torch.promote_types(value_BSMd.dtype, torch.float32)
        given = (value_BSMd.to(dtype), locations_BQMLP2.to(dtype), weights_BQMLP.to(dtype))
    with torch.autocast(value_BSMd.device.type, enabled=False):
        out_BQD = _attend(implementation)(given[0], shapes, given[1], given[2])
    return out_BQD.to(value_BSMd.dtype)


def _attend(implementation: Implementation) -> _Attend:
    match implementation:
        case "triton":
            # Not every torch comes with Triton.
            from training.workloads.detection.attention_kernel import by_kernel

            return by_kernel
        case "reference":
            return _by_grid_sample
        case "deterministic":
            return _by_rows


def _by_grid_sample(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """Use torch's own bilinear sampling, a level at a time to limit the memory for points."""
    num_images, _, num_heads, width = value_BSMd.shape
    # grid_sample counts from -1 to 1, border to border.
    grid_LNQP2 = (2 * locations_BQMLP2 - 1).permute(3, 0, 2, 1, 4, 5).flatten(1, 2)
    weights_LNQP = weights_BQMLP.permute(3, 0, 2, 1, 4).flatten(1, 2)
    levels = torch.split(value_BSMd, [height * width for height, width in shapes], dim=1)
    out_NdQ: Tensor | None = None
    for value_BsMd, shape, grid_NQP2, weights_NQP in zip(
        levels, shapes, grid_LNQP2, weights_LNQP, strict=True
    ):
        value_Ndhw = value_BsMd.permute(0, 2, 3, 1).reshape(-1, width, *shape)
        points_NdQP = F.grid_sample(value_Ndhw, grid_NQP2, align_corners=False)
        read_NdQ = (points_NdQP * weights_NQP[:, None]).sum(dim=-1)
        out_NdQ = read_NdQ if out_NdQ is None else out_NdQ + read_NdQ
    assert out_NdQ is not None
    return out_NdQ.reshape(num_images, num_heads * width, -1).transpose(1, 2)


def choose(
    device: torch.device,
    dtype: torch.dtype,
    started_with: str | None = None,
    max_side: int | None = None,
) -> Implementation:
    """Choose the best implementation for values of `dtype`; keep what the stage started with.

    On a GPU, that is the Triton kernel where it works, otherwise sums of rows. On a CPU, where all
    have the same bits, it is the faster one.

    `max_side` is the longest side of an image, in pixels, if it is known.
    """
    if device.type != "cuda":
        if started_with is not None and started_with != "triton":
            return cast(Implementation, started_with)
        is_small = max_side is not None and max_side <= _SMALL_SIDE
        return "reference" if is_small else "deterministic"
    if started_with == "deterministic":
        return "deterministic"
    if reason := why_not_triton(device, dtype):
        _log.warning(
            "[attention] Triton's kernel does not work here (%s); deformable attention is computed "
            "as sums of rows instead: the same results, but slower",
            reason,
        )
        return "deterministic"
    return "triton"


def why_not_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the kernel on a small case; return what is wrong with it, if anything."""
    try:
        from triton.errors import TritonError
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    try:
        found, again, expected = (
            _step(which, device, dtype) for which in ("triton", "triton", "deterministic")
        )
    except (
        TritonError,
        RuntimeError,
        AssertionError,
        OSError,
        subprocess.SubprocessError,
    ) as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    for name, mine, right in zip(("the output", *_GRADIENTS), found, expected, strict=True):
        error_share = float((mine - right).abs().max() / right.abs().max())
        # Rounding to bfloat16 alone causes errors of 0.4 %.
        if not error_share < 0.02:
            return f"{name} is wrong by {error_share:.1%}"
    if torch.are_deterministic_algorithms_enabled() and not all(map(torch.equal, found, again)):
        return "its bits differ from one run to the next"
    return None


def _step(
    implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the output of a small case and its three gradients, in float32 on the CPU."""
    rng, num_tokens = torch.Generator().manual_seed(0), sum(h * w for h, w in _SHAPES)
    given = [
        torch.randn(2, num_tokens, 2, 24, generator=rng).to(device, dtype),
        (1.5 * torch.rand(2, 9, 2, 2, 3, 2, generator=rng) - 0.25).to(device),
        torch.rand(2, 9, 2, 2, 3, generator=rng).to(device),
    ]
    inputs = [each.requires_grad_() for each in given]
    with torch.enable_grad():
        out_BQD = deformable_attention(inputs[0], _SHAPES, inputs[1], inputs[2], implementation)
    gradients = torch.autograd.grad(out_BQD, inputs, torch.ones_like(out_BQD))
    return tuple(each.detach().float().cpu() for each in (out_BQD, *gradients))


def _by_rows(
    value_BSMd: Tensor,
    shapes: Sequence[tuple[int, int]],
    locations_BQMLP2: Tensor,
    weights_BQMLP: Tensor,
) -> Tensor:
    """Use sums of rows; keep only the inputs for backward, which places the points again."""
    num_images, _, num_heads, width = value_BSMd.shape
    canvas = _Canvas(tuple(shapes), num_images, num_heads)
    out_Nd = _RowSums.apply(value_BSMd, locations_BQMLP2, weights_BQMLP, canvas)
    return cast(Tensor, out_Nd).view(num_images, -1, num_heads * width)


@dataclass(frozen=True, slots=True)
class _Canvas:
    """All levels, one below another with zeros around; each pixel and head is a row of a table."""

    shapes: tuple[tuple[int, int], ...]
    num_images: int
    num_heads: int

    @property
    def width(self) -> int:
        return 2 + max(width for _, width in self.shapes)

    @property
    def tops(self) -> list[int]:
        """The row at which each level begins, and at the end the canvas's height."""
        return [1 + sum(h + 1 for h, _ in self.shapes[:k]) for k in range(len(self.shapes) + 1)]

    @property
    def distances(self) -> tuple[int, ...]:
        """Offsets from a point's upper left pixel to the four around it, in rows of the table."""
        return tuple(self.num_heads * pixels for pixels in (0, 1, self.width, self.width + 1))

    def table(self, value_BSMd: Tensor) -> Tensor:
        """Return the rows: (R, d)."""
        tops, width = self.tops, value_BSMd.shape[3]
        size = (self.num_images, tops[-1], self.width, self.num_heads, width)
        canvas_BhwMd = value_BSMd.new_zeros(size)
        for level_BhwMd, tokens_BsMd in zip(
            self._levels(canvas_BhwMd), self._tokens(value_BSMd), strict=True
        ):
            level_BhwMd.copy_(tokens_BsMd.view(level_BhwMd.shape))
        return canvas_BhwMd.view(-1, width)

    def tokens(self, table_Rd: Tensor) -> Tensor:
        """Return the levels' part of the table: (B, S, M, d)."""
        size = (self.num_images, self.tops[-1], self.width, self.num_heads, -1)
        return torch.cat([level.flatten(1, 2) for level in self._levels(table_Rd.view(size))], 1)

    def place(self, locations_BQMLP2: Tensor) -> tuple[Tensor, Tensor]:
        """Return each point's upper left row, (N, E), and its offset in pixels, (N, E, 2).

        A point that is outside its level or NaN is moved to where it reads only zeros.
        """
        device, num_points = locations_BQMLP2.device, locations_BQMLP2.shape[4]
        size_F = _sizes(self.shapes, locations_BQMLP2)
        at_BQMF = (locations_BQMLP2.flatten(3) * size_F).sub_(0.5)
        # fmin would handle NaN, but is not vectorized.
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
    """Return each row's sum over the points that read it: the reverse of forward's sums."""
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
    """Return the weighted sum of each bag's rows; `starts` says where each bag begins."""
    return F.embedding_bag(rows, table_Rd, starts, mode="sum", per_sample_weights=weights)


def _corner_weights(way_NE2: Tensor, weights_NE: Tensor) -> tuple[Tensor, ...]:
    """Return the weights of upper left, upper right, lower left and lower right: (N, E) each."""
    x_NE, y_NE = way_NE2.unbind(-1)
    right_NE = weights_NE * x_NE
    left_NE = weights_NE - right_NE
    low_left_NE, low_right_NE = left_NE * y_NE, right_NE * y_NE
    return left_NE.sub_(low_left_NE), right_NE.sub_(low_right_NE), low_left_NE, low_right_NE


def _way_gradients(
    dcorners: Sequence[Tensor], way_NE2: Tensor, weights_NE: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of points' weights and offsets, from those of corners' weights."""
    x_NE, y_NE = way_NE2.unbind(-1)
    upper_left, upper_right, low_left, low_right = dcorners
    along_upper, along_low = upper_right - upper_left, low_right - low_left
    upper_NE = torch.addcmul(upper_left, x_NE, along_upper)
    down_NE = torch.addcmul(low_left, x_NE, along_low).sub_(upper_NE)
    dweights_NE = torch.addcmul(upper_NE, y_NE, down_NE)
    along_NE = along_upper.lerp_(along_low, y_NE)
    return dweights_NE, torch.stack([along_NE, down_NE], dim=-1).mul_(weights_NE[..., None])


def _sizes(shapes: Sequence[tuple[int, int]], locations_BQMLP2: Tensor) -> Tensor:
    """Return (width, height) of each point's level, in the order of the points' coordinates."""
    num_points = locations_BQMLP2.shape[4]
    sizes = [(width, height) for height, width in shapes for _ in range(num_points)]
    return constant(sizes, locations_BQMLP2.device, locations_BQMLP2.dtype).flatten()
