"""Clips that users bring are imported, trained on and evaluated; what is no clip is named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from training.cli.main import main
from training.errors import UserError
from training.sources import SourceFile
from training.workloads.trajectory.clips import CLIP_SHAPE, Frames
from training.workloads.trajectory.dataset import open_dataset, read_clip

CLASSES = ("falling", "rising")
SMALL = ("tokenizer_width=8", "width=16", "num_heads=2", "num_layers=1", "num_shards=2")
SHORT = ("tokenizer_epochs=1", "epochs=1", "time_average_epochs=1")


def clip(rng: np.random.Generator, name: str, num_frames: int = 20, size: int = 96) -> Frames:
    """A bright square that falls or rises, in a larger picture than the recipes train on."""
    frames = rng.integers(0, 60, (num_frames, size, size, 3), dtype=np.uint8)
    for number in range(num_frames):
        row = number * (size - 16) // num_frames
        row = row if name == "falling" else size - 16 - row
        frames[number, row : row + 16, 30:46] = 250
    return frames


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per class, with twelve clips in each."""
    root, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir()
        for number in range(12):
            np.save(root / name / f"{number:02}.npy", clip(rng, name))
    return root


def command(source: Path, out: Path) -> list[str]:
    return ["data", "import", str(source), "--workload=trajectory", f"--out={out}"]


def test_clips_of_one_s_own_become_a_dataset(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(own, tmp_path / "out")) == 0
    assert "classes: falling (12), rising (12)" in capsys.readouterr().out
    data = open_dataset(tmp_path / "out")
    assert data.frames.shape == (24, *CLIP_SHAPE)
    assert np.isnan(data.tracks).all()
    meta = json.loads((tmp_path / "out" / "manifest.json").read_text())["meta"]
    assert meta["classes"] == list(CLASSES)
    assert meta["shape"] == [24, *CLIP_SHAPE]
    assert meta["splits"] == {"train": 18, "validation": 4, "test": 2}
    first, last = (data.frames[0, frame].mean(axis=(1, 2)).argmax() for frame in (0, -1))
    assert first < 12 < 50 < last, "the first clip falls, from its first to its last frame"
    archive = shutil.make_archive(str(tmp_path / "own"), "zip", own)
    assert main(command(Path(archive), tmp_path / "again")) == 0
    manifests = [json.loads((tmp_path / n / "manifest.json").read_text()) for n in ("out", "again")]
    assert manifests[0]["files"] == manifests[1]["files"]


def test_a_run_trains_on_them_and_evaluates(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    assert main(command(own, data)) == 0
    options = [f"--dataset-uri={data}", "--workload=trajectory", "--recipe=magvit_laptop"]
    options += [f"--override={override}" for override in (*SMALL, *SHORT)]
    wrong = "--override=classes=falling,jumping"
    assert main(["run", f"--run-uri={run}", *options, wrong]) == 2
    assert not run.exists(), "a wrong override costs no run"
    assert "other classes; give --override classes=falling,rising" in capsys.readouterr().err
    assert main(["run", f"--run-uri={run}", *options]) == 0
    assert json.loads((run / "config.json").read_text())["fitted"] == {"classes": "falling,rising"}
    assert main(["run", f"--run-uri={run}", *options]) == 0, "it is the same run"
    stages = json.loads((run / "receipt.json").read_text())["stages"]
    assert {"accuracy_falling", "accuracy_rising", "loss"} <= stages["transformer"].keys()
    # Nobody knows where the ball is.
    assert "position_error_pixels" not in stages["transformer"]
    assert "psnr_ball" not in stages["tokenizer"]
    out = tmp_path / "predicted.jsonl"
    arguments = [f"--run-uri={run}", f"--dataset-uri={data}", f"--out={out}"]
    assert main(["predict", *arguments]) == 0
    for line in out.read_text().splitlines():
        prediction = json.loads(line)
        assert prediction["class"] in CLASSES
        assert prediction["true_future_position"] is None


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 8, 8)), r"has shape \(4, 8, 8\); give \(frames, height, width, 3\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), r"has shape \(0, 8, 8, 3\)"),
        (np.zeros((4, 8, 8, 3)), "has pixels of float64; give uint8, from 0 to 255"),
        (np.array([object()]), "is not a .npy file: "),
        (b"a video", "is not a .npy file: "),
    ],
)
def test_fails_for_a_file_that_is_no_clip(tmp_path: Path, array: object, message: str) -> None:
    path = tmp_path / "x.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, np.asarray(array))
    with pytest.raises(UserError, match=message):
        read_clip(SourceFile(name=path.name, folder=path.parent, label="a", split=None))
