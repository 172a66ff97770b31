"""Evaluation: top-1 and top-5 by hand, flips apart, the most confused classes with pictures."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from contract.errors import UserError
from training.workload import Batch, Inputs, Partial, Samples, Train
from training.workloads.imagenet.config import _laptop
from training.workloads.imagenet.imagenet_workload import TrainClassifier


def summarize(parts: Sequence[Partial]) -> Mapping[str, float]:
    return Train.summarize(Train(), parts, Path())


def partial(m: nn.Module, b: Batch, *, with_flips: bool) -> Partial:
    config = replace(_laptop(), evaluate_flips=with_flips)
    return TrainClassifier(config=config).evaluate(m, b)


CLASSES = [f"class {number}" for number in range(8)]


class LeftColumn(nn.Module):
    """Logits that are the pixels of the left column: each class is a row."""

    def forward(self, images_BHWC: Tensor) -> Tensor:
        return images_BHWC[:, :, 0, 0].float()


def batch(left: list[list[int]], labels: list[int], right: list[list[int]] | None = None) -> Batch:
    """Images of eight rows and two columns."""
    columns = torch.tensor([left, right or left]).permute(1, 2, 0)
    return {
        "images": columns.unsqueeze(-1).expand(-1, -1, -1, 3).to(torch.uint8),
        "labels": torch.tensor(labels),
        "ids": torch.arange(10, 10 + len(labels)),
    }


# Best to worst: class 7, 6, 5, 4, 3 | 2, 1, 0.
RISING = [10, 20, 30, 40, 50, 60, 70, 80]


def test_top_1_and_top_5_count_the_best_class_and_the_best_five() -> None:
    parts = [
        partial(LeftColumn(), batch([RISING] * 3, [7, 3, 2]), with_flips=False),
        partial(LeftColumn(), batch([RISING], [6]), with_flips=False),
    ]
    metrics = summarize(parts)
    assert list(metrics) == ["top1", "top5", "loss"]
    assert (metrics["top1"], metrics["top5"]) == (1 / 4, 3 / 4)
    loss = torch.nn.functional.cross_entropy(
        torch.tensor([RISING] * 4).float(), torch.tensor([7, 3, 2, 6])
    )
    assert metrics["loss"] == pytest.approx(float(loss))


def test_figures_with_flips_stand_beside_the_plain_ones() -> None:
    """The mirrored image is surer of class 0 than the image is of class 7."""
    falling = [255, *RISING[-2::-1]]
    given = batch([RISING, RISING], [0, 7], right=[falling, falling])
    metrics = summarize([partial(LeftColumn(), given, with_flips=True)])
    assert list(metrics) == ["top1", "top5", "top1_with_flips", "top5_with_flips", "loss"]
    assert (metrics["top1"], metrics["top1_with_flips"]) == (0.5, 0.5)
    plain = summarize([partial(LeftColumn(), given, with_flips=False)])
    assert {name: metrics[name] for name in plain} == plain
    only_zero = batch([RISING], [0], right=[falling])
    only = summarize([partial(LeftColumn(), only_zero, with_flips=True)])
    assert (only["top1"], only["top1_with_flips"]) == (0.0, 1.0)


def test_fewer_than_five_classes_have_a_top_5_of_all_of_them() -> None:
    few = batch([[1, 2, 3]], [0])
    assert summarize([partial(LeftColumn(), few, with_flips=False)])["top5"] == 1.0


@pytest.mark.parametrize("num", [7, 9])
def test_fails_for_a_dataset_of_other_classes(num: int) -> None:
    """Of fewer, each label is another class's number: it was measured without a word."""
    dataset = SimpleNamespace(meta={"classes": [*map(str, range(num))]})
    with pytest.raises(UserError, match=f"has {num} classes, but the model tells 8 apart; use a"):
        TrainClassifier(config=_laptop()).samples(SimpleNamespace(dataset=dataset), "validation")  # type: ignore[arg-type]


def test_a_prediction_has_the_five_most_probable_classes() -> None:
    stage = TrainClassifier(config=_laptop())
    (first, _) = stage.predict(LeftColumn(), batch([RISING] * 2, [3, 4]))
    assert (first["image"], first["label"], first["classes"]) == (10, 3, [7, 6, 5, 4, 3])
    assert first["probabilities"] == sorted(first["probabilities"], reverse=True)


class MeanColors(nn.Module):
    """Logits that are the means of the colors, of which each is a class."""

    def forward(self, images_BHWC: Tensor) -> Tensor:
        return images_BHWC.float().mean(dim=(1, 2)) / 50


def test_images_of_one_s_own_are_named_whatever_their_format(tmp_path: Path) -> None:
    found, paths = tmp_path / "found", []
    found.mkdir()
    for name, color in (("a.png", (250, 0, 0)), ("b.gif", (0, 250, 0)), ("c.jpg", (0, 0, 250))):
        Image.new("RGB", (90, 60), color).save(tmp_path / name)
        paths.append(tmp_path / name)
    inputs = cast(
        Inputs,
        SimpleNamespace(
            dataset=SimpleNamespace(meta={"classes": ["red", "green", "blue"]}),
            device=torch.device("cpu"),
        ),
    )
    stage = TrainClassifier(config=_laptop())
    stage.draw(MeanColors(), inputs, paths, found)
    rows = list(csv.DictReader((found / "classes.csv").read_text().splitlines()))
    best = [(each["file"], each["class"]) for each in rows if each["place"] == "1"]
    assert best == [("a.png", "red"), ("b.gif", "green"), ("c.jpg", "blue")]
    assert len(rows) == 9 and float(rows[0]["probability"]) > 0.9
    assert (found / "classes.png").exists()
    (tmp_path / "d.txt").write_text("no image")
    with pytest.raises(UserError, match=r"d\.txt cannot identify the image file; remove it"):
        stage.draw(MeanColors(), inputs, [tmp_path / "d.txt"], found)


@dataclass(frozen=True)
class Gray(Samples):
    """Samples that remember which of them were drawn."""

    drawn: list[int]

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Mapping[str, Tensor]:
        assert epoch == -1
        self.drawn.append(index)
        return {"images": torch.full((32, 32, 3), 128, dtype=torch.uint8)}


def show(parts: Sequence[Partial], classes: Sequence[str], shown: Samples, out: Path) -> None:
    class Shown(TrainClassifier):
        def samples(self, i: Inputs, split: str) -> Any:
            return shown

    inputs = SimpleNamespace(dataset=SimpleNamespace(meta={"classes": classes}))
    Shown(config=_laptop()).show(nn.Identity(), cast(Inputs, inputs), parts, out)


def confusions(*rows: tuple[int, int, int]) -> Partial:
    """Of images their number, class and prediction."""
    return Partial(tensors={"id_label_predicted": torch.tensor(rows).T})


def test_the_most_confused_classes_are_shown_with_pictures(tmp_path: Path) -> None:
    samples = Gray(drawn=[])
    wrong = [(number, 1, 2) for number in range(6)] + [(20, 2, 1), (21, 2, 1), (30, 0, 5)]
    parts = [confusions((90, 3, 3), *wrong[:4]), confusions(*wrong[4:], (91, 4, 4))]
    show(parts, CLASSES, samples, tmp_path)
    rows = list(csv.reader((tmp_path / "most_confused.csv").read_text().splitlines()))
    assert rows[1:] == [
        ["class 1", "class 2", "6"],
        ["class 2", "class 1", "2"],
        ["class 0", "class 5", "1"],
    ]
    # Four pictures of each pair at most.
    assert samples.drawn == [0, 1, 2, 3, 20, 21, 30]
    assert (tmp_path / "most_confused.png").read_bytes().startswith(b"\x89PNG")


def test_where_nothing_is_confused_there_is_no_picture(tmp_path: Path) -> None:
    show([confusions((1, 2, 2))], CLASSES, Gray(drawn=[]), tmp_path)
    assert (tmp_path / "most_confused.csv").read_text().splitlines() == ["class,taken for,images"]
    assert not (tmp_path / "most_confused.png").exists()
