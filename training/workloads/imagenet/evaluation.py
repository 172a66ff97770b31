"""Evaluation of an image classifier: top-1, top-5, and the classes that it confuses most.

Legend: B batch, K classes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.errors import UserError
from training.evaluation_files import Captioned, write_sheet, write_table
from training.workload import Batch, Inputs, Partial, Train
from training.workloads.imagenet.config import ImagenetConfig

_PAIRS = 10
_PICTURES_PER_PAIR = 4
_SEED = 0


class ImageEvaluation(Train):
    """What the stage does with the network that it has trained."""

    config: ImagenetConfig

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Sums over one batch, and each image's class and prediction."""
        logits_BK: Tensor = m(b["images"]).float()
        labels_B = b["labels"]
        if (last := int(labels_B.max())) >= logits_BK.shape[1]:
            raise UserError(
                f"the dataset has a class {last}, but the model tells {logits_BK.shape[1]} "
                "classes apart; evaluate on a dataset of the classes that it was trained on"
            )
        num = float(len(labels_B))
        first_B, right5 = _top(logits_BK, labels_B)
        sums = {"top1": (float((first_B == labels_B).sum()), num), "top5": (right5, num)}
        if self.config.evaluate_flips:
            both_BK = logits_BK + m(b["images"].flip(2)).float()
            best_B, right5 = _top(both_BK, labels_B)
            sums["top1_with_flips"] = (float((best_B == labels_B).sum()), num)
            sums["top5_with_flips"] = (right5, num)
        sums["loss"] = (float(F.cross_entropy(logits_BK, labels_B, reduction="sum")), num)
        rows = torch.stack([b["ids"], labels_B, first_B]).cpu()
        return Partial(sums=sums, tensors={"id_label_predicted": rows})

    def predict(self, m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
        """The five most probable classes of each image, by number, and the true one."""
        probabilities_BK = m(b["images"]).float().softmax(dim=1)
        best = probabilities_BK.topk(min(5, probabilities_BK.shape[1]), dim=1)
        return [
            {"image": image, "label": label, "classes": classes, "probabilities": probabilities}
            for image, label, classes, probabilities in zip(
                b["ids"].tolist(),
                b["labels"].tolist(),
                best.indices.tolist(),
                best.values.tolist(),
                strict=True,
            )
        ]

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """The pairs of classes that are confused most, as a table and with pictures."""
        classes = i.dataset.meta["classes"]
        rows = torch.cat([part.tensors["id_label_predicted"] for part in parts], dim=1)
        wrong = rows[:, rows[1] != rows[2]]
        pairs = Counter(zip(wrong[1].tolist(), wrong[2].tolist(), strict=True)).most_common(_PAIRS)
        told = ((classes[true], classes[taken], count) for (true, taken), count in pairs)
        write_table(out / "most_confused.csv", ["class", "taken for", "images"], told)
        samples, rng = self.samples(i, "validation"), torch.Generator().manual_seed(_SEED)
        pictures = []
        for (true, taken), _ in pairs:
            numbers = wrong[0, (wrong[1] == true) & (wrong[2] == taken)].tolist()
            images = [samples.get(number, -1, rng) for number in numbers[:_PICTURES_PER_PAIR]]
            pixels = np.concatenate([image["images"].numpy() for image in images], axis=1)
            pictures.append(Captioned(pixels, f"{classes[true]}, taken for {classes[taken]}"))
        if pictures:
            write_sheet(out / "most_confused.png", "most confused", pictures, num_columns=1)


def _top(scores_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, float]:
    """The best class of each image, and how many have theirs among the best five."""
    best_B5 = scores_BK.topk(min(5, scores_BK.shape[1]), dim=1).indices
    return best_B5[:, 0], float((best_B5 == labels_B[:, None]).any(dim=1).sum())
