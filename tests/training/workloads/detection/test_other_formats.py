"""Each of twenty exports of one scene becomes the same boxes, and a run by what the import says."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.training.workloads.detection import coco_scene as scene
from tests.training.workloads.detection.exports import BOXES, EXPORTS, SMALL, Write, put, yolo_v5
from training.cli.main import main

assert len(EXPORTS) == 20
# What the import warns of: a point is not learned; what is not written is derived.
SAID = {"labelme": ["other-shape"], "coco_with_masks": ["derived-box", "derived-area"]}


@pytest.mark.parametrize("write", EXPORTS, ids=lambda write: write.__name__)
def test_every_export_of_one_scene_becomes_the_same_boxes(tmp_path: Path, write: Write) -> None:
    write(tmp_path)
    checked = scene.checked(tmp_path)
    assert checked.report.refusals == []
    found = [found.rule for found in checked.report.findings]
    assert found == SAID.get(write.__name__, [])
    sizes = [(split.name, len(split)) for split in checked.splits]
    is_undivided = "label_studio" in write.__name__
    assert sizes == ([("all", 30)] if is_undivided else [("train", 24), ("validation", 6)])
    for split in checked.splits:
        names = [category.name for category in split.categories]
        assert sorted(names) == ["room", "wall"]
        for row in range(len(split)):
            own = split.objects(row)
            for box, label in zip(split.boxes[own].tolist(), split.labels[own], strict=True):
                left, top, width, height = box
                assert (left, top, left + width, top + height) == pytest.approx(
                    BOXES[names[label]], abs=1e-5
                )
            assert split.starts[row + 1] - split.starts[row] == 2


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(
            write,
            id=write.__name__,
            marks=() if write.__name__ == "coco_of_roboflow" else pytest.mark.slow,
        )
        for write in EXPORTS
    ],
)
def test_an_export_is_trained_on_by_the_commands_that_its_import_prints(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Write,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All overrides are for speed: what the dataset needs, the run takes from it."""
    write(tmp_path / "export")
    monkeypatch.chdir(tmp_path)
    assert main(["data", "import", "export", "--workload=detection", "--out=data"]) == 0
    said = capsys.readouterr().out
    assert "2 classes" in said and "on Spot" in said
    (command,) = [line for line in said.splitlines() if "-m training run" in line]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "training"]
    overrides = [f"--override={text}" for text in SMALL]
    assert main([*words[3:], *overrides]) == 0
    # As document 003's container says: torch, the operators, the dataset, the config.
    said = capsys.readouterr().out
    assert f"[ok] torch {torch.__version__} on cpu" in said
    assert "[ok] detect uses: attention reference" in said
    assert "[ok] dataset data: 2 classes (wall, room), train " in said
    assert "[ok] detection, recipe laptop: decoder_layers=1 " in said
    assert (tmp_path / "runs/first/final/model.safetensors").is_file()
    assert json.loads((tmp_path / "runs/first/receipt.json").read_text())["state"] == "finished"


def test_fails_for_what_none_of_them_writes(tmp_path: Path) -> None:
    yolo_v5(tmp_path)
    put(tmp_path / "labels/train/3.txt", "2 0.5 0.5 0.1 0.1\n0 0.5 0.5 0.1\n")
    (finding,) = scene.checked(tmp_path).report.refusals
    assert finding.message == (
        "labels/train/3.txt, line 1, is 2 0.5 0.5 0.1 0.1, not one of 2 classes and a box "
        "(and 1 more); export it again"
    )
