#!/usr/bin/env bash
# globox 2.9.0 numbers the boxes of a COCO file from 0. For pycocotools 2.0.11 a match with box 0 is
# no match: predictions that equal the annotations miss it, and it counts as a box not found. With
# numbers from 1 the same file gives 1.0. Three boxes of one class, each in its own image.
# Seen: AP 0.442, recall 0.667 with numbers from 0; 1.0 and 1.0 with numbers from 1.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  globox==2.9.0 pycocotools==2.0.11 numpy==2.4.6 pillow==13.0.0
cd "$folder"
venv/bin/python - <<'PY'
import contextlib
import io
import json
import sys

from globox import Annotation, AnnotationSet, BoundingBox
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

boxes = AnnotationSet(
    Annotation(
        image_id=f"{n}.jpg",
        image_size=(640, 480),
        boxes=[BoundingBox.create(label="zebra", coords=(10, 10, 100, 80 + n))],
    )
    for n in range(3)
)
boxes.save_coco("globox.json", auto_ids=True)


def evaluated(path):
    """Average precision and recall of predictions that equal the annotations."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(path)
        found = [
            {key: each[key] for key in ("image_id", "category_id", "bbox")} | {"score": 0.9}
            for each in truth.dataset["annotations"]
        ]
        result = COCOeval(truth, truth.loadRes(found), "bbox")
        result.evaluate()
        result.accumulate()
        result.summarize()
    first = min(each["id"] for each in truth.dataset["annotations"])
    print(f"numbers from {first}: AP {result.stats[0]:.3f}, recall {result.stats[8]:.3f}")
    return result.stats[0], result.stats[8]


seen = evaluated("globox.json")
content = json.load(open("globox.json"))
for each in content["annotations"]:
    each["id"] += 1
json.dump(content, open("from-1.json", "w"))
sys.exit(not (evaluated("from-1.json") == (1, 1) and max(seen) < 0.7))
PY
