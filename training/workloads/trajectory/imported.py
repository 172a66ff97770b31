"""`data import`: users' files become a dataset; broken ones are listed and left out.

Several processes decode them once, to what the loader maps into memory (training/LOG.md compares).
An interrupted import continues: a line of DECODED is written once a file's clip is on disk.

Reads users' clips: videos, with PyAV, or arrays; all become CLIP_SHAPE.

As is usual, the shorter side is scaled to FRAME_SIZE, the middle square is cut out, and NUM_FRAMES
frames are taken evenly from the time that the video is shown, or one from each of as many segments
(TSN, Wang et al. 2016, arXiv:1608.00859). No torch: each decoding process would wait for it.
"""

import csv
import hashlib
import json
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath, PurePosixPath
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from contract.errors import UserError
from contract.file_names import composed
from contract.keys import UNFINISHED
from training import Progress, in_processes
from training.durable import FolderOutput, SourceFile, class_names, without_strays
from training.workloads.trajectory.clip_dataset import (
    stratified_splits,
    without_partial_test,
    write_labels,
)
from training.workloads.trajectory.clips import (
    CLIP_BYTES,
    CLIPS_FILE,
    FRAME_SIZE,
    NUM_FRAMES,
    TRACK_SHAPE,
    TRACKS_FILE,
    Frames,
)
from training.workloads.trajectory.config import ClipOptions

_VIDEO_SUFFIXES = (".mp4", ".webm", ".mov", ".avi", ".gif", ".mkv")
_ARRAY_SUFFIX = ".npy"
_SEGMENTS = 5  # first word of the seed sequence, see clips.py
# Facts about a file before it became a clip: frames, width, height, frames_per_second.
_Facts: TypeAlias = dict[str, Any]


class _NoClipError(Exception):
    """The file is not a clip, or only a part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChoice:
    """The choice of a file's frames; `is_random`: any frame of each segment, else the middle."""

    sampling: str
    is_random: bool
    seed: int

    def of(self, num: int, name: str) -> list[int]:
        """Return NUM_FRAMES numbers from 0 to `num` - 1, in order; the same for the same name."""
        return self.shown(range(num), name)

    def shown(self, times: Sequence[int | None], name: str) -> list[int]:
        """Return the numbers of the frames that are on screen at NUM_FRAMES times, in order.

        `times`, in any unit, is when each appears; if they make no sense, the rate is constant.
        """
        num = len(times)
        began = np.array([np.nan if time is None else time for time in times])
        if not (np.diff(began) >= 0).all() or began[-1] == began[0]:
            began = np.arange(num)
        # In frames of the mean rate; whole ones almost, if the container keeps only milliseconds.
        began = (began - began[0]) * ((num - 1) / max(began[-1] - began[0], 1))
        began = np.where(np.abs(began - np.rint(began)) < 0.05, np.rint(began), began)
        if self.sampling == "uniform":
            # Halfway to the next frame, so that at a constant rate it is the nearest one.
            places = np.linspace(0, num - 1, NUM_FRAMES) + np.diff(began).min(initial=1.0) / 2
        else:
            edges = np.linspace(0, num, NUM_FRAMES + 1)
            rng = np.random.default_rng([_SEGMENTS, self.seed, zlib.crc32(name.encode())])
            within = rng.random(NUM_FRAMES) if self.is_random else np.full(NUM_FRAMES, 0.5)
            places = edges[:-1] + within * np.diff(edges)
        return [int(place) - 1 for place in np.searchsorted(began, places, side="right")]


def check_suffix(file: SourceFile) -> None:
    """Raise UserError for a file that is neither a video nor an array."""
    suffix = PurePath(file.name).suffix.lower()
    if suffix not in (*_VIDEO_SUFFIXES, _ARRAY_SUFFIX):
        raise UserError(
            f"{file.name} is not a clip; give videos ({', '.join(_VIDEO_SUFFIXES)}) or .npy arrays "
            "(frames, height, width, 3) of uint8, and nothing else"
        )


def _read_clip(file: SourceFile, choice: FrameChoice) -> tuple[Frames, _Facts]:
    """Return the clip in CLIP_SHAPE, uint8, and its facts; _NoClipError if it is not a clip."""
    is_array = file.name.lower().endswith(_ARRAY_SUFFIX)
    return _read_array(file, choice) if is_array else _read_video(file, choice)


def _read_video(file: SourceFile, choice: FrameChoice) -> tuple[Frames, _Facts]:
    try:
        import av
    except ModuleNotFoundError as error:
        raise UserError(
            f"{file.name} is a video, which requires the package av: python -m pip install av"
        ) from error
    _check_length(file.path)
    try:
        # All frames, also those that a cut without re-encoding hides: the header counts them, too.
        with av.open(str(file.path), options={"ignore_editlist": "1"}) as container:
            stream = container.streams.best("video")
            if stream is None:
                raise _NoClipError("has no pictures")
            times: list[int | None] = [p.pts for p in container.demux(stream) if p.size]
            # AVI's header also counts frames that were dropped.
            is_counted = container.format.name != "avi"
            if len(times) < max(stream.frames if is_counted else 1, 1):
                raise _NoClipError(f"has {len(times)} of {stream.frames} frames: it is torn")
        times.sort(key=lambda time: time or 0)
        wanted: list[int] | None = None
        # The second pass is for videos of which other frames are shown than announced.
        while times and wanted != (found := choice.shown(times, file.name)):
            wanted = found
            with av.open(str(file.path)) as container:
                taken, times, facts = _decoded(container, wanted)
    except av.error.FFmpegError as error:
        raise _NoClipError(f"cannot be decoded: {error.strerror or error}") from error
    if not times:
        raise _NoClipError("has no frame that can be decoded")
    return np.stack([taken[number] for number in found]), facts


def _check_length(path: Path) -> None:
    """Raise _NoClipError for an mkv, webm or AVI that ends before its header says."""
    with path.open("rb") as file:
        head = file.read(4096)
    began = head.find(b"\x18\x53\x80\x67") + 4  # of the Segment, in which all else is
    if head.startswith(b"\x1a\x45\xdf\xa3") and 4 <= began < len(head) and head[began]:
        # The zeros before a length's first one say how many bytes it has; all ones: unknown.
        num = 9 - head[began].bit_length()
        bits = int.from_bytes(head[began : began + num]) & (unknown := (1 << 7 * num) - 1)
        size, whole = path.stat().st_size, began + num + bits
        if bits != unknown and size < whole:
            raise _NoClipError(f"has {size} of {whole} bytes: it is torn")
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        size, length = path.stat().st_size, int.from_bytes(head[4:8], "little")
        whole = 8 + length
        if size < whole and length != 0xFFFFFFFF:
            raise _NoClipError(f"has {size} of {whole} bytes: it is torn")


def _decoded(container: Any, wanted: Sequence[int]) -> tuple[dict[int, Frames], list[Any], _Facts]:
    """Return the wanted frames by number, and of all when each is shown, and their size."""
    stream = container.streams.best("video")
    rate, ratio = stream.average_rate, float(stream.sample_aspect_ratio or 1)
    taken, times, facts = dict[int, Frames](), list[int | None](), _Facts()
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            taken[number] = _square(frame, ratio)
        times.append(frame.pts)
        facts = {"frames": number + 1, "width": frame.width, "height": frame.height}
    return taken, times, {**facts, "frames_per_second": round(float(rate), 3) if rate else None}


def _square(frame: Any, ratio: float) -> Frames:
    """Return the middle square of a decoded frame in FRAME_SIZE, upright.

    `ratio` is a stored pixel's width by its height.
    """
    shown = frame.width * ratio, frame.height
    scale = FRAME_SIZE / min(shown)
    width, height = (max(FRAME_SIZE, round(scale * n)) for n in shown)
    pixels: Frames = frame.reformat(
        width=width, height=height, format="rgb24", interpolation="AREA"
    ).to_ndarray()
    top, left = (height - FRAME_SIZE) // 2, (width - FRAME_SIZE) // 2
    square = pixels[top : top + FRAME_SIZE, left : left + FRAME_SIZE]
    for matrix in (data for data in frame.side_data if data.type.name == "DISPLAYMATRIX"):
        # How much of the stored x goes into the shown x and y, and then of the stored y.
        (xx, yx, _), (xy, yy, _) = np.frombuffer(matrix, np.int32).reshape(3, 3)[:2].tolist()
        if abs(xy) > abs(xx):
            square, xx, yy = square.swapaxes(0, 1), xy, yx
        square = square[:: -1 if yy < 0 else 1, :: -1 if xx < 0 else 1]
    return np.ascontiguousarray(square)


def _read_array(file: SourceFile, choice: FrameChoice) -> tuple[Frames, _Facts]:
    try:
        frames = np.load(file.path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise _NoClipError(f"is not an array of numbers ({type(error).__name__})") from error
    if getattr(frames, "ndim", 0) != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        shape = getattr(frames, "shape", "no")
        raise _NoClipError(f"has shape {shape}; give (frames, height, width, 3)")
    if frames.dtype != np.uint8:
        raise _NoClipError(f"has pixels of {frames.dtype}; give uint8, from 0 to 255")
    num, height, width, _ = frames.shape
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    chosen = frames[choice.of(num, file.name), top : top + side, left : left + side]
    facts = {"frames": num, "width": width, "height": height, "frames_per_second": None}
    if side == FRAME_SIZE:
        return np.ascontiguousarray(chosen), facts
    import torch
    import torch.nn.functional as F

    pixels_T3HW = torch.from_numpy(np.ascontiguousarray(chosen)).permute(0, 3, 1, 2).float()
    resized_T3HW = F.interpolate(pixels_T3HW, size=(FRAME_SIZE, FRAME_SIZE), mode="area")
    clip: Frames = resized_T3HW.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return clip, facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """A file for another process to decode; its number is its clip's place in the file `out`."""

    number: int
    file: SourceFile
    choice: FrameChoice
    out: Path


def decode(task: Decoding) -> Mapping[str, Any]:
    """Write the clip to its place; return facts about the file, or `why` it is not a clip."""
    about = {"number": task.number, "file": task.file.name}
    try:
        frames, facts = _read_clip(task.file, task.choice)
    except _NoClipError as error:
        return {**about, "why": str(error)}
    with task.out.open("r+b") as clips:
        clips.seek(task.number * CLIP_BYTES)
        clips.write(frames.tobytes())
        clips.flush()
        os.fsync(clips.fileno())
    return {**about, **facts}


VIDEOS_FILE, LEFT_OUT_FILE = "videos.csv", "left_out.json"
DECODED, _RAW_FILE = "decoded.jsonl", "decoded.u8"
_COLUMNS = ("file", "class", "split", "frames", "width", "height", "frames_per_second")
_WORDS = {"train": "train", "val": "validation", "test": "test"}


def import_dataset(
    files: Sequence[SourceFile],
    out: Path,
    seed: int,
    progress: Progress,
    options: ClipOptions | None = None,
) -> Mapping[str, Any]:
    """Write the clips of `files` into the folder `out`; return the meta.

    If they have no splits, each class is divided like generated clips; `seed` decides how.
    """
    options = options or ClipOptions()
    missing: list[str] = []
    files = without_strays(files, (*_VIDEO_SUFFIXES, _ARRAY_SUFFIX))
    if options.lists:
        files, missing = _listed(files, [Path(name) for name in options.lists.split(",")])
    for file in files:
        check_suffix(file)
    classes = class_names(files)
    labels = [classes.index(str(file.label)) for file in files]
    splits = _splits(files, labels, seed, options.validation_share)
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
    tasks: Sequence[Decoding], out: Path, progress: Progress
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
    found: dict[int, Mapping[str, Any]] = {one["number"]: one for one in _recorded(out / DECODED)}
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


def _recorded(path: Path) -> Iterator[dict[str, Any]]:
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


def _splits(
    files: Sequence[SourceFile], labels: Sequence[int], seed: int, share: float
) -> dict[str, list[int]]:
    """Return clip numbers by split; validation is taken out of train if there is none."""
    divided = stratified_splits(labels, seed, share)
    if files[0].split is None:
        return divided
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for number, file in enumerate(files):
        assert file.split is not None
        splits[file.split].append(number)
    if not splits["validation"]:
        train = splits["train"]
        held_out = stratified_splits([labels[n] for n in train], seed, share)["validation"]
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
    by_stem = defaultdict[str, list[SourceFile]](list)
    for file in files:
        by_stem[composed(PurePosixPath(file.name).stem)].append(file)
    found: dict[str, SourceFile] = {}
    missing: list[str] = []
    for path in lists:
        if not path.is_file():
            raise UserError(f"the list {path} does not exist; check its path")
        for stem, label, split in _entries(path):
            # A video that was cut may be named by its id alone, without the times.
            name = composed(stem)
            called = by_stem.get(name) or by_stem.get(re.sub(r"_\d{6}_\d{6}$", "", name))
            if not called:
                missing.append(stem)
                continue
            file = _meant(called, label, split, f"{path}: {stem}")
            found[file.name] = replace(
                file, label=label or file.label, split=split, doubt="" if label else file.doubt
            )
    if not found:
        raise UserError(f"none of the files is in {', '.join(map(str, lists))}; check the lists")
    return sorted(found.values(), key=lambda file: file.name), missing


def _meant(files: Sequence[SourceFile], label: str | None, split: str, what: str) -> SourceFile:
    """Return the one file; of several, the one in a folder named like the class, or the split."""
    folder = composed(label or "")
    found = [file for file in files if folder in composed(file.name).split("/")[:-1]] or files
    if len(found) > 1:
        found = [file for file in found if file.split == split] or found
    if len(found) > 1:
        raise UserError(
            f"{what} may be {found[0].name} or {found[1].name}; give its class's folder, or "
            "rename one"
        )
    return found[0]


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
