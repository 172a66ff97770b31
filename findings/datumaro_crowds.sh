#!/usr/bin/env bash
# datumaro 1.13.12: a COCO file of boxes (no masks) that is imported and exported as COCO again
# loses iscrowd: the region of many animals becomes one animal, which an evaluation then asks for.
# The importer knows it (attribute is_crowd); its YOLO export leaves the box out, LabelMe's keeps
# the mark, CVAT's keeps the box without it. A crowd with a mask (RLE) keeps it.
# Seen: iscrowd [0, 1] before, [0, 0] after COCO to COCO; with a mask [0, 1].
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  datumaro==1.13.12 numpy==2.4.6 pandas==2.3.3 pillow==12.3.0
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import json
import sys
from pathlib import Path

from datumaro import Dataset
from PIL import Image


def written(name, crowd):
    """A dataset of one picture, one animal and one crowd, whose mask is `crowd`."""
    for folder in ("images/train", "annotations"):
        Path(name, folder).mkdir(parents=True)
    Image.new("RGB", (640, 480)).save(f"{name}/images/train/a.jpg")
    boxes = [[10, 10, 100, 80], [200, 200, 300, 200]]
    content = {
        "info": {}, "licenses": [],
        "images": [{"id": 1, "file_name": "a.jpg", "width": 640, "height": 480}],
        "categories": [{"id": 1, "name": "zebra", "supercategory": ""}],
        "annotations": [
            {"id": n + 1, "image_id": 1, "category_id": 1, "bbox": box, "iscrowd": n,
             "area": box[2] * box[3], "segmentation": crowd if n else []}
            for n, box in enumerate(boxes)
        ],
    }
    Path(name, "annotations/instances_train.json").write_text(json.dumps(content))


def crowds(name):
    content = json.loads(Path(name, "annotations/instances_train.json").read_text())
    return [each["iscrowd"] for each in sorted(content["annotations"], key=lambda one: one["bbox"])]


column = [480 * 200 + 200, 200] + [280, 200] * 299 + [480 * 140 + 80]
seen = {}
for name, crowd in {"box": [], "mask": {"counts": column, "size": [480, 640]}}.items():
    written(name, crowd)
    loaded = Dataset.import_from(name, "coco_instances")
    loaded.export(f"{name}-out", "coco_instances", save_media=True)
    seen[name] = crowds(name), crowds(f"{name}-out")
    print(f"crowd with a {name}: iscrowd {seen[name][0]} before, {seen[name][1]} after")
for form in ("yolo", "label_me", "cvat"):
    Dataset.import_from("box", "coco_instances").export(form, form, save_media=True)
    (item,) = Dataset.import_from(form, form)
    kept = [each.attributes.get("is_crowd", "no word of it") for each in item.annotations]
    print(f"{form}: {len(kept)} boxes, is_crowd {kept}")
sys.exit(seen != {"box": ([0, 1], [0, 0]), "mask": ([0, 1], [0, 1])})
PY
