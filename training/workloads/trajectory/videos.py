"""Reads users' clips: videos, with PyAV, or arrays; all become CLIP_SHAPE.

As is usual, the shorter side is scaled to FRAME_SIZE, the middle square is cut out, and NUM_FRAMES
frames are taken evenly from the time that the video is shown, or one from each of as many segments
(TSN, Wang et al. 2016, arXiv:1608.00859). No torch: each decoding process would wait for it.
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np

from contract.errors import UserError
from training.durable import SourceFile
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
    try:
        # All frames, also those that a cut without re-encoding hides: the header counts them, too.
        with av.open(str(file.path), options={"ignore_editlist": "1"}) as container:
            stream = container.streams.best("video")
            if stream is None:
                raise _NoClipError("has no pictures")
            times: list[int | None] = [p.pts for p in container.demux(stream) if p.size]
            if len(times) < max(stream.frames, 1):
                raise _NoClipError(f"has {len(times)} of {stream.frames} frames: it is torn")
        _check_length(file.path)
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
    """Raise _NoClipError for an mkv or webm that ends before its header says."""
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
