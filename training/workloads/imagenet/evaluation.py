"""Evaluation of an image classifier: top-1, top-5, and the classes that it confuses most.

Legend: B batch, K classes.
"""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.errors import UserError
from training.workload import Batch, Partial
from training.workloads.imagenet.samples import ImageSamples

_PAIRS = 10
_PICTURES_PER_PAIR = 4
_SEED = 0


def partial(m: nn.Module, b: Batch, with_flips: bool) -> Partial:
    """Sums over one batch, and each image's class and prediction."""
    logits_BK: Tensor = m(b["images"]).float()
    labels_B = b["labels"]
    if (last := int(labels_B.max())) >= logits_BK.shape[1]:
        raise UserError(
            f"the dataset has a class {last}, but the model tells {logits_BK.shape[1]} classes "
            "apart; evaluate on a dataset of the classes that it was trained on"
        )
    num = float(len(labels_B))
    first_B, right5 = _top(logits_BK, labels_B)
    sums = {"top1": (float((first_B == labels_B).sum()), num), "top5": (right5, num)}
    if with_flips:
        both_BK = logits_BK + m(b["images"].flip(2)).float()
        best_B, right5 = _top(both_BK, labels_B)
        sums["top1_with_flips"] = (float((best_B == labels_B).sum()), num)
        sums["top5_with_flips"] = (right5, num)
    sums["loss"] = (float(F.cross_entropy(logits_BK, labels_B, reduction="sum")), num)
    rows = torch.stack([b["ids"], labels_B, first_B]).cpu()
    return Partial(sums=sums, tensors={"id_label_predicted": rows})


def _top(scores_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, float]:
    """The best class of each image, and how many have theirs among the best five."""
    best_B5 = scores_BK.topk(min(5, scores_BK.shape[1]), dim=1).indices
    return best_B5[:, 0], float((best_B5 == labels_B[:, None]).any(dim=1).sum())


def predictions(m: nn.Module, b: Batch) -> Sequence[Mapping[str, Any]]:
    """Each image's five most probable classes."""
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


def show_confusions(
    parts: Sequence[Partial], classes: Sequence[str], samples: ImageSamples, out: Path
) -> None:
    """Write the pairs of classes that are confused most, as a table and with pictures."""
    rows = torch.cat([part.tensors["id_label_predicted"] for part in parts], dim=1)
    wrong = rows[:, rows[1] != rows[2]]
    pairs = Counter(zip(wrong[1].tolist(), wrong[2].tolist(), strict=True)).most_common(_PAIRS)
    with (out / "most_confused.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["class", "taken for", "images"])
        writer.writerows([classes[true], classes[taken], count] for (true, taken), count in pairs)
    if pairs:
        _draw(wrong, [pair for pair, _ in pairs], classes, samples, out)


def _draw(
    wrong: Tensor,
    pairs: Sequence[tuple[int, int]],
    classes: Sequence[str],
    samples: ImageSamples,
    out: Path,
) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return  # an image without it: the table says it too
    figure = Figure(figsize=(1.6 * _PICTURES_PER_PAIR, 1.8 * len(pairs)), layout="tight")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(pairs), _PICTURES_PER_PAIR, squeeze=False)
    rng = torch.Generator().manual_seed(_SEED)
    for axes, (true, taken) in zip(grid, pairs, strict=True):
        is_pair = (wrong[1] == true) & (wrong[2] == taken)
        for place, number in zip(axes, wrong[0, is_pair].tolist(), strict=False):
            place.imshow(samples.get(number, -1, rng)["images"].numpy())
        for place in axes:
            place.set_axis_off()
        title = f"{classes[true]}, taken for {classes[taken]}"
        axes[0].set_title(title, fontsize=8, loc="left", parse_math=False)
    figure.savefig(out / "most_confused.png", dpi=110)
