"""The 3-D paths that the clips show: one function per class, each a curve over time.

The clip shows times 0 to 1; later times are the future that the position head predicts. A path
describes motion only: position in the picture, size and viewpoint are drawn afterwards,
independently of the class (clips.py).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Path = Callable[[np.random.Generator, Floats], Floats]

TURN = 2.0 * np.pi


def _sign(rng: np.random.Generator) -> float:
    return 1.0 if rng.random() < 0.5 else -1.0


def _along_line(rng: np.random.Generator, progress: Floats) -> Floats:
    angle = rng.uniform(0.0, TURN)
    depth = rng.uniform(-0.5, 0.5)
    path: Floats = progress[:, None] * np.array([np.cos(angle), np.sin(angle), depth])
    return path


def _around(angle: Floats, radius: Floats | float) -> Floats:
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), np.zeros_like(angle)], axis=1)


def linear(rng: np.random.Generator, time: Floats) -> Floats:
    return _along_line(rng, time)


def accelerating(rng: np.random.Generator, time: Floats) -> Floats:
    return _along_line(rng, time ** rng.uniform(2.2, 3.2))


def _circle(rng: np.random.Generator, time: Floats, direction: float) -> Floats:
    turns = rng.uniform(0.8, 1.6)
    return _around(rng.uniform(0.0, TURN) + direction * TURN * turns * time, 1.0)


def circle_cw(rng: np.random.Generator, time: Floats) -> Floats:
    return _circle(rng, time, -1.0)


def circle_ccw(rng: np.random.Generator, time: Floats) -> Floats:
    return _circle(rng, time, 1.0)


def _spiral(rng: np.random.Generator, time: Floats) -> Floats:
    """From the rim to the centre, turning in either sense; reversed in time it is `spiral_out`."""
    turns = rng.uniform(1.3, 2.0) * _sign(rng)
    radius = np.maximum(1.0 + (rng.uniform(0.05, 0.2) - 1.0) * time, 0.0)
    return _around(rng.uniform(0.0, TURN) + TURN * turns * time, radius)


def spiral_in(rng: np.random.Generator, time: Floats) -> Floats:
    return _spiral(rng, time)


def spiral_out(rng: np.random.Generator, time: Floats) -> Floats:
    return _spiral(rng, 1.0 - time)


def parabola(rng: np.random.Generator, time: Floats) -> Floats:
    apex = rng.uniform(0.35, 0.65)
    height = rng.uniform(2.5, 5.0)
    x = _sign(rng) * time
    return np.stack([x, -height * (time - apex) ** 2, rng.uniform(-0.5, 0.5) * time], axis=1)


def sinusoid(rng: np.random.Generator, time: Floats) -> Floats:
    wave = rng.uniform(0.2, 0.35) * np.sin(
        rng.uniform(0.0, TURN) + TURN * rng.uniform(1.6, 2.6) * time
    )
    angle = rng.uniform(0.0, TURN)
    x = np.cos(angle) * time - np.sin(angle) * wave
    y = np.sin(angle) * time + np.cos(angle) * wave
    return np.stack([x, y, rng.uniform(-0.3, 0.3) * time], axis=1)


def bounce(rng: np.random.Generator, time: Floats) -> Floats:
    num_bounces = rng.uniform(2.2, 3.4)
    phase = rng.uniform(0.0, 0.5) + num_bounces * time
    hop, within = np.floor(phase), phase % 1.0
    height = rng.uniform(0.6, 1.0) * rng.uniform(0.65, 0.9) ** hop * 4.0 * within * (1.0 - within)
    return np.stack([_sign(rng) * time, height, rng.uniform(-0.4, 0.4) * time], axis=1)


def helix(rng: np.random.Generator, time: Floats) -> Floats:
    angle = rng.uniform(0.0, TURN) + _sign(rng) * TURN * rng.uniform(2.0, 3.0) * time
    radius = rng.uniform(0.25, 0.35)
    drift = rng.uniform(0.0, TURN)
    path = _around(angle, radius)
    path[:, 0] += np.cos(drift) * time
    path[:, 1] += np.sin(drift) * time
    path[:, 2] += rng.uniform(0.3, 0.8) * _sign(rng) * time
    return path


def random_walk(rng: np.random.Generator, time: Floats) -> Floats:
    steps = rng.normal(size=(len(time), 3)) * np.array([1.0, 1.0, 0.4])
    steps[0] = 0.0
    return np.cumsum(steps, axis=0)


PATHS: Mapping[str, Path] = MappingProxyType(
    {
        "linear": linear,
        "accelerating": accelerating,
        "circle_cw": circle_cw,
        "circle_ccw": circle_ccw,
        "spiral_in": spiral_in,
        "spiral_out": spiral_out,
        "parabola": parabola,
        "sinusoid": sinusoid,
        "bounce": bounce,
        "helix": helix,
        "random_walk": random_walk,
    }
)
CLASSES: tuple[str, ...] = tuple(PATHS)
