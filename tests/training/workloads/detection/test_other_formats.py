"""Each of twenty exports of one scene becomes the same boxes, and a run by what the import says.

A dataset's own splits win: nothing that it names for validation is trained on.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from contract.errors import UserError
from tests.training.workloads.detection import coco_scene as scene
from tests.training.workloads.detection.exports import (
    BOXES,
    EXPORTS,
    SMALL,
    Write,
    put,
    save,
    voc_xml,
    yolo_lines,
    yolo_v5,
)
from training.cli.main import main

assert len(EXPORTS) == 20
# What the import warns of: a point is not learned; what is not written is derived.
SAID = {"labelme": ["other-shape"], "coco_with_masks": ["derived-box", "derived-area"]}
SAID["kitti"] = ["ignored-region"]


@pytest.mark.parametrize("write", EXPORTS, ids=lambda write: write.__name__)
def test_every_export_of_one_scene_becomes_the_same_boxes(tmp_path: Path, write: Write) -> None:
    write(tmp_path)
    checked = scene.checked(tmp_path)
    assert checked.report.refusals == []
    found = [found.rule for found in checked.report.findings]
    assert found == SAID.get(write.__name__, [])
    sizes = [(split.name, len(split)) for split in checked.splits]
    is_undivided = "label_studio" in write.__name__
    assert sizes == ([("all", 30)] if is_undivided else [("train", 24), ("validation", 6)])
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


def test_the_folders_of_an_export_may_be_links(tmp_path: Path) -> None:
    """Images whose labels were not found would be images of nothing."""
    yolo_v5(own := tmp_path / "own")
    for name in ("images", "labels"):
        (own / name).rename(tmp_path / name)
        (own / name).symlink_to(tmp_path / name)
    checked = scene.checked(own)
    assert checked.report.findings == []
    assert [(len(split), len(split.boxes)) for split in checked.splits] == [(24, 48), (6, 12)]


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(
            write,
            id=write.__name__,
            marks=() if write.__name__ == "coco_of_roboflow" else pytest.mark.slow,
        )
        for write in EXPORTS
    ],
)
def test_an_export_is_trained_on_by_the_commands_that_its_import_prints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All overrides are for speed: what the dataset needs, the run takes from it."""
    write(tmp_path / "export")
    monkeypatch.chdir(tmp_path)
    assert main(["data", "import", "export", "--workload=detection", "--out=data"]) == 0
    said = capsys.readouterr().out
    assert "2 classes" in said and "on Spot" in said
    (command,) = [line for line in said.splitlines() if "-m training run" in line]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "training"]
    overrides = [f"--override={text}" for text in SMALL]
    assert main([*words[3:], *overrides]) == 0
    # As document 003's container says: torch, the operators, the dataset, the config.
    said = capsys.readouterr().out
    assert f"[ok] torch {torch.__version__} on cpu" in said
    assert "[ok] detect uses: attention reference" in said
    # As listed; what lists none has them by name.
    is_listed = any(name in write.__name__ for name in ("coco", "yolo"))
    order = "wall, room" if is_listed else "room, wall"
    assert f"[ok] dataset data: 2 classes ({order}), train " in said
    assert "[ok] detection, recipe laptop: decoder_layers=1 " in said
    assert (tmp_path / "runs/first/final/model.safetensors").is_file()
    assert json.loads((tmp_path / "runs/first/receipt.json").read_text())["state"] == "finished"


def test_fails_for_what_none_of_them_writes(tmp_path: Path) -> None:
    yolo_v5(tmp_path)
    put(tmp_path / "labels/train/3.txt", "2 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1\n")
    (finding,) = scene.checked(tmp_path).report.refusals
    assert finding.message == (
        "labels/train/3.txt, line 1, is 2 0.5 0.5 0.1 0.1, not one of 2 classes from 0 and a box "
        "(and 1 more); export it again"
    )


FOUR = {"images/part1": range(4), "images/part2": range(4, 6)}


def _yolo(folder: Path, described: str, parts: Mapping[str, Sequence[int]]) -> None:
    put(folder / "data.yaml", f"{described}\nnames: [wall, room]\n")
    for part, numbers in parts.items():
        for number in numbers:
            save(folder / part / f"{number}.png", number)
            put(folder / part.replace("images", "labels") / f"{number}.txt", yolo_lines())


def _splits(folder: Path) -> dict[str, list[int]]:
    checked = scene.checked(folder)
    assert checked.report.refusals == []
    stems = {s.name: [int(Path(file).stem) for file in s.files.tolist()] for s in checked.splits}
    return {name: sorted(of_split) for name, of_split in stems.items()}


@pytest.mark.parametrize(
    "described",
    [
        "train: images/part1\nval: images/part2",
        "path: ../datasets/of_a_test\ntrain: [images/part1]\nval: ./images/part2/",
        "train: ../images/part1\nval: ../images/part2\ntest:",
        # Roboflow names a test split that its export may not hold.
        "train: ../images/part1\nval: ../images/part2\ntest: ../test/images",
        "train: /content/train_set/images/part1\nvalidation: /content/train_set/images/part2",
        "train: 'C:\\sets\\images\\part1'\nval: 'C:\\sets\\images\\part2'",
        "path: /kaggle/working\ntrain: lists/a.txt\nval:\n  - lists/b.txt\n",
    ],
)
def test_data_yaml_names_the_splits(tmp_path: Path, described: str) -> None:
    """Whatever the folders are called, and wherever the file was written."""
    _yolo(tmp_path, described, FOUR)
    put(tmp_path / "lists/a.txt", "".join(f"./images/part1/{n}.png\n" for n in range(4)))
    put(tmp_path / "lists/b.txt", "/old/images/part2/4.png\nimages/part2/5.png\n")
    assert _splits(tmp_path) == {"train": [0, 1, 2, 3], "validation": [4, 5]}


def test_data_yaml_wins_over_folders_and_leaves_out_what_it_does_not_name(tmp_path: Path) -> None:
    parts = {"images/train": range(3), "images/val": range(3, 5), "images/test": range(5, 7)}
    _yolo(tmp_path, "train: images/val\nval: images/train", parts)
    assert _splits(tmp_path) == {"train": [3, 4], "validation": [0, 1, 2]}
    (finding,) = scene.checked(tmp_path).report.warnings
    assert finding.message.startswith("images/test/5.png is in no annotation file (and 1 more)")


@pytest.mark.parametrize(
    ("described", "images"),
    [
        ("train: images", "images"),
        ("train: images/train", "images/train"),
        # As coco128.yaml, with which ultralytics' tutorial begins.
        ("train: images/train2017\nval: images/train2017", "images/train2017"),
        # As CVAT exports a task.
        ("", "obj_train_data"),
    ],
)
def test_what_holds_nothing_out_is_divided_by_the_import(
    tmp_path: Path, described: str, images: str
) -> None:
    _yolo(tmp_path, described, {images: range(6)})
    put(tmp_path / "train.txt", "".join(f"data/{images}/{n}.png\n" for n in range(6)))
    assert _splits(tmp_path) == {"all": [0, 1, 2, 3, 4, 5]}


def test_what_is_in_no_split_beside_others_is_left_out_and_named(tmp_path: Path) -> None:
    for name, number in (("train/a", 0), ("val/b", 1), ("c", 2)):
        save(tmp_path / f"{name}.png", number)
        put(tmp_path / f"{name}.xml", voc_xml(f"{Path(name).name}.png"))
    checked = scene.checked(tmp_path)
    assert [split.name for split in checked.splits] == ["train", "validation"]
    (finding,) = checked.report.findings
    assert finding.message == "c.png is in no annotation file; it is not used"


def test_lists_name_images_whose_files_have_the_same_name(tmp_path: Path) -> None:
    _yolo(tmp_path, "", {f"{site}/images": range(1) for site in "abc"})
    save(tmp_path / "b/images/0.png", 1)
    save(tmp_path / "c/images/0.png", 2)
    put(tmp_path / "train.txt", "a/images/0.png\nb/images/0.png\n")
    put(tmp_path / "val.txt", "c/images/0.png\n")
    checked = scene.checked(tmp_path)
    files = {split.name: split.files.tolist() for split in checked.splits}
    assert files["train"] == ["a/images/0.png", "b/images/0.png"]
    assert files["validation"] == ["c/images/0.png"]


def _voc(folder: Path, lists: Mapping[str, str]) -> None:
    for number in range(6):
        save(folder / f"VOC2012/JPEGImages/{number:06}.png", number)
        put(folder / f"VOC2012/Annotations/{number:06}.xml", voc_xml(f"{number:06}.png"))
    for name, text in lists.items():
        put(folder / f"VOC2012/ImageSets/Main/{name}.txt", text)


def test_image_sets_of_voc_name_the_splits(tmp_path: Path) -> None:
    lists = {"train": "000000\n000002\n", "val": "000001\n", "trainval": "000000\n000001\n000002\n"}
    of_class = {"wall_train": "000000  1\n000002 -1\n", "wall_val": "000001  0\n"}
    _voc(tmp_path, lists | of_class | {"test": "000003\n000004\n"})
    assert _splits(tmp_path) == {"train": [0, 2], "validation": [1], "test": [3, 4]}


def test_image_sets_without_validation_leave_it_to_the_import(tmp_path: Path) -> None:
    """As many have of VOC 2007; the image that neither list names is left out."""
    _voc(tmp_path, {"trainval": "000000\n000001\n000002\n", "test": "000003\n000004\n"})
    assert _splits(tmp_path) == {"train": [0, 1, 2], "test": [3, 4]}
    rules = [finding.rule for finding in scene.checked(tmp_path).report.warnings]
    assert rules == ["drawn-validation", "unlisted-image"]


MISSING: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (
        lambda folder: _yolo(folder, "train: images/part1\nval: images/val", FOUR),
        r"data\.yaml names 'images/val' for validation, where .* has no image; copy its images",
    ),
    "folder above": (
        lambda folder: _yolo(folder, "train: images/part1\nval: valid/images", FOUR),
        r"data\.yaml names 'valid/images' for validation, where ",
    ),
    "image of a list": (
        lambda folder: (
            _yolo(folder, "train: images/part1\nval: val.txt", FOUR)
            or put(folder / "val.txt", "images/part2/4.png\nimages/part2/9.png\n")
        ),
        r"val\.txt names 'images/part2/9\.png' for validation, where ",
    ),
    "image of ImageSets": (
        lambda folder: _voc(folder, {"train": "000000\n", "val": "000001\n000009\n"}),
        r"ImageSets/Main/val\.txt names '000009' for validation, where ",
    ),
    "one image for both": (
        lambda folder: _yolo(folder, "train: images\nval: images/part2", FOUR),
        r"names images/part2/[45]\.png for validation, which is also named for train",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_fails_for_a_split_whose_images_are_missing_or_another_ones(
    tmp_path: Path, case: str
) -> None:
    write, message = MISSING[case]
    write(tmp_path)
    with pytest.raises(UserError, match=message):
        scene.checked(tmp_path).report.refuse()


def test_files_of_tensorflow_name_the_splits(tmp_path: Path) -> None:
    """train_labels.csv beside val_labels.csv, and all images in one folder."""
    for split, numbers in (("train", range(4)), ("val", range(4, 6))):
        rows = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
        for number in numbers:
            save(tmp_path / f"images/{number}.png", number)
            rows += [f"{number}.png,64,48,wall,{','.join(map(str, BOXES['wall']))}"]
        put(tmp_path / f"{split}_labels.csv", "\n".join(rows) + "\n")
    assert _splits(tmp_path) == {"train": [0, 1, 2, 3], "validation": [4, 5]}


def test_folders_of_one_coco_file_name_the_splits(tmp_path: Path) -> None:
    content = scene.content(6)
    for image in content["images"]:
        image["file_name"] = f"{'val' if image['id'] > 3 else 'train'}/{image['file_name']}"
    content["annotations"].reverse()
    scene.save_images(content, tmp_path / "images")
    scene.write(tmp_path / "annotations.json", content)
    assert _splits(tmp_path) == {"train": [0, 1, 2, 3], "validation": [4, 5]}
    validation = scene.checked(tmp_path).splits[1]
    assert validation.starts.tolist() == [0, 2, 4]
    of_wall = validation.boxes[validation.labels == 0].tolist()
    assert of_wall == 2 * [[2.0, 3.0, 40.0, 6.0]]
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(content).replace("train/", "test/"))
    (tmp_path / "images/train").rename(tmp_path / "images/test")
    with pytest.raises(UserError, match="has no annotations for train"):
        scene.checked(tmp_path)
