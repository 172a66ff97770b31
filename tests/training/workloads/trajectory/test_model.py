"""The head: finds the ball in features and, with a path on the pixels, where these say nothing."""

from dataclasses import replace

import pytest
import torch

from tests.training.workloads.trajectory.scene import (
    COUNT,
    NO_RANDOMNESS,
    FakeDataset,
    batch_of,
    inputs_of,
    started,
    train_stage,
)
from training.workload import Inputs
from training.workloads.trajectory.clip_dataset import open_dataset
from training.workloads.trajectory.config import CHANNELS, TrajectoryConfig, laptop
from training.workloads.trajectory.model import _TransformerHead, cell_centers

# Cells of 16 x 16 pixels.
CONFIG = replace(laptop(), grid=4, dropout=0.0, place_weight=10.0, learning_rate=3e-3)


def away_after(config: TrajectoryConfig, num_steps: int) -> float:
    """How far from the marked one of two moving cells the place is that a head has learned.

    In half frames. With a path on the pixels the marks are in these, and nothing in the features.
    """
    torch.manual_seed(0)
    stage = train_stage(config, "head")
    model = _TransformerHead(config, num_frames=stage.num_frames)
    optimizer = stage.optimizer(model)
    generator = torch.Generator().manual_seed(1)

    def batch(size: int) -> dict[str, torch.Tensor]:
        cells = torch.randint(16, (2, size, 16), generator=generator)
        features = torch.zeros(size, 16, 16, CHANNELS[config.backbone_layer])
        marks = torch.zeros(size, 16, 16, 3)
        for channel, cell in enumerate(cells):
            marks[..., channel].scatter_(2, cell[..., None], 5.0)
        places = cell_centers(4, features.device)[cells[0]]
        given = {**stage.example(size), "places": places, "futures": places}
        if config.pixel_width:
            squares = (40.0 * marks).to(torch.uint8).view(size, 16, 4, 1, 4, 1, 3)
            frames = squares.expand(-1, -1, -1, 16, -1, 16, -1).reshape(size, 16, 64, 64, 3)
            return {**given, "x": features, "frames": frames}
        features[..., :3] = marks
        return {**given, "x": features}

    for step in range(num_steps):
        loss = stage.loss(model, batch(8), step, num_steps)
        optimizer.zero_grad()
        (loss.total / 8).backward()
        optimizer.step()
    unseen = batch(20)
    with torch.no_grad():
        found = stage.answer(model, unseen)[2]
    return float((found - unseen["places"]).norm(dim=-1).mean())


def test_the_place_of_a_marked_cell_is_learned_beside_one_that_moves_like_it() -> None:
    assert away_after(CONFIG, 100) < 0.2, "half frames: a cell is 0.5"


@pytest.mark.slow
def test_the_place_of_a_mark_is_learned_from_the_pixels_where_features_say_nothing() -> None:
    assert away_after(replace(CONFIG, pixel_width=4), 25) < 0.2, "half frames: a cell is 0.5"


@pytest.mark.parametrize("stride", [1, 7, 9, 12])
def test_frames_and_places_are_of_those_that_the_features_were_made_from(
    dataset: FakeDataset, stride: int
) -> None:
    config = replace(laptop(), frame_stride=stride)
    features = torch.zeros(COUNT, config.num_frames, 1, 1)
    given = inputs_of(dataset, config, {"features": [{"features": features}]})
    frames = train_stage(config, "head").samples(given, "train").get(0, 0, NO_RANDOMNESS)[2]
    assert frames == list(range(0, 32, stride))


@pytest.mark.parametrize("name", ["head", "single_frame", "shuffled"])
def test_the_path_on_pixels_sees_the_frames_that_the_features_are_of(
    inputs: Inputs, name: str
) -> None:
    config = replace(inputs.config, pixel_width=4)
    stage = train_stage(config, name)
    samples = stage.samples(inputs, "train")
    _, clip, frames = item = samples.get(3, 0, torch.Generator().manual_seed(1))
    batch = samples.collate([item])
    assert len(frames) == stage.num_frames
    true = torch.from_numpy(open_dataset(inputs.dataset.folder).frames[clip, frames])
    assert torch.equal(batch["frames"][0], true)
    whole, example = batch_of(stage, inputs, 5), stage.example(5)
    assert {k: (v.shape, v.dtype) for k, v in whole.items()} == {
        k: (v.shape, v.dtype) for k, v in example.items()
    }
    model = started(stage, replace(inputs, config=config)).eval()
    with torch.no_grad():
        answers = stage.answer(model, whole)
        first = {key: value[:1] for key, value in whole.items()}
        alone = stage.answer(model, first)
        assert all(torch.allclose(a[:1], b, atol=1e-5) for a, b in zip(answers, alone, strict=True))
        inverted = {**whole, "frames": 255 - whole["frames"]}
        assert not torch.allclose(stage.answer(model, inverted)[2], answers[2], atol=1e-5)


def test_a_frame_brighter_as_a_whole_is_the_same_to_the_path_on_pixels(inputs: Inputs) -> None:
    """Light that changes is no motion."""
    config = replace(inputs.config, pixel_width=4)
    stage = train_stage(config, "head")
    samples = stage.samples(inputs, "train")
    batch = samples.collate([samples.get(0, 0, NO_RANDOMNESS)])
    model = started(stage, replace(inputs, config=config)).eval()
    brighter = batch["frames"].clamp(20, 200)
    brighter[:, ::2] += 30
    with torch.no_grad():
        expected = stage.answer(model, {**batch, "frames": batch["frames"].clamp(20, 200)})
        found = stage.answer(model, {**batch, "frames": brighter})
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(expected, found, strict=True))
