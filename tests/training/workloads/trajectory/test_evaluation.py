"""The evaluation: calibration by its definition, pictures that are pictures, predictions."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.workloads.trajectory.scene import batch_of, started, train_stage
from training.evaluation_files import Captioned
from training.workload import Inputs, Partial
from training.workloads.trajectory import model as module
from training.workloads.trajectory.clips import CLASSES
from training.workloads.trajectory.config import laptop
from training.workloads.trajectory.model import TrainTimeAverage


def summarized(confidence: list[float], is_right: list[bool], out: Path) -> Mapping[str, float]:
    """Of clips of all classes in turn, each answered with this confidence."""
    labels = torch.arange(len(confidence)) % len(CLASSES)
    rows = {name: torch.zeros(len(labels)) for name in ("loss", "position_error", "steady_error")}
    rows |= {"standstill_error": torch.full((len(labels),), torch.nan), "clips": labels}
    rows |= {"labels": labels, "confidence": torch.tensor(confidence)}
    rows["predicted"] = torch.where(torch.tensor(is_right), labels, (labels + 1) % len(CLASSES))
    stage = TrainTimeAverage(config=laptop(), name="mean", view="time_average", epochs=1)
    return stage.summarize([Partial(tensors=rows)], out)


def test_calibration_is_zero_where_confidence_is_the_accuracy(tmp_path: Path) -> None:
    confidence = [0.75] * 8 + [0.25] * 8
    right = [True, True, True, False] * 2 + [True, False, False, False] * 2
    assert summarized(confidence, right, tmp_path)["calibration_error"] == pytest.approx(0.0)
    never = summarized([0.9] * 11, [False] * 11, tmp_path)
    assert never["calibration_error"] == pytest.approx(0.9)


def test_a_confidence_of_one_falls_into_the_last_bin(tmp_path: Path) -> None:
    summarized([1.0] * 11, [True] * 11, tmp_path)
    names, *bins = (tmp_path / "reliability.csv").read_text().splitlines()
    assert names == "clips,confidence,accuracy"
    assert bins == ["0,0.0000,0.0000"] * 9 + ["11,1.0000,1.0000"]


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
    (drawn,) = tmp_path.iterdir()
    assert drawn.name == "clips.jpg" and drawn.read_bytes().startswith(b"\xff\xd8")
    assert 5_000 < drawn.stat().st_size < 400_000  # the report holds it


def test_the_contact_sheet_shows_clips_with_truth_and_answer(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Captioned] = []
    monkeypatch.setattr(
        module, "write_sheet", lambda path, title, given, num_columns: shown.extend(given)
    )
    parts = parts_of(inputs, "head")
    train_stage(inputs.config, "head").show(nn.Identity(), inputs, parts, tmp_path)
    rows = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    assert len(shown) == len(rows["labels"]) == 11
    answers = zip(shown, rows["labels"].tolist(), rows["predicted"].tolist(), strict=True)
    for picture, label, predicted in answers:
        assert picture.caption.startswith(f"{CLASSES[label]},")
        assert (f" predicted {CLASSES[predicted]} " in picture.caption) == (label != predicted)
        assert picture.color == ("black" if label == predicted else "red")


def test_tracks_are_dots_where_the_ball_is_and_where_it_was_found(inputs: Inputs) -> None:
    (part, *_) = parts_of(inputs, "head")
    found, truth = part.tensors["found_places"], part.tensors["true_places"]
    assert found.shape == truth.shape == (4, 16, 2)
    assert truth.min() > 0 and truth.max() < 64
    frames = np.zeros((1, 2, 64, 64, 3), np.uint8)
    track = np.array([[[10.4, 20.9], [np.nan, np.nan], [80.0, 3.0]]], np.float32)
    drawn = module._with_tracks(frames, track, (1, 2, 3))
    assert np.argwhere(drawn[0, 1].any(axis=2)).tolist() == [[3, 63], [20, 10]]
    assert drawn[0, 0, 20, 10].tolist() == [1, 2, 3] and not frames.any()


def test_a_prediction_names_the_class_and_the_place_in_pixels(inputs: Inputs) -> None:
    stage = train_stage(inputs.config, "head")
    model = started(stage, inputs).eval()
    batch = batch_of(stage, inputs, 3)
    with torch.no_grad():
        rows = stage.predict(model, batch)
    assert [row["clip"] for row in rows] == batch["clips"].tolist()
    for row, label, future in zip(rows, batch["labels"], batch["futures"][:, -1], strict=True):
        assert row["true_class"] == CLASSES[int(label)] and row["class"] in CLASSES
        assert 1.0 / len(CLASSES) <= row["probability"] <= 1.0
        assert row["true_future_position"] == pytest.approx(((future + 1.0) * 32.0).tolist())
