"""Twenty exports of one scene, in the shapes in which tools write them: each the same boxes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.training.workloads.detection import coco_scene as scene

# As users' tools lay them out: split -> numbers of the images.
SPLITS = {"train": range(24), "val": range(24, 30)}
NAMES = ("wall", "room")
BOXES = {"wall": (2.0, 3.0, 42.0, 9.0), "room": (10.0, 12.0, 40.0, 32.0)}
IMAGES = [(split, number) for split, numbers in SPLITS.items() for number in numbers]
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
    for split, number in IMAGES:
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
    for split, number in IMAGES:
        save(root / split / f"{number}.png", number)
        put(root / split / f"{number}.xml", voc_xml(f"{number}.png"))


def labelme(root: Path) -> None:
    """A JSON file beside each image: a polygon, a rectangle, a point."""
    for split, number in IMAGES:
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


def coco_2017(root: Path) -> None:
    """annotations/instances_train2017.json beside train2017, next to files about other tasks."""
    for split, numbers in SPLITS.items():
        content = scene.content(len(numbers), numbers[0])
        scene.write(root / f"annotations/instances_{split}2017.json", content)
        scene.write(root / f"annotations/captions_{split}2017.json", {"annotations": []})
        scene.save_images(content, root / f"{split}2017")


def _of_roboflow(root: Path, project: str, kinds: Sequence[str]) -> None:
    """SPLIT/_annotations.coco.json beside its images; category 0 is the project."""
    for split, numbers in SPLITS.items():
        folder = root / ("valid" if split == "val" else split)
        content = scene.content(len(numbers), numbers[0])
        content["info"] = {"description": "Exported from roboflow.com"}
        content["categories"] = [
            {"id": 0, "name": project, "supercategory": "none"},
            *({"id": n, "name": k, "supercategory": project} for n, k in enumerate(kinds, 1)),
        ]
        scene.save_images(content, folder)
        for image in content["images"]:  # ids begin anew in each split
            image |= {"id": image["id"] - numbers[0], "extra": {"name": "plan.jpg"}}
        for number, each in enumerate(content["annotations"]):
            each |= {"id": number, "image_id": number // 2}
        scene.write(folder / "_annotations.coco.json", content)
    put(root / "README.roboflow.txt", "This dataset was exported via roboflow.com")


def coco_of_roboflow(root: Path) -> None:
    """The project has a name of its own."""
    _of_roboflow(root, "floor-plans", NAMES)


def coco_of_roboflow_named_as_its_class(root: Path) -> None:
    """The project is called as one of its classes."""
    _of_roboflow(root, "wall", NAMES)


def coco_of_cvat(root: Path) -> None:
    """annotations/instances_SPLIT.json and images/SPLIT, with attributes and empty licenses."""
    for split, numbers in SPLITS.items():
        content = scene.content(len(numbers), numbers[0])
        for each in content["annotations"]:
            each["attributes"] = {"occluded": False, "rotation": 0.0}
        content |= {"licenses": [{"name": "", "id": 0, "url": ""}], "info": {"contributor": ""}}
        scene.write(root / f"annotations/instances_{split.title()}.json", content)
        scene.save_images(content, root / "images" / split.title())


def coco_of_label_studio(root: Path) -> None:
    """result.json and images, undivided; names with Windows' separators, categories from 0."""
    content = scene.content(30)
    scene.save_images(content, root / "images")
    for image in content["images"]:
        image["file_name"] = f"images\\{image['file_name']}"
    for each in content["annotations"]:
        each["category_id"] -= 1
        each["ignore"] = 0
    content["categories"] = [{"id": n, "name": kind} for n, kind in enumerate(NAMES)]
    scene.write(root / "result.json", content)


def coco_with_masks(root: Path) -> None:
    """As segmentation tools write it: polygons, one part an object, no boxes and no areas."""
    for split, numbers in SPLITS.items():
        content = scene.content(len(numbers), numbers[0])
        for each in content["annotations"]:
            x, y, w, h = each.pop("bbox")
            del each["area"], each["iscrowd"]
            each["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        scene.write(root / split / "coco.json", content)
        scene.save_images(content, root / split)


def coco_with_loose_ids(root: Path) -> None:
    """As scripts write it: ids as text and floats, with gaps."""
    for split, numbers in SPLITS.items():
        content = scene.content(len(numbers), numbers[0])
        for each in content["annotations"]:
            each |= {"image_id": str(each["image_id"]), "category_id": 7.0 * each["category_id"]}
        for category in content["categories"]:
            category["id"] = str(7 * category["id"])
        scene.write(root / f"{split}.json", content)
        scene.save_images(content, root / split)


def yolo_v11_with_lists(root: Path) -> None:
    """All images in one folder; train.txt and val.txt list them."""
    put(root / "data.yaml", "path: .\ntrain: train.txt\nval: val.txt\nnames: {0: wall, 1: room}\n")
    for split, numbers in SPLITS.items():
        put(root / f"{split}.txt", "".join(f"./images/{n}.png\n" for n in numbers))
        for number in numbers:
            save(root / f"images/{number}.png", number)
            put(root / f"labels/{number}.txt", yolo_lines())


def yolo_of_cvat(root: Path) -> None:
    """YOLO 1.1: obj.names, and text files beside the images."""
    put(root / "obj.names", "wall\nroom\n")
    put(root / "obj.data", "classes = 2\nnames = data/obj.names\nbackup = backup/\n")
    for split, numbers in SPLITS.items():
        inside = f"obj_{'valid' if split == 'val' else split}_data"
        put(root / f"{split}.txt", "".join(f"data/{inside}/{n}.png\n" for n in numbers))
        for number in numbers:
            save(root / inside / f"{number}.png", number)
            put(root / inside / f"{number}.txt", yolo_lines())


def yolo_of_label_studio(root: Path) -> None:
    """classes.txt, notes.json, images and labels: undivided."""
    put(root / "classes.txt", "wall\nroom\n")
    put(root / "notes.json", json.dumps({"categories": [{"id": 0, "name": "wall"}], "info": {}}))
    for number in range(30):
        save(root / f"images/{number}.png", number)
        put(root / f"labels/{number}.txt", yolo_lines())


CVAT = {"train": "Train", "val": "Validation"}


def cvat_for_images(root: Path) -> None:
    """annotations.xml of CVAT's own, a box and a polygon; a subset for each image."""
    images = []
    for split, number in IMAGES:
        save(root / f"images/{number}.png", number)
        left, top, right, bottom = BOXES["room"]
        corners = f"{left},{top};{right},{top};{right},{bottom};{left},{bottom}"
        box = 'label="wall" occluded="0" xtl="2" ytl="3" xbr="42" ybr="9" z_order="0"'
        images.append(
            f'<image id="{number}" name="{number}.png" subset="{CVAT[split]}" width="64" '
            f'height="48"><box {box}><attribute name="a">1</attribute></box>'
            f'<polygon label="room" points="{corners}"></polygon></image>'
        )
    meta = "<version>1.1</version><meta><task><name>plans</name></task></meta>"
    put(root / "annotations.xml", f"<annotations>{meta}{''.join(images)}</annotations>")


def csv_of_tensorflow(root: Path) -> None:
    """SPLIT/_annotations.csv beside its images, a row for each box."""
    for split, numbers in SPLITS.items():
        rows = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
        for number in numbers:
            save(root / split / f"{number}.png", number)
            for kind, box in BOXES.items():
                rows.append(f"{number}.png,64,48,{kind},{','.join(f'{v:g}' for v in box)}")
        put(root / split / "_annotations.csv", "\n".join(rows) + "\n")


def create_ml(root: Path) -> None:
    """SPLIT/_annotations.createml.json: centres and sizes in pixels."""
    for split, numbers in SPLITS.items():
        content = []
        for number in numbers:
            save(root / split / f"{number}.png", number)
            objects = [
                {
                    "label": kind,
                    "coordinates": {
                        "x": (left + right) / 2,
                        "y": (top + bottom) / 2,
                        "width": right - left,
                        "height": bottom - top,
                    },
                }
                for kind, (left, top, right, bottom) in BOXES.items()
            ]
            content.append({"image": f"{number}.png", "annotations": objects})
        scene.write(root / split / "_annotations.createml.json", content)


EXPORTS: Sequence[Write] = (
    *(coco_2017, coco_elsewhere, coco_of_roboflow, coco_of_roboflow_named_as_its_class),
    *(coco_of_cvat, coco_of_label_studio, coco_with_masks, coco_with_loose_ids),
    *(yolo_v5, yolo_v8_of_roboflow, yolo_v11_with_lists, yolo_of_cvat, yolo_of_label_studio),
    *(voc_2012, voc_of_roboflow, labelme, kitti, cvat_for_images, csv_of_tensorflow, create_ml),
)

# A model of seconds.
SMALL = ["width=32", "feed_forward=32", "encoder_layers=1", "decoder_layers=1", "num_queries=5"]
SMALL += ["denoising_queries=0", "short_sides=64", "max_side=64", "num_threads=1", "epochs=1"]
SMALL += ["drop_epoch=1", "global_batch=8", "micro_batch=8"]
