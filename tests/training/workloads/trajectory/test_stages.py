"""The stages: artifacts that do not depend on shards, models that learn, refusals, recipes."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import UserError
from tests.training.workloads.trajectory.scene import (
    COUNT,
    FakeDataset,
    batch_of,
    inputs_of,
    started,
    train_stage,
)
from training.settings import changed
from training.workload import Inputs, Partial, Prepare, Train
from training.workloads.trajectory.clip_dataset import (
    _LABELS_FILE,
    open_dataset,
    shard_frames,
)
from training.workloads.trajectory.clips import CLASSES, CLIPS_FILE, TRACKS_FILE
from training.workloads.trajectory.config import (
    CHANNELS,
    MagvitConfig,
    TrajectoryConfig,
    full,
    laptop,
    reference,
)
from training.workloads.trajectory.features import (
    Features,
    MeanImages,
    _clip_features,
    _load_backbone,
    build_backbone,
)
from training.workloads.trajectory.model import TrainClipClassifier
from training.workloads.trajectory.trajectory_workload import RECIPES, TRAJECTORY, Tracks

NO_RANDOMNESS = torch.Generator()


def test_data_comes_first_then_baselines_then_what_they_judge() -> None:
    mean, tracks = ["mean_images", "time_average"], ["tracks", "tracker"]
    frozen = [*mean, *tracks, "features", "single_frame", "shuffled", "head"]
    magvit = [*mean, "tokenizer", "tokens", "transformer"]
    for recipe in RECIPES.values():
        c = recipe()
        stages = TRAJECTORY.stages(replace(c, baselines=True))
        expected = magvit if isinstance(c, MagvitConfig) else frozen
        gone = [] if c.time_average_epochs else [*mean, "shuffled"]
        assert [stage.name for stage in stages] == [name for name in expected if name not in gone]
        without = [stage.name for stage in TRAJECTORY.stages(replace(c, baselines=False))]
        needed = ["features", "head"] if expected is frozen else magvit[2:]
        assert without == needed, "only what the last stage needs"
        for stage in stages:
            made = stage.name in ("mean_images", "tracks", "features", "tokens")
            assert isinstance(stage, Prepare if made else Train)


def test_paid_recipes_have_no_baselines_unless_they_are_asked_for() -> None:
    assert {name for name, recipe in RECIPES.items() if recipe().baselines} == {
        "laptop", "demo", "magvit_laptop",
    }  # fmt: skip


def test_the_reference_recipe_is_that_of_the_seed_document() -> None:
    c = reference()
    assert (c.image_size, c.num_frames) == (64, 32)
    assert Features(config=c).probe().build()(torch.zeros(1, 3, 64, 64)).shape == (1, 512, 2, 2)
    assert (c.settings.epochs, c.settings.global_batch) == (30, 16)
    assert train_stage(c, "head").model_input(16).shape == (16, 32, 1, 512)
    assert TRAJECTORY.nominal_samples["reference"] == {"train": 8_000, "validation": 1_000}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "imagenet"),
        ("backbone_layer", "layer9"),
        ("width", 62),
        ("epochs", 0),
        ("precision", "float16"),
        ("dropout", 1.0),
        ("learning_rate", 0.0),
        ("baseline_width", 0),
        ("grid", 0),
    ],
)
def test_fails_on_a_config_value_that_cannot_work(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        changed(laptop(), **{name: value})


@pytest.mark.slow  # a data set of a few clips
def test_more_shards_than_clips_have_each_clip_once(dataset: FakeDataset, inputs: Inputs) -> None:
    """18 clips of a user's own stopped in the first of the 20 shards of recipe full."""
    config = replace(laptop(), num_shards=COUNT + 4)
    ends = [shard_frames(dataset.folder, n, COUNT + 4)[1:] for n in range(COUNT + 4)]
    empty = next(n for n, (first, end) in enumerate(ends) if first == end)
    given = inputs_of(dataset, config)
    for stage in (Features(config=config), MeanImages(config=config), Tracks(config=config)):
        for name, rows in stage.make(given, empty).items():
            like = inputs.artifact(stage.name)[0][name]
            assert rows.shape == (0, *like.shape[1:]) and rows.dtype == like.dtype
    means = [MeanImages(config=config).make(given, n)["mean_image"] for n in range(COUNT + 4)]
    whole = [shard["mean_image"] for shard in inputs.artifact("mean_images")]
    assert torch.equal(torch.cat(means), torch.cat(whole))


def test_features_are_the_same_bits_in_shards_and_at_once(
    dataset: FakeDataset, inputs: Inputs
) -> None:
    config = replace(laptop(), num_shards=1)
    (at_once,) = Features(config=config).make(inputs_of(dataset, config), 0).values()
    in_shards = torch.cat([shard["features"] for shard in inputs.artifact("features")])
    (images,) = (
        MeanImages(config=replace(config, num_shards=1))
        .make(inputs_of(dataset, config), 0)
        .values()
    )
    assert images.shape == (COUNT, 3, 64, 64) and images.dtype == torch.uint8
    mean = open_dataset(dataset.folder).frames[5].mean(axis=0).transpose(2, 0, 1)
    assert (images[5] - torch.from_numpy(mean)).abs().max() <= 0.5 + 1e-4
    of_shards = torch.cat([shard["mean_image"] for shard in inputs.artifact("mean_images")])
    assert torch.equal(images, of_shards)
    assert at_once.shape == (COUNT, 16, 64, 128) and at_once.dtype == torch.float16
    assert torch.equal(at_once, in_shards)
    assert at_once.isfinite().all()


def test_features_leave_the_global_generator_alone(dataset: FakeDataset, inputs: Inputs) -> None:
    stage = Features(config=replace(inputs.config, backbone_seed=1))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    other = stage.make(inputs, 0)["features"]
    assert torch.equal(torch.rand(1), expected)
    assert not torch.equal(other, inputs.artifact("features")[0]["features"])


def test_fails_on_an_image_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="ResNet-18 needs the package torchvision") as refusal:
        build_backbone("random", 0, "layer2")
    assert "install the torchvision that matches torch 2." in str(refusal.value)


def test_the_key_names_weights_preprocessing_and_data(dataset: FakeDataset) -> None:
    config = laptop()
    others = [
        replace(config, **change)
        for change in (
            {"weights": "pretrained"},
            {"backbone_seed": 1},
            {"backbone_layer": "layer1"},
            {"image_size": 32},
            {"frame_stride": 1},
            {"grid": 2},
            {"num_shards": 8},
        )
    ]
    keys = {Features(config=c).key(inputs_of(dataset, c)) for c in [config, *others]}
    other_data = replace(dataset, fingerprint="two")
    keys.add(Features(config=config).key(inputs_of(other_data, config)))
    assert len(keys) == len(others) + 2
    same = changed(config, epochs=3, width=32, seed=5)
    assert Features(config=same).key(inputs_of(dataset, same)) in keys
    assert all(set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for key in keys)


@pytest.mark.parametrize("name", ["head", "single_frame", "shuffled", "tracker", "time_average"])
def test_models_give_class_and_position_and_examples_have_the_shapes_of_batches(
    inputs: Inputs, name: str
) -> None:
    stage = train_stage(inputs.config, name)
    batch, example = batch_of(stage, inputs, 5), stage.example(5)
    assert batch.keys() == example.keys()
    for key, tensor in batch.items():
        assert (tensor.shape, tensor.dtype) == (example[key].shape, example[key].dtype), key
    logits, futures, *_ = started(stage, inputs)(batch["x"])
    assert logits.shape == (5, len(CLASSES)) and logits.isfinite().all()
    assert futures.shape == batch["futures"].shape and futures.isfinite().all()


def test_the_single_frame_is_the_middle_one(inputs: Inputs) -> None:
    whole = train_stage(inputs.config, "head").samples(inputs, "validation")
    single = train_stage(inputs.config, "single_frame").samples(inputs, "validation")
    for index in range(len(whole)):
        features, clip, frames = whole.get(index, 0, NO_RANDOMNESS)
        frame, same_clip, places = single.get(index, 0, NO_RANDOMNESS)
        assert torch.equal(frame[0], features[8]) and clip == same_clip
        assert places == [16] and frames == list(range(0, 32, 2))


def test_shuffled_has_the_same_frames_in_an_order_that_the_generator_decides(
    inputs: Inputs,
) -> None:
    whole = train_stage(inputs.config, "head").samples(inputs, "train")
    mixed = train_stage(inputs.config, "shuffled").samples(inputs, "train")
    features, _, _ = whole.get(0, 0, NO_RANDOMNESS)
    one, _, frames = mixed.get(0, 0, torch.Generator().manual_seed(1))
    other, _, _ = mixed.get(0, 0, torch.Generator().manual_seed(2))
    again, _, _ = mixed.get(0, 0, torch.Generator().manual_seed(1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert not torch.equal(one, features)
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(1))
    assert torch.equal(one, features[order]) and frames == (2 * order).tolist()


def test_the_future_is_the_last_row_of_the_track_in_half_frames(inputs: Inputs) -> None:
    stage = train_stage(inputs.config, "head")
    batch = batch_of(stage, inputs, 4)
    tracks = torch.from_numpy(open_dataset(inputs.dataset.folder).tracks[batch["clips"].numpy()])
    assert torch.allclose((batch["futures"][:, -1] + 1.0) * 32.0, tracks[:, 32, :2], atol=1e-4)
    assert torch.allclose((batch["last"] + 1.0) * 32.0, tracks[:, 31, :2], atol=1e-4)
    assert torch.allclose((batch["places"] + 1.0) * 32.0, tracks[:, :32:2, :2], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "frames", "ahead"), [("head", range(0, 32, 2), 5), ("tracker", range(32), 4)]
)
def test_each_frames_future_is_as_far_ahead_as_the_clips_is_of_the_last(
    inputs: Inputs, name: str, frames: range, ahead: int
) -> None:
    batch = batch_of(train_stage(inputs.config, name), inputs, 3)
    tracks = torch.from_numpy(open_dataset(inputs.dataset.folder).tracks[batch["clips"].numpy()])
    for column, frame in enumerate(frames):
        future = (batch["futures"][:, column] + 1.0) * 32.0
        if frame + ahead < 32:
            assert torch.allclose(future, tracks[:, frame + ahead, :2], atol=1e-4)
        elif frame < frames[-1]:
            assert future.isnan().all()
        else:
            assert torch.allclose(future, tracks[:, 32, :2], atol=1e-4)


@pytest.mark.parametrize("name", ["shuffled", "single_frame", "time_average"])
def test_without_the_order_of_frames_only_the_clips_future_is_known(
    inputs: Inputs, name: str
) -> None:
    futures = batch_of(train_stage(inputs.config, name), inputs, 3)["futures"]
    assert futures[:, :-1].isnan().all() and futures[:, -1].isfinite().all()


def test_samples_hold_each_clip_of_their_split_with_its_label(
    dataset: FakeDataset, inputs: Inputs
) -> None:
    data = open_dataset(dataset.folder)
    all_features = torch.cat([shard["features"] for shard in inputs.artifact("features")])
    stage = train_stage(inputs.config, "head")
    for split, indices in data.splits.items():
        samples = stage.samples(inputs, split)
        assert len(samples) == len(indices)
        assert sorted(samples.order(3, 0)) == list(range(len(indices)))
        for place, clip in enumerate(indices):
            item = samples.get(place, 0, NO_RANDOMNESS)
            assert torch.equal(item[0], all_features[clip]) and item[1] == clip
            assert samples.collate([item])["labels"].item() == data.labels[clip]


@pytest.mark.parametrize("name", ["head", "single_frame", "tracker", "time_average"])
def test_steps_on_a_fixed_batch_decrease_its_loss(inputs: Inputs, name: str) -> None:
    stage = train_stage(replace(inputs.config, dropout=0.0, learning_rate=1e-3), name)
    model = started(stage, inputs)
    optimizer = stage.optimizer(model)
    batch = batch_of(stage, inputs, 16)
    losses = []
    for step in range(4):
        loss = stage.loss(model, batch, step, 100)
        losses.append(loss.total.item() / stage.weight(batch))
        optimizer.zero_grad()
        (loss.total / stage.weight(batch)).backward()
        optimizer.step()
    assert losses[1] < losses[0] and losses[3] < losses[1]


@pytest.mark.parametrize("recipe", [full, reference])  # the laptop's: test_waits.py
def test_each_recipe_runs_a_step_on_the_cpu(dataset: FakeDataset, recipe: Any) -> None:
    config: TrajectoryConfig = replace(recipe(), weights="random")
    inputs = inputs_of(dataset, config)
    data = open_dataset(dataset.folder)
    backbone = _load_backbone(config, dataset.folder, inputs.device)
    features = _clip_features(backbone, data.frames[0], config, inputs.device)
    assert features.shape == (config.num_frames, config.grid**2, CHANNELS[config.backbone_layer])
    for stage in TRAJECTORY.stages(config):
        if not isinstance(stage, TrainClipClassifier):
            continue
        torch.manual_seed(0)
        model = stage.model(inputs)
        optimizer = stage.optimizer(model)
        loss = stage.loss(model, stage.example(2), 0, 1)
        loss.total.backward()
        optimizer.step()
        assert loss.total.isfinite()
        assert all(p.isfinite().all() for p in model.parameters())


def test_the_loss_is_a_sum_so_micro_batches_add_up(inputs: Inputs) -> None:
    stage = train_stage(inputs.config, "head")
    model = started(stage, inputs).eval()
    batch = batch_of(stage, inputs, 16)
    halves = [
        {key: value[part] for key, value in batch.items()} for part in (slice(8), slice(8, 16))
    ]
    whole = stage.loss(model, batch, 0, 1)
    parts = [stage.loss(model, half, 0, 1) for half in halves]
    assert torch.allclose(whole.total, parts[0].total + parts[1].total, rtol=1e-5)
    assert stage.weight(batch) == sum(stage.weight(half) for half in halves) == 16.0
    assert whole.metrics["accuracy"][1] == 16.0


def test_every_parameter_is_optimised_once(inputs: Inputs) -> None:
    stage = train_stage(inputs.config, "head")
    model = started(stage, inputs)
    groups = stage.optimizer(model).param_groups
    given = [id(p) for group in groups for p in group["params"]]
    assert sorted(given) == sorted(id(p) for p in model.parameters())
    assert all(p.ndim < 2 for p in groups[1]["params"]) and groups[1]["weight_decay"] == 0.0


def test_evaluation_counts_each_clip_and_writes_the_confusion(
    inputs: Inputs, tmp_path: Path
) -> None:
    stage = train_stage(inputs.config, "head")
    model = started(stage, inputs).eval()
    samples = stage.samples(inputs, "train")
    items = [samples.get(k, 0, NO_RANDOMNESS) for k in range(len(samples))]
    with torch.no_grad():
        parts = [stage.evaluate(model, samples.collate(items[k : k + 20])) for k in (0, 20, 40)]
        expected = model(samples.collate(items)["x"])[0].argmax(dim=1)
    labels = samples.collate(items)["labels"]
    metrics = stage.summarize(parts, tmp_path)
    assert metrics["accuracy"] == pytest.approx((expected == labels).float().mean().item())
    names, *rows = csv.reader((tmp_path / "confusion.csv").read_text().splitlines())
    assert names[1:] == [name for name, *_ in rows] == list(CLASSES)
    confusion = torch.tensor([[int(count) for count in counts] for _, *counts in rows])
    assert confusion.sum() == len(samples)
    assert confusion.sum(dim=1).tolist() == labels.bincount(minlength=len(CLASSES)).tolist()
    of_helix = CLASSES.index("helix")
    assert metrics["accuracy_helix"] == pytest.approx(
        confusion[of_helix, of_helix].item() / confusion[of_helix].sum().item()
    )


def test_a_guided_head_begins_where_something_moves_and_an_unguided_one_is_as_before(
    inputs: Inputs,
) -> None:
    """A run begun before heads could be guided has no such field, and weights of these shapes."""
    away, shapes = {}, {}
    for is_guided in (False, True):
        c = replace(inputs.config, is_guided=is_guided)
        stage = train_stage(c, "head")
        model, batch = started(stage, replace(inputs, config=c)).eval(), batch_of(stage, inputs, 40)
        away[is_guided] = 32 * (model(batch["x"])[2] - batch["places"]).norm(dim=2).mean().item()
        shapes[is_guided] = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert away[True] < 8.0 < 10.0 < away[False], "pixels"
    told = {"embed.weight": (c.width, 21)}
    assert shapes[False] == {n: s for n, s in shapes[True].items() if n != "motion_gain"} | told


@pytest.mark.parametrize("pixel_width", [0, 8])
def test_a_guided_head_of_one_frame_or_on_pixels_learns_from_a_ball_that_stands_still(
    inputs: Inputs, pixel_width: int
) -> None:
    c = replace(inputs.config, is_guided=True, pixel_width=pixel_width)
    for name in ("single_frame", "head"):
        stage = train_stage(c, name)
        batch = stage.example(2) | {"x": torch.ones_like(stage.model_input(2))}
        model = stage.model(inputs)
        stage.loss(model, batch, 0, 1).total.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        assert model.motion_gain.grad is not None


def test_fails_to_summarize_an_evaluation_that_lacks_a_class(
    inputs: Inputs, tmp_path: Path
) -> None:
    zeros = torch.zeros(20)
    names = ("confidence", "loss", "position_error", "standstill_error", "steady_error")
    rows = {name: torch.full((20,), 3) for name in ("labels", "predicted", "clips")}
    part = Partial(tensors={**rows, **dict.fromkeys(names, zeros)})
    with pytest.raises(ValueError, match="lack linear, accelerating"):
        train_stage(inputs.config, "head").summarize([part], tmp_path)


def test_fails_to_start_on_labels_that_are_all_the_same(
    dataset: FakeDataset, inputs: Inputs, tmp_path: Path
) -> None:
    content = json.loads((dataset.folder / _LABELS_FILE).read_text())
    content["labels"] = [0] * COUNT
    (tmp_path / _LABELS_FILE).write_text(json.dumps(content))
    for name in (CLIPS_FILE, TRACKS_FILE):
        (tmp_path / name).symlink_to(dataset.folder / name)
    broken = inputs_of(FakeDataset(tmp_path), inputs.config)
    stage = train_stage(inputs.config, "head")
    failures = stage.start(torch.nn.Identity(), broken).failures
    assert "every clip of split train has the same label linear" in failures
    assert "every clip of split validation has the same label linear" in failures


def test_fails_on_features_of_another_number_of_clips(dataset: FakeDataset, inputs: Inputs) -> None:
    short = inputs_of(dataset, inputs.config, {"features": inputs.artifact("features")[:3]})
    with pytest.raises(ValueError, match="but there are 66 labels"):
        train_stage(inputs.config, "head").samples(short, "train")
