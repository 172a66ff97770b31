"""Makes a trajectory dataset of clips that users bring: .npy files of frames, a class each.

Frames are sampled evenly and resized by area to the shape that the recipes train on. There are no
tracks: positions are NaN, and no loss or metric counts them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from training.errors import UserError
from training.sources import SourceFile, class_names
from training.workloads.trajectory.clips import (
    CLIP_SHAPE,
    FRAME_SIZE,
    NUM_FRAMES,
    TRACK_SHAPE,
    Frames,
)
from training.workloads.trajectory.dataset import (
    CLIPS_FILE,
    LABELS_FILE,
    TRACKS_FILE,
    dataset_meta,
    stratified_splits,
)

if TYPE_CHECKING:
    from training.workload import Progress


def import_dataset(
    files: Sequence[SourceFile], out: Path, seed: int, progress: "Progress"
) -> Mapping[str, Any]:
    """Write the clips of `files` into the folder `out`; return the meta.

    Without splits of their own, each class is divided like the made clips; `seed` decides how.
    """
    classes = class_names(files)
    labels = [classes.index(str(file.label)) for file in files]
    splits = _splits(files, labels, seed)
    with (out / CLIPS_FILE).open("wb") as clips:
        for number, file in enumerate(files, 1):
            clips.write(read_clip(file).tobytes())
            progress(number, len(files))
    np.full((len(files), *TRACK_SHAPE), np.nan, dtype="<f4").tofile(out / TRACKS_FILE)
    content = {"classes": classes, "labels": labels, "splits": splits}
    (out / LABELS_FILE).write_text(json.dumps(content) + "\n")
    return dataset_meta(classes, splits)


def read_clip(file: SourceFile) -> Frames:
    """The clip in CLIP_SHAPE, uint8; UserError if the file is no clip."""
    try:
        frames = np.load(file.path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{file.name} is not a .npy file: {error}; save clips as arrays") from error
    if getattr(frames, "ndim", 0) != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        shape = getattr(frames, "shape", "no")
        raise UserError(f"{file.name} has shape {shape}; give (frames, height, width, 3)")
    if frames.dtype != np.uint8:
        raise UserError(f"{file.name} has pixels of {frames.dtype}; give uint8, from 0 to 255")
    chosen = frames[np.rint(np.linspace(0, len(frames) - 1, NUM_FRAMES)).astype(int)]
    if chosen.shape == CLIP_SHAPE:
        return np.ascontiguousarray(chosen)
    pixels_T3HW = torch.from_numpy(np.ascontiguousarray(chosen)).permute(0, 3, 1, 2).float()
    resized_T3HW = F.interpolate(pixels_T3HW, size=(FRAME_SIZE, FRAME_SIZE), mode="area")
    clip: Frames = resized_T3HW.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    return clip


def _splits(files: Sequence[SourceFile], labels: Sequence[int], seed: int) -> dict[str, list[int]]:
    if files[0].split is None:
        return stratified_splits(labels, seed)
    splits: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    for number, file in enumerate(files):
        assert file.split is not None
        splits[file.split].append(number)
    if empty := [name for name in ("train", "validation") if not splits[name]]:
        raise UserError(f"no file is in split {empty[0]}; give it some, or give no splits")
    return {name: clips for name, clips in splits.items() if clips}
