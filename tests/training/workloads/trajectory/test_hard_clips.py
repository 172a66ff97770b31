"""Hard clips: a function of seed and number, with a track of the marked ball."""

import numpy as np

from training.workloads.trajectory.clips import CLIP_SHAPE, TRACK_SHAPE, render_hard_clip

NUM = 24


def test_a_clip_is_a_function_of_seed_and_number() -> None:
    (frames, track), (again, same) = render_hard_clip(3, 5), render_hard_clip(3, 5)
    assert frames.shape == CLIP_SHAPE and frames.dtype == np.uint8
    assert track.shape == TRACK_SHAPE and track.dtype == np.float32
    assert np.array_equal(frames, again) and np.array_equal(track, same)
    assert not np.array_equal(frames, render_hard_clip(3, 6)[0])
    assert not np.array_equal(frames, render_hard_clip(4, 5)[0])


def test_the_marked_ball_is_where_its_track_says_unless_something_hides_it() -> None:
    red, seen = [], 0
    for index in range(NUM):
        frames, track = render_hard_clip(0, index)
        for frame, (x, y, radius) in zip(frames, track[:-1], strict=True):
            # On the rim, right of the core: red, brighter than the other channels together.
            column, row = int(x + 0.75 * radius), int(y)
            if 0 <= column < 64 and 0 <= row < 64:
                seen += 1
                r, g, b = (int(value) for value in frame[row, column])
                red.append(r > 1.3 * max(g, b))
    assert seen > 20 * NUM, "the ball is mostly in the picture"
    assert np.mean(red) > 0.6


def test_the_camera_moves_and_the_light_changes() -> None:
    changes, levels = [], []
    for index in range(NUM):
        frames, _ = render_hard_clip(0, index)
        corner = frames[:, :12, :12].astype(float)  # mostly background
        level = corner.mean(axis=(1, 2, 3))
        levels.append(level.max() / level.min())
        even = corner / corner.mean(axis=(1, 2), keepdims=True)
        changes.append(np.abs(even[-1] - even[0]).mean())
    assert np.median(levels) > 1.2
    assert np.median(changes) > 0.05
