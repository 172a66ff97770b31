"""Exports that people brought: each is read as its tool means it, or refused by its reason."""

import json
import shutil
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from contract.errors import UserError
from tests.training.workloads.detection import coco_scene as scene
from tests.training.workloads.detection.exports import put, save, voc_xml, yolo_lines
from training.cli.main import main
from training.durable import ImportSource

FORK = bytes.fromhex("00051607000200004d6163204f532058") + bytes(120)
NAMES = ("a", "b")


def _found(folder: Path) -> dict[str, list[Any]]:
    """Image -> class and box of each object."""
    checked = scene.checked(folder)
    assert checked.report.refusals == []
    found: dict[str, list[Any]] = {}
    for split in checked.splits:
        for row, file in enumerate(split.files.tolist()):
            own = split.objects(row)
            kinds = [split.categories[label].name for label in split.labels[own].tolist()]
            boxes = [tuple(round(side, 2) for side in box) for box in split.boxes[own].tolist()]
            found[file] = [*zip(kinds, boxes, strict=True)]
    return found


def _rules(folder: Path) -> list[str]:
    return [finding.rule for finding in scene.checked(folder).report.findings]


def _voc_object(name: str, *corners: float, more: str = "") -> str:
    sides = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    box = "".join(f"<{side}>{number}</{side}>" for side, number in sides)
    return f"<object><name>{name}</name>{more}<bndbox>{box}</bndbox></object>"


def _voc(folder: Path, name: str, objects: str, *, encoding: str = "utf-8") -> None:
    save(folder / f"{name}.png", len(list(folder.glob("*.png"))))
    text = f"<annotation><filename>{name}.png</filename>{objects}</annotation>"
    declared = f'<?xml version="1.0" encoding="{encoding}"?>{text}'
    (folder / f"{name}.xml").write_bytes(declared.encode(encoding))


def gb2312(folder: Path) -> None:
    """expat refuses an encoding of several bytes (pelops#72)."""
    for name in NAMES:
        _voc(folder, name, _voc_object("汽车", 3, 4, 42, 9), encoding="gb2312")


def swapped(folder: Path) -> None:
    """A box keeps the direction in which it was drawn."""
    _voc(folder, "a", _voc_object("汽车", 42, 4, 3, 9))
    _voc(folder, "b", _voc_object("汽车", 3, 9, 42, 4))


def polygons(folder: Path) -> None:
    """VOC without bndbox."""
    corners = [(2, 3), (42, 3), (42, 9)]
    sides = "".join(f"<x{n}>{x}</x{n}><y{n}>{y}</y{n}>" for n, (x, y) in enumerate(corners, 1))
    for name in NAMES:
        _voc(folder, name, f"<object><name>汽车</name><polygon>{sides}</polygon></object>")


def difficult(folder: Path) -> None:
    """The development kit ignores what is marked so; it is no crowd of persons."""
    other = _voc_object("汽车", 3, 4, 42, 9, more="<difficult>1</difficult>")
    for name in NAMES:
        _voc(folder, name, _voc_object("汽车", 3, 4, 42, 9) + other)


CAR = [("汽车", (2.0, 3.0, 40.0, 6.0))]


@pytest.mark.parametrize(
    ("write", "boxes", "rules"),
    [
        (gb2312, CAR, []),
        (swapped, CAR, ["swapped-corners"]),
        (polygons, CAR, []),
        (difficult, 2 * CAR, ["difficult"]),
    ],
)
def test_voc_is_read_as_it_was_meant(
    tmp_path: Path, write: Callable[[Path], None], boxes: list[Any], rules: list[str]
) -> None:
    write(tmp_path)
    assert _found(tmp_path) == {"a.png": boxes, "b.png": boxes}
    assert [rule for rule in _rules(tmp_path) if rule != "duplicate-annotation"] == rules
    learned = scene.checked(tmp_path).splits[0].can_be_learned.tolist()
    assert learned == 2 * [True, False][: len(boxes)]


def test_images_of_one_name_are_kept_apart_by_parallel_trees(tmp_path: Path) -> None:
    """labelImg#400, make-sense#351."""
    for number, kind in enumerate(("cat", "dog")):
        save(tmp_path / f"JPEGImages/{kind}/000.png", number)
        text = voc_xml("000.png").replace("wall", kind)
        put(tmp_path / f"Annotations/{kind}/000.xml", text)
    found = _found(tmp_path)
    assert {file: boxes[0][0] for file, boxes in found.items()} == {
        "JPEGImages/cat/000.png": "cat",
        "JPEGImages/dog/000.png": "dog",
    }
    (tmp_path / "Annotations/dog").rename(tmp_path / "Annotations/other")
    (refused,) = scene.checked(tmp_path).report.refusals
    assert refused.message == (
        "Annotations/other/000.xml names '000.png', which JPEGImages/cat/000.png and "
        "JPEGImages/dog/000.png are called; give their path, move the others away, or lay both "
        "trees out with the same folders"
    )


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_unicode_forms_of_one_name_are_one_name(tmp_path: Path, form: Any) -> None:
    """A Mac's archive has names decomposed (aws-cli#1639)."""
    other = "NFD" if form == "NFC" else "NFC"
    content = scene.content(2)
    for image in content["images"]:
        image["file_name"] = f"café/é{image['id']}.png"
        save(
            tmp_path / "coco/images" / unicodedata.normalize(form, image["file_name"]), image["id"]
        )
        image["file_name"] = unicodedata.normalize(other, image["file_name"])
    scene.write(tmp_path / "coco/annotations.json", content)
    assert [len(boxes) for boxes in _found(tmp_path / "coco").values()] == [2, 2]
    for number, name in enumerate(("é0", "é1")):
        own = unicodedata.normalize(form, name)
        save(tmp_path / f"yolo/images/{own}.png", number)
        put(tmp_path / f"yolo/labels/{unicodedata.normalize(other, name)}.txt", yolo_lines())
    put(tmp_path / "yolo/data.yaml", "names: [wall, room]\n")
    assert [len(boxes) for boxes in _found(tmp_path / "yolo").values()] == [2, 2]


@pytest.mark.parametrize("place", ["{}/labels.json", "labels/{}.json"])
def test_images_of_one_name_are_those_of_the_file_s_own_split(tmp_path: Path, place: str) -> None:
    """As FiftyOne lays out the first: its images have the same names in each split."""
    contents = {"train": scene.content(12), "validation": scene.content(4)}
    for seed, (split, content) in enumerate(contents.items()):
        scene.write(tmp_path / place.format(split), content)
        for image in content["images"]:
            save(tmp_path / split / "data" / image["file_name"], 100 * seed + image["id"])
    checked = scene.checked(tmp_path)
    assert [finding.message for finding in checked.report.findings] == []
    found = {split.name: split.folder for split in checked.splits}
    assert found == {split: tmp_path / split / "data" for split in contents}


def test_fails_where_two_folders_have_all_of_a_file_s_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, source = scene.content(40), tmp_path / "brought"
    scene.write(source / "labels.json", content)
    for seed, folder in enumerate(("rgb", "depth")):
        for image in content["images"]:
            save(source / folder / image["file_name"], 100 * seed + image["id"])
    out = f"--out={tmp_path / 'out'}"
    assert main(["data", "import", str(source), "--workload=detection", out]) == 2
    said = capsys.readouterr().err
    assert "labels.json names images that are both in depth and rgb; give their path, move" in said
    for image in content["images"]:
        image["file_name"] = f"rgb/{image['file_name']}"
    scene.write(source / "labels.json", content)
    assert scene.checked(source).report.refusals == []


def test_fails_where_a_split_has_two_folders_and_takes_the_one_of_its_name(tmp_path: Path) -> None:
    for split in ("train", "val"):
        content = scene.content(12)
        scene.write(tmp_path / f"annotations/{split}.json", content)
        for seed, folder in enumerate((f"{split}_rgb", f"{split}_depth", f"{split}_masks")):
            for image in content["images"]:
                save(tmp_path / folder / image["file_name"], 100 * seed + image["id"])
    said = [each.message for each in scene.checked(tmp_path).report.refusals]
    assert any(
        "images that are both in train_depth and train_masks (and 1 more)" in m for m in said
    )
    for split in ("train", "val"):
        (tmp_path / f"{split}_rgb").rename(tmp_path / split)
    assert not any("both in" in m.message for m in scene.checked(tmp_path).report.refusals)


def test_the_data_folder_of_fiftyone_wins_and_two_parts_are_not_called_doubled(
    tmp_path: Path,
) -> None:
    content = scene.content(40)
    for name in ("one", "two"):
        scene.write(tmp_path / name / "labels.json", content)
    for number, image in enumerate(content["images"]):
        for seed, folder in enumerate(("data", "masks")):
            save(tmp_path / "one" / folder / image["file_name"], 100 * seed + image["id"])
        save(tmp_path / "two/photos" / "ab"[number % 2] / image["file_name"], image["id"])
    checked = scene.checked(tmp_path / "one")
    assert checked.report.refusals == []
    assert checked.splits[0].folder == tmp_path / "one/data"
    rules = [each.rule for each in scene.checked(tmp_path / "two").report.refusals]
    assert rules == ["missing-file"]


def test_what_a_mac_adds_is_no_image_and_no_annotation(tmp_path: Path) -> None:
    inner = tmp_path / "set"
    put(inner / "data.yaml", "train: images/train\nval: images/val\nnames: [wall, room]\n")
    for number, split in enumerate(("train", "val")):
        save(inner / f"images/{split}/{number}.png", number)
        put(inner / f"labels/{split}/{number}.txt", yolo_lines())
    for path in [path for path in inner.rglob("*") if path.is_file()]:
        beside = tmp_path / "__MACOSX" / path.relative_to(tmp_path).with_name(f"._{path.name}")
        beside.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(FORK)
        path.with_name(f"._{path.name}").write_bytes(FORK)
    put(inner / ".DS_Store", "Bud1")
    shutil.make_archive(str(tmp_path.parent / "mac"), "zip", tmp_path)
    folder = ImportSource(tmp_path.parent / "mac.zip", tmp_path / "scratch").folder()
    assert sorted(_found(folder)) == ["images/train/0.png", "images/val/1.png"]
    assert _rules(folder) == []


UPLOADED = "..\\..\\label-studio\\media\\upload\\4\\{}"


def test_names_of_another_machine_find_the_image_that_is_there(tmp_path: Path) -> None:
    """Label Studio 1.16 names its images from its own folder (label-studio#7294)."""
    content = scene.content(2)
    for image in content["images"]:
        image["file_name"] = f"0a1b2c3d-{image['id']}.png"
    scene.save_images(content, tmp_path / "images")
    for image in content["images"]:
        image["file_name"] = UPLOADED.format(image["file_name"])
    scene.write(tmp_path / "result.json", content)
    assert [*_found(tmp_path)] == ["images/0a1b2c3d-0.png", "images/0a1b2c3d-1.png"]
    assert _rules(tmp_path) == ["found-elsewhere"]


def test_fails_for_an_image_that_label_studio_turned(tmp_path: Path) -> None:
    value = {"x": 10, "y": 10, "width": 5, "height": 5, "rectanglelabels": ["car"]}
    region = {"original_width": 64, "original_height": 48, "image_rotation": 90, "value": value}
    task = {
        "id": 1,
        "data": {"image": "/data/upload/1/a.png"},
        "annotations": [{"result": [region]}],
    }
    save(tmp_path / "a.png", 0)
    scene.write(tmp_path / "tasks.json", [task])
    (refused,) = scene.checked(tmp_path).report.refusals
    assert refused.message.startswith("/data/upload/1/a.png was turned by 90 degrees in Label St")


def test_json_min_of_label_studio_is_read_too(tmp_path: Path) -> None:
    value = {"x": 50, "y": 25, "width": 12.5, "height": 50, "rotation": 90}
    value |= {"rectanglelabels": ["car"], "original_width": 64, "original_height": 48}
    task = {"image": "/data/local-files/?d=sets/caf%C3%A9.png", "id": 1, "label": [value]}
    save(tmp_path / "café.png", 0)
    scene.write(tmp_path / "tasks.json", [{**task, "annotator": 1}])
    # Eight wide and 24 high, turned about its top left corner (32, 12).
    assert _found(tmp_path) == {"café.png": [("car", (8.0, 12.0, 24.0, 8.0))]}


def test_a_track_between_two_frames_is_where_cvat_moves_it(tmp_path: Path) -> None:
    box = '<box frame="{}" outside="0" xtl="{}" ytl="0" xbr="{}" ybr="9"/>'
    boxes = box.format(0, 0, 10) + box.format(2, 20, 40)
    put(tmp_path / "a.xml", f'<annotations><track id="0" label="car">{boxes}</track></annotations>')
    for number in range(3):
        save(tmp_path / f"frame_{number:06}.png", number)
    assert _found(tmp_path)["frame_000001.png"] == [("car", (10.0, 0.0, 15.0, 9.0))]


def _nothing_named(folder: Path) -> None:
    save(folder / "images/0.png", 0)
    put(folder / "labels/0.txt", yolo_lines())


def _no_boxes(folder: Path) -> None:
    _voc(folder, "a", "<object><name>car</name></object>")


def _unknown_encoding(folder: Path) -> None:
    save(folder / "a.png", 0)
    put(folder / "a.xml", '<?xml version="1.0" encoding="x-none"?><annotation></annotation>')


REASONS: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "no data.yaml": (
        _nothing_named,
        "labels/0.txt has YOLO's rows, such as 0 0.343750000 .*; add a data.yaml with their names",
    ),
    "no box": (_no_boxes, "a.xml cannot be read: an object of 'car' has neither bndbox nor pol"),
    "encoding": (_unknown_encoding, "a.xml cannot be read: unknown encoding"),
    "no COCO": (lambda folder: put(folder / "a.json", "{}"), "a.json has no list 'images'"),
}


@pytest.mark.parametrize("case", REASONS)
def test_fails_by_the_reason_of_the_reader_that_came_furthest(tmp_path: Path, case: str) -> None:
    write, reason = REASONS[case]
    write(tmp_path)
    with pytest.raises(UserError, match=f"cannot be trained on: {reason}"):
        scene.checked(tmp_path).report.refuse()


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_box_may_overhang_an_image_that_was_resized_or_is_turned(
    tmp_path: Path, orientation: int
) -> None:
    """Annotated as 64x48; now four times as large, or turned from these by EXIF."""
    for number, name in enumerate(NAMES):
        scale = 4 if orientation == 1 else 1
        exif = Image.Exif()
        exif[0x0112] = orientation
        scene.picture(number, 64 * scale, 48 * scale).save(tmp_path / f"{name}.png", exif=exif)
        objects = "<size><width>64</width><height>48</height></size>"
        objects += _voc_object("car", 11, 21, 30, 52)
        put(
            tmp_path / f"{name}.xml",
            f"<annotation><filename>{name}.png</filename>{objects}</annotation>",
        )
    box = (40.0, 80.0, 80.0, 128.0) if orientation == 1 else (-4.0, 10.0, 32.0, 20.0)
    assert _found(tmp_path) == {f"{name}.png": [("car", box)] for name in NAMES}
    assert "clipped-box" in _rules(tmp_path)


def test_labelme_names_an_image_by_its_path(tmp_path: Path) -> None:
    """Of three images called a.png, its path from the file decides."""
    shape = {"label": "car", "points": [[2, 3], [42, 9]], "shape_type": "rectangle"}
    for number, kind in enumerate(("x", "y", "z")):
        save(tmp_path / f"images/{kind}/a.png", number)
    content = {"shapes": [shape], "imagePath": "..\\images\\y\\a.png", "imageData": None}
    put(tmp_path / "labels/any.json", json.dumps(content))
    assert [*_found(tmp_path)] == ["images/y/a.png"]
