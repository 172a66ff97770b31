#!/usr/bin/env bash
# Three packages' average precision. mapcalc 0.2.2 never looks at the scores: the order in which the
# predictions are given counts. map-boxes 1.0.6 leaves out predictions in images without a box, and
# of two predictions for one box it takes the first one in the list, not the better one.
# mean-average-precision 2024.1.5.0 and mapcalc add 1 to each width and height, as of pixels: boxes
# in shares of the image (0 to 1) seem to overlap by much more than they do.
# Seen: mapcalc 1.0, reversed 0.5; map-boxes 1.0 with 9 false alarms on empty images, 1.0 or 0.67
# by the order; boxes that share a fifth: 1.0 for both.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet mapcalc==0.2.2 \
  map-boxes==1.0.6 mean-average-precision==2024.1.5.0 numpy==2.4.6 pandas==2.3.3
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys

import numpy as np
from map_boxes import mean_average_precision_for_boxes
from mapcalc import calculate_map
from mean_average_precision import MetricBuilder


def by_mapcalc(truth, found):
    """Of one image: boxes, and (box, score)."""
    given = {"boxes": [box for box, _ in found], "scores": [score for _, score in found]}
    truth = {"boxes": truth, "labels": [1] * len(truth)}
    return float(calculate_map(truth, given | {"labels": [1] * len(found)}, 0.5))


def by_map_boxes(truth, found):
    """Of several images: (image, box), and (image, box, score)."""

    def row(image, box, *score):
        return [image, "cat", *score, box[0], box[2], box[1], box[3]]

    rows = [row(image, box, score) for image, box, score in found]
    arrays = (np.array(each, dtype=object) for each in ([row(*each) for each in truth], rows))
    return float(mean_average_precision_for_boxes(*arrays, verbose=False)[0])


def by_mean_average_precision(truth, found):
    metric = MetricBuilder.build_evaluation_metric("map_2d", async_mode=False, num_classes=1)
    metric.add(np.array([[*box, 0, score] for box, score in found]),
               np.array([[*box, 0, 0, 0] for box in truth]))
    return float(metric.value(iou_thresholds=0.5, mpolicy="soft")["mAP"])


one, two = [0, 0, 50, 50], [100, 0, 150, 50]
elsewhere, empty = [0, 200, 50, 250], [50, 200, 99, 250]
found = [(one, 0.9), (two, 0.8), (elsewhere, 0.2), (empty, 0.1)]
seen = [by_mapcalc([one, two], given) for given in (found, found[::-1])]
print("mapcalc, the best first and last:", seen)

truth = [("a", one), ("b", two)]
right = [("a", one, 0.5), ("b", two, 0.5)]
alarms = [(f"empty-{n}", one, 0.9) for n in range(9)]
near = ("a", [0, 0, 50, 40], 0.3)  # of the same object, less sure
seen += [by_map_boxes(truth, alarms + right)]
seen += [by_map_boxes(truth, given) for given in ([*right, near], [near, *right])]
print("map-boxes with false alarms, the better of two first and last:", seen[2:])

apart = ([[0.1, 0.1, 0.4, 0.4]], [([0.3, 0.1, 0.6, 0.4], 0.9)])
seen += [by_mapcalc(*apart), by_mean_average_precision(*apart)]
print("boxes that share a fifth, mapcalc and mean-average-precision:", seen[5:])
sys.exit(not (seen[:4] == [1, 0.5, 1, 1] and seen[4] < 1 and seen[5:] == [1, 1]))
PY
