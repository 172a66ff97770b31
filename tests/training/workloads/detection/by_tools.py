"""Files that other tools write, with the boxes that the tool itself finds in them.

    python -m tests.training.workloads.detection.by_tools     # remakes made_by_tools/NAME.json

Each needs its tool, which no lock has: pip install ultralytics==8.4.190 labelme==6.3.1
label-studio-sdk==2.0.19 supervision==0.31.2 datumaro==1.13.12 lvis==0.5.3
"""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from tests.training.workloads.detection import coco_scene as scene

KEPT = Path(__file__).parent / "made_by_tools"
# Image -> class, left, top, right and bottom of each object.
Boxes: TypeAlias = dict[str, list[list[Any]]]
NAMES = ["wall", "room"]
WIDTH, HEIGHT = scene.WIDTH, scene.HEIGHT
# x, y, width, height and class of each object of each image.
OBJECTS = {"0": [(2, 3, 40, 6, 0), (10, 12, 30, 20, 1)], "1": [(5.5, 6.25, 20.5, 30, 1)]}


def _save_images(folder: Path, suffix: str = "png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in OBJECTS:
        scene.picture(int(name)).save(folder / f"{name}.{suffix}")


def _extent(points: Any) -> list[float]:
    array = np.asarray(points, np.float64).reshape(-1, 2)
    return [*array.min(axis=0).tolist(), *array.max(axis=0).tolist()]


def ultralytics(folder: Path) -> Boxes:
    """Rows of boxes, polygons, oriented boxes and keypoints, as its trainer reads them."""
    from ultralytics.data.utils import img2label_paths, verify_image_label

    rows = {
        "box": ["1 0.5 0.5 0.25 0.5", "0 0.25 0.25 0.125 0.125"],
        "polygon": ["0 0.375 0.25 0.5 0.3 0.625 0.5 0.5 0.75 0.4 0.6"],
        "oriented": ["1 0.5 0.25 0.625 0.5 0.5 0.75 0.375 0.5"],
    }
    found: Boxes = {}
    (folder / "data.yaml").write_text("path: .\ntrain: images\nnames: {0: wall, 1: room}\n")
    for kind, text in rows.items():
        image = folder / f"images/{kind}.png"
        image.parent.mkdir(exist_ok=True)
        scene.picture(len(found)).save(image)
        (label,) = map(Path, img2label_paths([str(image)]))
        label.parent.mkdir(exist_ok=True)
        label.write_text("\n".join(text) + "\n")
        read = verify_image_label((str(image), str(label), "", False, 2, 0, 0, False))
        found[f"images/{kind}.png"] = [_of_shares(row) for row in read[1].tolist()]
    return found


def ultralytics_pose(folder: Path) -> Boxes:
    """A box with four keypoints of x, y and visibility."""
    from ultralytics.data.utils import img2label_paths, verify_image_label

    points = "0.42 0.45 2 0.58 0.45 2 0.45 0.58 1 0.55 0.58 0"
    names = "names: {0: wall, 1: room}"
    (folder / "data.yaml").write_text(f"path: .\ntrain: images\nkpt_shape: [4, 3]\n{names}\n")
    _save_images(folder / "images")
    found: Boxes = {}
    for name in OBJECTS:
        image = f"images/{name}.png"
        (label,) = map(Path, img2label_paths([str(folder / image)]))
        label.parent.mkdir(exist_ok=True)
        label.write_text(f"{name} 0.5 0.5 0.25 0.5 {points}\n")
        read = verify_image_label((str(folder / image), str(label), "", True, 2, 4, 3, False))
        found[image] = [_of_shares(row) for row in read[1].tolist()]
    return found


def _of_shares(row: Sequence[float]) -> list[Any]:
    kind, x, y, w, h = row
    x, w, y, h = x * WIDTH, w * WIDTH, y * HEIGHT, h * HEIGHT
    return [NAMES[int(kind)], x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def labelme(folder: Path) -> Boxes:
    """A rectangle, a circle, two polygons of one group and a mask, as labelme rasters them."""
    from labelme._label_file import read_label_file, write_label_file
    from labelme.utils import img_arr_to_b64, shapes_to_label

    def shape(label: str, kind: str, points: list[list[float]], **more: Any) -> dict[str, Any]:
        base = {"label": label, "points": points, "shape_type": kind, "group_id": None}
        return {**base, "flags": {}, "description": "", "mask": None, **more}

    mask = img_arr_to_b64(np.ones((9, 13), np.uint8))
    drawn = {
        "0": [
            shape("wall", "rectangle", [[42, 9], [2, 3]]),  # drawn from its last corner
            shape("room", "circle", [[30, 28], [30, 38]]),
            shape("wall", "point", [[3, 3]]),
        ],
        "1": [
            shape("room", "polygon", [[4, 4], [14, 4], [9, 12]], group_id=7),
            shape("room", "polygon", [[34, 20], [44, 20], [39, 30]], group_id=7),
            shape("wall", "mask", [[20, 35], [32, 43]], mask=mask),
        ],
    }
    found: Boxes = {}
    _save_images(folder / "images")
    (folder / "labels").mkdir()
    for name, shapes in drawn.items():
        path, image = folder / f"labels/{name}.json", f"..\\images\\{name}.png"
        sides = {"image_height": HEIGHT, "image_width": WIDTH}
        write_label_file(str(path), shapes=shapes, image_path=image, **sides)
        read = [s for s in read_label_file(str(path)).shapes if s["shape_type"] != "point"]
        classes, objects = shapes_to_label((HEIGHT, WIDTH, 3), read, {"wall": 1, "room": 2})
        found[f"images/{name}.png"] = []
        for number in range(1, int(objects.max()) + 1):
            ys, xs = np.nonzero(objects == number)
            kind = NAMES[int(classes[ys[0], xs[0]]) - 1]
            ends = [int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1]
            found[f"images/{name}.png"].append([kind, *ends])
    return found


CONFIG = """<View><Image name="image" value="$image"/><RectangleLabels name="label" toName="image">
<Label value="wall"/><Label value="room"/></RectangleLabels></View>"""


def _tasks(*, are_rotated: bool) -> list[dict[str, Any]]:
    tasks = []
    for name, objects in OBJECTS.items():
        result = []
        for x, y, w, h, kind in objects:
            value = {"x": 100 * x / WIDTH, "y": 100 * y / HEIGHT, "rotation": 0}
            value |= {"width": 100 * w / WIDTH, "height": 100 * h / HEIGHT}
            value |= {"rectanglelabels": [NAMES[kind]], "rotation": 20 if are_rotated else 0}
            base = {"from_name": "label", "to_name": "image", "type": "rectanglelabels"}
            sides = {"original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0}
            result.append({"id": f"r{len(result)}", **base, **sides, "value": value})
        old = {"id": 1, "result": result[:1], "created_at": "2026-01-01T00:00:00Z"}
        new = {"id": 2, "result": result, "created_at": "2026-01-02T00:00:00Z"}
        skipped = {**old, "id": 3, "was_cancelled": True, "created_at": "2026-01-03T00:00:00Z"}
        data = {"image": f"/data/upload/4/0a1b2c3d-{name}.png"}
        made = [new, old, skipped] if are_rotated else [new]
        tasks.append({"id": int(name) + 1, "data": data, "annotations": made})
    return tasks


def label_studio(folder: Path) -> Boxes:
    """Its own JSON: rotated boxes, an older and a skipped annotation; corners as its SDK's."""
    from label_studio_sdk.converter import Converter
    from label_studio_sdk.converter.utils import convert_annotation_to_yolo_obb

    scene.write(folder / "project-4.json", _tasks(are_rotated=True))
    _save_images(folder / "images")
    items = Converter(CONFIG, str(folder)).iter_from_json_file(str(folder / "project-4.json"))
    found: Boxes = {}
    for item in items:  # the newest first
        name = Path(item["input"]["image"]).name.partition("-")[2]
        of_item = []
        for each in item["output"].get("label", ()):
            corners = convert_annotation_to_yolo_obb(each, normalize=False)
            of_item.append([each["rectanglelabels"][0], *_extent(corners)])
        found.setdefault(f"images/{name}", of_item)
    return found


def label_studio_converted(folder: Path, form: str = "COCO") -> Boxes:
    """What its converter writes of the same task, without rotation."""
    from label_studio_sdk.converter import Converter

    source = folder.parent / f"{folder.name}-tasks"
    scene.write(source / "tasks.json", _tasks(are_rotated=False))
    converter = Converter(CONFIG, str(source), download_resources=False)
    act = {"COCO": converter.convert_to_coco, "YOLO": converter.convert_to_yolo}
    act["VOC"] = converter.convert_to_voc
    act[form](str(source / "tasks.json"), str(folder), is_dir=False)
    _save_images(folder / "images")  # the server adds them, by the names of the uploads
    for path in (folder / "images").glob("*.png"):
        path.rename(path.with_name(f"0a1b2c3d-{path.name}"))
    return _known("images/0a1b2c3d-{}.png")


def label_studio_yolo(folder: Path) -> Boxes:
    """YOLO by its converter."""
    return label_studio_converted(folder, "YOLO")


def label_studio_voc(folder: Path) -> Boxes:
    """VOC by its converter."""
    return label_studio_converted(folder, "VOC")


def _known(image: str) -> Boxes:
    return {
        image.format(name): [[NAMES[k], x, y, x + w, y + h] for x, y, w, h, k in objects]
        for name, objects in OBJECTS.items()
    }


def supervision_voc(folder: Path) -> Boxes:
    """VOC, as supervision writes it and reads it again."""
    return _by_supervision(folder, "voc")


def supervision_yolo(folder: Path) -> Boxes:
    """YOLO, as supervision writes it and reads it again."""
    return _by_supervision(folder, "yolo")


def supervision_coco(folder: Path) -> Boxes:
    """COCO, as supervision writes it and reads it again."""
    return _by_supervision(folder, "coco")


def _by_supervision(folder: Path, form: str) -> Boxes:
    from supervision import DetectionDataset, Detections

    _save_images(folder / "images")
    known = _known("images/{}.png")
    marked = {}
    for image, objects in known.items():
        kinds = np.asarray([NAMES.index(kind) for kind, *_ in objects])
        boxes = np.asarray([ends for _, *ends in objects], np.float64)
        marked[str(folder / image)] = Detections(xyxy=boxes, class_id=kinds)
    made = DetectionDataset(classes=NAMES, images=[*marked], annotations=marked)
    images, labels = str(folder / "images"), str(folder / "labels")
    if form == "voc":
        made.as_pascal_voc(annotations_directory_path=labels)
        read = DetectionDataset.from_pascal_voc(images, labels)
    elif form == "yolo":
        made.as_yolo(annotations_directory_path=labels, data_yaml_path=str(folder / "data.yaml"))
        read = DetectionDataset.from_yolo(images, labels, str(folder / "data.yaml"))
    else:
        made.as_coco(annotations_path=str(folder / "annotations.json"))
        read = DetectionDataset.from_coco(images, str(folder / "annotations.json"))
    found: Boxes = {}
    for image, own in read.annotations.items():
        pairs = zip(own.class_id, own.xyxy.tolist(), strict=True)
        name = Path(image).relative_to(folder).as_posix()
        found[name] = [[read.classes[kind], *ends] for kind, ends in pairs]
    return found


def _by_datumaro(folder: Path, form: str, rotation: float = 0.0, by: float = 0.0) -> None:
    from datumaro import Bbox, Dataset, DatasetItem
    from datumaro import Image as Media
    from datumaro.components.annotation import RotatedBbox

    items = []
    for name, objects in OBJECTS.items():
        boxes = [
            RotatedBbox(x + w / 2, y + h / 2, w, h, rotation, label=kind)
            if rotation
            else Bbox(x + by, y + by, w, h, label=kind)
            for x, y, w, h, kind in objects
        ]
        pixels = np.asarray(scene.picture(int(name)))
        media = Media.from_numpy(pixels[:, :, ::-1].copy(), ext=".png")
        items.append(DatasetItem(name, subset="train", media=media, annotations=boxes))
    made = Dataset.from_iterable(items, categories=NAMES)
    made.export(str(folder), form, save_media=True)


def datumaro_cvat(folder: Path) -> Boxes:
    """CVAT's XML by the library of CVAT's authors, each box rotated; corners by OpenCV."""
    import cv2

    _by_datumaro(folder, "cvat", rotation=30.0)
    (image,) = {path.parent for path in folder.rglob("*.png")}
    base = image.relative_to(folder).as_posix()
    return {
        f"{base}/{name}.png": [
            [NAMES[k], *_extent(cv2.boxPoints(((x + w / 2, y + h / 2), (w, h), 30.0)))]
            for x, y, w, h, k in objects
        ]
        for name, objects in OBJECTS.items()
    }


VIDEO = """<?xml version="1.0" encoding="utf-8"?><annotations><version>1.1</version><meta><task>
<id>1</id><name>v</name><size>4</size><mode>interpolation</mode><start_frame>0</start_frame>
<stop_frame>3</stop_frame><labels><label><name>wall</name><attributes></attributes></label>
<label><name>room</name><attributes></attributes></label></labels><original_size><width>64</width>
<height>48</height></original_size></task></meta>{}</annotations>"""


def datumaro_cvat_video(folder: Path) -> Boxes:
    """CVAT for video as CVAT dumps it: each frame's box, until it is outside; the last is empty."""
    from datumaro import Dataset

    row = '<box frame="{}" keyframe="{}" outside="{}" occluded="0" xtl="{}" ytl="3.00" xbr="{}"'
    row += ' ybr="9.00" z_order="0"></box>'
    boxes = [row.format(n, int(n != 1), int(n == 2), 2 + n, 12 + n) for n in range(3)]
    track = f'<track id="0" label="wall" source="manual">{"".join(boxes)}</track>'
    other = row.format(1, 1, 0, 30, 50) + row.format(2, 1, 1, 30, 50)
    track += f'<track id="1" label="room" source="manual">{other}</track>'
    (folder / "annotations.xml").write_text(VIDEO.format(track))
    (folder / "images").mkdir()
    for number in range(4):
        scene.picture(number).save(folder / f"images/frame_{number:06}.png")
    found: Boxes = {f"images/frame_{number:06}.png": [] for number in range(4)}
    for item in Dataset.import_from(str(folder), "cvat"):
        for each in item.annotations:
            x, y, w, h = each.get_bbox()
            if not each.attributes.get("outside"):
                own = [NAMES[each.label], x, y, x + w, y + h]
                found[f"images/frame_{int(item.attributes['frame']):06}.png"].append(own)
    return found


def datumaro_voc(folder: Path) -> Boxes:
    """VOC as CVAT exports it: counted from 0, which shares of pixels tell."""
    _by_datumaro(folder, "voc_detection", by=0.25)
    (image,) = {path.parent for path in folder.rglob("*.png")}
    known = _known(f"{image.relative_to(folder).as_posix()}/{{}}.png")
    return {
        name: [[kind, *(side + 0.25 for side in sides)] for kind, *sides in boxes]
        for name, boxes in known.items()
    }


def datumaro_kitti(folder: Path) -> Boxes:
    """KITTI's labels."""
    _by_datumaro(folder, "kitti_detection")
    (image,) = {path.parent for path in folder.rglob("*.png")}
    return _known(f"{image.relative_to(folder).as_posix()}/{{}}.png")


def lvis(folder: Path) -> Boxes:
    """LVIS v1, whose images have URLs only, as its API reads it."""
    from lvis import LVIS

    content = scene.content(2)
    for image in content["images"]:
        image["coco_url"] = f"http://images.example.org/val2017/{image.pop('file_name')}"
        image |= {"not_exhaustive_category_ids": [1], "neg_category_ids": []}
    for each in content["annotations"]:
        del each["iscrowd"]
    _save_images(folder / "val2017")
    scene.write(folder / "lvis_v1_train.json", content)
    api = LVIS(str(folder / "lvis_v1_train.json"))
    found: Boxes = {}
    for image_id in api.get_img_ids():
        (image,) = api.load_imgs([image_id])
        name = "/".join(image["coco_url"].split("/")[-2:])
        own = api.load_anns(api.get_ann_ids(img_ids=[image_id]))
        found[name] = [
            [api.cats[a["category_id"]]["name"], x, y, x + w, y + h]
            for a in own
            for x, y, w, h in [a["bbox"]]
        ]
    return found


# Each with the package that writes or reads the files.
TOOLS: dict[str, tuple[str, Callable[[Path], Boxes]]] = {
    "ultralytics": ("ultralytics", ultralytics),
    "ultralytics_pose": ("ultralytics", ultralytics_pose),
    "labelme": ("labelme", labelme),
    "label_studio": ("label-studio-sdk", label_studio),
    "label_studio_coco": ("label-studio-sdk", label_studio_converted),
    "label_studio_yolo": ("label-studio-sdk", label_studio_yolo),
    "label_studio_voc": ("label-studio-sdk", label_studio_voc),
    "supervision_voc": ("supervision", supervision_voc),
    "supervision_yolo": ("supervision", supervision_yolo),
    "supervision_coco": ("supervision", supervision_coco),
    "datumaro_cvat": ("datumaro", datumaro_cvat),
    "datumaro_cvat_video": ("datumaro", datumaro_cvat_video),
    "datumaro_voc": ("datumaro", datumaro_voc),
    "datumaro_kitti": ("datumaro", datumaro_kitti),
    "lvis": ("lvis", lvis),
}


def keep(name: str) -> None:
    """Write a tool's files, the sizes of its images and its boxes as one JSON file."""
    package, make = TOOLS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, name)
        folder.mkdir()
        boxes = make(folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        images = [path for path in files if path.suffix == ".png"]
        texts = {
            path.relative_to(folder).as_posix(): path.read_text().replace(scratch, "/tmp/made")
            for path in files
            if path not in images
        }
        sizes = {p.relative_to(folder).as_posix(): Image.open(p).size for p in images}
    command = f"python -m tests.training.workloads.detection.by_tools {name}"
    made_by = f"{package} {metadata.version(package)}"
    kept = {"made_by": made_by, "command": command, "files": texts, "images": sizes}
    KEPT.mkdir(exist_ok=True)
    text = json.dumps({**kept, "boxes": boxes}, indent=1, ensure_ascii=False)
    (KEPT / f"{name}.json").write_text(text + "\n")


def lay_out(name: str, folder: Path) -> Boxes:
    """Write what was kept of a tool into a folder; return the tool's boxes."""
    kept = json.loads((KEPT / f"{name}.json").read_text())
    for file, text in kept["files"].items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    for seed, (file, (width, height)) in enumerate(kept["images"].items()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        scene.picture(seed, width, height).save(folder / file)
    boxes: Boxes = kept["boxes"]
    return boxes


if __name__ == "__main__":
    for each in sys.argv[1:] or TOOLS:
        keep(each)
        print(each)
