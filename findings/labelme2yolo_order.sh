#!/usr/bin/env bash
# labelme2yolo 0.4.0 numbers the classes in another order each time it runs, whatever its --seed:
# labels converted again, or a second folder, fit no model that was trained on the first ones, and
# only dataset.yaml tells. With --deterministic_labels, which the README does not name, the order is
# the same each time.
# Seen: 10 conversions of one picture with 6 classes: 10 orders of names; with the option, one.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet labelme2yolo==0.4.0 \
  pillow==13.0.0 pyyaml
cd "$folder"
venv/bin/python - <<'PY'
import json
import subprocess
import sys
from pathlib import Path

import yaml
from PIL import Image

CLASSES = ["ant", "bee", "cat", "dog", "elk", "fox"]
Path("labelme").mkdir()
Image.new("RGB", (640, 480)).save("labelme/all.jpg")
shape = {"shape_type": "rectangle", "points": [[10, 10], [60, 40]], "group_id": None, "flags": {}}
content = {"version": "5.5.0", "flags": {}, "imagePath": "all.jpg", "imageData": None}
content |= {"imageHeight": 480, "imageWidth": 640}
content["shapes"] = [{"label": name, **shape} for name in CLASSES]
Path("labelme/all.json").write_text(json.dumps(content))


def converted(to, *options):
    """The names in the order of their numbers."""
    program = ["venv/bin/labelme2yolo", "-d", "labelme", "-o", to, "--seed", "1", *options]
    subprocess.run(program, check=True, capture_output=True)
    names = yaml.safe_load(Path(to, "dataset.yaml").read_text())["names"]
    return tuple(names[number] for number in range(len(names)))


orders = {converted(f"yolo-{n}") for n in range(10)}
steady = {converted(f"steady-{n}", "--deterministic_labels") for n in range(10)}
print(f"{len(orders)} orders in 10 conversions, such as", *sorted(orders)[:2], sep="\n  ")
print("with --deterministic_labels:", *steady)
sys.exit(not (len(orders) > 1 and len(steady) == 1))
PY
