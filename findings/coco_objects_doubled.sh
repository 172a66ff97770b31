#!/usr/bin/env bash
# Two converters that write COCO. dagshub-annotation-converter 0.3.0, COCO to COCO: an object with a
# box and a polygon becomes two objects, one with each; a crowd becomes an object with a box; images
# without objects are left out. darwin-py 3.6.3: an object whose polygon has two parts becomes a
# crowd of area 0, which pycocotools 2.0.11 leaves out of every average; category ids are CRC32
# sums, mostly above 2**31.
# Seen: dagshub 2 objects and a crowd in 2 images: 5 objects in 1; darwin: iscrowd 1, area 0.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet darwin-py==3.6.3 \
  dagshub-annotation-converter==0.3.0
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import json
import sys
from pathlib import Path

from dagshub_annotation_converter.converters.coco import export_to_coco_file, load_coco_from_file
from darwin.exporter.formats import coco as darwin_coco
from darwin.utils import parse_darwin_json

SIZE = {"width": 64, "height": 48}


def square(x, y, size=10):
    return [(x, y), (x + size, y), (x + size, y + size), (x, y + size)]


def thing(number, x, **more):
    polygon = [value for point in square(x, 5) for value in point]
    common = {"image_id": 1, "category_id": 1, "area": 100, "iscrowd": 0, "segmentation": [polygon]}
    return {"id": number, "bbox": [x, 5, 10, 10], **common, **more}


rows = {"size": [48, 64], "counts": [1000, 400, 1672]}
content = {
    "images": [{"id": n, "file_name": f"{n}.jpg", **SIZE} for n in (1, 2)],
    "categories": [{"id": 1, "name": "zebra"}],
    "annotations": [thing(1, 5), thing(2, 30), thing(3, 20, iscrowd=1, segmentation=rows)],
}
Path("coco.json").write_text(json.dumps(content))
grouped, context = load_coco_from_file("coco.json")
export_to_coco_file([each for group in grouped.values() for each in group], "again.json", context)
again = json.loads(Path("again.json").read_text())
kinds = [("box" if "bbox" in each else "mask", each["iscrowd"]) for each in again["annotations"]]
print(f"dagshub: {len(again['images'])} image, (kind, iscrowd) {kinds}")

parts = [[{"x": x, "y": y} for x, y in square(*corner)] for corner in ((5, 5), (40, 20))]
box = {"x": 5, "y": 5, "w": 45, "h": 25}
zebra = {"id": "1", "name": "zebra", "polygon": {"paths": parts}, "bounding_box": box}
slot = {"type": "image", "slot_name": "0", "source_files": [{"file_name": "1.jpg", "url": ""}]}
item = {"name": "1.jpg", "path": "/", "slots": [slot | SIZE]}
item["source_info"] = {"dataset": {"name": "d", "slug": "d"}, "item_id": "1"}
zebra["slot_names"] = ["0"]
document = {"version": "2.0", "item": item, "annotations": [zebra]}
Path("darwin.json").write_text(json.dumps(document))
darwin_coco.export(iter([parse_darwin_json(Path("darwin.json"), None)]), Path())
(written,) = json.loads(Path("output.json").read_text())["annotations"]
seen = written["iscrowd"], written["area"], written["category_id"]
print(f"darwin: iscrowd {seen[0]}, area {seen[1]}, category id {seen[2]}")
expected = 2 * [("box", 0)] + [("box", 0)] + 2 * [("mask", 0)]
sys.exit(not (kinds == expected and len(again["images"]) == 1 and seen[:2] == (1, 0)))
PY
