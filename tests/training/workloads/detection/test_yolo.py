"""YOLO's rows are read as ultralytics reads them: boxes, keypoints, polygons, oriented boxes."""

from pathlib import Path

import pytest

from contract.errors import UserError
from tests.training.workloads.detection import coco_scene as scene
from tests.training.workloads.detection.exports import put, save
from training.workloads.detection.check import Checked

BOX = "0.5 0.5 0.25 0.5"  # of 64 x 48: from (24, 12) to (40, 36)
KEYPOINTS = "0.4 0.3 2 0.6 0.3 2 0.4 0.7 1 0.6 0.7 0"
OF_TWO = "0.4 0.3 0.6 0.3 0.4 0.7 0.6 0.7"
ORIENTED = "0.5 0.25 0.625 0.5 0.5 0.75 0.375 0.5"
POLYGON = "0.375 0.25 0.5 0.3 0.625 0.5 0.5 0.75 0.4 0.6 0.38 0.4"


def _checked(folder: Path, *rows: str, described: str | None = "") -> Checked:
    if described is None:
        put(folder / "classes.txt", "hand\nfoot\n")
    else:
        splits = "train: images/train\nval: images/val\n"
        put(folder / "data.yaml", f"{splits}{described}\nnames: {{0: hand, 1: foot}}\n")
    for number, split in enumerate(("train", "val")):
        save(folder / f"images/{split}/{number}.png", number)
        put(folder / f"labels/{split}/{number}.txt", "".join(f"1 {row}\n" for row in rows))
    return scene.checked(folder)


def _boxes(checked: Checked) -> list[list[float]]:
    assert checked.report.refusals == []
    train, validation = checked.splits
    assert train.boxes.tolist() == validation.boxes.tolist()
    boxes: list[list[float]] = train.boxes.round(4).tolist()
    return boxes


@pytest.mark.parametrize(
    ("rows", "described"),
    [
        ([BOX], None),
        ([f"{BOX} {KEYPOINTS}"], "kpt_shape: [4, 3]"),
        ([f"{BOX} {OF_TWO}", BOX], "kpt_shape: [4, 2]"),
        ([ORIENTED], ""),
        ([POLYGON], ""),
        ([POLYGON, ORIENTED, BOX], None),
    ],
)
def test_every_kind_of_row_becomes_its_box(
    tmp_path: Path, rows: list[str], described: str | None
) -> None:
    boxes = _boxes(_checked(tmp_path, *rows, described=described))
    assert boxes == len(rows) * [[24.0, 12.0, 16.0, 24.0]]


@pytest.mark.parametrize(
    ("row", "described", "readings"),
    [
        (f"{BOX} {KEYPOINTS}", None, "a polygon's corners, or a box with 4 keypoints of 3 numbers"),
        (f"{BOX} {KEYPOINTS}", "", "a polygon's corners, or a box with 4 keypoints of 3 numbers"),
        (f"{BOX} {OF_TWO}", None, "a polygon's corners, or a box with 4 keypoints of 2 numbers"),
        (ORIENTED, None, "a polygon's corners, or a box with 2 keypoints of 2 numbers"),
    ],
)
def test_fails_for_rows_that_may_be_corners_or_keypoints(
    tmp_path: Path, row: str, described: str | None, readings: str
) -> None:
    with pytest.raises(UserError, match=rf"train/0\.txt, line 1, has .* {readings}; name kpt_sh"):
        _checked(tmp_path, row, row, described=described)


@pytest.mark.parametrize(
    ("row", "described", "expected"),
    [
        (f"{BOX} 0.9", "", "2 classes from 0 and a box"),
        (
            f"{BOX} {OF_TWO}",
            "kpt_shape: [4, 3]",
            r"2 classes from 0 and a box of kpt_shape \[4, 3\]",
        ),
        (POLYGON.replace("0.75", "1.75"), "", "2 classes from 0 and a box"),
    ],
)
def test_fails_for_a_row_of_another_kind(
    tmp_path: Path, row: str, described: str, expected: str
) -> None:
    report = _checked(tmp_path, row, described=described).report
    with pytest.raises(UserError, match=rf"line 1, is 1 0\..*, not one of {expected} \(and 1 more"):
        report.refuse()


def test_fails_for_a_class_below_zero(tmp_path: Path) -> None:
    report = _checked(tmp_path, BOX + "\n-1 " + BOX).report
    with pytest.raises(UserError, match=r"line 2, is -1 0\.5.* not one of 2 classes"):
        report.refuse()
