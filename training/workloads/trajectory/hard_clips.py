"""Renders the clips of difficulty hard, which a tracker of what moves cannot follow.

The camera pans, sways and shakes over a texture; up to two other balls move as the marked one does,
which is a red ball with a white core; one or two posts stand in front; the light changes. None of
this depends on the class, which is that of the marked ball's path in the world. The track is where
the ball is in the picture, behind a post, too.
"""

import numpy as np

from training.workloads.trajectory.clips import (
    CLASSES,
    FRAME_SIZE,
    FUTURE_FRAMES,
    NUM_FRAMES,
    Float32s,
    Floats,
    Frames,
    clip_label,
    draw_ball,
    place_path,
    project,
    to_pixels,
    track_of,
)

_HARD_CLIP = 4  # first word of the seed sequence, see clips.py
_TIMES = np.arange(NUM_FRAMES + FUTURE_FRAMES) / (NUM_FRAMES - 1)
_MARK, _CORE = np.array([225.0, 30.0, 30.0]), np.array([250.0, 250.0, 250.0])
_CORE_SHARE = 0.5  # of the radius
_NUM_WAVES = 12


def render_hard_clip(seed: int, index: int) -> tuple[Frames, Float32s]:
    """Return clip `index` of the hard dataset `seed`: frames (CLIP_SHAPE) and track."""
    rng = np.random.default_rng([_HARD_CLIP, seed, index])
    camera_T2 = _camera(rng)
    shown = camera_T2[:NUM_FRAMES]
    frames = _texture(rng, shown)
    name = CLASSES[clip_label(seed, index)]
    centers, radii = project(rng, place_path(rng, name))
    centers = centers - camera_T2
    num_others = rng.integers(0, 3)
    in_front = rng.integers(0, num_others + 1)  # of the others: so many are drawn after it
    for number in range(num_others + 1):
        if number == num_others - in_front:
            draw_ball(frames, centers[:NUM_FRAMES], radii[:NUM_FRAMES], _MARK)
            draw_ball(frames, centers[:NUM_FRAMES], _CORE_SHARE * radii[:NUM_FRAMES], _CORE)
        else:
            path = place_path(rng, CLASSES[rng.integers(len(CLASSES))])
            others, sizes = (each[:NUM_FRAMES] for each in project(rng, path))
            draw_ball(frames, others - shown, sizes, rng.uniform(0.0, 255.0, size=3))
    for _ in range(rng.integers(1, 3)):
        _draw_post(rng, frames, shown)
    frames *= _light(rng)
    return to_pixels(rng, frames), track_of(centers, radii)


def _camera(rng: np.random.Generator) -> Floats:
    """Where the camera looks, in pixels from the scene's centre; the shake ends with the clip."""
    angle, length = rng.uniform(0.0, 2.0 * np.pi), rng.uniform(0.0, 12.0)
    pan = (_TIMES[:, None] - 0.5) * length * np.array([np.cos(angle), np.sin(angle)])
    cycles, phases = rng.uniform(0.5, 2.5, size=2), rng.uniform(0.0, 2.0 * np.pi, size=2)
    sway = rng.uniform(0.0, 3.0, size=2) * np.sin(2.0 * np.pi * cycles * _TIMES[:, None] + phases)
    shake = rng.normal(scale=rng.uniform(0.0, 0.6), size=(len(_TIMES), 2))
    shake[NUM_FRAMES:] = 0.0
    looks: Floats = pan + sway + shake
    return looks


def _texture(rng: np.random.Generator, camera_T2: Floats) -> Float32s:
    """A sum of waves of 4 to 40 pixels, the long ones stronger, as natural pictures have it.

    Seen by the camera, which may stand between two pixels: frames (T, H, W, 3).
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
    # cos(a + b), of which the sum over the waves is a product of matrices.
    rows_THk = np.concatenate([np.cos(b), -np.sin(b)], axis=1).transpose(0, 2, 1)
    columns_TkW = np.concatenate([np.cos(a), np.sin(a)], axis=1)
    channels = [
        (rows_THk * np.tile(colors_K3[:, channel], 2)) @ columns_TkW for channel in range(3)
    ]
    base = rng.uniform(50.0, 205.0, size=3)
    frames: Float32s = (np.stack(channels, axis=3) + base).astype(np.float32)
    return np.clip(frames, 0.0, 255.0, out=frames)


def _draw_post(rng: np.random.Generator, frames: Float32s, camera_T2: Floats) -> None:
    """Draw an upright or lying post with a texture of its own, in place."""
    is_upright = bool(rng.integers(0, 2))
    moved = camera_T2[:, 0 if is_upright else 1]
    middle = rng.uniform(0.2, 0.8) * FRAME_SIZE - moved
    half = rng.uniform(2.0, 4.5)
    away_TX = np.abs(np.arange(FRAME_SIZE) + 0.5 - middle[:, None])
    cover_TX = np.clip(half - away_TX + 0.5, 0.0, 1.0).astype(np.float32)
    cover = cover_TX[:, None, :, None] if is_upright else cover_TX[:, :, None, None]
    frames += cover * (_texture(rng, camera_T2) - frames)


def _light(rng: np.random.Generator) -> Float32s:
    """Gain of each frame and channel, (T, 1, 1, 3)."""
    strength, cycles = rng.uniform(0.1, 0.35), rng.uniform(0.3, 2.0)
    wave = np.sin(2.0 * np.pi * (cycles * _TIMES[:NUM_FRAMES] + rng.random()))
    tint = rng.uniform(0.85, 1.15, size=3)
    gain: Floats = (1.0 + strength * wave)[:, None, None, None] * tint
    return gain.astype(np.float32)
