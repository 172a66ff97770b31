"""The classes of ImageNet's validation images, which are in no folder of a class.

Read from ILSVRC2012's devkit, from Kaggle's LOC_val_solution.csv, or from a CSV of one's own.
"""

import csv
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from training.errors import UserError

_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_SYNSETS = "meta.mat"


def read_validation_classes(path: str) -> Mapping[str, str]:
    """File name without its ending -> the name of its class."""
    given = Path(path)
    if given.is_dir():
        found = sorted(given.rglob(_TRUTH))
        if not found:
            raise UserError(f"{path} has no {_TRUTH}; give the folder ILSVRC2012_devkit_t12")
        return _of_devkit(found[0])
    if not given.is_file():
        raise UserError(f"{path} does not exist; give a CSV or the folder ILSVRC2012_devkit_t12")
    try:
        with given.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, restval="")
            rows, columns = list(reader), set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}; save it as a CSV in UTF-8") from error
    if {"ImageId", "PredictionString"} <= columns:
        # The class, and four numbers for each of its objects.
        listed = {row["ImageId"]: row["PredictionString"].split(" ")[0] for row in rows}
    elif {"file", "class"} <= columns:
        listed = {PurePosixPath(row["file"]).stem: row["class"] for row in rows}
    else:
        raise UserError(
            f"{path} has neither the columns file and class nor ImageId and PredictionString; give "
            "one that has"
        )
    # A row that ends too early has no class: its image is then said to be missing.
    return {name: label for name, label in listed.items() if label}


def _of_devkit(truth: Path) -> Mapping[str, str]:
    """Line n of the ground truth is the number of image n's class, which meta.mat names."""
    from scipy.io import loadmat

    meta = truth.with_name(_SYNSETS)
    try:
        synsets = loadmat(meta, squeeze_me=True)["synsets"]
        names = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        numbers = [int(line) for line in truth.read_text().split()]
        return {
            f"ILSVRC2012_val_{image:08d}": names[number] for image, number in enumerate(numbers, 1)
        }
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"{truth.parent} is not the data of ILSVRC2012's devkit: {error}; unpack it again"
        ) from error
