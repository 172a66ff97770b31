"""The tracker finds one ball on a plain background, also under a camera that moves."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from training.cli.main import main
from training.workloads.trajectory.clip_dataset import open_dataset
from training.workloads.trajectory.clips import Float32s, Frames, render_clip, render_hard_clip
from training.workloads.trajectory.trajectory_workload import _track


def errors(render: Callable[[int, int], tuple[Frames, Float32s]], num: int) -> list[float]:
    """The median distance in pixels between the tracker and the ball, of each clip."""
    found = []
    for index in range(num):
        frames, truth = render(1, index)
        places = (_track(torch.from_numpy(frames))[:, :2].numpy() + 1.0) * 32.0
        found.append(float(np.median(np.linalg.norm(places - truth[:-1, :2], axis=1))))
    return found


def test_it_follows_the_ball_of_easy_clips() -> None:
    assert np.median(errors(render_clip, 12)) < 1.0


def test_hard_clips_lead_it_astray() -> None:
    assert np.median(errors(render_hard_clip, 40)) > 4.0


def test_it_undoes_the_camera_s_motion() -> None:
    rng = np.random.default_rng(0)
    squares = rng.integers(40, 216, (14, 14, 3), dtype=np.uint8)
    scene = np.kron(squares, np.ones((8, 8, 1), np.uint8))
    frames = np.stack([scene[9 + t : 73 + t, 20 - t : 84 - t] for t in range(16)])
    for t in range(16):
        frames[t, 20:26, 3 * t + 4 : 3 * t + 10] = 255
    found = _track(torch.from_numpy(frames)).numpy()
    camera = found[:, 2:4] * 32.0
    assert np.allclose(camera[:, 0], np.arange(16) - 8, atol=0.2)
    assert np.allclose(camera[:, 1], 8 - np.arange(16), atol=0.2)
    assert np.allclose((found[:, 0] + 1.0) * 32.0, 3 * np.arange(16) + 7, atol=1.5)
    assert np.allclose((found[:, 1] + 1.0) * 32.0, 23, atol=1.5)


def test_difficulty_is_an_option_of_the_data_and_is_kept_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = ["data", "make", "--workload=trajectory", "--count=55", "--seed=2"]
    assert main([*make, f"--out={tmp_path / 'hard'}", "--override=difficulty=hard"]) == 0
    data = open_dataset(tmp_path / "hard")
    frames, truth = render_hard_clip(2, 7)
    assert np.array_equal(data.frames[7], frames) and np.array_equal(data.tracks[7], truth)
    assert '"difficulty": "hard"' in (tmp_path / "hard" / "manifest.json").read_text()
    capsys.readouterr()
    assert main([*make, f"--out={tmp_path / 'other'}", "--override=difficulty=medium"]) == 2
    assert "difficulty is 'medium'; use one of easy, hard" in capsys.readouterr().err
