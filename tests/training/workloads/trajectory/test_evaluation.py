"""The evaluation: calibration by its definition, pictures that are pictures, predictions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.workloads.trajectory.scene import batch_of, started, train_stage
from training.workload import Inputs, Partial
from training.workloads.trajectory import evaluation
from training.workloads.trajectory.clips import CLASSES

PNG = b"\x89PNG"
JPEG = b"\xff\xd8"


def test_calibration_is_zero_where_confidence_is_the_accuracy() -> None:
    confidence = torch.tensor([0.75] * 4 + [0.25] * 4)
    correct = torch.tensor([True, True, True, False, True, False, False, False])
    bins = evaluation.reliability(confidence, correct)
    assert len(bins) == evaluation.NUM_BINS and sum(count for count, _, _ in bins) == 8
    assert evaluation.calibration_error(bins) == pytest.approx(0.0)
    never = evaluation.reliability(torch.full((8,), 0.9), torch.zeros(8, dtype=torch.bool))
    assert evaluation.calibration_error(never) == pytest.approx(0.9)


def test_a_confidence_of_one_falls_into_the_last_bin() -> None:
    bins = evaluation.reliability(torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert bins[-1] == (3, 1.0, 1.0)


def parts_of(inputs: Inputs, name: str) -> list[Partial]:
    stage = train_stage(inputs.config, name)
    model = started(stage, inputs).eval()
    samples = stage.samples(inputs, "validation")
    items = [samples.get(k, 0, torch.Generator().manual_seed(k)) for k in range(len(samples))]
    with torch.no_grad():
        return [stage.evaluate(model, samples.collate(items[k : k + 4])) for k in (0, 4, 8)]


def test_the_last_evaluation_is_drawn(inputs: Inputs, tmp_path: Path) -> None:
    stage = train_stage(inputs.config, "head")
    stage.show(nn.Identity(), inputs, parts_of(inputs, "head"), tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(drawn) == {"confusion.png", "reliability.png", "clips.jpg"}
    kinds = {"png": PNG, "jpg": JPEG}
    assert all(data[:4].startswith(kinds[name[-3:]]) for name, data in drawn.items())
    assert all(5_000 < len(data) < 400_000 for data in drawn.values())  # the report holds them


def test_the_contact_sheet_shows_clips_with_truth_and_answer(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captions: list[evaluation.Caption] = []
    monkeypatch.setattr(
        evaluation, "_draw_contact_sheet", lambda path, title, frames, given: captions.extend(given)
    )
    parts = parts_of(inputs, "head")
    evaluation.illustrate(parts, tmp_path, "head", CLASSES)
    scores = evaluation.Scores.of(parts, len(CLASSES))
    assert len(captions) == len(scores["labels"]) == 11
    assert [c.true for c in captions] == [CLASSES[k] for k in scores["labels"].tolist()]
    assert [c.predicted for c in captions] == [CLASSES[k] for k in scores["predicted"].tolist()]


def test_tracks_are_dots_where_the_ball_is_and_where_it_was_found(inputs: Inputs) -> None:
    (part, *_) = parts_of(inputs, "head")
    found, truth = part.tensors["found_places"], part.tensors["true_places"]
    assert found.shape == truth.shape == (4, 16, 2)
    assert truth.min() > 0 and truth.max() < 64
    frames = np.zeros((1, 2, 64, 64, 3), np.uint8)
    track = np.array([[[10.4, 20.9], [np.nan, np.nan], [80.0, 3.0]]], np.float32)
    drawn = evaluation.with_tracks(frames, track, (1, 2, 3))
    assert np.argwhere(drawn[0, 1].any(axis=2)).tolist() == [[3, 63], [20, 10]]
    assert drawn[0, 0, 20, 10].tolist() == [1, 2, 3] and not frames.any()


def test_without_matplotlib_the_numbers_are_written_and_one_line_says_so(
    inputs: Inputs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    stage = train_stage(inputs.config, "head")
    parts = parts_of(inputs, "head")
    stage.summarize(parts, tmp_path)
    stage.show(nn.Identity(), inputs, parts, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["confusion.json"]
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_a_prediction_names_the_class_and_the_place_in_pixels(inputs: Inputs) -> None:
    stage = train_stage(inputs.config, "head")
    model = started(stage, inputs).eval()
    batch = batch_of(stage, inputs, 3)
    with torch.no_grad():
        rows = stage.predict(model, batch)
    assert [row["clip"] for row in rows] == batch["clips"].tolist()
    for row, label, future in zip(rows, batch["labels"], batch["future"], strict=True):
        assert row["true_class"] == CLASSES[int(label)] and row["class"] in CLASSES
        assert 1.0 / len(CLASSES) <= row["probability"] <= 1.0
        assert row["true_future_position"] == pytest.approx(((future + 1.0) * 32.0).tolist())
