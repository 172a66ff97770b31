"""Boxes: centre x, centre y, width, height, relative to the valid image (0 to 1), as in DETR."""

import torch
from torch import Tensor

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
