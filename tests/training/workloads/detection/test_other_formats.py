"""What other tools write that is not COCO's: each layout of one scene becomes the same boxes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.workloads.detection import coco_scene as scene

# As users' tools lay them out: split -> numbers of the images.
SPLITS = {"train": range(24), "val": range(24, 30)}
NAMES = ("wall", "room")
BOXES = {"wall": (2.0, 3.0, 42.0, 9.0), "room": (10.0, 12.0, 40.0, 32.0)}
Write = Callable[[Path], None]


def save(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scene.picture(number).save(path)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def yolo_lines(*, as_polygons: bool = False) -> str:
    lines = []
    for kind, (left, top, right, bottom) in BOXES.items():
        x0, x1 = left / scene.WIDTH, right / scene.WIDTH
        y0, y1 = top / scene.HEIGHT, bottom / scene.HEIGHT
        numbers = [(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0]
        if as_polygons:
            numbers = [x0, y0, x1, y0, x1, y1, x0, y1]
        lines.append(" ".join([str(NAMES.index(kind)), *(f"{each:.9f}" for each in numbers)]))
    return "\n".join(lines) + "\n"


def yolo_v5(root: Path) -> None:
    """images/SPLIT beside labels/SPLIT."""
    put(root / "data.yaml", "train: images/train\nval: images/val\nnc: 2\nnames: [wall, room]\n")
    for split, numbers in SPLITS.items():
        for number in numbers:
            save(root / "images" / split / f"{number}.png", number)
            put(root / "labels" / split / f"{number}.txt", yolo_lines())


def yolo_v8_of_roboflow(root: Path) -> None:
    """SPLIT/images beside SPLIT/labels, names by number, and polygons."""
    put(root / "data.yaml", "path: ../here\ntrain: train/images\nnames:\n  0: wall\n  1: room\n")
    for split, numbers in SPLITS.items():
        folder = root / ("valid" if split == "val" else split)
        for number in numbers:
            save(folder / "images" / f"{number}_png.rf.0c{number}.png", number)
            lines = yolo_lines(as_polygons=True)
            put(folder / "labels" / f"{number}_png.rf.0c{number}.txt", lines)


def voc_xml(file: str) -> str:
    objects = "".join(
        f"<object><name>{kind}</name><difficult>0</difficult><bndbox><xmin>{left + 1}</xmin>"
        f"<ymin>{top + 1}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for kind, (left, top, right, bottom) in BOXES.items()
    )
    return f"<annotation><filename>{file}</filename>{objects}</annotation>"


def voc_2012(root: Path) -> None:
    """Annotations, JPEGImages and lists of the splits, in VOCdevkit/VOC2012."""
    inside = root / "VOC2012"
    for split, numbers in SPLITS.items():
        put(inside / f"ImageSets/Main/{split}.txt", "".join(f"{n:06}\n" for n in numbers))
        for number in numbers:
            save(inside / f"JPEGImages/{number:06}.png", number)
            put(inside / f"Annotations/{number:06}.xml", voc_xml(f"{number:06}.png"))


def voc_of_roboflow(root: Path) -> None:
    """Images and XML side by side in each split's folder."""
    for split, numbers in SPLITS.items():
        for number in numbers:
            save(root / split / f"{number}.png", number)
            put(root / split / f"{number}.xml", voc_xml(f"{number}.png"))


def labelme(root: Path) -> None:
    """A JSON file beside each image: a polygon, a rectangle, a point."""
    for split, numbers in SPLITS.items():
        for number in numbers:
            save(root / split / f"{number}.png", number)
            shapes: list[dict[str, Any]] = []
            for kind, (left, top, right, bottom) in BOXES.items():
                points = [[left, top], [right, bottom]]
                if kind == "wall":
                    points = [[left, top], [right, top], [right, bottom], [left, bottom]]
                of = "polygon" if kind == "wall" else "rectangle"
                shapes.append({"label": kind, "points": points, "shape_type": of})
            shapes.append({"label": "door", "points": [[3, 3]], "shape_type": "point"})
            content = {"version": "5.4.1", "flags": {}, "shapes": shapes}
            content |= {"imagePath": f"..\\{split}\\{number}.png", "imageData": None}
            put(root / split / f"{number}.json", json.dumps(content))


def kitti(root: Path) -> None:
    """image_2 beside label_2, below a folder of each split."""
    for split, numbers in SPLITS.items():
        folder = root / ("training" if split == "train" else split)
        for number in numbers:
            save(folder / f"image_2/{number:06}.png", number)
            lines = [
                f"{kind} 0.00 0 -1.58 {left} {top} {right} {bottom} 1 1 1 0 0 0 0"
                for kind, (left, top, right, bottom) in BOXES.items()
            ]
            lines.append("DontCare -1 -1 -10 1 1 5 5 -1 -1 -1 -1000 -1000 -1000 -10")
            put(folder / f"label_2/{number:06}.txt", "\n".join(lines))


def coco_elsewhere(root: Path) -> None:
    """COCO's own files, with the images somewhere below: found by name."""
    for split, numbers in SPLITS.items():
        content = scene.content(len(numbers), numbers[0])
        scene.write(root / f"annotations/instances_{split}2017.json", content)
        scene.save_images(content, root / "raw" / "everything" / split)


LAYOUTS = (
    *(yolo_v5, yolo_v8_of_roboflow, voc_2012, voc_of_roboflow, labelme, kitti, coco_elsewhere),
)


@pytest.mark.parametrize("write", LAYOUTS, ids=lambda write: write.__name__)
def test_every_layout_of_one_scene_becomes_the_same_boxes(tmp_path: Path, write: Write) -> None:
    write(tmp_path)
    checked = scene.checked(tmp_path)
    assert checked.report.refusals == []
    # The point is not learned, and said.
    expected = ["other-shape"] if write is labelme else []
    assert [found.rule for found in checked.report.findings if found.rule != "derived-area"] == (
        expected
    )
    assert [(split.name, len(split)) for split in checked.splits] == [
        ("train", 24),
        ("validation", 6),
    ]
    for split in checked.splits:
        names = [category.name for category in split.categories]
        assert sorted(names) == ["room", "wall"]
        for row in range(len(split)):
            own = split.objects(row)
            for box, label in zip(split.boxes[own].tolist(), split.labels[own], strict=True):
                left, top, width, height = box
                assert (left, top, left + width, top + height) == pytest.approx(
                    BOXES[names[label]], abs=1e-5
                )
            assert split.starts[row + 1] - split.starts[row] == 2


def test_fails_for_what_none_of_them_writes(tmp_path: Path) -> None:
    yolo_v5(tmp_path)
    put(tmp_path / "labels/train/3.txt", "2 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1\n")
    (finding,) = scene.checked(tmp_path).report.refusals
    assert finding.message == (
        "labels/train/3.txt, line 1, is 2 0.5 0.5 0.1 0.1, not one of 2 classes and a box "
        "(and 1 more); export it again"
    )
