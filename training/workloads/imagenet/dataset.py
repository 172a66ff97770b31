"""Packs the images that users bring: a folder of classes, or ImageNet's own layout.

The classes of validation images in no folder are read from ILSVRC2012's devkit, Kaggle's
LOC_val_solution.csv, or the user's own CSV.
Imports no torch: each process that packs would have to wait for it.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import PIL
from PIL import Image

from training.dataset_output import FinishedFiles, Output
from training.errors import UserError
from training.sources import Brought
from training.workloads.imagenet.images import BroughtImage, ImageOptions
from training.workloads.imagenet.packing import Packing, pack

if TYPE_CHECKING:
    # It imports torch.
    from training.workload import Progress

_VALIDATION_SHARE = 0.1
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_SYNSETS = "meta.mat"


def pack_dataset(
    files: Sequence[Brought],
    output: Output,
    seed: int,
    progress: "Progress",
    options: ImageOptions | None = None,
) -> FinishedFiles:
    """Pack the images of `files`.

    Without splits of their own, a tenth of each class is for validation; `seed` decides which.
    """
    chosen = options or ImageOptions()
    brought, labels = _in_classes(files, chosen)
    classes = sorted(set(labels))
    if len(classes) < 2:
        raise UserError(f"{len(classes)} classes have images; lay two or more out as CLASS/FILE")
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, list[BroughtImage]] = {}
    source = []
    for file, label, split in zip(brought, labels, _splits(brought, labels, seed), strict=True):
        image = BroughtImage(
            file=file,
            label=numbers[label],
            shorter_side=chosen.shorter_side,
            quality=chosen.quality,
        )
        splits.setdefault(split, []).append(image)
        source.append(f"{file.num_bytes} {label} {split} {file.name}")
    if missing := [split for split in ("train", "validation") if split not in splits]:
        raise UserError(f"split {missing[0]} has no files; add some, or use no splits")
    packing = Packing(
        splits=splits,
        classes=classes,
        seed=seed,
        # Another Pillow may encode to other bytes.
        options={
            "shorter_side": chosen.shorter_side,
            "quality": chosen.quality,
            "pillow": PIL.__version__,
        },
        source=source,
        left_out_share=chosen.left_out_share,
    )
    return pack(packing, output, progress)


def _in_classes(files: Sequence[Brought], options: ImageOptions) -> tuple[list[Brought], list[str]]:
    """The files that are in a class, and these classes; UserError for an image that is in none.

    Left out of those in none: files that are not images by their names, and images to test on.
    """
    listed: Mapping[str, str] = {}
    if options.validation_classes:
        listed = read_validation_classes(options.validation_classes)
    brought, labels = [], []
    suffixes = Image.registered_extensions()
    for file in files:
        path = PurePosixPath(file.name)
        label = file.label
        if label is None and file.split == "validation" and listed:
            label = listed.get(path.stem)
            if label is None and path.suffix.lower() in suffixes:
                raise UserError(f"{file.name} is not in {options.validation_classes}; complete it")
        if label is not None:
            brought.append(file)
            labels.append(label)
        elif file.split != "test" and path.suffix.lower() in suffixes:
            raise UserError(_in_no_class(file))
    return brought, labels


def _in_no_class(file: Brought) -> str:
    if file.split == "validation":
        return (
            f"{file.name} is in no class; lay the files out as SPLIT/CLASS/FILE, or name a list of "
            "classes or ILSVRC2012's devkit: --override validation_classes=PATH"
        )
    wanted = "CLASS/FILE" if file.split is None else "SPLIT/CLASS/FILE"
    return f"{file.name} is in no class; lay the files out as {wanted}"


def _splits(files: Sequence[Brought], labels: Sequence[str], seed: int) -> Iterator[str]:
    """The split of each file."""
    of_class: dict[str, list[int]] = {}
    for number, (file, label) in enumerate(zip(files, labels, strict=True)):
        if file.split is None:
            of_class.setdefault(label, []).append(number)
    held_out = set[int]()
    for place, (label, numbers) in enumerate(sorted(of_class.items())):
        if len(numbers) < 2:
            raise UserError(f"class {label!r} has a single image; give two or more")
        num = max(1, round(_VALIDATION_SHARE * len(numbers)))
        chosen = np.random.default_rng([seed, place]).permutation(len(numbers))[:num]
        held_out |= {numbers[int(at)] for at in chosen}
    for number, file in enumerate(files):
        yield file.split or ("validation" if number in held_out else "train")


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
