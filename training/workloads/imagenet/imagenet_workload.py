"""The imagenet workload: one stage trains a classifier on images in shards.

Legend: B batch, C channels, H height, W width, K classes.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torchvision.transforms import v2

from contract.errors import UserError
from training import (
    Batch,
    Captioned,
    Inputs,
    Loss,
    Partial,
    Prepare,
    Progress,
    Rung,
    Settings,
    Start,
    Train,
    Workload,
    Writer,
    autocast_rungs,
    micro_batch_rungs,
    write_sheet,
    write_table,
)
from training.durable import Brought, FinishedFiles, Output
from training.workloads.imagenet.config import BASE_BATCH, RECIPES, ImagenetConfig
from training.workloads.imagenet.image_dataset import make_dataset, pack_dataset
from training.workloads.imagenet.model import (
    SMALL,
    TIMM,
    Classifier,
    from_library,
    is_resnet,
    layers,
    pixels_of,
    write_for_library,
    write_program,
)
from training.workloads.imagenet.packing import ImageOptions, NoImageError, Shards
from training.workloads.imagenet.samples import EVAL_RATIO, ImageSamples, evaluated_image

# This many of the most confused pairs of classes are shown, with pictures.
_PAIRS, _PICTURES_PER_PAIR = 10, 4
# So many of the most probable classes are named.
_NUM_BEST = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainClassifier(Train):
    """The training of one network; `name` is the stage's name in metrics and reports."""

    config: ImagenetConfig
    name: str = "classifier"

    @property
    def settings(self) -> Settings:
        """Length, batches, precision; the warm-up is part of the learning-rate schedule."""
        c = self.config
        return replace(
            c.settings,
            schedule=self._schedule if c.warmup_epochs else c.settings.schedule,
            ema_buffers=c.settings.ema_decay is not None,
        )

    def _schedule(self, step: int, num_steps: int) -> float:
        """Rise linearly over the warm-up epochs, then fall, linearly or by half a cosine."""
        c = self.config
        warmup = num_steps * min(c.warmup_epochs / c.epochs, 1.0)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = (num_steps - step) / max(num_steps - warmup, 1.0)
        if c.settings.schedule != "linear":
            left = 0.5 - 0.5 * float(torch.cos(torch.tensor(left * torch.pi, dtype=torch.float64)))
        low = c.settings.final_lr_fraction
        return low + (1 - low) * left

    def model(self, i: Inputs) -> Classifier:
        c = self.config
        # There are few image sizes, so searching for the fastest convolutions pays off.
        torch.backends.cudnn.benchmark = not c.deterministic
        return Classifier(c.architecture, c.num_classes, blur_pool=c.blur_pool)

    def from_foreign(
        self, m: nn.Module, tensors: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | None:
        """Read weights of torchvision's or timm's model of the same name."""
        return from_library(m, tensors)

    def formats(self) -> Mapping[str, Writer]:
        """Return writers for its library (for a ResNet, both libraries) and a plain program."""
        c = self.config
        libraries = ["torchvision", "timm"] if is_resnet(c.architecture) else ["torchvision"]
        if c.architecture.startswith(TIMM):
            libraries = ["timm"]
        if c.blur_pool or c.architecture == SMALL:
            libraries = []
        program = partial(write_program, side=c.eval_size)
        return {**dict.fromkeys(libraries, write_for_library), "torch.export": program}

    def companions(
        self, meta: Mapping[str, Any], read: Callable[[str], bytes]
    ) -> Mapping[str, bytes]:
        """Return what an evaluation does to an image; an exported program normalizes itself."""
        side = self.config.image_size(-1)
        shorter = round(side / EVAL_RATIO)
        mean, deviation = pixels_of(self.config.architecture)
        numbers = {"shorter_side": shorter, "middle": side, "mean": mean, "deviation": deviation}
        steps = {"pixels": "RGB, 0 to 255", **numbers}
        return {"preprocessing.json": json.dumps(steps).encode()}

    def refusals(self, meta: Mapping[str, Any]) -> Sequence[str]:
        """Refuse another number of classes, an unknown architecture or an unsupported size."""
        num, mine = len(meta.get("classes", ())), self.config.num_classes
        found = [self._unfit()]
        if num not in (0, mine):
            found.append(
                f"the dataset has {num} classes but num_classes is {mine}; pass --override "
                f"num_classes={num}"
            )
        return [text for text in found if text]

    def _unfit(self) -> str:
        """Return why the architecture cannot train on these images, found without computing."""
        c = self.config
        try:
            with torch.device("meta"):
                network = Classifier(c.architecture, c.num_classes, blur_pool=c.blur_pool).eval()
        except UserError as error:
            return str(error)
        except NotImplementedError:  # it reads values while it is built, as RegNets do
            return ""
        for side in sorted({c.image_size(epoch) for epoch in range(-1, c.epochs)}):
            images = torch.empty(2, side, side, 3, dtype=torch.uint8, device="meta")
            try:
                with torch.no_grad():
                    network(images)
            except Exception as error:  # each library has its own
                why = f"{error}".rstrip(".") or type(error).__name__
                return f"{c.architecture} does not take images of {side} pixels ({why})"
        return ""

    def start(self, m: nn.Module, i: Inputs) -> Start:
        """State the images of each split."""
        classes, splits = i.dataset.meta["classes"], i.dataset.meta["splits"]
        facts = {f"{split}_images": float(count) for split, count in splits.items()}
        return Start(facts={**facts, "chance": 1 / len(classes)})

    def optimizer(self, m: nn.Module) -> Optimizer:
        """Return SGD or AdamW; norms and biases do not decay, and early layers learn slower."""
        c = self.config
        rate = c.learning_rate * c.settings.global_batch / BASE_BATCH
        assert isinstance(m, Classifier)
        groups = [
            {"params": params, "weight_decay": decay, "lr": rate * share}
            for share, layer in self._by_rate(m.network)
            for params, decay in (
                ([p for p in layer if p.ndim > 1], c.weight_decay),
                ([p for p in layer if p.ndim <= 1], 0.0),
            )
            if params
        ]
        if c.optimizer == "adamw":
            return AdamW(groups, lr=rate)
        return SGD(groups, lr=rate, momentum=c.momentum)

    def _by_rate(self, network: nn.Module) -> list[tuple[float, list[nn.Parameter]]]:
        """Return layers' shares of the learning rate and parameters, the last layer first."""
        decay = self.config.layer_decay
        if decay == 1.0:
            return [(1.0, list(network.parameters()))]
        parts = [found for part in layers(network) if (found := list(part.parameters()))]
        known = {id(p) for part in parts for p in part}
        # For example, a transformer's positions, which belong to no layer.
        own = [p for p in network.parameters() if id(p) not in known]
        ordered = [*reversed(parts), *([own] if own else [])]
        return [(decay**number, part) for number, part in enumerate(ordered)]

    def samples(self, i: Inputs, split: str) -> ImageSamples:
        c = self.config
        # A finished run may be evaluated on other images.
        if (num := len(i.dataset.meta.get("classes", ()))) not in (0, c.num_classes):
            raise UserError(
                f"the dataset has {num} classes, but the model tells {c.num_classes} apart; use a "
                "dataset of the classes that it was trained on"
            )
        return ImageSamples(
            shards=Shards(i.dataset, split),
            size=c.image_size,
            window=c.shuffle_window,
            seed=i.seed,
            augment=v2.RandAugment(magnitude=c.rand_augment) if c.rand_augment else None,
        )

    def first_files(self) -> int:
        """Return a window's shards: a batch has images of all of them."""
        return self.config.shuffle_window

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        images_BHWC, targets = self._mixed(b["images"], b["labels"])
        logits_BK: Tensor = m(images_BHWC).float()
        total = F.cross_entropy(
            logits_BK, targets, reduction="sum", label_smoothing=self.config.label_smoothing
        )
        num = self.weight(b)
        right = (logits_BK.argmax(dim=1) == b["labels"]).sum()
        return Loss(total=total, metrics={"top1": (right, num)})

    def _mixed(self, images_BHWC: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """Apply mixup or CutMix to a micro-batch, with the generators that its step has seeded."""
        c = self.config
        ways: list[v2.Transform] = []
        if c.mixup:
            ways.append(v2.MixUp(alpha=c.mixup, num_classes=c.num_classes))
        if c.cutmix:
            ways.append(v2.CutMix(alpha=c.cutmix, num_classes=c.num_classes))
        if not ways:
            return images_BHWC, labels_B
        images_BCHW = images_BHWC.float().permute(0, 3, 1, 2)
        mixed_BCHW, targets_BK = v2.RandomChoice(ways)(images_BCHW, labels_B)
        return mixed_BCHW.permute(0, 2, 3, 1), targets_BK

    def example(self, size: int) -> Batch:
        """Return a batch of the largest training images."""
        c = self.config
        numbers = torch.zeros(size, dtype=torch.long)
        return {
            "images": torch.zeros(size, c.train_size, c.train_size, 3, dtype=torch.uint8),
            "labels": numbers,
            "ids": numbers,
            "replaced": numbers,
        }

    def work(self, epoch: int) -> tuple[str, float]:
        """Return an epoch's work: that of convolutions grows with the pixels."""
        c, side = self.config, self.config.image_size(epoch)
        passes = 2 if epoch < 0 and c.evaluate_flips else 1
        return f"{side} pixels", passes * (side / c.train_size) ** 2

    def shape_key(self, b: Batch) -> int:
        """Return the images' side: an evaluation's smaller last batch needs no other code."""
        return int(b["images"].shape[1])

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        """Return sums over one batch, and each image's class and prediction."""
        logits_BK: Tensor = m(b["images"]).float()
        labels_B = b["labels"]
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
        """Return each image's five most probable classes, by number, and its true class."""
        probabilities_BK = m(b["images"]).float().softmax(dim=1)
        best = probabilities_BK.topk(min(_NUM_BEST, probabilities_BK.shape[1]), dim=1)
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

    def draw(self, m: nn.Module, i: Inputs, images: Sequence[Path], out: Path) -> None:
        """Name each image's five most probable classes, in a table and in a sheet of pictures."""
        names, rows, pictures = i.dataset.meta["classes"], [], []
        for path in images:
            try:
                pixels = evaluated_image(path.read_bytes(), self.config.image_size(-1))
            except NoImageError as error:
                raise UserError(f"{path} {error}; remove it") from error
            probabilities_K = m(pixels[None].to(i.device)).float().softmax(dim=1)[0]
            best = probabilities_K.topk(min(_NUM_BEST, len(names)))
            found = [(names[k], p) for p, k in zip(*(t.tolist() for t in best), strict=True)]
            rows += [(path.name, place, *each) for place, each in enumerate(found, 1)]
            name, probability = found[0]
            pictures.append(Captioned(pixels.numpy(), f"{path.name}: {name} {probability:.0%}"))
        write_table(out / "classes.csv", ["file", "place", "class", "probability"], rows)
        write_sheet(out / "classes.png", "the most probable class", pictures, _PICTURES_PER_PAIR)

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """Write the most confused pairs of classes, as a table and with pictures."""
        classes = i.dataset.meta["classes"]
        rows = torch.cat([part.tensors["id_label_predicted"] for part in parts], dim=1)
        wrong = rows[:, rows[1] != rows[2]]
        pairs = Counter(zip(wrong[1].tolist(), wrong[2].tolist(), strict=True)).most_common(_PAIRS)
        table = ((classes[true], classes[taken], count) for (true, taken), count in pairs)
        write_table(out / "most_confused.csv", ["class", "taken for", "images"], table)
        samples, rng = self.samples(i, "validation"), torch.Generator()
        pictures = []
        for (true, taken), _ in pairs:
            numbers = wrong[0, (wrong[1] == true) & (wrong[2] == taken)].tolist()
            images = [samples.get(number, -1, rng) for number in numbers[:_PICTURES_PER_PAIR]]
            pixels = np.concatenate([image["images"].numpy() for image in images], axis=1)
            pictures.append(Captioned(pixels, f"{classes[true]}, taken for {classes[taken]}"))
        if pictures:
            write_sheet(out / "most_confused.png", "most confused", pictures, num_columns=1)


def _top(scores_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, float]:
    """Return each image's best class, and how many have the true one among the best five."""
    best_B5 = scores_BK.topk(min(5, scores_BK.shape[1]), dim=1).indices
    return best_B5[:, 0], float((best_B5 == labels_B[:, None]).any(dim=1).sum())


_IMAGENET = {"train": 1_281_167, "validation": 50_000}
_NOMINAL_SAMPLES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {name: {"train": 960, "validation": 240} if name == "laptop" else _IMAGENET for name in RECIPES}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Imagenet(Workload[ImagenetConfig]):
    """The workload that the registry imports."""

    name: str = "imagenet"
    data_options: ImageOptions = field(default_factory=ImageOptions)
    recipes = RECIPES
    nominal_samples = _NOMINAL_SAMPLES

    def stages(self, c: ImagenetConfig) -> Sequence[Prepare | Train]:
        return [TrainClassifier(config=c)]

    def fitted(self, c: ImagenetConfig, meta: Mapping[str, Any]) -> Mapping[str, str]:
        """Set the dataset's number of classes."""
        num = len(meta.get("classes", ())) or c.num_classes
        return {"num_classes": str(num)} if num != c.num_classes else {}

    def rungs(self, c: ImagenetConfig) -> Sequence[Rung]:
        return [*micro_batch_rungs(c), *autocast_rungs(c)]

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        return make_dataset(out, count, seed, progress)

    def pack_dataset(
        self, files: Sequence[Brought], output: Output, seed: int, progress: Progress
    ) -> FinishedFiles:
        return pack_dataset(files, output, seed, progress, self.data_options)


IMAGENET = _Imagenet()
