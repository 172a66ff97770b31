"""Reads users' clips: videos, with PyAV, or arrays; all become CLIP_SHAPE.

As is usual, the shorter side is scaled to FRAME_SIZE, the middle square is cut out, and NUM_FRAMES
frames are taken evenly from the entire video, or one from each of as many segments (TSN, Wang et
al. 2016, arXiv:1608.00859). Imports no torch, for which every decoding process would have to wait.
"""

import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np

from training.errors import UserError
from training.sources import SourceFile
from training.workloads.trajectory.clips import CLIP_BYTES, FRAME_SIZE, NUM_FRAMES, Frames

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
        if self.sampling == "uniform":
            return [round(place) for place in np.linspace(0, num - 1, NUM_FRAMES).tolist()]
        edges = np.linspace(0, num, NUM_FRAMES + 1)
        rng = np.random.default_rng([_SEGMENTS, self.seed, zlib.crc32(name.encode())])
        within = rng.random(NUM_FRAMES) if self.is_random else np.full(NUM_FRAMES, 0.5)
        return [int(place) for place in (edges[:-1] + within * np.diff(edges)).tolist()]


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
    try:
        with av.open(str(file.path)) as container:
            if not container.streams.video:
                raise _NoClipError("has no pictures")
            # The header may lack the number of frames, or be wrong.
            num = sum(packet.size > 0 for packet in container.demux(video=0))
            promised = container.streams.video[0].frames
        if num < max(promised, 1):
            raise _NoClipError(f"has {num} of {promised} frames: it is torn")
        wanted = choice.of(num, file.name)
        with av.open(str(file.path)) as container:
            stream = container.streams.video[0]
            taken, facts = _decoded(container.decode(stream), frozenset(wanted))
            rate = stream.average_rate
    except av.error.FFmpegError as error:
        raise _NoClipError(f"cannot be decoded: {error.strerror or error}") from error
    if not taken:
        raise _NoClipError("has no frame that can be decoded")
    final = taken[max(taken)]
    # For some videos, fewer frames are decoded than were counted.
    clip = np.stack([taken.get(number, final) for number in wanted])
    return clip, {**facts, "frames_per_second": round(float(rate), 3) if rate else None}


def _decoded(frames: Iterable[Any], wanted: frozenset[int]) -> tuple[dict[int, Frames], _Facts]:
    """Return the wanted frames by number, and the size and number of all frames."""
    taken, facts = dict[int, Frames](), _Facts()
    for number, frame in enumerate(frames):
        if number in wanted:
            taken[number] = _square(frame)
        facts = {"frames": number + 1, "width": frame.width, "height": frame.height}
    return taken, facts


def _square(frame: Any) -> Frames:
    """Return the middle square of a decoded frame in FRAME_SIZE, upright."""
    scale = FRAME_SIZE / min(frame.width, frame.height)
    width, height = (max(FRAME_SIZE, round(scale * n)) for n in (frame.width, frame.height))
    pixels: Frames = frame.reformat(
        width=width, height=height, format="rgb24", interpolation="AREA"
    ).to_ndarray()
    top, left = (height - FRAME_SIZE) // 2, (width - FRAME_SIZE) // 2
    square = pixels[top : top + FRAME_SIZE, left : left + FRAME_SIZE]
    return np.ascontiguousarray(np.rot90(square, frame.rotation // 90))


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
