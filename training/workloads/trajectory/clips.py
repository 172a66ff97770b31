"""Renders clips: a moving ball on a 3-D path, seen by a pinhole camera, T frames of 64x64 RGB.

Besides the pixels, each clip has a track: the ball's position in every frame, and FUTURE_FRAMES
after the last one.

Clip k is a function of only (seed, k), so clips can be made in any order by any number of
processes. Colour, size, speed, background, camera, place and noise do not depend on the class.

A tracker of moving pixels cannot follow hard clips. In them, the camera pans, sways and shakes over
a texture; up to two other balls move like the marked one, which is red with a white core; one or
two posts stand in front; the light changes. The track is the ball's place in the picture, even when
it is behind a post.

It imports no torch, for which every process that renders clips would have to wait.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

CLIPS_FILE = "clips.u8"
TRACKS_FILE = "tracks.f32"
NUM_FRAMES = 32
FRAME_SIZE = 64
# The second head predicts the position this many frames after the last.
FUTURE_FRAMES = 4
CLIP_SHAPE = (NUM_FRAMES, FRAME_SIZE, FRAME_SIZE, 3)
CLIP_BYTES = NUM_FRAMES * FRAME_SIZE * FRAME_SIZE * 3
# x, y and radius in pixels: a row for each frame, and one for FUTURE_FRAMES after the last.
TRACK_SHAPE = (NUM_FRAMES + 1, 3)
TRACK_BYTES = (NUM_FRAMES + 1) * 3 * 4

_Floats = npt.NDArray[np.float64]
Frames = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]
# A curve over time: times 0 to 1 are the clip; later ones are the future to predict.
_Path = Callable[[np.random.Generator, _Floats], _Floats]

# First words of the seed sequences, so that no two purposes share random numbers.
_LABELS, _CLIP, _HARD_CLIP = 1, 2, 4
# Half the width of the camera's view at the distance of the scene's centre.
_HALF_WIDTH = 1.25
_TURN = 2.0 * np.pi
# For hard clips: the marked ball's colours, its core's share of the radius, waves of a texture.
_MARK, _CORE = np.array([225.0, 30.0, 30.0]), np.array([250.0, 250.0, 250.0])
_CORE_SHARE = 0.5
_NUM_WAVES = 12
_TIMES = np.arange(NUM_FRAMES + FUTURE_FRAMES) / (NUM_FRAMES - 1)


def clip_label(seed: int, index: int) -> int:
    """Return the class of clip `index`: each block of len(CLASSES) clips has every class once."""
    block, place = divmod(index, len(CLASSES))
    rng = np.random.default_rng([_LABELS, seed, block])
    return int(rng.permutation(len(CLASSES))[place])


def render_clip(seed: int, index: int) -> tuple[Frames, Float32s]:
    """Return clip `index` of the dataset `seed`: frames (CLIP_SHAPE) and track (TRACK_SHAPE)."""
    rng = np.random.default_rng([_CLIP, seed, index])
    path = _place_path(rng, CLASSES[clip_label(seed, index)])
    centers, radii = _project(rng, path)
    return _render(rng, centers[:NUM_FRAMES], radii[:NUM_FRAMES]), _track_of(centers, radii)


def _track_of(centers: _Floats, radii: _Floats) -> Float32s:
    """Return the track (TRACK_SHAPE) of a ball; the clip shows its first NUM_FRAMES places."""
    track: _Floats = np.column_stack([centers, radii])[[*range(NUM_FRAMES), -1]]
    return track.astype(np.float32)


def _place_path(rng: np.random.Generator, name: str) -> _Floats:
    """Draw a path of class `name`, moved and scaled independently of the class.

    The rows after NUM_FRAMES are the future, which the clip does not show.
    """
    path = _PATHS[name](rng, _TIMES)
    low, high = path[:NUM_FRAMES].min(axis=0), path[:NUM_FRAMES].max(axis=0)
    extent = rng.uniform(1.1, 1.7)
    margin = 1.0 - extent / 2.0
    place = np.append(rng.uniform(-margin, margin, size=2), 0.0)
    scale = extent / max(high[0] - low[0], high[1] - low[1])
    placed: _Floats = (path - (low + high) / 2.0) * scale + place
    return placed


def _project(rng: np.random.Generator, path: _Floats) -> tuple[_Floats, _Floats]:
    """Project a path by a random pinhole camera: centers (T, 2) and radii (T), in pixels."""
    yaw, pitch = rng.uniform(-0.4, 0.4, size=2)
    roll = rng.uniform(-0.2, 0.2)
    cos, sin = np.cos, np.sin
    turn_y = np.array([[cos(yaw), 0, sin(yaw)], [0, 1, 0], [-sin(yaw), 0, cos(yaw)]])
    turn_x = np.array([[1, 0, 0], [0, cos(pitch), -sin(pitch)], [0, sin(pitch), cos(pitch)]])
    turn_z = np.array([[cos(roll), -sin(roll), 0], [sin(roll), cos(roll), 0], [0, 0, 1]])
    seen = path @ (turn_z @ turn_x @ turn_y).T
    distance = rng.uniform(3.0, 5.0)
    focal = FRAME_SIZE / 2.0 * distance / _HALF_WIDTH
    scale = focal / np.maximum(distance - seen[:, 2], 0.5)
    centers = FRAME_SIZE / 2.0 + np.stack([seen[:, 0] * scale, -seen[:, 1] * scale], axis=1)
    return centers, rng.uniform(0.10, 0.2) * scale


def _render(rng: np.random.Generator, centers: _Floats, radii: _Floats) -> Frames:
    """Draw the ball on a background, with brief distractors, flicker and sensor noise."""
    background = _background(rng)
    color = _contrasting_color(rng, background)
    frames = np.broadcast_to(background, CLIP_SHAPE).copy()
    for _ in range(rng.integers(0, 3)):
        # A distractor is visible in one to three frames only, so it carries no class information.
        first, length = rng.integers(0, NUM_FRAMES), rng.integers(1, 4)
        place = np.tile(rng.uniform(0.0, FRAME_SIZE, size=2), (NUM_FRAMES, 1))
        size = np.full(NUM_FRAMES, rng.uniform(2.0, 5.0))
        shown = slice(first, first + length)
        _draw_ball(frames[shown], place[shown], size[shown], rng.uniform(0.0, 255.0, size=3))
    _draw_ball(frames, centers, radii, color)
    frames *= rng.uniform(0.95, 1.05, size=(NUM_FRAMES, 1, 1, 1)).astype(np.float32)
    return _to_pixels(rng, frames)


def _to_pixels(rng: np.random.Generator, frames: Float32s) -> Frames:
    """Add sensor noise and round, in place: frames of CLIP_SHAPE."""
    amplitude = int(rng.integers(2, 11))
    frames += rng.integers(-amplitude, amplitude + 1, size=CLIP_SHAPE, dtype=np.int8)
    np.rint(frames, out=frames)
    return np.clip(frames, 0.0, 255.0, out=frames).astype(np.uint8)


def render_hard_clip(seed: int, index: int) -> tuple[Frames, Float32s]:
    """Return clip `index` of the hard dataset `seed`: frames (CLIP_SHAPE) and track."""
    rng = np.random.default_rng([_HARD_CLIP, seed, index])
    camera_T2 = _camera(rng)
    shown = camera_T2[:NUM_FRAMES]
    frames = _texture(rng, shown)
    name = CLASSES[clip_label(seed, index)]
    centers, radii = _project(rng, _place_path(rng, name))
    centers = centers - camera_T2
    num_others = rng.integers(0, 3)
    in_front = rng.integers(0, num_others + 1)  # this many others are drawn after it
    for number in range(num_others + 1):
        if number == num_others - in_front:
            _draw_ball(frames, centers[:NUM_FRAMES], radii[:NUM_FRAMES], _MARK)
            _draw_ball(frames, centers[:NUM_FRAMES], _CORE_SHARE * radii[:NUM_FRAMES], _CORE)
        else:
            path = _place_path(rng, CLASSES[rng.integers(len(CLASSES))])
            others, sizes = (each[:NUM_FRAMES] for each in _project(rng, path))
            _draw_ball(frames, others - shown, sizes, rng.uniform(0.0, 255.0, size=3))
    for _ in range(rng.integers(1, 3)):
        _draw_post(rng, frames, shown)
    frames *= _light(rng)
    return _to_pixels(rng, frames), _track_of(centers, radii)


def _camera(rng: np.random.Generator) -> _Floats:
    """Draw where the camera looks, in pixels from the centre; the shake ends with the clip."""
    angle, length = rng.uniform(0.0, 2.0 * np.pi), rng.uniform(0.0, 12.0)
    pan = (_TIMES[:, None] - 0.5) * length * np.array([np.cos(angle), np.sin(angle)])
    cycles, phases = rng.uniform(0.5, 2.5, size=2), rng.uniform(0.0, 2.0 * np.pi, size=2)
    sway = rng.uniform(0.0, 3.0, size=2) * np.sin(2.0 * np.pi * cycles * _TIMES[:, None] + phases)
    shake = rng.normal(scale=rng.uniform(0.0, 0.6), size=(len(_TIMES), 2))
    shake[NUM_FRAMES:] = 0.0
    looks: _Floats = pan + sway + shake
    return looks


def _texture(rng: np.random.Generator, camera_T2: _Floats) -> Float32s:
    """Draw a sum of waves of 4 to 40 pixels, of which long ones are stronger, as in nature.

    The camera that sees it may stand between two pixels; frames (T, H, W, 3).
    """
    lengths = np.exp(rng.uniform(np.log(4.0), np.log(40.0), size=_NUM_WAVES))
    angles = rng.uniform(0.0, 2.0 * np.pi, size=_NUM_WAVES)
    wave_x, wave_y = np.cos(angles) / lengths, np.sin(angles) / lengths
    colors_K3 = rng.normal(size=(_NUM_WAVES, 3)) * lengths[:, None]
    colors_K3 *= rng.uniform(15.0, 45.0) / np.sqrt(np.square(colors_K3).sum() / 6.0)
    pixels = np.arange(FRAME_SIZE)
    phases = rng.uniform(0.0, 2.0 * np.pi, size=_NUM_WAVES)
    across_TKW = wave_x[:, None] * (pixels + camera_T2[:, :1, None])
    down_TKH = wave_y[:, None] * (pixels + camera_T2[:, 1:, None])
    a, b = 2.0 * np.pi * across_TKW + phases[:, None], 2.0 * np.pi * down_TKH
    # cos(a + b), whose sum over the waves is a product of matrices.
    rows_THk = np.concatenate([np.cos(b), -np.sin(b)], axis=1).transpose(0, 2, 1)
    columns_TkW = np.concatenate([np.cos(a), np.sin(a)], axis=1)
    channels = [
        (rows_THk * np.tile(colors_K3[:, channel], 2)) @ columns_TkW for channel in range(3)
    ]
    base = rng.uniform(50.0, 205.0, size=3)
    frames: Float32s = (np.stack(channels, axis=3) + base).astype(np.float32)
    return np.clip(frames, 0.0, 255.0, out=frames)


def _draw_post(rng: np.random.Generator, frames: Float32s, camera_T2: _Floats) -> None:
    """Draw, in place, a vertical or horizontal post with its own texture."""
    is_upright = bool(rng.integers(0, 2))
    moved = camera_T2[:, 0 if is_upright else 1]
    middle = rng.uniform(0.2, 0.8) * FRAME_SIZE - moved
    half = rng.uniform(2.0, 4.5)
    away_TX = np.abs(np.arange(FRAME_SIZE) + 0.5 - middle[:, None])
    cover_TX = np.clip(half - away_TX + 0.5, 0.0, 1.0).astype(np.float32)
    cover = cover_TX[:, None, :, None] if is_upright else cover_TX[:, :, None, None]
    frames += cover * (_texture(rng, camera_T2) - frames)


def _light(rng: np.random.Generator) -> Float32s:
    """Draw the gain of each frame and channel, (T, 1, 1, 3)."""
    strength, cycles = rng.uniform(0.1, 0.35), rng.uniform(0.3, 2.0)
    wave = np.sin(2.0 * np.pi * (cycles * _TIMES[:NUM_FRAMES] + rng.random()))
    tint = rng.uniform(0.85, 1.15, size=3)
    gain: _Floats = (1.0 + strength * wave)[:, None, None, None] * tint
    return gain.astype(np.float32)


def _background(rng: np.random.Generator) -> Float32s:
    """Draw a gradient between two colours in a random direction: (FRAME_SIZE, FRAME_SIZE, 3)."""
    base = rng.uniform(20.0, 235.0, size=3)
    other = np.clip(base + rng.uniform(-50.0, 50.0, size=3), 0.0, 255.0)
    angle = rng.uniform(0.0, 2.0 * np.pi)
    line = np.linspace(-0.5, 0.5, FRAME_SIZE)
    share = 0.5 + (line[None, :] * np.cos(angle) + line[:, None] * np.sin(angle)) / np.sqrt(2.0)
    background: _Floats = base + share[:, :, None] * (other - base)
    return background.astype(np.float32)


def _contrasting_color(rng: np.random.Generator, background: Float32s) -> _Floats:
    """Draw colours until one stands out: one channel differs from the mean background by 90."""
    mean = background.mean(axis=(0, 1))
    while True:
        color = rng.uniform(0.0, 255.0, size=3)
        if np.abs(color - mean).max() >= 90.0:
            return color


def _draw_ball(frames: Float32s, centers: _Floats, radii: _Floats, color: _Floats) -> None:
    """Blend one shaded disc per frame into `frames`, in place, with soft edges."""
    pixel = np.arange(FRAME_SIZE, dtype=np.float32) + np.float32(0.5)
    x, y = centers[:, 0, None].astype(np.float32), centers[:, 1, None].astype(np.float32)
    radius = radii.astype(np.float32)[:, None, None]
    away = np.sqrt(((pixel - y) ** 2)[:, :, None] + ((pixel - x) ** 2)[:, None, :])
    cover = np.clip(radius - away + np.float32(0.5), 0.0, 1.0)[..., None]
    shade = (1.0 - 0.35 * np.minimum(away / radius, 1.0))[..., None] * color.astype(np.float32)
    frames += cover * (shade - frames)


def _sign(rng: np.random.Generator) -> float:
    return 1.0 if rng.random() < 0.5 else -1.0


def _along_line(rng: np.random.Generator, progress: _Floats) -> _Floats:
    angle = rng.uniform(0.0, _TURN)
    depth = rng.uniform(-0.5, 0.5)
    path: _Floats = progress[:, None] * np.array([np.cos(angle), np.sin(angle), depth])
    return path


def _around(angle: _Floats, radius: _Floats | float) -> _Floats:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), np.zeros_like(angle)], axis=1)


def _accelerating(rng: np.random.Generator, time: _Floats) -> _Floats:
    return _along_line(rng, time ** rng.uniform(2.2, 3.2))


def _circle(rng: np.random.Generator, time: _Floats, direction: float) -> _Floats:
    turns = rng.uniform(0.8, 1.6)
    return _around(rng.uniform(0.0, _TURN) + direction * _TURN * turns * time, 1.0)


def _spiral(rng: np.random.Generator, time: _Floats) -> _Floats:
    """Move from the rim to the centre in either sense; reversed in time, it is another class."""
    turns = rng.uniform(1.3, 2.0) * _sign(rng)
    radius = np.maximum(1.0 + (rng.uniform(0.05, 0.2) - 1.0) * time, 0.0)
    return _around(rng.uniform(0.0, _TURN) + _TURN * turns * time, radius)


def _parabola(rng: np.random.Generator, time: _Floats) -> _Floats:
    apex = rng.uniform(0.35, 0.65)
    height = rng.uniform(2.5, 5.0)
    x = _sign(rng) * time
    return np.stack([x, -height * (time - apex) ** 2, rng.uniform(-0.5, 0.5) * time], axis=1)


def _sinusoid(rng: np.random.Generator, time: _Floats) -> _Floats:
    wave = rng.uniform(0.2, 0.35) * np.sin(
        rng.uniform(0.0, _TURN) + _TURN * rng.uniform(1.6, 2.6) * time
    )
    angle = rng.uniform(0.0, _TURN)
    x = np.cos(angle) * time - np.sin(angle) * wave
    y = np.sin(angle) * time + np.cos(angle) * wave
    return np.stack([x, y, rng.uniform(-0.3, 0.3) * time], axis=1)


def _bounce(rng: np.random.Generator, time: _Floats) -> _Floats:
    num_bounces = rng.uniform(2.2, 3.4)
    phase = rng.uniform(0.0, 0.5) + num_bounces * time
    hop, within = np.floor(phase), phase % 1.0
    height = rng.uniform(0.6, 1.0) * rng.uniform(0.65, 0.9) ** hop * 4.0 * within * (1.0 - within)
    return np.stack([_sign(rng) * time, height, rng.uniform(-0.4, 0.4) * time], axis=1)


def _helix(rng: np.random.Generator, time: _Floats) -> _Floats:
    angle = rng.uniform(0.0, _TURN) + _sign(rng) * _TURN * rng.uniform(2.0, 3.0) * time
    radius = rng.uniform(0.25, 0.35)
    drift = rng.uniform(0.0, _TURN)
    path = _around(angle, radius)
    path[:, 0] += np.cos(drift) * time
    path[:, 1] += np.sin(drift) * time
    path[:, 2] += rng.uniform(0.3, 0.8) * _sign(rng) * time
    return path


def _random_walk(rng: np.random.Generator, time: _Floats) -> _Floats:
    steps = rng.normal(size=(len(time), 3)) * np.array([1.0, 1.0, 0.4])
    steps[0] = 0.0
    return np.cumsum(steps, axis=0)


_PATHS: Mapping[str, _Path] = MappingProxyType(
    {
        "linear": _along_line,
        "accelerating": _accelerating,
        "circle_cw": partial(_circle, direction=-1.0),
        "circle_ccw": partial(_circle, direction=1.0),
        "spiral_in": _spiral,
        "spiral_out": lambda rng, time: _spiral(rng, 1.0 - time),
        "parabola": _parabola,
        "sinusoid": _sinusoid,
        "bounce": _bounce,
        "helix": _helix,
        "random_walk": _random_walk,
    }
)
CLASSES: tuple[str, ...] = tuple(_PATHS)

# Renderers by difficulty: clips that a tracker can follow, and clips that only a model can.
_RENDERERS = MappingProxyType({"easy": render_clip, "hard": render_hard_clip})


def write_chunk(chunk: tuple[str, str, int, int, int]) -> int:
    """Render a dataset's clips from `first` to `end` into its files; return their number."""
    out, difficulty, seed, first, end = chunk
    with (
        (Path(out) / CLIPS_FILE).open("r+b") as clips,
        (Path(out) / TRACKS_FILE).open("r+b") as tracks,
    ):
        clips.seek(first * CLIP_BYTES)
        tracks.seek(first * TRACK_BYTES)
        for index in range(first, end):
            frames, track = _RENDERERS[difficulty](seed, index)
            clips.write(frames.tobytes())
            tracks.write(track.tobytes())
    return end - first
