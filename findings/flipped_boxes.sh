#!/usr/bin/env bash
# kornia 0.9.0 flips an image's box as if its right edge were a pixel (x to W - 1 - x, where a width
# is x2 - x1): each flip moves the boxes one pixel off the object; rotations by 90 degrees and sizes
# are off likewise. torchvision 0.29.2 flips boxes exactly, but KeyPoints by one rule and turns them
# by another: two flips and a turn by 180 degrees give one picture, and points a pixel apart.
# Seen: object 39 to 59, kornia's box 38 to 58; keypoint 58, 37 by flips, 59, 38 by the turn.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet torch==2.15.0 \
  torchvision==0.29.2 kornia==0.9.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys

import kornia.augmentation as kornia
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

image = torch.zeros(3, 48, 64)
image[:, 10:20, 5:25] = 1
box, point = torch.tensor([[5.0, 10, 25, 20]]), torch.tensor([[5.0, 10]])


def around(picture):
    """The box of its white pixels."""
    rows, columns = torch.where(picture[0] > 0.5)
    edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    return [float(each) for each in edges]


flip = kornia.AugmentationSequential(
    kornia.RandomHorizontalFlip(p=1), data_keys=["input", "bbox_xyxy"]
)
flipped, moved = flip(image[None], box[None])
by_kornia = around(flipped[0]), moved.reshape(4).tolist()
print("kornia, object and box:", *by_kornia)

canvas = {"canvas_size": (48, 64)}
flip = v2.RandomHorizontalFlip(1)
flipped, moved = flip(
    tv_tensors.Image(image), tv_tensors.BoundingBoxes(box, format="XYXY", **canvas)
)
by_torchvision = around(flipped), moved.reshape(4).tolist()
print("torchvision, object and box:", *by_torchvision)

given = tv_tensors.Image(image), tv_tensors.KeyPoints(point, **canvas)
flips = v2.Compose([flip, v2.RandomVerticalFlip(1)])(*given)
turn = v2.RandomRotation((180, 180))(*given)
points = [[round(each, 3) for each in to[1].reshape(2).tolist()] for to in (flips, turn)]
print("torchvision, keypoint by two flips and by a turn:", *points)
right = [39.0, 10.0, 59.0, 20.0]
sys.exit(
    by_kornia != (right, [38.0, 10.0, 58.0, 20.0])
    or by_torchvision != (right, right)
    or not torch.equal(flips[0], turn[0])
    or points != [[58.0, 37.0], [59.0, 38.0]]
)
PY
