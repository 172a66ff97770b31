"""Which query is to predict which object: the cheapest assignment, found on the CPU.

T images (of all layers), Q queries, N objects of the image with most, C classes.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from training.workloads.detection.architecture import LossWeights
from training.workloads.detection.boxes import giou

# Costs (T, Q, N) and labels (B, N), -1 for no object, to each object's query (T, N), Q for none.
# T is a multiple of B: several layers' predictions of the same images.
Match: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def missing_packages() -> list[str]:
    """Why this machine cannot train, in sentences: to be asked before the first step."""
    if find_spec("scipy") is not None:
        return []
    return [
        "matching predictions to objects needs the package scipy, which is not installed; "
        "install it with `pip install scipy`"
    ]


@torch.no_grad()
def costs(
    logits_TQC: Tensor, boxes_TQ4: Tensor, labels_TN: Tensor, boxes_TN4: Tensor, w: LossWeights
) -> Tensor:
    """What it costs that a query predicts an object, (T, Q, N): class, distance and overlap."""
    chance_TQC = logits_TQC.sigmoid()
    yes_TQC = -w.focal_alpha * (1 - chance_TQC) ** w.focal_gamma * (chance_TQC + 1e-8).log()
    no_TQC = (1 - w.focal_alpha) * chance_TQC**w.focal_gamma * (1 - chance_TQC + 1e-8).log()
    label_TQN = labels_TN.clamp(min=0)[:, None].expand(-1, logits_TQC.shape[1], -1)
    class_TQN = (yes_TQC + no_TQC).gather(2, label_TQN)
    boxes_TQ14, boxes_T1N4 = boxes_TQ4[:, :, None], boxes_TN4[:, None]
    away_TQN = (boxes_TQ14 - boxes_T1N4).abs().sum(dim=-1)
    overlap_TQN = giou(boxes_TQ14, boxes_T1N4)
    return w.class_cost * class_TQN + w.box_cost * away_TQN - w.giou_cost * overlap_TQN


def hungarian(costs_TQN: Tensor, labels_BN: Tensor) -> Tensor:
    """The assignment that costs least in all."""
    # A third of a second of imports that only training needs.
    from scipy.optimize import linear_sum_assignment

    # What is no number must end in a loss that is none, not in an error of the solver.
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
    """The first queries, whatever it costs: a match by shapes alone, to measure a step."""
    num_images, num_queries, num_objects = costs_TQN.shape
    queries_N = torch.arange(num_objects, device=costs_TQN.device).clamp(max=num_queries)
    return queries_N.expand(num_images, -1)
