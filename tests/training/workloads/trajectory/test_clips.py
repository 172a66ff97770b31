"""The generator: what a clip depends on, and what the classes have in common."""

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import UserError
from training.workloads.trajectory.clip_dataset import (
    _LABELS_FILE,
    make_dataset,
    open_dataset,
    split_failures,
    stratified_splits,
)
from training.workloads.trajectory.clips import (
    _PATHS,
    CLASSES,
    CLIP_SHAPE,
    CLIPS_FILE,
    FUTURE_FRAMES,
    NUM_FRAMES,
    TRACK_SHAPE,
    TRACKS_FILE,
    _place_path,
    _project,
    _render,
    clip_label,
    render_clip,
    render_hard_clip,
)

COUNT, NUM_HARD = 66, 24


def ignore_progress(done: int, total: int) -> None:
    """For calls whose progress is not looked at."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dataset")
    make_dataset(path, COUNT, 7, ignore_progress, num_workers=1)
    return path


@pytest.mark.parametrize("render", [render_clip, render_hard_clip])
def test_a_clip_is_a_function_of_seed_and_index_alone(render: Any) -> None:
    clip, track = render(3, 40)
    render(3, 41)
    assert clip.shape == CLIP_SHAPE and clip.dtype == np.uint8
    assert track.shape == TRACK_SHAPE and track.dtype == np.float32
    again, same_track = render(3, 40)
    assert np.array_equal(clip, again) and np.array_equal(track, same_track)
    assert not np.array_equal(clip, render(4, 40)[0])
    assert not np.array_equal(clip, render(3, 51)[0])


def test_clips_do_not_depend_on_count_or_number_of_workers(folder: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path, COUNT - 11, 7, ignore_progress, num_workers=2)
    few, many = open_dataset(tmp_path), open_dataset(folder)
    assert np.array_equal(few.frames, many.frames[: COUNT - 11])
    assert np.array_equal(few.tracks, many.tracks[: COUNT - 11])
    assert few.labels == many.labels[: COUNT - 11]


def test_making_reports_progress_to_the_end_and_describes_itself(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    meta = make_dataset(
        tmp_path, 70, 0, lambda done, total: seen.append((done, total)), num_workers=1
    )
    assert seen[-1] == (70, 70) and len(seen) > 1
    assert meta["shape"] == [70, *CLIP_SHAPE] and meta["count"] == 70 and meta["seed"] == 0
    assert sum(meta["splits"].values()) == 70
    assert {path.name for path in tmp_path.iterdir()} == {CLIPS_FILE, TRACKS_FILE, _LABELS_FILE}


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_every_class_is_in_every_split_in_its_share(share: float) -> None:
    labels = [clip_label(0, index) for index in range(1000)]
    splits = stratified_splits(labels, 0, share)
    assert sorted(chain.from_iterable(splits.values())) == list(range(1000))
    assert [round(len(splits[n]) / 1000, 2) for n in ("validation", "test")] == [share, 0.1]
    for indices in splits.values():
        counts = np.bincount([labels[index] for index in indices], minlength=len(CLASSES))
        assert counts.min() > 0 and counts.max() - counts.min() <= 2
    assert splits != stratified_splits(labels, 1)


def test_neither_label_nor_split_can_be_told_from_the_index() -> None:
    count = 2200
    labels = np.array([clip_label(1, index) for index in range(count)])
    held_out = np.zeros((2, count))
    splits = stratified_splits(labels.tolist(), 1)
    for row, name in zip(held_out, ("validation", "test"), strict=True):
        row[splits[name]] = 1.0
    of_class = np.eye(len(CLASSES))[labels].T
    for row in [*of_class, *held_out]:
        # 4.5 standard deviations of the correlation of independent values.
        assert abs(np.corrcoef(row, np.arange(count))[0, 1]) < 4.5 / np.sqrt(count)
        places = np.bincount(np.flatnonzero(row) % len(CLASSES), minlength=len(CLASSES))
        expected = row.sum() / len(CLASSES)
        assert np.abs(places - expected).max() < 4.5 * np.sqrt(expected)


def test_the_order_only_pairs_leave_the_same_trace() -> None:
    time = np.linspace(0.0, 1.0, 32)
    inwards = _PATHS["spiral_in"](np.random.default_rng(5), time)
    outwards = _PATHS["spiral_out"](np.random.default_rng(5), time)
    assert np.allclose(inwards, outwards[::-1])
    # Drawn from the same numbers, the circles are each other's mirror image after the phase.
    cw = _PATHS["circle_cw"](np.random.default_rng(5), time)
    ccw = _PATHS["circle_ccw"](np.random.default_rng(5), time)
    assert np.allclose(np.linalg.norm(cw, axis=1), 1.0)
    assert np.allclose(
        np.linalg.norm(cw[1:] - cw[0], axis=1), np.linalg.norm(ccw[1:] - ccw[0], axis=1)
    )
    steps = {}
    for name in ("linear", "accelerating"):
        path = _PATHS[name](np.random.default_rng(5), time)
        assert np.linalg.matrix_rank(path - path[0], tol=1e-9) == 1
        steps[name] = np.linalg.norm(np.diff(path, axis=0), axis=1)
    assert np.allclose(steps["linear"], steps["linear"][0])
    assert (np.diff(steps["accelerating"]) > 0.0).all()


def test_clockwise_and_counter_clockwise_have_the_same_mean_image_over_many_clips() -> None:
    means = {}
    for name in ("circle_cw", "circle_ccw"):
        images = []
        for k in range(60):
            rng = np.random.default_rng([11, k])
            centers, radii = _project(rng, _place_path(rng, name)[:NUM_FRAMES])
            frames = _render(rng, centers, radii).astype(np.float32)
            images.append(np.abs(frames - np.median(frames, axis=0)).max(axis=3).mean(axis=0))
        means[name] = np.mean(images, axis=0).reshape(8, 8, 8, 8).mean(axis=(1, 3)).ravel()
    assert np.corrcoef(means["circle_cw"], means["circle_ccw"])[0, 1] > 0.9


def test_clockwise_is_clockwise_from_every_camera() -> None:
    for name, sign in [("circle_cw", 1.0), ("circle_ccw", -1.0)]:
        for seed in range(30):
            rng = np.random.default_rng(seed)
            centers, _ = _project(rng, _place_path(rng, name)[:NUM_FRAMES])
            x, y = (centers - centers.mean(axis=0)).T
            # Pixels count y downwards, so a positive area is clockwise for the eye.
            area = np.sum(x[:-1] * y[1:] - x[1:] * y[:-1])
            assert np.sign(area) == sign


def test_place_and_size_do_not_depend_on_the_class() -> None:
    boxes = {}
    for name in CLASSES:
        placed = [_place_path(np.random.default_rng([9, k]), name) for k in range(300)]
        paths = [path[:NUM_FRAMES, :2] for path in placed]
        low = np.array([path.min(axis=0) for path in paths])
        high = np.array([path.max(axis=0) for path in paths])
        assert low.min() >= -1.0 - 1e-9 and high.max() <= 1.0 + 1e-9
        boxes[name] = (((low + high) / 2.0).mean(axis=0), (high - low).max(axis=1).mean())
    for center, extent in boxes.values():
        assert np.abs(center).max() < 0.06
        assert abs(extent - 1.4) < 0.04


def test_the_ball_is_seen_in_nearly_every_frame(folder: Path) -> None:
    data = open_dataset(folder)
    moving = np.abs(data.frames.astype(np.int16) - np.median(data.frames, axis=1, keepdims=True))
    assert (moving.max(axis=(2, 3, 4)) > 60).mean() > 0.95


def test_a_track_says_where_the_ball_is_and_the_future_goes_on_from_there(folder: Path) -> None:
    data = open_dataset(folder)
    is_there = []
    for k, label in enumerate(data.labels):
        track = data.tracks[k]
        away = np.abs(data.frames[k] - np.median(data.frames[k], axis=0)).max(axis=3)
        for frame, (x, y, _) in enumerate(track[:NUM_FRAMES]):
            if 0.0 <= x < 64.0 and 0.0 <= y < 64.0:
                is_there.append(away[frame, int(y), int(x)] > 20.0)
        if CLASSES[label] != "random_walk":
            # No further than the clip's longest step leads in that time, and half as much again.
            steps = np.linalg.norm(np.diff(track[:NUM_FRAMES, :2], axis=0), axis=1)
            way = np.linalg.norm(track[NUM_FRAMES, :2] - track[NUM_FRAMES - 1, :2])
            assert way <= 1.5 * FUTURE_FRAMES * steps.max()
    # Where the ball lingers the median is the ball itself.
    assert np.mean(is_there) > 0.9


def test_the_future_of_a_circle_lies_on_the_circle() -> None:
    path = _place_path(np.random.default_rng(3), "circle_cw")
    assert path.shape == (NUM_FRAMES + FUTURE_FRAMES, 3)
    distances = np.linalg.norm(path[:, :2] - _center_of(path[:NUM_FRAMES, :2]), axis=1)
    assert np.allclose(distances, distances[0], rtol=1e-6)


def _center_of(points: np.ndarray) -> np.ndarray:
    """The centre of the circle through points: linear least squares."""
    a = np.column_stack([2.0 * points, np.ones(len(points))])
    solution, *_ = np.linalg.lstsq(a, (points**2).sum(axis=1), rcond=None)
    return np.asarray(solution[:2])


def test_fails_to_make_fewer_clips_than_the_splits_need(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="count is 54; give at least 55"):
        make_dataset(tmp_path, 54, 0, ignore_progress)
    with pytest.raises(UserError, match="seed is -1"):
        make_dataset(tmp_path, 100, -1, ignore_progress)


def test_fails_to_open_clips_that_do_not_fit_the_labels(folder: Path, tmp_path: Path) -> None:
    (tmp_path / _LABELS_FILE).write_text((folder / _LABELS_FILE).read_text())
    (tmp_path / CLIPS_FILE).write_bytes(b"too short")
    (tmp_path / TRACKS_FILE).write_bytes((folder / TRACKS_FILE).read_bytes())
    with pytest.raises(UserError, match="has 9 bytes, but 66 labels need"):
        open_dataset(tmp_path)
    (tmp_path / CLIPS_FILE).unlink()
    with pytest.raises(UserError, match=r"has no clips\.u8, so it is not a trajectory dataset"):
        open_dataset(tmp_path)
    content = json.loads((folder / _LABELS_FILE).read_text())
    (tmp_path / CLIPS_FILE).touch()
    (tmp_path / _LABELS_FILE).write_text(json.dumps({**content, "classes": ["line", "helix"]}))
    with pytest.raises(UserError, match=r"has labels from 0 to 10, but 2 classes; make the data"):
        open_dataset(tmp_path)


def test_a_split_of_one_class_or_without_a_class_is_named(folder: Path) -> None:
    data = open_dataset(folder)
    assert split_failures(data, "train") == split_failures(data, "validation") == []
    helix = CLASSES.index("helix")
    of_helix = [k for k, label in enumerate(data.labels) if label == helix]
    others = [k for k, label in enumerate(data.labels) if label != helix]
    broken = replace(data, splits={"a": of_helix, "b": others})
    assert split_failures(broken, "a") == ["every clip of split a has the same label helix"]
    assert split_failures(broken, "b") == ["split b has no clip of class helix"]


def test_in_hard_clips_the_marked_ball_is_where_its_track_says_unless_something_hides_it() -> None:
    red, seen = [], 0
    for index in range(NUM_HARD):
        frames, track = render_hard_clip(0, index)
        for frame, (x, y, radius) in zip(frames, track[:-1], strict=True):
            # On the rim, right of the core: red, brighter than the other channels together.
            column, row = int(x + 0.75 * radius), int(y)
            if 0 <= column < 64 and 0 <= row < 64:
                seen += 1
                r, g, b = (int(value) for value in frame[row, column])
                red.append(r > 1.3 * max(g, b))
    assert seen > 20 * NUM_HARD, "the ball is mostly in the picture"
    assert np.mean(red) > 0.6


def test_in_hard_clips_the_camera_moves_and_the_light_changes() -> None:
    changes, levels = [], []
    for index in range(NUM_HARD):
        frames, _ = render_hard_clip(0, index)
        corner = frames[:, :12, :12].astype(float)  # mostly background
        level = corner.mean(axis=(1, 2, 3))
        levels.append(level.max() / level.min())
        even = corner / corner.mean(axis=(1, 2), keepdims=True)
        changes.append(np.abs(even[-1] - even[0]).mean())
    assert np.median(levels) > 1.2
    assert np.median(changes) > 0.05
