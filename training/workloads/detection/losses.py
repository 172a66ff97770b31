"""The detector's loss: focal, L1 and generalized IoU, of every layer, summed over the objects.

The cheapest assignment, found on the CPU, decides which query predicts which object. The engine
divides by the number of objects, because it knows those of all micro-batches and ranks. S sets of
predictions (each decoder layer's, then the encoder's), B images, T images of all sets, Q queries, N
objects of the image with most, C classes, L layers, G groups, K denoising queries.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.workloads.detection.decoder import giou
from training.workloads.detection.detector import Predictions, denoising_targets

# Maps costs (T, Q, N) and labels (B, N), -1 for no object, to objects' queries (T, N), Q for none.
# T is a multiple of B: several layers' predictions of the same images.
Match: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# The weights of the parts of the loss, and of the matching costs, as published.
_CLASSES, _BOXES, _GIOU = 1.0, 5.0, 2.0
_CLASS_COST, _BOX_COST, _GIOU_COST = 2.0, 5.0, 2.0
# The focal loss (arXiv:1708.02002): the share of the objects' class, and the focus.
_ALPHA, _GAMMA = 0.25, 2.0


@torch.no_grad()
def _costs(logits_TQC: Tensor, boxes_TQ4: Tensor, labels_TN: Tensor, boxes_TN4: Tensor) -> Tensor:
    """Return the costs of queries for predicting objects, (T, Q, N): class, distance, overlap."""
    chance_TQC = logits_TQC.sigmoid()
    yes_TQC = -_ALPHA * (1 - chance_TQC) ** _GAMMA * (chance_TQC + 1e-8).log()
    no_TQC = (1 - _ALPHA) * chance_TQC**_GAMMA * (1 - chance_TQC + 1e-8).log()
    label_TQN = labels_TN.clamp(min=0)[:, None].expand(-1, logits_TQC.shape[1], -1)
    class_TQN = (yes_TQC + no_TQC).gather(2, label_TQN)
    boxes_TQ14, boxes_T1N4 = boxes_TQ4[:, :, None], boxes_TN4[:, None]
    away_TQN = (boxes_TQ14 - boxes_T1N4).abs().sum(dim=-1)
    overlap_TQN = giou(boxes_TQ14, boxes_T1N4)
    return _CLASS_COST * class_TQN + _BOX_COST * away_TQN - _GIOU_COST * overlap_TQN


def hungarian(costs_TQN: Tensor, labels_BN: Tensor) -> Tensor:
    """Return the assignment with the lowest total cost."""
    # Importing it takes a third of a second, which only training needs to spend.
    from scipy.optimize import linear_sum_assignment

    # NaN must end in a loss of NaN, not in an error of the solver.
    matrices = np.nan_to_num(costs_TQN.cpu().numpy(), nan=1e9, posinf=1e9, neginf=-1e9)
    num_queries = matrices.shape[1]
    queries_TN = np.full((len(matrices), matrices.shape[2]), num_queries, dtype=np.int64)
    objects = [np.flatnonzero(row >= 0) for row in labels_BN.cpu().numpy()]
    for number, matrix in enumerate(matrices):
        of_image = objects[number % len(objects)]
        queries, places = linear_sum_assignment(matrix[:, of_image])
        queries_TN[number, of_image[places]] = queries
    return torch.from_numpy(queries_TN).to(costs_TQN.device)


def in_order(costs_TQN: Tensor, labels_BN: Tensor) -> Tensor:
    """Match objects to the first queries whatever the cost: only shapes matter to a measurement."""
    num_images, num_queries, num_objects = costs_TQN.shape
    queries_N = torch.arange(num_objects, device=costs_TQN.device).clamp(max=num_queries)
    return queries_N.expand(num_images, -1)


class _Losses(NamedTuple):
    """The training loss and, for the log, its weighted parts; all are sums over objects."""

    total: Tensor
    classes: Tensor  # of the last layer
    boxes: Tensor
    giou: Tensor
    encoder: Tensor
    denoising: Tensor  # of all layers


def criterion(
    predictions: Predictions,
    labels_BN: Tensor,
    boxes_BN4: Tensor,
    match: Match = hungarian,
) -> _Losses:
    """Match each layer's predictions with the objects (label -1: none); sum the losses."""
    p = predictions
    boxes_SBQ4 = torch.cat([p.boxes_LBQ4, p.encoder_boxes_BQ4[None]])
    # Under autocast, logits have fewer bits than boxes.
    logits_SBQC = torch.cat([p.logits_LBQC, p.encoder_logits_BQC[None]]).to(boxes_SBQ4.dtype)
    queries_SBN = _matched(logits_SBQC, boxes_SBQ4, labels_BN, boxes_BN4, match)
    num_queries, is_matched_SBN = logits_SBQC.shape[2], queries_SBN < logits_SBQC.shape[2]
    # One more place than there are queries, for the objects without one.
    targets_SBQ = labels_BN.new_full((*logits_SBQC.shape[:2], num_queries + 1), -1)
    targets_SBQ.scatter_(2, queries_SBN, labels_BN.expand(queries_SBN.shape))
    found_SBN4 = _taken(boxes_SBQ4, queries_SBN.clamp(max=num_queries - 1))
    sums_3S = _weighted_sums(
        logits_SBQC,
        targets_SBQ[..., :-1],
        found_SBN4,
        boxes_BN4.expand(found_SBN4.shape),
        is_matched_SBN,
    )
    denoising = _denoising(p, labels_BN, boxes_BN4)
    classes, boxes, overlap = sums_3S[:, -2].detach()
    return _Losses(
        total=sums_3S.sum() + denoising,
        classes=classes,
        boxes=boxes,
        giou=overlap,
        encoder=sums_3S[:, -1].sum().detach(),
        denoising=denoising.detach(),
    )


def _weighted_sums(
    logits_SBQC: Tensor,
    targets_SBQ: Tensor,
    found_SBN4: Tensor,
    true_SBN4: Tensor,
    counts_SBN: Tensor,
) -> Tensor:
    """Return the losses of classes, boxes and overlaps, (3, S); boxes only where `counts_SBN`."""
    classes_SBQC = _focal(logits_SBQC, targets_SBQ)
    away_SBN = (found_SBN4 - true_SBN4).abs().sum(dim=-1)
    apart_SBN = 1 - giou(found_SBN4, true_SBN4)
    boxes_S, apart_S = (
        torch.where(counts_SBN, each_SBN, 0).sum(dim=(1, 2)) for each_SBN in (away_SBN, apart_SBN)
    )
    classes_S = classes_SBQC.sum(dim=(1, 2, 3))
    return torch.stack([_CLASSES * classes_S, _BOXES * boxes_S, _GIOU * apart_S])


def _focal(logits_C: Tensor, targets: Tensor) -> Tensor:
    """Compute each class's own focal loss (arXiv:1708.02002); a target of -1 means no class."""
    classes = torch.arange(logits_C.shape[-1], device=logits_C.device)
    is_class_C = targets[..., None] == classes
    entropy_C = F.binary_cross_entropy_with_logits(
        logits_C, is_class_C.to(logits_C.dtype), reduction="none"
    )
    chance_C = logits_C.sigmoid()
    wrong_C = torch.where(is_class_C, 1 - chance_C, chance_C)
    share_C = torch.where(is_class_C, _ALPHA, 1 - _ALPHA)
    return share_C * wrong_C**_GAMMA * entropy_C


def _matched(
    logits_SBQC: Tensor,
    boxes_SBQ4: Tensor,
    labels_BN: Tensor,
    boxes_BN4: Tensor,
    match: Match,
) -> Tensor:
    """Return each object's query, (S, B, N)."""
    num_sets = len(logits_SBQC)
    costs_TQN = _costs(
        logits_SBQC.flatten(0, 1),
        boxes_SBQ4.flatten(0, 1),
        labels_BN.repeat(num_sets, 1),
        boxes_BN4.repeat(num_sets, 1, 1),
    )
    return match(costs_TQN, labels_BN).view(num_sets, *labels_BN.shape)


def _taken(boxes_SBQ4: Tensor, queries_SBN: Tensor) -> Tensor:
    """Return these queries' boxes, by indexing, whose backward always has the same bits."""
    num_sets, num_images = boxes_SBQ4.shape[:2]
    set_S11 = torch.arange(num_sets, device=boxes_SBQ4.device)[:, None, None]
    image_B1 = torch.arange(num_images, device=boxes_SBQ4.device)[:, None]
    return boxes_SBQ4[set_S11, image_B1, queries_SBN]


def _denoising(p: Predictions, labels_BN: Tensor, boxes_BN4: Tensor) -> Tensor:
    """Return the denoising queries' loss, averaged over groups; they need no matching."""
    boxes_LBK4 = p.denoising_boxes_LBK4
    logits_LBKC = p.denoising_logits_LBKC.to(boxes_LBK4.dtype)
    num_groups = logits_LBKC.shape[2] // max(1, 2 * labels_BN.shape[1])
    if not num_groups:
        # Zero, but not a constant, so that every parameter has a gradient.
        return logits_LBKC.sum() + boxes_LBK4.sum()
    targets_BG2N = denoising_targets(labels_BN, num_groups)
    num_layers = len(logits_LBKC)
    true_LBK4 = (
        boxes_BN4[:, None].expand(-1, 2 * num_groups, -1, -1).flatten(1, 2).expand(boxes_LBK4.shape)
    )
    targets_LBK = targets_BG2N.flatten(1).expand(num_layers, -1, -1)
    sums_3L = _weighted_sums(logits_LBKC, targets_LBK, boxes_LBK4, true_LBK4, targets_LBK >= 0)
    return sums_3L.sum() / num_groups
