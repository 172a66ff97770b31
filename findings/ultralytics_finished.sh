#!/usr/bin/env bash
# ultralytics 8.4.190, torch 2.14.1: `yolo train resume model=last.pt` of a training that has ended
# (its last step strips last.pt) does not say so and end: it begins a new training of 100 epochs on
# the default dataset, coco8, which it downloads. `yolo train model=last.pt resume=last.pt` is an
# error: "training to 1 epochs is finished, nothing to resume".
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
    ultralytics==8.4.190 torch==2.14.1 torchvision==0.29.1 numpy==2.4.6
cd "$folder"
export HOME=$folder
mkdir -p data/images data/labels
venv/bin/python - <<'PY'
import numpy
from PIL import Image

for number in range(4):
    pixels = numpy.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype="uint8")
    Image.fromarray(pixels).save(f"data/images/{number}.png")
    open(f"data/labels/{number}.txt", "w").write("0 0.5 0.5 0.5 0.5\n")
PY
printf 'path: %s/data\ntrain: images\nval: images\nnames: [square]\n' "$folder" >data.yaml
venv/bin/yolo train model=yolo11n.yaml data=data.yaml epochs=1 imgsz=32 batch=4 workers=0 device=cpu \
    amp=False plots=False project="$folder/out" name=run &>first
last=out/run/weights/last.pt
timeout 60 venv/bin/yolo train resume model=$last device=cpu &>again || true
timeout 60 venv/bin/yolo train model=$last resume=$last device=cpu &>path || true
grep --only-matching --extended-regexp 'data=coco8.yaml|\bepochs=100\b|Starting new training instead' again
grep --only-matching 'training to 1 epochs is finished, nothing to resume' path
grep -q 'data=coco8.yaml' again && grep -q 'epochs=100' again
