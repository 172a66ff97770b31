"""Packs users' images, in class folders or ImageNet's own layout, or drawn ones.

For validation images without class folders, classes come from ILSVRC2012's devkit, Kaggle's
LOC_val_solution.csv or the user's own CSV. Drawn pictures, functions of (seed, index), can train a
classifier without a download: one of eight patterns with random scale, place and lighting, in two
random colors, with noise. Imports no torch, for which every packing process would have to wait.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import Image

from contract.errors import UserError
from contract.file_names import composed
from training.durable import (
    Brought,
    FinishedFiles,
    FolderOutput,
    Output,
    SourceFile,
    classless,
    refuse_untrained,
    without_strays,
)
from training.workloads.imagenet.packing import BroughtImage, Encoded, ImageOptions, Packing, pack

if TYPE_CHECKING:
    # It imports torch.
    from training import Progress

_VALIDATION_SHARE = 0.1  # of users' images
_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_SYNSETS = "meta.mat"
_TINY_LIST = "val_annotations.txt"  # tiny-imagenet-200's
# Hugging Face's own library reads its tables, of which no file says which images it holds.
_CONVERT = (
    "{file} is a table; write its images to the folder images with `pip install datasets && "
    "python -c \"import datasets, pathlib; [((p := pathlib.Path('images', s, "
    "d.features['label'].int2str(r['label']))).mkdir(parents=True, exist_ok=True), "
    "(p / f'{{n}}.jpg').write_bytes(r['image']['bytes'])) for s, d in "
    "datasets.load_dataset('{folder}').items() for n, r in "
    "enumerate(d.cast_column('image', datasets.Image(decode=False)))]\"` and import that"
)
_QUALITY = 90  # of drawn pictures; every fifth of a class is for validation
_VALIDATION_EVERY = 5

_Values: TypeAlias = NDArray[np.float64]
# Coordinates in units of the pattern -> the share of the second color, from 0 to 1.
_Pattern: TypeAlias = Callable[[_Values, _Values], Any]


def pack_dataset(
    files: Sequence[Brought],
    output: Output,
    seed: int,
    progress: "Progress",
    options: ImageOptions | None = None,
) -> FinishedFiles:
    """Pack the images of `files`.

    If they have no split for validation, it gets a tenth of each class, not of a split for test;
    `seed` decides which.
    """
    chosen = options or ImageOptions()
    brought, labels = _in_classes(files, chosen)
    classes = sorted(set(labels))
    if len(classes) < 2:
        which = f"only the class {classes[0]!r} has" if classes else "no class has"
        raise UserError(f"{which} images; lay two or more out as CLASS/FILE")
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, list[BroughtImage]] = {}
    source, split_of = [], list(_splits(brought, labels, seed))
    for file, label, split in zip(brought, labels, split_of, strict=True):
        image = BroughtImage(file=file, label=numbers[label], options=chosen)
        splits.setdefault(split, []).append(image)
        source.append(f"{file.num_bytes} {label} {split} {file.name}")
    if missing := [split for split in ("train", "validation") if split not in splits]:
        raise UserError(f"split {missing[0]} has no files; add some, or use no splits")
    refuse_untrained(labels, split_of)
    packing = Packing(
        splits=splits,
        classes=classes,
        seed=seed,
        # Another version of Pillow may encode different bytes.
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
    """Return the files that have a class, and their classes; UserError for an image without one.

    Test images, and files whose names are not those of images, may have none and are left out.
    """
    listed: Mapping[str, str] = {}
    if options.validation_classes:
        listed = _read_validation_classes(options.validation_classes)
    elif own := [file for file in files if PurePosixPath(file.name).name == _TINY_LIST]:
        listed = _of_tiny_imagenet(own[0].read().decode(errors="replace"))
    brought, labels = [], []
    suffixes = Image.registered_extensions()
    for file in without_strays(files, suffixes):
        path = PurePosixPath(file.name)
        label = file.label
        if label is None and file.split == "validation" and listed:
            label = listed.get(composed(path.stem))
            if label is None and path.suffix.lower() in suffixes:
                raise UserError(f"{file.name} is not in {options.validation_classes}; complete it")
        if path.suffix.lower() == ".parquet":
            folder = file.folder if isinstance(file, SourceFile) else "FOLDER"
            raise UserError(_CONVERT.format(file=file.name, folder=folder))
        if file.doubt and file.label is not None:
            raise UserError(file.doubt)
        if label is not None:
            brought.append(file)
            labels.append(label)
        elif file.split != "test" and path.suffix.lower() in suffixes:
            raise UserError(_in_no_class(file))
    if empty := sorted({file.label for file in files if file.label is not None} - set(labels)):
        raise UserError(f"class {empty[0]!r} has no images; add some, or delete its folder")
    return brought, labels


def _in_no_class(file: Brought) -> str:
    if file.split == "validation":
        return (
            f"{file.name} is in no class; lay the files out as SPLIT/CLASS/FILE, or name a list of "
            "classes or ILSVRC2012's devkit: --override validation_classes=PATH"
        )
    return classless(file)


def _splits(files: Sequence[Brought], labels: Sequence[str], seed: int) -> Iterator[str]:
    """Yield the split of each file."""
    of_class: dict[str, list[int]] = {}
    has_own = any(file.split == "validation" for file in files)
    for number, (file, label) in enumerate(zip(files, labels, strict=True)):
        if file.split != "test" and not has_own:
            of_class.setdefault(label, []).append(number)
    held_out = set[int]()
    for place, (label, numbers) in enumerate(sorted(of_class.items())):
        if len(numbers) < 2:
            raise UserError(f"class {label!r} has a single image; give two or more")
        num = max(1, round(_VALIDATION_SHARE * len(numbers)))
        chosen = np.random.default_rng([seed, place]).permutation(len(numbers))[:num]
        held_out |= {numbers[int(at)] for at in chosen}
    for number, file in enumerate(files):
        yield "validation" if number in held_out else file.split or "train"


def _read_validation_classes(path: str) -> Mapping[str, str]:
    """Map file names, without their endings, to the names of their classes."""
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
        # PredictionString is the class and four numbers for each of its objects.
        listed = {row["ImageId"]: row["PredictionString"].split(" ")[0] for row in rows}
    elif {"file", "class"} <= columns:
        listed = {PurePosixPath(row["file"]).stem: row["class"] for row in rows}
    else:
        raise UserError(
            f"{path} has neither the columns file and class nor ImageId and PredictionString; use "
            "one of these pairs"
        )
    # A row that ends too early has no class; its image is then reported as missing.
    return {composed(name): composed(label) for name, label in listed.items() if label}


def _of_tiny_imagenet(text: str) -> Mapping[str, str]:
    """Map images to classes: a line has file, class and a box, separated by tabs."""
    rows = [line.split("\t") for line in text.splitlines()]
    return {PurePosixPath(row[0]).stem: row[1] for row in rows if row[1:]}


def _of_devkit(truth: Path) -> Mapping[str, str]:
    """Map images to classes: line n of the truth is image n's class number, named in meta.mat."""
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


def _wave(x: _Values) -> _Values:
    return 0.5 + 0.5 * np.cos(2 * np.pi * x)


def _bricks(x: _Values, y: _Values) -> Any:
    shifted = x / 2 + 0.5 * (np.floor(y) % 2)
    return (np.abs(shifted % 1 - 0.5) < 0.43) & (np.abs(y % 1 - 0.5) < 0.4)


def _dots(x: _Values, y: _Values) -> Any:
    return np.hypot(x % 1 - 0.5, y % 1 - 0.5) < 0.32


_CLASSES: Mapping[str, _Pattern] = MappingProxyType(
    {
        "bricks": _bricks,
        "checks": lambda x, y: (np.floor(x) + np.floor(y)) % 2,
        "dots": _dots,
        "plaid": lambda x, y: (_wave(x) + _wave(y)) / 2,
        "rays": lambda x, y: _wave(np.arctan2(y, x) * 6 / np.pi),
        "rings": lambda x, y: _wave(np.hypot(x, y)),
        "stripes": lambda x, y: _wave(x),
        "zigzags": lambda x, y: _wave(x + np.abs(y % 2 - 1)),
    }
)


def make_dataset(out: Path, count: int, seed: int, progress: "Progress") -> Mapping[str, Any]:
    """Draw and pack `count` pictures, every fifth of a class for validation; return the meta."""
    least = 2 * _VALIDATION_EVERY * len(_CLASSES)
    if count < least:
        raise UserError(f"count is {count}; give at least {least} ({len(_CLASSES)} classes)")
    if seed < 0:
        raise UserError(f"seed is {seed}; give 0 or more")
    splits: dict[str, list[_Drawn]] = {"train": [], "validation": []}
    for index in range(count):
        is_held_out = index // len(_CLASSES) % _VALIDATION_EVERY == 0
        drawn = _Drawn(seed=seed, index=index)
        splits["validation" if is_held_out else "train"].append(drawn)
    packing = Packing(
        splits=splits, classes=list(_CLASSES), seed=seed, options={"drawn": count}, source=[]
    )
    output = FolderOutput(out)
    finished = pack(packing, output, progress)
    output.clean_up()
    return finished.meta


@dataclass(frozen=True, kw_only=True, slots=True)
class _Drawn:
    """A picture that is drawn by the process that packs it."""

    seed: int
    index: int

    @property
    def name(self) -> str:
        return f"picture {self.index}"

    @property
    def label(self) -> int:
        return self.index % len(_CLASSES)

    def make(self) -> Encoded:
        return _draw(self.seed, self.index)


def _draw(seed: int, index: int) -> Encoded:
    """Draw picture `index` as a JPEG."""
    rng = np.random.default_rng([seed, index])
    width, height = (int(side) for side in rng.integers(72, 128, 2))
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    # The pattern's origin is somewhere near the middle of the picture, and it is rotated.
    x, y = x - width * rng.uniform(0.2, 0.8), y - height * rng.uniform(0.2, 0.8)
    angle, unit = rng.uniform(-0.4, 0.4), rng.uniform(10, 18)
    u = (np.cos(angle) * x + np.sin(angle) * y) / unit
    v = (np.cos(angle) * y - np.sin(angle) * x) / unit
    pattern = list(_CLASSES.values())[index % len(_CLASSES)]
    share = np.asarray(pattern(u, v), np.float64)[..., None]
    first, second = _two_colors(rng)
    light = 1 + 0.3 * np.cos(rng.uniform(0, 2 * np.pi) + x / width * rng.uniform(1, 4))[..., None]
    pixels = (first + share * (second - first)) * light + rng.normal(0, 14, (height, width, 3))
    encoded = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(encoded, "JPEG", quality=_QUALITY)
    return Encoded(jpeg=encoded.getvalue(), num_pixels=width * height, is_converted=False)


def _two_colors(rng: np.random.Generator) -> tuple[_Values, _Values]:
    """Draw a dark color and a light one."""
    return rng.uniform(10, 120, 3), rng.uniform(135, 245, 3)
