"""Boxes drawn on another size, on stored pixels or rotated land where their object is seen."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.training.workloads.detection import coco_scene as scene
from tests.training.workloads.detection.exports import put
from training.workloads.detection.image_files import read_rgb

WIDTH, HEIGHT = 160, 120
# Of a green object: left, top, right, bottom in pixels of WIDTH x HEIGHT.
LEFT, TOP, RIGHT, BOTTOM = 20, 30, 68, 54
Annotate = Callable[[Path, str, int, int], None]


def _voc(folder: Path, name: str, width: int, height: int) -> None:
    sides = (
        f"<xmin>{LEFT + 1}</xmin><ymin>{TOP + 1}</ymin><xmax>{RIGHT}</xmax><ymax>{BOTTOM}</ymax>"
    )
    put(
        folder / f"{name}.xml",
        f"<annotation><filename>{name}.png</filename><size><width>{width}</width><height>{height}"
        f"</height></size><object><name>car</name><bndbox>{sides}</bndbox></object></annotation>",
    )


def _labelme(folder: Path, name: str, width: int, height: int) -> None:
    corners = [[LEFT, TOP], [RIGHT, TOP], [RIGHT, BOTTOM], [LEFT, BOTTOM]]
    shape = {"label": "car", "points": corners, "shape_type": "oriented_rectangle"}
    content = {"shapes": [shape], "imagePath": f"{name}.png", "imageData": None}
    content |= {"imageWidth": width, "imageHeight": height}
    put(folder / f"{name}.json", json.dumps(content))


def _tensorflow(folder: Path, name: str, width: int, height: int) -> None:
    row = f"{name}.png,{width},{height},car,{LEFT},{TOP},{RIGHT},{BOTTOM}"
    put(folder / "_annotations.csv", f"filename,width,height,class,xmin,ymin,xmax,ymax\n{row}\n")


def _cvat(folder: Path, name: str, width: int, height: int) -> None:
    box = f'label="car" xtl="{LEFT}" ytl="{TOP}" xbr="{RIGHT}" ybr="{BOTTOM}"'
    image = (
        f'<image id="0" name="{name}.png" width="{width}" height="{height}"><box {box}/></image>'
    )
    put(folder / "annotations.xml", f"<annotations>{image}</annotations>")


def _coco(folder: Path, name: str, width: int, height: int) -> None:
    box = [LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP]
    content = {
        "images": [{"id": 1, "file_name": f"{name}.png", "width": width, "height": height}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": box}],
        "categories": [{"id": 1, "name": "car"}],
    }
    scene.write(folder / "_annotations.coco.json", content)


ALL: list[Annotate] = [_voc, _labelme, _tensorflow, _cvat, _coco]


def _save(path: Path, stored: Image.Image, orientation: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(path, exif=exif)


def _seen(folder: Path) -> Iterable[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Of each split's only image, where green pixels are when it is read, and the box."""
    checked = scene.checked(folder)
    assert checked.report.refusals == []
    for split in checked.splits:
        height, width = split.sizes[0].tolist()
        pixels = np.asarray(read_rgb(split.folder / str(split.files[0]), height, width))
        down, across = np.nonzero(pixels[:, :, 1] > 200)
        ends = (across.min(), down.min(), across.max() + 1, down.max() + 1)
        x, y, w, h = split.boxes[0].tolist()
        assert split.areas[0] == pytest.approx(w * h)
        yield tuple(map(int, ends)), (x, y, x + w, y + h)


def _draw_both(folder: Path, annotate: Annotate, scale: int = 4, height: int = HEIGHT) -> None:
    """An image in each split, larger than it is annotated to be; train's by that height."""
    for seed, split in enumerate(("train", "val")):
        _save(folder / split / "a.png", _drawing(scale, seed), 1)
        annotate(folder / split, "a", WIDTH, HEIGHT if split == "val" else height)


def _drawing(scale: int = 1, seed: int = 0) -> Image.Image:
    drawn = Image.new("RGB", (scale * WIDTH, scale * HEIGHT), (10 + seed, 0, 0))
    drawn.paste((0, 255, 0), tuple(scale * side for side in (LEFT, TOP, RIGHT, BOTTOM)))
    return drawn


@pytest.mark.parametrize("annotate", ALL)
def test_boxes_are_scaled_to_an_image_that_was_resized(tmp_path: Path, annotate: Annotate) -> None:
    _draw_both(tmp_path, annotate)
    for seen, box in _seen(tmp_path):
        assert seen == pytest.approx(box) == (80, 120, 272, 216)
    warnings = scene.checked(tmp_path).report.warnings
    (said,) = [finding.message for finding in warnings if finding.rule == "scaled-box"]
    assert "a.png has 640x480 pixels, but is annotated as 160x120 (and 1 more); its boxes " in said


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("annotate", ALL)
def test_boxes_are_where_their_object_is_seen_if_exif_turns_it(
    tmp_path: Path, annotate: Annotate, orientation: int
) -> None:
    """In train drawn on the pixels as stored, if their size tells; in val on the upright image."""
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    for seed, split in enumerate(("train", "val")):
        stored = _drawing(seed=seed)
        if orientation < 5 or split == "val":
            stored = stored.transpose(Image.Transpose(back))
        _save(tmp_path / split / "a.png", stored, orientation)
        annotate(tmp_path / split, "a", WIDTH, HEIGHT)
    boxes = [box for seen, box in _seen(tmp_path) if seen == pytest.approx(box)]
    assert len(boxes) == 2 and boxes[1] == (LEFT, TOP, RIGHT, BOTTOM)
    if orientation == 6:
        assert boxes[0] == (HEIGHT - BOTTOM, LEFT, HEIGHT - TOP, RIGHT)
    said = {finding.rule: finding.message for finding in scene.checked(tmp_path).report.warnings}
    stored = f"a.png is stored rotated (EXIF orientation {orientation})"
    if orientation < 5:
        assert f"{stored} (and 1 more); it is read upright, and its boxes as" in said["orientation"]
    else:
        assert f"{stored}; it is annotated so; it is read upright, and its b" in said["turned-box"]
        assert f"{stored}; it is read upright, and its boxes as drawn on the" in said["upright"]


def test_fails_for_the_stored_size_that_label_studio_writes_beside_other_boxes(
    tmp_path: Path,
) -> None:
    """HumanSignal/label-studio#6608: boxes are drawn on the image as a browser shows it."""
    for seed, split in enumerate(("train", "val")):
        _save(tmp_path / split / "a.png", _drawing(seed=seed), 8)
        _coco(tmp_path / split, "a", WIDTH, HEIGHT)
        path = tmp_path / split / "_annotations.coco.json"
        scene.write(path, json.loads(path.read_text()) | {"info": {"contributor": "Label Studio"}})
    (refused,) = scene.checked(tmp_path).report.refusals
    assert refused.message == (
        "train: a.png is stored rotated (EXIF orientation 8) (and 1 more); Label Studio has "
        "written that size, but boxes on the upright image; save the images upright, and export "
        "again"
    )


def test_a_tiff_that_pillow_turns_itself_is_read_once(tmp_path: Path) -> None:
    for seed, split in enumerate(("train", "val")):
        stored = _drawing(seed=seed).transpose(Image.Transpose.ROTATE_90)
        _save(tmp_path / split / "a.tiff", stored, 6)
        left, top, wide, high = LEFT / WIDTH, TOP / HEIGHT, 48 / WIDTH, 24 / HEIGHT
        row = f"0 {left + wide / 2} {top + high / 2} {wide} {high}\n"
        put(tmp_path / split / "a.txt", row)
    put(tmp_path / "classes.txt", "car\n")
    for seen, box in _seen(tmp_path):
        assert seen == pytest.approx(box) == (LEFT, TOP, RIGHT, BOTTOM)


@pytest.mark.parametrize("annotate", ALL)
def test_fails_for_a_size_that_no_scale_explains(tmp_path: Path, annotate: Annotate) -> None:
    _draw_both(tmp_path, annotate, height=100)
    (refused,) = scene.checked(tmp_path).report.refusals
    assert refused.message == (
        "train: a.png has 640x480 pixels, but is annotated as 160x100; correct the size, or the "
        "boxes that were drawn on another one"
    ).replace("a.png", "a.png" if annotate is _coco else "train/a.png")


def test_fails_for_a_box_beyond_the_size_on_which_it_is_said_to_be_drawn(tmp_path: Path) -> None:
    """It fits the image as it is now, so one of the two sizes is not the boxes' own."""
    _draw_both(tmp_path, _voc)
    path = tmp_path / "train/a.xml"
    path.write_text(path.read_text().replace("<xmax>68<", "<xmax>400<"))
    (refused,) = scene.checked(tmp_path).report.refusals
    assert refused.message.startswith("train: train/a.png is annotated as 160x120, but has a box")


def _rotated_in_xml(folder: Path) -> None:
    box = '<box label="pole" xtl="30" ytl="50" xbr="130" ybr="70" rotation="30.0"></box>'
    images = "".join(
        f'<image name="{split}/a.png" width="160" height="120" subset="{split}">{box}</image>'
        for split in ("train", "val")
    )
    put(folder / "annotations.xml", f"<annotations>{images}</annotations>")


def _rotated_in_voc(folder: Path) -> None:
    for split in ("train", "val"):
        put(
            folder / split / "a.xml",
            "<annotation><filename>a.png</filename><object><name>pole</name><attributes><attribute>"
            "<name>rotation</name><value>30.0</value></attribute></attributes><bndbox><xmin>31"
            "</xmin><ymin>51</ymin><xmax>130</xmax><ymax>70</ymax></bndbox></object></annotation>",
        )


def _rotated_in_coco(folder: Path) -> None:
    """Validation has a mask also, of the box before it is rotated."""
    for split in ("train", "val"):
        _coco(folder / split, "a", WIDTH, HEIGHT)
        path = folder / split / "_annotations.coco.json"
        content = json.loads(path.read_text())
        record = content["annotations"][0]
        record |= {"bbox": [30, 50, 100, 20], "attributes": {"rotation": -330.0}, "area": 2000}
        record["segmentation"] = [] if split == "train" else [[30, 50, 130, 50, 130, 70, 30, 70]]
        scene.write(path, content)


def _rotated_in_coco_with_its_mask(folder: Path) -> None:
    """The mask is the rotated box; validation's box is the extent of both."""
    _rotated_in_coco(folder)
    for split in ("train", "val"):
        path = folder / split / "_annotations.coco.json"
        content = json.loads(path.read_text())
        mask = [128.3013, 76.3397, 118.3013, 93.6603, 31.6987, 43.6603, 41.6987, 26.3397]
        content["annotations"][0]["segmentation"] = [mask]
        if split == "val":
            content["annotations"][0]["bbox"] = [31.6987, 26.3397, 96.6025, 67.3205]
        scene.write(path, content)


ROTATED = [_rotated_in_xml, _rotated_in_voc, _rotated_in_coco, _rotated_in_coco_with_its_mask]


@pytest.mark.parametrize("write", ROTATED)
def test_a_rotated_box_becomes_its_extent(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """As CVAT exports it, about the box's centre."""
    _draw_both(tmp_path, lambda *_: None, scale=1)
    write(tmp_path)
    checked = scene.checked(tmp_path)
    messages = {finding.rule: finding.message for finding in checked.report.findings}
    assert "is rotated by 30 degrees (and 1 more); the box is the ext" in messages["rotated-box"]
    # 100 cos 30 + 20 sin 30 wide, 100 sin 30 + 20 cos 30 high, about (80, 60).
    wide, high = 96.60254, 67.32051
    for of_split in checked.splits:
        expected = [80 - wide / 2, 60 - high / 2, wide, high]
        assert of_split.boxes[0].tolist() == pytest.approx(expected, abs=1e-3)
