"""Contrastive denoising: besides its own queries the decoder is given noised true boxes.

Positive ones are to find back to their object, negative ones, further off, to find nothing. They
come in groups, each of which has every object once as a positive and once as a negative query.
B images, N objects of the image with most, G groups, K = G x 2 x N denoising queries, Q the
detector's own queries.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from training.workloads.detection.architecture import Architecture
from training.workloads.detection.boxes import corners, from_corners


class Denoising(NamedTuple):
    """Denoising queries. An image with fewer than N objects has some without a label (-1)."""

    labels_BK: Tensor
    boxes_BK4: Tensor
    num_groups: int


def denoising(labels_BN: Tensor, boxes_BN4: Tensor, architecture: Architecture) -> Denoising:
    """Draw noise from torch's generator of the device; as many groups as there are queries for.

    There is one group at least: images with many objects take more queries than the architecture's.
    """
    num_images, num_objects = labels_BN.shape
    num_groups = max(1, architecture.denoising_queries // max(1, num_objects))
    shape = (num_images, num_groups, 2, num_objects)
    is_object = (labels_BN >= 0)[:, None, None]
    labels_BG2N = labels_BN[:, None, None].expand(shape)
    other_BG2N = torch.randint_like(labels_BG2N, architecture.num_classes)
    # Half of the label noise, as in the reference.
    is_other = torch.rand(shape, device=labels_BN.device) < architecture.label_noise / 2
    labels_BG2N = torch.where(is_other & is_object, other_BG2N, labels_BG2N)
    noise_BG2N4 = torch.rand((*shape, 4), device=boxes_BN4.device)
    # The negatives' corners move between one and two times as far as the positives' may.
    noise_BG2N4[:, :, 1] += 1
    sign_BG2N4 = torch.randint_like(noise_BG2N4, 2) * 2 - 1
    reach_BN4 = boxes_BN4[..., 2:].repeat(1, 1, 2) * (architecture.box_noise / 2)
    moved_BG2N4 = (
        corners(boxes_BN4)[:, None, None] + noise_BG2N4 * sign_BG2N4 * (reach_BN4[:, None, None])
    )
    boxes_BG2N4 = from_corners(moved_BG2N4.clamp(0, 1))
    # Padding starts in the middle, with half of the image's size.
    boxes_BG2N4 = torch.where(is_object[..., None], boxes_BG2N4, 0.5)
    return Denoising(
        labels_BK=labels_BG2N.flatten(1), boxes_BK4=boxes_BG2N4.flatten(1, 3), num_groups=num_groups
    )


def hidden_queries(noise: Denoising, num_queries: int) -> Tensor | None:
    """Which queries (rows) must not see which (columns), denoising ones first: (K + Q, K + Q).

    None sees a denoising query but those of the same group: it would see the truth.
    """
    num_noised = noise.labels_BK.shape[1]
    if not num_noised:
        return None
    number = torch.arange(num_noised + num_queries, device=noise.labels_BK.device)
    group = torch.where(number < num_noised, number * noise.num_groups // num_noised, -1)
    return (group != group[:, None]) & (group >= 0)


def denoising_targets(labels_BN: Tensor, num_groups: int) -> Tensor:
    """The true labels (B, G, 2, N) of the denoising queries: -1 for the negative ones."""
    labels_BG2N = labels_BN[:, None, None].repeat(1, num_groups, 2, 1)
    labels_BG2N[:, :, 1] = -1
    return labels_BG2N
