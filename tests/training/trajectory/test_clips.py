"""The generator: what a clip depends on, and what the classes have in common."""

from pathlib import Path

import numpy as np
import pytest

from training.errors import UserError
from training.trajectory.clips import (
    CLIP_SHAPE,
    clip_label,
    place_path,
    project,
    render,
    render_clip,
)
from training.trajectory.dataset import (
    CLIPS_FILE,
    LABELS_FILE,
    make_dataset,
    open_dataset,
    split_failures,
    stratified_splits,
)
from training.trajectory.paths import CLASSES, PATHS

COUNT = 99


def ignore_progress(done: int, total: int) -> None:
    """For calls whose progress is not looked at."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dataset")
    make_dataset(path, COUNT, 7, ignore_progress, num_workers=1)
    return path


def test_there_are_ten_or_more_classes_with_order_only_pairs() -> None:
    assert len(CLASSES) >= 10
    assert {"circle_cw", "circle_ccw", "spiral_in", "spiral_out", "linear", "accelerating"} <= set(
        CLASSES
    )


def test_a_clip_is_a_function_of_seed_and_index_alone() -> None:
    clip = render_clip(3, 40)
    render_clip(3, 41)
    assert clip.shape == CLIP_SHAPE and clip.dtype == np.uint8
    assert np.array_equal(clip, render_clip(3, 40))
    assert not np.array_equal(clip, render_clip(4, 40))
    assert not np.array_equal(clip, render_clip(3, 51))


def test_clips_do_not_depend_on_count_or_number_of_workers(folder: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path, COUNT - 40, 7, ignore_progress, num_workers=2)
    few, many = open_dataset(tmp_path), open_dataset(folder)
    assert np.array_equal(few.frames, many.frames[: COUNT - 40])
    assert few.labels == many.labels[: COUNT - 40]


def test_making_reports_progress_to_the_end_and_describes_itself(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    meta = make_dataset(tmp_path, 70, 0, lambda done, total: seen.append((done, total)), 1)
    assert seen[-1] == (70, 70) and len(seen) > 1
    assert meta["shape"] == [70, *CLIP_SHAPE] and meta["count"] == 70 and meta["seed"] == 0
    assert sum(meta["splits"].values()) == 70
    assert {path.name for path in tmp_path.iterdir()} == {CLIPS_FILE, LABELS_FILE}


def test_every_class_is_in_every_split_in_its_share() -> None:
    labels = [clip_label(0, index) for index in range(1000)]
    splits = stratified_splits(labels, 0)
    assert sorted(splits["train"] + splits["validation"]) == list(range(1000))
    for indices in splits.values():
        counts = np.bincount([labels[index] for index in indices], minlength=len(CLASSES))
        assert counts.min() > 0 and counts.max() - counts.min() <= 2
    assert splits != stratified_splits(labels, 1)


def test_neither_label_nor_split_can_be_told_from_the_index() -> None:
    count = 2200
    labels = np.array([clip_label(1, index) for index in range(count)])
    validation = np.zeros(count)
    validation[stratified_splits(labels.tolist(), 1)["validation"]] = 1.0
    of_class = np.eye(len(CLASSES))[labels].T
    for row in [*of_class, validation]:
        # 4.5 standard deviations of the correlation of independent values.
        assert abs(np.corrcoef(row, np.arange(count))[0, 1]) < 4.5 / np.sqrt(count)
        places = np.bincount(np.flatnonzero(row) % len(CLASSES), minlength=len(CLASSES))
        expected = row.sum() / len(CLASSES)
        assert np.abs(places - expected).max() < 4.5 * np.sqrt(expected)


def test_the_order_only_pairs_leave_the_same_trace() -> None:
    time = np.linspace(0.0, 1.0, 32)
    inwards = PATHS["spiral_in"](np.random.default_rng(5), time)
    outwards = PATHS["spiral_out"](np.random.default_rng(5), time)
    assert np.allclose(inwards, outwards[::-1])
    # Drawn from the same numbers, the circles are each other's mirror image after the phase.
    cw = PATHS["circle_cw"](np.random.default_rng(5), time)
    ccw = PATHS["circle_ccw"](np.random.default_rng(5), time)
    assert np.allclose(np.linalg.norm(cw, axis=1), 1.0)
    assert np.allclose(
        np.linalg.norm(cw[1:] - cw[0], axis=1), np.linalg.norm(ccw[1:] - ccw[0], axis=1)
    )
    steps = {}
    for name in ("linear", "accelerating"):
        path = PATHS[name](np.random.default_rng(5), time)
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
            frames = render(rng, *project(rng, place_path(rng, name))).astype(np.float32)
            images.append(np.abs(frames - np.median(frames, axis=0)).max(axis=3).mean(axis=0))
        means[name] = np.mean(images, axis=0).reshape(8, 8, 8, 8).mean(axis=(1, 3)).ravel()
    assert np.corrcoef(means["circle_cw"], means["circle_ccw"])[0, 1] > 0.9


def test_clockwise_is_clockwise_from_every_camera() -> None:
    for name, sign in [("circle_cw", 1.0), ("circle_ccw", -1.0)]:
        for seed in range(30):
            rng = np.random.default_rng(seed)
            centers, _ = project(rng, place_path(rng, name))
            x, y = (centers - centers.mean(axis=0)).T
            # Pixels count y downwards, so a positive area is clockwise for the eye.
            area = np.sum(x[:-1] * y[1:] - x[1:] * y[:-1])
            assert np.sign(area) == sign


def test_place_and_size_do_not_depend_on_the_class() -> None:
    boxes = {}
    for name in CLASSES:
        paths = [place_path(np.random.default_rng([9, k]), name)[:, :2] for k in range(300)]
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


def test_fails_to_make_fewer_clips_than_the_splits_need(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="count is 54; give at least 55"):
        make_dataset(tmp_path, 54, 0, ignore_progress)
    with pytest.raises(UserError, match="seed is -1"):
        make_dataset(tmp_path, 100, -1, ignore_progress)


def test_fails_to_open_clips_that_do_not_fit_the_labels(folder: Path, tmp_path: Path) -> None:
    (tmp_path / LABELS_FILE).write_text((folder / LABELS_FILE).read_text())
    (tmp_path / CLIPS_FILE).write_bytes(b"too short")
    with pytest.raises(UserError, match="has 9 bytes where 99 labels need"):
        open_dataset(tmp_path)
    (tmp_path / CLIPS_FILE).unlink()
    with pytest.raises(UserError, match=r"lacks clips\.u8: it holds no trajectory dataset"):
        open_dataset(tmp_path)
    text = (folder / LABELS_FILE).read_text()
    (tmp_path / CLIPS_FILE).touch()
    (tmp_path / LABELS_FILE).write_text(text.replace("helix", "loop"))
    with pytest.raises(UserError, match="make the dataset again"):
        open_dataset(tmp_path)


def test_a_split_of_one_class_or_without_a_class_is_named(folder: Path) -> None:
    data = open_dataset(folder)
    assert split_failures(data, "train") == split_failures(data, "validation") == []
    helix = CLASSES.index("helix")
    of_helix = [k for k, label in enumerate(data.labels) if label == helix]
    others = [k for k, label in enumerate(data.labels) if label != helix]
    broken = type(data)(frames=data.frames, labels=data.labels, splits={"a": of_helix, "b": others})
    assert split_failures(broken, "a") == ["every clip of split a has the same label helix"]
    assert split_failures(broken, "b") == ["split b has no clip of class helix"]
