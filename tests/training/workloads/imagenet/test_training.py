"""From a folder of JPEGs to a network that tells them apart, with a kill on the way.

The whole path: packed into shards, in S3, synced, loaded, trained, resumed, evaluated, reported.
"""

import json
import os
from pathlib import Path

import pytest

from tests.training.hooks import kill_at
from tests.training.runs import Run, assert_equal
from training.cli.main import main
from training.workloads.imagenet.image_dataset import _CLASSES, _draw

WORKLOAD = "--workload=tests.training.workloads.imagenet.hooked:HOOKED"
NUM_TRAIN, NUM_VALIDATION = 560, 80
CHANCE = 1 / len(_CLASSES)


def fill(folder: Path) -> Path:
    """Pictures as files in ImageNet's layout."""
    for index in range(NUM_TRAIN + NUM_VALIDATION):
        split = "train" if index < NUM_TRAIN else "val"
        path = folder / split / list(_CLASSES)[index % len(_CLASSES)] / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_draw(5, index).jpeg)
    return folder


@pytest.fixture
def datasets(tmp_path: Path, bucket_uri: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The pictures, packed by this process: in a folder, and uploaded to S3."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    source, out, uri = str(fill(tmp_path / "own")), str(tmp_path / "out"), f"{bucket_uri}/pictures"
    imported = ["data", "import", source, WORKLOAD, f"--out={out}", f"--dataset-uri={uri}"]
    assert main(imported) == 0
    return out, uri


def run_of(dataset: str, folder: Path, *options: str) -> Run:
    return Run(
        dataset=dataset,
        uri=str(folder / "run"),
        scratch=folder / "scratch",
        options=[WORKLOAD, "--recipe=small", "--checkpoint-interval=20steps", *options],
    )


@pytest.mark.slow  # weekly; in each run of the tests: test_kills.py and test_packing.py
def test_a_folder_of_jpegs_becomes_a_classifier_whatever_kills_its_training(
    datasets: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, uri = datasets
    whole = run_of(folder, tmp_path / "whole")
    assert whole.attempt() == 0

    # Synced this time, and loaded by another process.
    run = run_of(uri, tmp_path / "killed", "--override=loader_workers=1")
    kill_at(run, "classifier", 50)
    assert run.attempt() == 0
    assert_equal(run, whole)

    metrics = whole.json("receipt.json")["stages"]["classifier"]
    assert metrics["top1"] > 4 * CHANCE
    assert metrics["top5"] > 0.9
    assert abs(metrics["top1_with_flips"] - metrics["top1"]) < 0.2
    assert "taken for" in (Path(whole.uri) / "report.html").read_text()

    capsys.readouterr()
    assert main(["predict", f"--run-uri={whole.uri}", f"--dataset-uri={folder}"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = json.loads((Path(folder) / "manifest.json").read_text())["meta"]["classes"]
    assert rows[0]["label_name"] == names[rows[0]["label"]]
    assert rows[0]["names"] == [names[number] for number in rows[0]["classes"]]
