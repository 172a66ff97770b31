"""Files that other tools write are read as they mean them, and become a dataset of the same."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as pycoco_masks
from pycocotools.coco import COCO

from contract.errors import UserError
from tests.training.workloads.detection import coco_scene as scene
from training.cli.main import main
from training.durable.store.local_dataset import LocalDataset
from training.workloads.detection.coco import CocoSplit
from training.workloads.detection.coco_faults import _Extent, _extent_of, exact_id
from training.workloads.detection.detection_dataset import import_folder, open_split

IMPORT = ["data", "import", "--workload=tests.training.workloads.detection.coco_scene:COCO_DATA"]


def only(folder: Path) -> CocoSplit:
    """The one split of a folder without refusals."""
    checked = scene.checked(folder)
    assert checked.report.refusals == []
    (split,) = checked.splits
    return split


def rules(folder: Path) -> list[str]:
    return [finding.rule for finding in scene.checked(folder).report.findings]


def imported(source: Path, out: Path) -> LocalDataset:
    assert main([*IMPORT, str(source), f"--out={out}"]) == 0
    return LocalDataset.open(out)


def test_cvat_writes_numbers_and_masks_in_its_own_way(tmp_path: Path) -> None:
    """One file without a split, images below images/default, crowds as lists of runs."""
    content = scene.content(20)
    for annotation in content["annotations"]:
        annotation["id"] = float(annotation["id"])
        annotation["image_id"] = float(annotation["image_id"])
        annotation["attributes"] = {"occluded": False}
    runs = [3 * scene.HEIGHT + 5, 10, scene.HEIGHT - 10, 10]
    runs.append(scene.WIDTH * scene.HEIGHT - sum(runs))
    mask = {"counts": runs, "size": [scene.HEIGHT, scene.WIDTH]}
    crowd = {"id": 99.0, "image_id": 0.0, "category_id": 1, "iscrowd": 1, "segmentation": mask}
    content["annotations"].append(crowd)
    scene.write(tmp_path / "annotations/instances_default.json", content)
    scene.save_images(content, tmp_path / "images/default")
    split = only(tmp_path)
    assert (split.name, len(split)) == ("all", 20)
    assert split.boxes[split.objects(0)][-1].tolist() == [3.0, 5.0, 2.0, 10.0]
    assert split.crowds[split.objects(0)].tolist() == [False, False, True]
    assert split.areas[split.objects(0)][-1] == 20.0
    assert rules(tmp_path) == ["derived-box", "derived-area"]


def test_label_studio_names_images_from_its_root(tmp_path: Path) -> None:
    """Ids as text, categories from 0, polygons; no area, no iscrowd; wrapped in one folder."""
    content = scene.content(20)
    for category in content["categories"]:
        category["id"] -= 1
    for image in content["images"]:
        image["file_name"] = f"images/1:50 – {image['id']}.png"
        image["id"] = str(image["id"])
    for annotation in content["annotations"]:
        del annotation["id"]
        annotation["category_id"] -= 1
        annotation["image_id"] = str(annotation["image_id"])
        x, y, w, h = annotation["bbox"]
        annotation["segmentation"] = [[x, y, x + w, y, x + w, y + h]]
        annotation["ignore"] = 0
        del annotation["area"], annotation["iscrowd"]
    content["annotations"][0]["bbox"] = None
    root = tmp_path / "project-1"
    scene.write(root / "result.json", content)
    scene.save_images(content, root)
    split = only(tmp_path)
    assert split.boxes[:2].tolist() == [[2.0, 3.0, 40.0, 6.0], [10.0, 12.0, 30.0, 20.0]]
    assert split.areas[:2].tolist() == [120.0, 300.0], "the polygons' areas"
    assert split.image_ids[:3].tolist() == [0, 1, 2]
    data = imported(tmp_path, tmp_path / "out")
    assert data.meta["splits"] == {"train": 15, "validation": 3, "test": 2}
    train = open_split(data, "train")
    assert data.file(f"train/{train.files[0]}").is_file()


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *((7, 7), (7.0, 7), ("7", 7), ("-7", -7), (2**62, 2**62)),
        *((7.5, None), ("007", None), ("7.0", None), ("", None), ("-", None), (True, None)),
        *((None, None), (float("nan"), None), (float("inf"), None), (1e300, None), (2**63, None)),
        *(("²", None), ("a", None), ([7], None)),
    ],
)
def test_an_id_is_an_integer_in_any_exact_notation(value: object, number: int | None) -> None:
    assert exact_id(value) == number


@pytest.mark.parametrize("seed", range(20))
def test_the_extent_of_runs_is_pycocotools_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 40, 2).tolist()
    mask = np.zeros((height, width), np.uint8, order="F")
    top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
    part = mask[top : top + 1 + seed, left : left + 1 + seed // 2]
    part[:] = rng.random(part.shape) < (1.0 if seed % 3 == 0 else 0.5)
    part[0, 0] = 1
    encoded = pycoco_masks.encode(mask)
    box, area = pycoco_masks.toBbox(encoded).tolist(), float(pycoco_masks.area(encoded))
    as_text = {"size": encoded["size"], "counts": encoded["counts"].decode()}
    assert _extent_of(as_text) == _Extent(*box, area)
    changes = np.flatnonzero(np.diff(np.r_[0, mask.ravel(order="F")]))
    runs = np.diff(np.r_[0, changes, mask.size]).tolist()
    assert _extent_of({"size": [height, width], "counts": runs}) == _Extent(*box, area)


@pytest.mark.parametrize(
    "segmentation",
    [
        *(None, [], "x", [[1, 2]], [[1, 2, 3]], [[1, 2, 3, 4, "x", 6]], [3]),
        *({}, {"counts": [1, 2], "size": [1]}, {"counts": [5], "size": [2, 2]}),
        *({"counts": [4], "size": [2, 2]}, {"counts": [-1, 5], "size": [2, 2]}),
        *({"counts": "\x10", "size": [2, 2]}, {"counts": "P", "size": [2, 2]}),
    ],
)
def test_what_is_no_mask_has_no_extent(segmentation: Any) -> None:
    assert _extent_of(segmentation) is None


def test_an_import_is_coco_again_and_what_was_annotated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, validation = scene.content(24), scene.content(6, first=24)
    train["annotations"][0] |= {"bbox": [50.5, 3, 40, 6], "iscrowd": 1}
    train["annotations"] = train["annotations"][:-2]
    train["categories"][0]["id"] = 44
    validation["categories"][0]["id"] = 44
    for annotation in [*train["annotations"], *validation["annotations"]]:
        annotation["category_id"] = {1: 44, 2: 2}[annotation["category_id"]]
    data = imported(scene.lay_out(tmp_path / "own", train, validation), tmp_path / "out")
    assert "2 classes (room, wall), train 24, validation 6" in capsys.readouterr().out
    assert data.meta["classes"] == ["room", "wall"], "in the order of their ids"
    assert data.meta["category_ids"] == [2, 44]
    split = open_split(data, "train")
    assert open_split(data, "train") is split, "it is read once"
    assert split.labels[:2].tolist() == [1, 0]
    assert split.boxes[0].tolist() == [50.5, 3, 40, 6], "nothing is mended"
    assert split.objects_per_image[-1] == 0
    other = COCO(tmp_path / "out/annotations/instances_train.json")
    assert sorted(other.getImgIds()) == list(range(24))
    assert [a["iscrowd"] for a in other.loadAnns(other.getAnnIds(imgIds=[0]))] == [1, 0]
    assert scene.checked(tmp_path / "out").report.refusals == []
    with pytest.raises(UserError, match=r"the dataset has no split 'test': .* has no file"):
        open_split(data, "test")


def test_one_file_is_divided_and_equal_images_stay_together(tmp_path: Path) -> None:
    content = scene.content(40)
    scene.write(tmp_path / "own/labels.json", content)
    scene.save_images(content, tmp_path / "own")
    for number in range(0, 40, 2):  # Each image is there twice.
        shutil.copy(tmp_path / f"own/{number}.png", tmp_path / f"own/{number + 1}.png")
    data = imported(tmp_path / "own", tmp_path / "out")
    splits = [open_split(data, name) for name in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [30, 6, 4]
    for split in splits:
        assert set(split.image_ids.tolist()) == {n ^ 1 for n in split.image_ids.tolist()}
    again = imported(tmp_path / "own", tmp_path / "again")
    assert again.manifest["files"] == data.manifest["files"]


def test_a_division_that_leaves_a_split_without_objects_is_refused(tmp_path: Path) -> None:
    content = scene.content(40)
    del content["annotations"][4:]  # Two images have objects, for three splits.
    scene.write(tmp_path / "own/labels.json", content)
    scene.save_images(content, tmp_path / "own")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="none of the 6 images that were divided into validation"):
        import_folder(tmp_path / "own", tmp_path / "out", 0, lambda done, total: None)
    assert not any((tmp_path / "out").iterdir()), "another seed can go to the same folder"


def test_fails_to_import_what_would_break_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = scene.content(24)
    folder = scene.lay_out(tmp_path / "own", train, scene.content(6, first=24))
    broken = copy.deepcopy(train)
    broken["annotations"][0]["bbox"][2] = -4
    scene.write(folder / "annotations/instances_train2017.json", broken)
    assert main([*IMPORT, str(folder), f"--out={tmp_path / 'out'}"]) == 2
    message = "the dataset cannot be trained on: train: annotation 1 has the box [2, 3, -4, 6], of"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    scene.picture(99).save(folder / "val2017/extra.png")
    broken["annotations"][1]["area"] = None
    broken["annotations"][3]["category_id"] = 9
    scene.write(folder / "annotations/instances_train2017.json", broken)
    assert main([*IMPORT, str(folder), f"--out={tmp_path / 'out'}", "--json"]) == 2
    said = capsys.readouterr()
    report = json.loads(said.out)
    found = [finding["rule"] for finding in report["refused"] + report["warned"]]
    assert found == ["unknown-category", "box-size", "derived-area"]
    assert "[refused] train: annotation 4 is of category 9, which does not exist; add" in said.err
    assert "[warning] train: annotation 2 has no area; the area is that of its mask" in said.err
    assert main([*IMPORT, str(tmp_path / "none"), f"--out={tmp_path / 'out'}"]) == 2
    assert "none does not exist; name a folder, a zip or a tar archive" in capsys.readouterr().err
    small = tmp_path / "small"
    scene.write(small / "labels.json", scene.content(5))
    scene.save_images(scene.content(5), small)
    assert main([*IMPORT, str(small), f"--out={tmp_path / 'out'}"]) == 2
    assert "5 images without splits are too few to divide; provide" in capsys.readouterr().err


def test_train_alone_is_divided_and_validation_is_drawn_from_it_beside_a_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = scene.content(24), scene.content(6, first=24)
    folder = scene.lay_out(tmp_path / "own", train, test)
    (folder / "annotations/instances_val2017.json").rename(folder / "annotations/test.json")
    (folder / "val2017").rename(folder / "test")
    assert imported(folder, tmp_path / "both").meta["splits"] == {
        "train": 20,
        "validation": 4,
        "test": 6,
    }
    assert "for validation; an import draws it from train, by --seed" in capsys.readouterr().out
    (folder / "annotations/test.json").unlink()
    alone = imported(folder, tmp_path / "alone").meta["splits"]
    assert alone == {"train": 18, "validation": 4, "test": 2}


def test_an_archive_is_imported_like_its_folder(tmp_path: Path) -> None:
    folder = scene.lay_out(tmp_path / "own", scene.content(24), scene.content(6, first=24))
    archive = shutil.make_archive(str(tmp_path / "export"), "zip", tmp_path, "own")
    one, other = imported(folder, tmp_path / "one"), imported(Path(archive), tmp_path / "other")
    assert one.manifest["files"] == other.manifest["files"]


def test_a_run_refuses_annotations_that_were_changed_after_the_import(tmp_path: Path) -> None:
    data = imported(
        scene.lay_out(tmp_path / "own", scene.content(24), scene.content(6, first=24)),
        tmp_path / "out",
    )
    path = tmp_path / "out/annotations/instances_validation.json"
    content = json.loads(path.read_text())
    content["annotations"][0]["category_id"] = 9
    scene.write(path, content)
    with pytest.raises(UserError, match="annotation 1 is of category 9, which does not exist; add"):
        open_split(data, "validation")


def test_half_a_character_is_a_fault_that_can_be_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a name that was cut off has at its end: no terminal, and no file system, takes it."""
    train = scene.content(12)
    folder = scene.lay_out(tmp_path / "own", train, scene.content(4, first=12))
    scene.picture(98).save(folder / "train2017" / os.fsdecode(b"\xff.png"))
    check = ["data", "check", IMPORT[2], str(folder)]
    assert main(check) == 0
    said = capsys.readouterr().out.encode().decode()
    assert r"[warning] train2017/\udcff.png is in no annotation file; it is not used" in said
    train["categories"][1]["name"] = "room \ud83d"
    train["images"][0]["file_name"] = "\ud83d.png"
    train["images"].append({"id": "\ud83d", "file_name": "x.png"})
    scene.write(folder / "annotations/instances_train2017.json", train)
    assert main(check) == 2
    said = capsys.readouterr().out.encode().decode()
    # The image's file_name is the other one.
    assert r"[refused] train: category 2 has the name 'room \ud83d' (and 1 more); export" in said
    assert r"[refused] train: image \ud83d has the id '\ud83d'; give integer ids" in said
