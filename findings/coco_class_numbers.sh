#!/usr/bin/env bash
# sahi 0.12.8 and labelformat 0.1.17 write COCO's category ids into YOLO's label files as they are.
# YOLO counts a dataset's names from 0, COCO's ids mostly begin at 1: of sahi's zebra and cat each
# zebra is then a cat, and each cat of a class that is not there. labelformat's data.yaml names its
# classes by these ids too, so its files agree, with numbers that YOLO does not have. And its COCO
# files number no annotation, which pycocotools 2.0.11 cannot load.
# Seen: zebra 1, cat 2, names [zebra, cat] (sahi), {1: zebra, 2: cat} (labelformat); KeyError: 'id'.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet sahi==0.12.8 \
  labelformat==0.1.17 pycocotools==2.0.11 numpy==2.4.6 pillow==13.0.0 pyyaml
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import json
import subprocess
import sys
from pathlib import Path

import yaml
from PIL import Image
from pycocotools.coco import COCO
from sahi.utils.coco import Coco

NAMES = ["zebra", "cat"]
SIZE, REST = {"width": 640, "height": 480}, {"iscrowd": 0, "segmentation": []}
Path("images").mkdir()
for name in NAMES:
    Image.new("RGB", (640, 480)).save(f"images/{name}.jpg")
content = {
    "images": [
        {"id": n, "file_name": f"{name}.jpg", **SIZE} for n, name in enumerate(NAMES, 1)
    ],
    "categories": [{"id": n, "name": name, "supercategory": ""} for n, name in enumerate(NAMES, 1)],
    "annotations": [
        {"id": n, "image_id": n, "category_id": n, "bbox": [10, 10, 100, 80], "area": 8000, **REST}
        for n in (1, 2)
    ],
}
Path("coco.json").write_text(json.dumps(content))


def numbers(folder):
    return {name: int((folder / f"{name}.txt").read_text().split()[0]) for name in NAMES}


def names_in(path):
    return yaml.safe_load(Path(path).read_text())["names"]


def converted(form, to, *options):
    program = ["venv/bin/labelformat", "convert"]
    given = ["--task", "object-detection", "--input-format", "coco", "--input-file", "coco.json"]
    made = ["--output-format", form, "--output-file", to, *options]
    subprocess.run([*program, *given, *made], check=True, capture_output=True)


coco = Coco.from_coco_dict_or_path("coco.json", image_dir="images")
coco.export_as_yolo("sahi", train_split_rate=1, disable_symlink=True)
(described,) = Path("sahi").glob("data.y*ml")
converted("yolov8", "labelformat/data.yaml", "--output-split", "train")
converted("coco", "again.json")
seen = {
    "sahi": (numbers(Path("sahi/train")), names_in(described)),
    "labelformat": (numbers(Path("labelformat/labels")), names_in("labelformat/data.yaml")),
}
for package, (written, names) in seen.items():
    print(f"{package}: labels {written}, names {names}")
try:
    loaded = str(COCO("again.json"))
except KeyError as error:
    loaded = f"KeyError: {error}"
print(f"labelformat's COCO file in pycocotools: {loaded}")
expected = {"zebra": 1, "cat": 2}
sys.exit(
    seen != {"sahi": (expected, NAMES), "labelformat": (expected, {1: "zebra", 2: "cat"})}
    or loaded != "KeyError: 'id'"
)
PY
