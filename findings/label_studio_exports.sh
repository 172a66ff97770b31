#!/usr/bin/env bash
# label-studio-sdk 2.1.2, the converter of Label Studio's exports: YOLO and VOC name a label file
# after the image alone. Of images with one name in two folders, and of two annotations of one task,
# the last one overwrites the others without a word; COCO lists the image twice instead. A rotated
# rectangle is turned in percents of width and height: in an image that is not square, its COCO
# box is elsewhere (reported in 2022: label-studio-converter #131).
# Seen: of 2 and 1 objects, 1 in YOLO and VOC, 3 in COCO; a box at 80 20 20 40 comes as 60 20 40 20.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet label-studio-sdk==2.1.2
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import json
import sys
from pathlib import Path

from label_studio_sdk.converter import Converter

CONFIG = """<View><Image name="image" value="$image"/><RectangleLabels name="label" toName="image">
<Label value="zebra"/><Label value="cat"/></RectangleLabels></View>"""


def region(name, x, rotation=0):
    """Of a picture of 200 by 100: 40 by 20 pixels, in percents as Label Studio has it."""
    value = {"x": x, "y": 20, "width": 20, "height": 20, "rotation": rotation}
    size = {"original_width": 200, "original_height": 100, "image_rotation": 0}
    names = {"from_name": "label", "to_name": "image", "type": "rectanglelabels"}
    return {"id": f"{name}{x}", **names, **size, "value": value | {"rectanglelabels": [name]}}


def task(number, image, *annotations):
    made = [
        {"id": 10 * number + n, "completed_by": n, "was_cancelled": False, "result": list(regions)}
        for n, regions in enumerate(annotations, 1)
    ]
    return {"id": number, "data": {"image": f"s3://bucket/{image}"}, "annotations": made}


def exported(name, *tasks):
    Path(f"{name}.json").write_text(json.dumps(tasks))
    for form in ("COCO", "YOLO", "VOC"):
        converter = Converter(CONFIG, project_dir=".", download_resources=False)
        converter.convert(f"{name}.json", f"{name}-{form}", form, is_dir=False)
    coco = json.loads(Path(f"{name}-COCO/result.json").read_text())
    yolo = [each.read_text() for each in Path(f"{name}-YOLO/labels").glob("*.txt")]
    voc = [each.read_text() for each in Path(f"{name}-VOC/Annotations").glob("*.xml")]
    objects = len("".join(yolo).split()) // 5, "".join(voc).count("<object>")
    print(f"{name}: COCO {len(coco['images'])} images, {len(coco['annotations'])} objects,"
          f" YOLO and VOC {objects} objects in {len(yolo)} file")
    return coco, objects


two, one = (region("zebra", 10), region("cat", 50)), (region("zebra", 10),)
folders, kept = exported("folders", task(1, "day1/1.jpg", two), task(2, "day2/1.jpg", one))
_, last = exported("annotators", task(1, "1.jpg", two, one))
turned, _ = exported("turned", task(1, "1.jpg", (region("cat", 50, rotation=90),)))
box = [round(each) for each in turned["annotations"][0]["bbox"]]
print("40 by 20, turned by 90 degrees about 100 20:", box)
found = len(folders["annotations"]), kept, last, box
sys.exit(found != (3, (1, 1), (1, 1), [60, 20, 40, 20]))
PY
