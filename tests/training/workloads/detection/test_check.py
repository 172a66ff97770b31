"""Each fault of a dataset in COCO's format gives its own sentence, and nothing else does."""

import copy
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from contract.errors import UserError
from tests.training.workloads.detection import coco_scene as scene
from training.cli.main import main
from training.workloads.detection.coco_faults import _REFUSED, _WARNED

Content = dict[str, Any]
TRAIN, VALIDATION = scene.content(12), scene.content(4, first=12)
CHECK = ["data", "check", "--workload=tests.training.workloads.detection.coco_scene:COCO_DATA"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scene.lay_out(tmp_path_factory.mktemp("coco"), TRAIN, VALIDATION)


class Fault(NamedTuple):
    rule: str
    message: str
    act: Callable[[Content, Path], None]  # on the annotations for train, and the whole folder


FAULTS: list[Fault] = []


def fault(rule: str, message: str) -> Callable[[Callable[[Content, Path], None]], None]:
    def add(act: Callable[[Content, Path], None]) -> None:
        FAULTS.append(Fault(rule, message, act))

    return add


def image(number: int, **values: Any) -> Callable[[Content, Path], None]:
    return lambda content, _: content["images"][number].update(values)


def annotation(number: int, **values: Any) -> Callable[[Content, Path], None]:
    return lambda content, _: content["annotations"][number].update(values)


def category(number: int, **values: Any) -> Callable[[Content, Path], None]:
    return lambda content, _: content["categories"][number].update(values)


def without(kind: str, number: int, key: str) -> Callable[[Content, Path], None]:
    def act(content: Content, folder: Path) -> None:
        del content[kind][number][key]

    return act


def file(name: str, data: bytes) -> Callable[[Content, Path], None]:
    def act(content: Content, folder: Path) -> None:
        (folder / "train2017" / name).write_bytes(data)

    return act


def encoded(picture: Image.Image, kind: str = "PNG", **values: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **values)
    return stream.getvalue()


def turned(orientation: int, width: int, height: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(scene.picture(99, width, height), "JPEG", exif=exif)


# Structure.
fault("structure", "instances_train2017.json has no list 'annotations'; export it as COCO")(
    lambda content, _: content.pop("annotations")
)
fault("structure", "instances_train2017.json has no list 'images'")(
    lambda content, _: content.update(images={"1": {}})
)
fault("record", "train: image number 1 is 'x', not an object; export it again")(
    lambda content, _: content["images"].insert(1, "x")
)
fault("no-categories", "train has no categories; name at least one category")(
    lambda content, _: content.update(categories=[])
)
fault("no-images", "train has no images; give it images")(
    lambda content, _: content.update(images=[])
)
fault("no-objects", "train has no objects in its 12 images; give it objects to learn")(
    lambda content, _: content.update(annotations=[])
)


@fault("no-objects", "train has no objects in its 12 images, only crowds and empty boxes; give")
def _(content: Content, folder: Path) -> None:
    """As CVAT may export masks: each of them a crowd."""
    for record in content["annotations"]:
        record["iscrowd"] = 1


# Ids and references.
fault("id", "train: image a7 has the id 'a7'; give integer ids")(
    lambda content, _: content["images"].append({"id": "a7", "file_name": "a7.png"})
)
fault("id", "train: annotation 1 has the image_id '--5'; give integer ids")(
    annotation(0, image_id="--5")
)
fault("id", "train: annotation 1 has the image_id 0.5; give integer ids")(
    annotation(0, image_id=0.5)
)
fault("duplicate-image-id", "train: image 6 appears twice; give each image an id of its own")(
    lambda content, _: content["images"].append({**content["images"][6], "file_name": "x.png"})
)
fault("duplicate-file", "train: image 8 is 7.png, like another image; list each image once")(
    image(8, file_name="7.png")
)
fault("duplicate-category", "train: category 1 appears twice; give each category an id")(
    lambda content, _: content["categories"].append({"id": 1, "name": "door"})
)
fault("duplicate-category", "train: category 2 is called 'wall', like category 1")(
    category(1, name="wall")
)
fault("record", "train: category 2 has the name None")(category(1, name=None))
fault("duplicate-annotation-id", "train: annotation 1 appears twice; nothing here depends on it")(
    annotation(1, id=1)
)
fault("unknown-image", "train: annotation 1 is of image 777, which does not exist; add the image")(
    annotation(0, image_id=777)
)
fault("unknown-category", "train: annotation 1 is of category 9, which does not exist; add the")(
    annotation(0, category_id=9)
)
fault("other-categories", "validation has category 2 'room', and train category 2 'Raum'; give")(
    category(1, name="Raum")
)
fault("unused-category", "category 3 (door) has no objects; its average precision will be 0")(
    lambda content, folder: add_category(content, folder)
)


def add_category(content: Content, folder: Path) -> None:
    content["categories"].append({"id": 3, "name": "door"})
    other = json.loads(json.dumps(VALIDATION))
    other["categories"].append({"id": 3, "name": "door"})
    scene.write(folder / "annotations/instances_val2017.json", other)


def only_walls(content: Content, folder: Path) -> None:
    other = copy.deepcopy(VALIDATION)
    other["annotations"] = [a for a in other["annotations"] if a["category_id"] == 1]
    scene.write(folder / "annotations/instances_val2017.json", other)


fault("class-not-in-split", "validation has no objects of category 2 (room); its average")(
    only_walls
)
# Files.
fault("absolute-path", "train: image 0 is '/kaggle/input/0.png'; give paths relative to")(
    image(0, file_name="/kaggle/input/0.png")
)
fault("absolute-path", "train: image 0 is '../0.png'; give paths relative to")(
    image(0, file_name="../0.png")
)
fault("absolute-path", r"train: image 0 is 'C:\\plans\\0.png'; give paths relative to")(
    image(0, file_name="C:\\plans\\0.png")
)
fault("absolute-path", "train: image 0 is 'https://example.org/0.png'; give paths relative to")(
    image(0, file_name="https://example.org/0.png")
)
fault("record", "train: image 0 has the file_name None")(image(0, file_name=None))


@fault("missing-file", "a is not in ")
def _(content: Content, folder: Path) -> None:
    content["images"][3]["file_name"] = 300 * "a"
    (folder / "train2017/3.png").unlink()


fault("missing-file", "train: 3.png is not in ")(
    lambda _, folder: (folder / "train2017/3.png").unlink()
)
fault("missing-file", "train (and 11 more); copy the images there")(
    lambda _, folder: shutil.rmtree(folder / "train2017")
)
fault("unreadable-image", "train: 3.png is not an image that Pillow can read; replace the file")(
    file("3.png", b"<html>404</html>")
)
fault("unreadable-image", "train: 3.png is HEIC, Apple's format, which Pillow cannot read; rep")(
    file("3.png", bytes.fromhex("000000186674797068656963") + bytes(200))
)
fault("unreadable-image", "train: 3.png cannot be decoded: ")(
    file("3.png", encoded(scene.picture(3))[:2000])
)
fault("unreadable-image", "train: 3.png cannot be decoded: Failed to decode image")(
    file("3.png", encoded(scene.picture(3), "AVIF").replace(b"iloc", b"free"))
)
fault("pixel-format", "train: 3.png has pixels of the kind I;16; save it with 8 bits")(
    file("3.png", encoded(Image.new("I;16", (scene.WIDTH, scene.HEIGHT))))
)
fault("transparency", "train: 3.png has transparent pixels; the colours below it are read")(
    file("3.png", encoded(Image.new("RGBA", (scene.WIDTH, scene.HEIGHT))))
)
fault("unlisted-image", "train2017/extra.png is in no annotation file; it is not used")(
    file("extra.png", encoded(scene.picture(77)))
)
fault("image-size", "train: 3.png has 70x48 pixels, but is annotated as 64x48; correct the size")(
    file("3.png", encoded(scene.picture(3, 70)))
)
fault("upright", "train: 3.png is stored rotated (EXIF orientation 6); it is read upright, and")(
    file("3.png", turned(6, scene.HEIGHT, scene.WIDTH))
)
fault("record", "train: image 0 has the size -5x48; export it again")(image(0, width=-5))
fault("derived-size", "train: image 0 has no size; width and height are taken from the file")(
    without("images", 0, "width")
)
fault("duplicate-image", "train: 3.png and 4.png are the same; each is trained on")(
    lambda _, folder: shutil.copy(folder / "train2017/3.png", folder / "train2017/4.png")
)
fault("leak", "validation: 13.png is also 3.png in train; remove them from one of the two")(
    lambda _, folder: shutil.copy(folder / "train2017/3.png", folder / "val2017/13.png")
)
# Boxes.
fault("box", "train: annotation 1 has the box [1, 2, 3]; give [x, y, width, height] in pixels")(
    annotation(0, bbox=[1, 2, 3])
)
fault("box", "train: annotation 1 has the box [nan, 2, 3, 4]; give [x, y")(
    annotation(0, bbox=[float("nan"), 2, 3, 4])
)
fault("box", "train: annotation 1 has neither bbox nor mask; give [x, y, width, height]")(
    annotation(0, bbox=None)
)
fault("mask", "train: annotation 1 has no bbox, and a mask that cannot be read; export the")(
    annotation(0, bbox=None, segmentation={"counts": "abc", "size": [48, 64]})
)
fault("derived-box", "train: annotation 1 has no bbox; the box is the mask's extent")(
    annotation(0, bbox=[], segmentation=[[1, 2, 5, 2, 5, 9]], area=14)
)
fault("box-size", "train: annotation 1 has the box [40, 3, -20, 6], of negative size; give")(
    annotation(0, bbox=[40, 3, -20, 6])
)
fault("empty-box", "train: 0.png (64x48) has the box [2, 3, 0, 6], without width or height; it")(
    annotation(0, bbox=[2, 3, 0, 6], area=0)
)
fault("box-outside", "train: 0.png (64x48) has the box [100, 3, 5, 6], outside it; correct")(
    annotation(0, bbox=[100, 3, 5, 6], area=30)
)
fault("clipped-box", "train: 0.png (64x48) has the box [50, 3, 40, 6], which crosses its border;")(
    annotation(0, bbox=[50, 3, 40, 6])
)


@fault("box-corners", "which crosses its border, as many do (and 23 more); these look like two")
def _(content: Content, folder: Path) -> None:
    for record in content["annotations"]:
        record["bbox"] = [40, 30, 60, 44]


@fault("box-relative", "train: 0.png (64x48) has the box [0.1, 0.2, 0.5, 0.5], and all others are")
def _(content: Content, folder: Path) -> None:
    for record in content["annotations"]:
        record["bbox"], record["area"] = [0.1, 0.2, 0.5, 0.5], 0.25


@fault("many-objects", "train has 1 images of more than 100 objects, 0.png 103 of them; denoising")
def _(content: Content, folder: Path) -> None:
    for number in range(101):
        box = [number % 60, number % 40, 4, 4 + number % 3]
        record = {**content["annotations"][0], "id": 1000 + number, "bbox": box, "area": 16}
        content["annotations"].append(record)


fault("duplicate-annotation", "train: 0.png (64x48) has the box [2, 3, 40, 6], more than once in")(
    lambda content, _: content["annotations"].append({**content["annotations"][0], "id": 999})
)
fault("area", "train: annotation 1 has the area -3; give an area of 0 or more, or omit it")(
    annotation(0, area=-3)
)
fault("area-larger", "train: annotation 1 has the area 900, more than its box 240; whether an")(
    annotation(0, area=900)
)
fault("derived-area", "train: annotation 1 has no area; the area is that of its mask or box")(
    without("annotations", 0, "area")
)
fault("crowd", "train: annotation 1 has iscrowd 'no'; give iscrowd 0 or 1")(
    annotation(0, iscrowd="no")
)


@pytest.mark.parametrize("broken", FAULTS, ids=lambda f: f.message[:50])
def test_one_fault_gives_one_sentence(broken: Fault, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "coco")
    content = copy.deepcopy(TRAIN)
    broken.act(content, folder)
    scene.write(folder / "annotations/instances_train2017.json", content)
    findings = scene.checked(folder).report.findings
    assert [finding.rule for finding in findings] == [broken.rule]
    assert broken.message in findings[0].message
    assert findings[0].is_refused == (broken.rule in _REFUSED)


def test_every_rule_has_a_broken_dataset_or_a_test_of_its_own() -> None:
    elsewhere = {"layout", "json", "too-large", "unread-file", "few-leaks", "other-shape"}
    elsewhere |= {"scaled-box", "turned-box", "rotated-box", "label-studio", "orientation"}
    # Of test_other_formats.py, test_by_tools.py and test_as_meant.py.
    elsewhere |= {"split-place", "two-splits", "ignored-region", "drawn-validation"}
    elsewhere |= {"other-annotations", "not-exhaustive", "several-images", "nameless-classes"}
    elsewhere |= {"image-rotation", "difficult", "swapped-corners", "found-elsewhere"}
    assert {broken.rule for broken in FAULTS} | elsewhere == _REFUSED.keys() | _WARNED.keys()
    assert len(FAULTS) >= 30


def test_a_dataset_without_faults_has_no_findings(whole: Path) -> None:
    report = scene.checked(whole).report
    assert report.findings == []
    assert [row["images"] for row in report.tables["splits"]] == [12, 4]
    wall = report.tables["classes"][0]
    assert (wall["class"], wall["category id"], wall["in train"]) == (0, 1, 12)


def test_the_command_refuses_with_exit_code_2_and_says_all_as_json(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CHECK, str(whole)]) == 0
    printed = capsys.readouterr().out
    assert "split       images  without objects" in printed
    assert "can be trained on; warnings: 0" in printed
    folder = shutil.copytree(whole, tmp_path / "coco")
    content = copy.deepcopy(TRAIN)
    content["annotations"][0]["bbox"] = [1, 2, 3]
    content["annotations"][1]["area"] = None
    scene.write(folder / "annotations/instances_train2017.json", content)
    assert main([*CHECK, "--json", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.err.endswith("coco cannot be trained on: it was refused for box\n")
    report = json.loads(captured.out)
    assert report["is_refused"] is True
    assert [finding["rule"] for finding in report["refused"]] == ["box"]
    assert [finding["rule"] for finding in report["warned"]] == ["derived-area"]


def test_fails_for_what_is_no_json(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "coco")
    (folder / "annotations/instances_val2017.json").write_text('{"images": [')
    found = scene.checked(folder).report.refusals
    assert [finding.rule for finding in found] == ["json"]
    assert "instances_val2017.json is not JSON: Expecting value: line 1 column 13" in str(found)


def test_fails_for_an_image_of_more_pixels_than_pillow_trusts(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.workloads.detection.image_files._MAX_PIXELS", 64 * 48 - 1)
    assert "0.png has 64x48 pixels (and 15 more); divide it into tiles" in str(
        scene.checked(whole).report.refusals
    )


def test_a_few_leaks_among_many_images_are_a_warning(
    whole: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("training.workloads.detection.check._MAX_LEAK_SHARE", 0.3)
    folder = shutil.copytree(whole, tmp_path / "coco")
    shutil.copy(folder / "train2017/3.png", folder / "val2017/13.png")
    assert [finding.rule for finding in scene.checked(folder).report.findings] == ["few-leaks"]


def test_fails_for_a_folder_without_annotations(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match="has no annotation file in COCO's format; lay the files"):
        scene.checked(tmp_path)
    with pytest.raises(UserError, match="nothing does not exist; pass the folder of a dataset"):
        scene.checked(tmp_path / "nothing")


def test_fails_for_a_split_that_is_missing_or_described_twice(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "coco")
    (folder / "annotations/instances_val2017.json").unlink()
    (split,) = scene.checked(folder).splits
    assert (split.name, len(split)) == ("all", 12), "an import divides it"
    (folder / "annotations/instances_train2017.json").rename(folder / "annotations/test.json")
    with pytest.raises(UserError, match="has no annotations for train; lay the files out"):
        scene.checked(folder)
    scene.write(folder / "annotations/valid.json", VALIDATION)
    scene.write(folder / "annotations/instances_val.json", VALIDATION)
    with pytest.raises(
        UserError, match=r"instances_val\.json and .*valid.json both describe valid"
    ):
        scene.checked(folder)


def test_files_of_coco_s_other_tasks_are_passed_over(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "coco")
    scene.write(folder / "annotations/captions_train2017.json", {})
    scene.write(folder / "annotations/extra.json", {})
    found = scene.checked(folder).report.findings
    assert [finding.rule for finding in found] == ["unread-file"]
    assert "annotations/extra.json names no split; move it away" in found[0].message
