#!/usr/bin/env bash
# coco-assistant 0.3.5: merge() numbers the images and annotations of the second file on from the
# last one in the first file's list, not from the largest number. In a COCO file that is not sorted
# by id (a shuffled one, or the part of a split) the new numbers are taken: each reader keeps one of
# two images with the same id, and gives it the boxes of both.
# Seen: ids 3 4 1 2, then 3 4 5 6: of 8 images pycocotools 2.0.11 loads 6, two of them with two
# boxes, one of which is another image's.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet coco-assistant==0.3.5 \
  pycocotools==2.0.11 numpy==2.4.6 pillow==13.0.0
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import contextlib
import io
import json
import sys
from pathlib import Path

from coco_assistant import COCO_Assistant
from PIL import Image
from pycocotools.coco import COCO


def written(name, ids):
    """One image with one box for each id, whose height tells the file that it comes from."""
    folder = Path("images", name)
    folder.mkdir(parents=True)
    images, boxes = [], []
    for each in ids:
        file = f"{name}-{each}.png"
        Image.new("RGB", (640, 480)).save(folder / file)
        images.append({"id": each, "file_name": file, "width": 640, "height": 480})
        box = {"bbox": [10, 10, 100, 80], "area": 8000, "iscrowd": 0, "segmentation": []}
        boxes.append({"id": each, "image_id": each, "category_id": 1, **box})
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    Path("annotations").mkdir(exist_ok=True)
    Path("annotations", f"{name}.json").write_text(json.dumps(content))


written("first", [3, 4, 1, 2])
written("second", [1, 2, 3, 4])
with contextlib.redirect_stdout(io.StringIO()):
    COCO_Assistant("images", "annotations").merge()
    merged = COCO("results/merged/annotations/merged.json")
print("image ids:", [each["id"] for each in merged.dataset["images"]])
lost = {each["file_name"] for each in merged.dataset["images"]}
lost -= {each["file_name"] for each in merged.loadImgs(merged.getImgIds())}
doubled = [n for n in merged.getImgIds() if len(merged.imgToAnns[n]) > 1]
print(f"loaded: {len(merged.imgs)} of 8 images; lost: {sorted(lost)}; two boxes: {doubled}")
sys.exit(not (len(merged.imgs) == 6 and doubled == [3, 4]))
PY
