"""The recipes and their ladders: what they promise by numbers, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from contract.errors import UserError
from training.settings import changed
from training.workload import Milestones
from training.workloads.detection.config import Architecture, coco_12, full, laptop
from training.workloads.detection.detection_workload import DETECTION, TrainDetector


def test_the_seed_s_recipe_is_what_its_document_says_and_coco_s_what_was_published() -> None:
    seed, coco = full(), coco_12()
    assert (seed.num_classes, seed.num_queries, seed.width) == (2, 300, 256)
    assert (seed.settings.global_batch, seed.settings.micro_batch, seed.epochs) == (2, 2, 50)
    assert seed.box_noise == coco.box_noise == 1.0
    assert (seed.learning_rate, seed.backbone_learning_rate) == (1e-4, 1e-5)
    assert (coco.num_classes, coco.num_queries, coco.settings.global_batch) == (80, 900, 16)
    settings = TrainDetector(config=coco).settings
    assert settings.schedule == Milestones(factor=0.1, epochs=(11,))
    assert (settings.epochs, settings.clip_norm, settings.ema_decay) == (12, 0.1, None)
    assert TrainDetector(config=seed).settings.ema_decay is not None


def test_the_ladder_takes_what_learns_the_same_and_offers_the_rest() -> None:
    rungs = DETECTION.rungs(coco_12())
    assert [rung.name for rung in rungs if not rung.override] == [
        "activations of the encoder recomputed",
        "micro-batch 1",
    ]
    assert [rung.override for rung in rungs if rung.override] == [
        "max_side=1066",
        "max_side=800",
        "denoising_queries=50",
        "num_queries=300",
        "num_queries=200",
        "width=192",
    ]
    # Each can be taken on top of all before it, and the last one has the smallest model.
    config = coco_12()
    for rung in rungs:
        config = rung.apply(config)
    assert (config.settings.micro_batch, config.settings.global_batch, config.width) == (1, 16, 192)
    # The seed's own ladder of fallbacks.
    offered = [rung.override for rung in DETECTION.rungs(full()) if rung.override]
    assert offered[-2:] == ["num_queries=200", "width=192"]
    assert [rung.override for rung in DETECTION.rungs(laptop()) if rung.override] == []


def test_the_measured_batches_are_the_largest_and_the_usual_one() -> None:
    stage = TrainDetector(config=full())
    # A wide and a tall image are padded to a square; one image alone is not.
    assert stage.example(2)["images"].shape == (2, 3, 1344, 1344)
    assert stage.example(1)["images"].shape == (1, 3, 800, 1344)
    assert stage.usual(2)["images"].shape == (2, 3, 640, 864)
    assert stage.weight(stage.example(2)) == 100


def test_a_step_by_shapes_alone_has_the_loss_s_parts() -> None:
    stage = TrainDetector(config=replace(laptop(), width=32, num_heads=2, encoder_layers=1))
    model = stage.model(None)  # type: ignore[arg-type]
    batch = stage.example(2)
    surrogate, loss = stage.surrogate(model, batch), stage.loss(model, batch, 0, 1)
    assert surrogate.metrics.keys() == loss.metrics.keys()
    assert surrogate.total.shape == loss.total.shape == torch.Size([])
    named = {count for _, count in loss.metrics.values()}
    assert named == {stage.weight(batch)}


def test_an_attention_that_does_not_work_here_is_refused_before_a_step() -> None:
    class OnTheCpu:
        device = torch.device("cpu")

    stage = TrainDetector(config=replace(laptop(), attention="triton"))
    with pytest.raises(UserError, match="attention is 'triton', which does not work here"):
        stage.numerics(torch.nn.Identity(), OnTheCpu(), {})  # type: ignore[arg-type]


def test_an_attention_whose_backward_torch_refuses_is_refused_before_a_step() -> None:
    class OnAGpu:
        device = torch.device("cuda")

    config = replace(laptop(), attention="reference", deterministic=True)
    with pytest.raises(UserError, match="whose backward torch refuses on a GPU where"):
        TrainDetector(config=config).numerics(torch.nn.Identity(), OnAGpu(), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "imagenet"}, "weights is 'imagenet'; use one of random, pretrained"),
        ({"short_sides": "480,big"}, "short_sides is '480,big'; use whole numbers with commas"),
        ({"max_side": 640}, "use numbers from 64 to max_side, 640"),
        ({"drop_epoch": 51}, "drop_epoch is 51 of 50 epochs"),
        ({"crop_share": 2.0}, "crop_share is 2.0; use a share from 0 to 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; use more than 0"),
        ({"num_queries": 0}, "num_queries is 0; use at least 1"),
        ({"width": 200}, "multiple of num_heads and of 32"),
        ({"epochs": 0}, "epochs is 0; use at least 1"),
    ],
)
def test_fails_for_a_config_that_cannot_be_trained(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        changed(full(), **change)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"backbone": "resnet7"}, "backbone is 'resnet7'; use one of resnet18, resnet34, resnet50"),
        ({"weights": "batch"}, "weights is 'batch'; use one of random, pretrained"),
        ({"num_classes": 0}, "num_classes is 0; use at least 1"),
        ({"denoising_queries": -1}, "denoising_queries is -1; use at least 0"),
        ({"num_levels": 5}, "num_levels is 5; use 3 or 4"),
        ({"box_noise": 1.5}, "box_noise is 1.5; use a share from 0 to 1"),
        ({"width": 200}, "width 200 over num_heads 8: use a width that is a multiple of"),
        ({"num_heads": 7}, "width 256 over num_heads 7: use a width that is a multiple of"),
    ],
)
def test_fails_on_what_cannot_be_built(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Architecture(**{"num_classes": 2, **changes})  # type: ignore[arg-type]


def test_an_export_names_the_size_that_is_evaluated() -> None:
    stage = TrainDetector(config=changed(full(), short_sides="800,480"))
    about = json.loads(stage.companions({}, lambda name: b"")["preprocessing.json"])
    assert about["shorter_side"] == stage.augmentation.eval_scale == 800
