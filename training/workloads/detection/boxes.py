"""Boxes: centre x, centre y, width, height, relative to the valid image (0 to 1), as in DETR."""

import torch
from torch import Tensor

# As the reference: a box nearer to 0 or 1 has no gradient, and is moved from here.
_NEAREST = 1e-3


def corners(boxes_4: Tensor) -> Tensor:
    """Left, top, right, bottom."""
    centre_2, size_2 = boxes_4[..., :2], boxes_4[..., 2:]
    return torch.cat([centre_2 - size_2 / 2, centre_2 + size_2 / 2], dim=-1)


def from_corners(corners_4: Tensor) -> Tensor:
    """Centre and size."""
    low_2, high_2 = corners_4[..., :2], corners_4[..., 2:]
    return torch.cat([(low_2 + high_2) / 2, high_2 - low_2], dim=-1)


def giou(first_4: Tensor, second_4: Tensor) -> Tensor:
    """Generalized IoU (arXiv:1902.09630), -1 to 1, of boxes whose leading dimensions broadcast."""
    one_4, other_4 = corners(first_4), corners(second_4)
    higher_4, lower_4 = torch.maximum(one_4, other_4), torch.minimum(one_4, other_4)
    shared = _area(lower_4[..., 2:] - higher_4[..., :2])
    hull = _area(higher_4[..., 2:] - lower_4[..., :2])
    union = _area(first_4[..., 2:]) + _area(second_4[..., 2:]) - shared
    # Two boxes without an area have neither: 0 / 0 would be no number.
    least = torch.finfo(union.dtype).tiny
    return shared / union.clamp(min=least) - (hull - union) / hull.clamp(min=least)


def inverse_sigmoid(share: Tensor) -> Tensor:
    """The number whose sigmoid this is, if it is at least 0.001 away from 0 and 1."""
    share = share.clamp(0, 1)
    return torch.log(share.clamp(min=_NEAREST) / (1 - share).clamp(min=_NEAREST))


def _area(size_2: Tensor) -> Tensor:
    # Not prod(): its backward asks the device whether there are zeros.
    size_2 = size_2.clamp(min=0)
    return size_2[..., 0] * size_2[..., 1]
