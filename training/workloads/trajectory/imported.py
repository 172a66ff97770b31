"""`data import`: users' files become a dataset; broken ones are listed and left out.

Several processes decode them once, to what the loader maps into memory (training/LOG.md compares).
An interrupted import continues: a line of DECODED is written once a file's clip is on disk.
"""

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from contract.errors import UserError
from contract.keys import UNFINISHED
from training import in_processes
from training.durable import FolderOutput, SourceFile, class_names
from training.workloads.trajectory.clip_dataset import (
    CLIPS_FILE,
    TRACKS_FILE,
    stratified_splits,
    without_partial_test,
    write_labels,
)
from training.workloads.trajectory.clips import CLIP_BYTES, TRACK_SHAPE
from training.workloads.trajectory.config import ClipOptions
from training.workloads.trajectory.videos import Decoding, FrameChoice, check_suffix, decode

if TYPE_CHECKING:
    from training import Progress

VIDEOS_FILE, LEFT_OUT_FILE = "videos.csv", "left_out.json"
DECODED, _RAW_FILE = "decoded.jsonl", "decoded.u8"
_COLUMNS = ("file", "class", "split", "frames", "width", "height", "frames_per_second")
_WORDS = {"train": "train", "val": "validation", "test": "test"}


def import_dataset(
    files: Sequence[SourceFile],
    out: Path,
    seed: int,
    progress: "Progress",
    options: ClipOptions | None = None,
) -> Mapping[str, Any]:
    """Write the clips of `files` into the folder `out`; return the meta.

    If they have no splits, each class is divided like generated clips; `seed` decides how.
    """
    options = options or ClipOptions()
    missing: list[str] = []
    if options.lists:
        files, missing = _listed(files, [Path(name) for name in options.lists.split(",")])
    for file in files:
        check_suffix(file)
    classes = class_names(files)
    labels = [classes.index(str(file.label)) for file in files]
    splits = _splits(files, labels, seed)
    _refuse_missing(splits, labels, classes)
    random = frozenset(splits["train"])
    tasks = [
        Decoding(
            number=number,
            file=file,
            choice=FrameChoice(sampling=options.sampling, is_random=number in random, seed=seed),
            out=out / _RAW_FILE,
        )
        for number, file in enumerate(files)
    ]
    found = _decode_all(tasks, out, progress)
    whole = [number for number in range(len(files)) if "why" not in found[number]]
    left_out = [{"file": one["file"], "why": one["why"]} for one in found if "why" in one]
    if len(left_out) > max(1, options.left_out_share * len(files)) or not whole:
        _refuse(left_out, len(files), out)
    left_out += [{"file": name, "why": "is in a list, but not among the files"} for name in missing]
    place = {number: clip for clip, number in enumerate(whole)}
    kept = {name: [place[n] for n in numbers if n in place] for name, numbers in splits.items()}
    kept_labels = [labels[number] for number in whole]
    if files[0].split is None:
        kept = without_partial_test(kept, kept_labels)
    _refuse_missing(kept, kept_labels, classes)
    np.full((len(whole), *TRACK_SHAPE), np.nan, dtype="<f4").tofile(out / TRACKS_FILE)
    if left_out:
        (out / LEFT_OUT_FILE).write_text(json.dumps(left_out, indent=1) + "\n")
    split_of = {clip: name for name, clips in kept.items() for clip in clips}
    rows = [{**found[n], "class": classes[labels[n]], "split": split_of[place[n]]} for n in whole]
    with (out / VIDEOS_FILE).open("w", newline="") as table:
        writer = csv.DictWriter(table, _COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    meta = write_labels(out, classes, kept_labels, kept)
    _keep_whole(out, whole)
    return {**meta, **_facts(rows), "tracks": "none", "left_out": len(left_out)}


def _refuse(left_out: Sequence[Mapping[str, str]], num: int, out: Path) -> None:
    (out / LEFT_OUT_FILE).write_text(json.dumps(left_out, indent=1) + "\n")
    first = left_out[0]
    raise UserError(
        f"{len(left_out)} of {num} files are not clips: {first['file']} {first['why']}; "
        f"{out / LEFT_OUT_FILE} names them all. Remove them, or allow more with "
        "--override left_out_share=0.5"
    )


def _facts(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return frame counts, sizes and frame rates of the files, for the manifest."""
    counts = [row["frames"] for row in rows]
    sizes = Counter(f"{row['width']}x{row['height']}" for row in rows)
    rates = Counter(f"{row['frames_per_second']:g}" for row in rows if row["frames_per_second"])
    return {
        "frame_counts": {"least": min(counts), "median": median(counts), "most": max(counts)},
        "sizes": dict(sizes.most_common()),
        "frame_rates": dict(rates.most_common()),
    }


def _decode_all(
    tasks: Sequence[Decoding], out: Path, progress: "Progress"
) -> Sequence[Mapping[str, Any]]:
    """Return each file's outcome, in order; an interrupted import's are not read again."""
    digest = hashlib.sha256()
    for task in tasks:
        file, choice = task.file, task.choice
        digest.update(f"{file.name} {file.num_bytes} {file.label} {choice}\n".encode())
    begun = {"workload": "trajectory", "source": digest.hexdigest()}
    kept = out / UNFINISHED
    if kept.is_file() and json.loads(kept.read_bytes()) != begun:
        raise UserError(f"{out} has an unfinished dataset of other files; give a new folder")
    FolderOutput(out).write(UNFINISHED, json.dumps(begun).encode())
    found: dict[int, Mapping[str, Any]] = {one["number"]: one for one in _decoded(out / DECODED)}
    with (out / _RAW_FILE).open("ab") as raw:
        raw.truncate(len(tasks) * CLIP_BYTES)
    left = [task for task in tasks if task.number not in found]
    progress(len(found), len(tasks))
    with (out / DECODED).open("a") as lines:
        for _, one in in_processes(decode, left):
            lines.write(json.dumps(one) + "\n")
            lines.flush()
            found[one["number"]] = one
            progress(len(found), len(tasks))
    return [found[task.number] for task in tasks]


def _decoded(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of DECODED; cut off an incomplete last one."""
    text = path.read_text() if path.is_file() else ""
    whole, end, torn = text.rpartition("\n")
    if torn:
        path.write_text(whole + end)
    yield from map(json.loads, whole.splitlines())


def _keep_whole(out: Path, whole: Sequence[int]) -> None:
    """Write the complete clips to their final file; from then on, nothing counts as decoded."""
    raw = out / _RAW_FILE
    if raw.stat().st_size == len(whole) * CLIP_BYTES:
        (out / DECODED).unlink()
        raw.replace(out / CLIPS_FILE)
        return
    with raw.open("rb") as clips, (out / CLIPS_FILE).open("wb") as kept:
        for number in whole:
            clips.seek(number * CLIP_BYTES)
            kept.write(clips.read(CLIP_BYTES))
    (out / DECODED).unlink()
    raw.unlink()


def _splits(files: Sequence[SourceFile], labels: Sequence[int], seed: int) -> dict[str, list[int]]:
    """Return clip numbers by split; validation is taken out of train if there is none."""
    divided = stratified_splits(labels, seed)
    if files[0].split is None:
        return divided
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for number, file in enumerate(files):
        assert file.split is not None
        splits[file.split].append(number)
    if not splits["validation"]:
        train = splits["train"]
        held_out = stratified_splits([labels[n] for n in train], seed)["validation"]
        splits["validation"] = [train[k] for k in held_out]
        splits["train"] = sorted(set(train) - set(splits["validation"]))
    return {name: clips for name, clips in splits.items() if clips}


def _refuse_missing(
    splits: Mapping[str, Sequence[int]], labels: Sequence[int], classes: Sequence[str]
) -> None:
    """Refuse a split that lacks a class, whose accuracy would be meaningless, before a run does."""
    for split, clips in {"train": (), "validation": (), **splits}.items():
        there = {labels[clip] for clip in clips}
        if missing := [name for label, name in enumerate(classes) if label not in there]:
            raise UserError(
                f"split {split} has no clip of class {missing[0]!r} that can be read; add one, or "
                "leave the class out (without splits of your own, a class needs two clips)"
            )


def _listed(
    files: Sequence[SourceFile], lists: Sequence[Path]
) -> tuple[list[SourceFile], list[str]]:
    """Return the files in the lists, with their class and split, and the names without a file."""
    by_stem = {PurePosixPath(file.name).stem: file for file in files}
    found: dict[str, SourceFile] = {}
    missing: list[str] = []
    for path in lists:
        if not path.is_file():
            raise UserError(f"the list {path} does not exist; check its path")
        for stem, label, split in _entries(path):
            # A video that was cut may be named by its id alone, without the times.
            file = by_stem.get(stem) or by_stem.get(re.sub(r"_\d{6}_\d{6}$", "", stem))
            if file is None:
                missing.append(stem)
            else:
                found[file.name] = replace(
                    file, label=label or file.label, split=split, doubt="" if label else file.doubt
                )
    if not found:
        raise UserError(f"none of the files is in {', '.join(map(str, lists))}; check the lists")
    return sorted(found.values(), key=lambda file: file.name), missing


def _entries(path: Path) -> Iterator[tuple[str, str | None, str]]:
    """Yield name without suffix, class if given, and split of each entry of a list.

    Kinetics' lists have the columns label, youtube_id, time_start, time_end and perhaps split;
    UCF-101's have a path per line, with the class's folder and perhaps its number.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"the list {path} cannot be read: {error}; save it in UTF-8") from error
    if not any(line.strip() for line in lines):
        raise UserError(f"the list {path} has no entries; give one that names videos")
    if "youtube_id" in lines[0]:
        rows = csv.DictReader(lines)
        for row in rows:
            try:
                start, end = (int(float(row[name])) for name in ("time_start", "time_end"))
            except (KeyError, TypeError, ValueError):
                raise UserError(
                    f"the list {path}, line {rows.line_num}: time_start and time_end are not both "
                    "numbers; correct them or remove the line"
                ) from None
            split = _split_of(row.get("split") or path.name, path)
            yield f"{row['youtube_id']}_{start:06d}_{end:06d}", row.get("label"), split
        return
    for name in (PurePosixPath(line.split()[0]) for line in lines if line.strip()):
        yield name.stem, name.parent.name or None, _split_of(path.name, path)


def _split_of(name: str, path: Path) -> str:
    found = [split for word, split in _WORDS.items() if word in name.lower()]
    if len(found) != 1:
        raise UserError(f"{path}: {name!r} names no split; let it contain train, val or test")
    return found[0]
