"""Recipes: sizes by epoch, learning rates, which parameters decay, and what is refused."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.forked import in_fork
from training.preflight.footprint import measure_evaluation, measure_step
from training.preflight.standalone import standalone_inputs
from training.registry import load_workload
from training.settings import changed, schedule_factor
from training.workloads.imagenet.config import _SIZE_STEP, RECIPES, ImagenetConfig, _full, _laptop
from training.workloads.imagenet.imagenet_workload import TrainClassifier
from training.workloads.imagenet.model import Classifier

PAGE = Path(__file__).parents[4] / "docs" / "imagenet.md"


@pytest.mark.parametrize(
    ("recipe", "larger_from", "last"),
    [("epochs_16", 12, 16), ("epochs_40", 32, 40), ("epochs_88", 71, 88)],
)
def test_images_grow_when_those_of_ffcv_imagenet_do(
    recipe: str, larger_from: int, last: int
) -> None:
    """Its ramps are from epoch 11 to 13, 29 to 34, 65 to 76, rounded to multiples of 32."""
    config = RECIPES[recipe]()
    sizes = [config.image_size(epoch) for epoch in range(last)]
    assert sizes == [160] * larger_from + [192] * (last - larger_from)
    assert config.image_size(-1) == 224


def test_mirrored_images_double_the_work_of_an_evaluation() -> None:
    for config, work in ((_full(), 1.0), (RECIPES["epochs_16"](), 2 * (224 / 192) ** 2)):
        stage = TrainClassifier(config=config)
        assert stage.work(-1)[1] == pytest.approx(work)
        assert stage.work(config.epochs - 1)[1] == 1.0


def test_sizes_are_few_so_that_little_is_compiled() -> None:
    config = replace(RECIPES["epochs_88"](), low_size=96, train_size=224)
    sizes = [config.image_size(epoch) for epoch in range(88)]
    assert sizes == sorted(sizes)
    assert set(sizes) == {96, 128, 160, 192, 224}


def test_the_learning_rate_is_scaled_to_the_batch() -> None:
    """ffcv-imagenet has 1.7 at 8 x 512 images; the plain recipe 0.1 at 256."""
    model = Classifier("resnet8", 8, blur_pool=False)
    for config, rate in ((RECIPES["epochs_16"](), 1.7 / 4), (_full(), 0.4)):
        groups = TrainClassifier(config=config).optimizer(model).param_groups
        assert [group["lr"] for group in groups] == [pytest.approx(rate)] * 2


def test_norms_and_biases_do_not_decay() -> None:
    model = Classifier("resnet50", 10, blur_pool=True)
    optimizer = TrainClassifier(config=RECIPES["epochs_16"]()).optimizer(model)
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    found = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert len(found) == len(decay) == 161
    for name, value in found.items():
        is_weight = re.search(r"conv\d?\.|convolution|downsample\.0|fc\.weight", name)
        assert value == (1e-4 if is_weight else 0.0), name


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_nothing(schedule: Any) -> None:
    config = changed(RECIPES["epochs_16"](), schedule=schedule, epochs=20, warmup_epochs=2)
    factor = TrainClassifier(config=config).settings.schedule
    assert callable(factor)
    values = [factor(step, 1000) for step in range(1000)]
    assert values[:100] == sorted(values[:100])
    assert values[100:] == sorted(values[100:], reverse=True)
    assert values[0] < 0.01 and values[100] == 1.0 and 0 < values[-1] < 0.002
    # Half-way down.
    assert factor(550, 1000) == pytest.approx(0.5)
    assert values[775] == pytest.approx(0.25 if schedule == "linear" else 0.1464, abs=1e-3)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_learning_rate_falls_no_lower_than_it_is_told(schedule: Any) -> None:
    config = changed(_laptop(), schedule=schedule, warmup_epochs=1.0, final_lr_fraction=0.1)
    settings = TrainClassifier(config=config).settings
    factors = [schedule_factor(settings, step, 1000, 100) for step in (500, 999)]
    assert factors[0] > factors[1] > 0.1 > 0.9 * factors[1]


def test_label_smoothing_and_accumulation_give_the_loss_of_the_whole_batch() -> None:
    stage = TrainClassifier(config=replace(RECIPES["laptop"](), label_smoothing=0.1))
    model = Classifier("resnet8", 8, blur_pool=False).eval()
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(256, (6, 32, 32, 3), generator=rng, dtype=torch.uint8)
    batch = {"images": images, "labels": torch.arange(6)}
    whole = stage.loss(model, batch, 0, 1).total
    halves = [
        stage.loss(model, {name: t[part] for name, t in batch.items()}, 0, 1).total
        for part in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(sum(halves), whole)
    plain = torch.nn.functional.cross_entropy(model(images), batch["labels"], label_smoothing=0.1)
    torch.testing.assert_close(whole / stage.weight(batch), plain)


def test_an_average_as_on_the_page_forgets_the_weights_before_training() -> None:
    found = re.search(r"ema_decay=([\d.]+) --override ema_every_steps=(\d+)", PAGE.read_text())
    assert found is not None
    for recipe in (_full, RECIPES["epochs_16"], RECIPES["epochs_40"], RECIPES["epochs_88"]):
        config = changed(
            recipe(), ema_decay=float(found.group(1)), ema_every_steps=int(found.group(2))
        )
        settings = TrainClassifier(config=config).settings
        assert settings.weights_left(settings.num_steps(1_281_167)) < 0.01
    config = changed(_full(), ema_decay=0.9999, ema_every_steps=16)
    settings = TrainClassifier(config=config).settings
    left = settings.weights_left(settings.num_steps(1_281_167))
    assert left == pytest.approx(0.495, abs=0.001)


@pytest.mark.parametrize(
    ("architecture", "first", "last"),
    [("resnet18", "conv1.weight", "fc.weight"), ("vit_b_16", "class_token", "heads.head.weight")],
)
def test_early_layers_learn_less_by_the_same_factor(
    architecture: str, first: str, last: str
) -> None:
    config = replace(_full(), architecture=architecture, layer_decay=0.5, optimizer="adamw")
    with torch.device("meta"):
        model = Classifier(architecture, 5, blur_pool=False)
    groups = TrainClassifier(config=config).optimizer(model).param_groups
    rates = sorted({group["lr"] for group in groups}, reverse=True)
    assert rates[0] == groups[0]["lr"] == pytest.approx(0.4)
    assert all(after == before / 2 for before, after in itertools.pairwise(rates))
    network = model.network
    assert isinstance(network, torch.nn.Module)
    by_name = {
        name: group["lr"]
        for name, parameter in network.named_parameters()
        for group in groups
        if any(parameter is other for other in group["params"])
    }
    assert by_name.keys() == {name for name, _ in network.named_parameters()}
    assert (by_name[first], by_name[last]) == (rates[-1], rates[0])


@pytest.mark.parametrize("ways", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}])
def test_a_micro_batch_is_mixed_by_the_seed_of_its_step(ways: dict[str, float]) -> None:
    stage = TrainClassifier(config=replace(_laptop(), **ways))
    rng = torch.Generator().manual_seed(1)
    images = torch.randint(256, (4, 32, 32, 3), generator=rng, dtype=torch.uint8)
    batch = {"images": images, "labels": torch.arange(4)}
    seen: list[torch.Tensor] = []

    class Spy(torch.nn.Module):
        def forward(self, images_BHWC: torch.Tensor) -> torch.Tensor:
            seen.append(images_BHWC)
            return images_BHWC.float().mean(dim=(1, 2)) @ torch.ones(3, 8)

    losses = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        losses.append(float(stage.loss(Spy(), batch, 0, 1).total))
    assert losses[0] == losses[1] and torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], images.float())
    assert seen[0].shape == images.shape
    # Each pixel is of the image itself, or of the one before it, or between both.
    both = torch.stack([images.float(), images.float().roll(1, 0)])
    assert bool((seen[0] >= both.amin(0) - 1e-3).all() and (seen[0] <= both.amax(0) + 1e-3).all())


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("resnet81", "which torchvision does not have; did you mean resnet8"),
        ("timm/resnet", "which timm does not have; did you mean "),
        ("vit_b_16", "vit_b_16 does not take images of 32 pixels (Wrong image height!"),
    ],
)
def test_an_architecture_is_refused_before_a_run(architecture: str, says: str) -> None:
    if architecture.startswith("timm/"):
        import timm  # noqa: F401
    config = replace(_laptop(), architecture=architecture)
    (found,) = TrainClassifier(config=config).refusals({"classes": ["one"] * 8})
    assert says in found
    assert TrainClassifier(config=_laptop()).refusals({"classes": ["one"] * 8}) == []


@pytest.mark.parametrize(
    "name", ["regnet_y_400mf", pytest.param("timm/vit_tiny_patch16_224", marks=pytest.mark.slow)]
)
def test_an_architecture_that_reads_values_while_it_is_built_is_measured(name: str) -> None:
    """RegNets count their widths, and timm's transformers the shares of paths they drop."""
    config = replace(_full(), architecture=name)
    stage = TrainClassifier(config=config)
    assert stage.refusals({"classes": ["one"] * 1000}) == []
    parameters = sum(p.numel() for p in Classifier(name, 1000, blur_pool=False).parameters())

    def measured() -> tuple[int, int, int]:
        step = measure_step(stage, config, 2)
        return step.parameters, step.peak_bytes, measure_evaluation(stage, config, 2)

    counted, peak, evaluation_peak = in_fork(measured)
    assert counted == parameters
    assert peak > evaluation_peak > 4 * parameters


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_use_less_memory(name: str) -> None:
    workload = load_workload("imagenet")
    config = RECIPES[name]()
    for rung in workload.rungs(config):
        config = rung.apply(config)
    before = RECIPES[name]().settings
    assert config.settings.micro_batch == 1
    assert config.settings.global_batch == before.global_batch


def test_the_page_has_published_figures_of_every_recipe_for_a_gpu() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([\d.]+ / [\d.]+) \|", PAGE.read_text(), re.M))
    assert rows.keys() == RECIPES.keys() - {"laptop"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"optimizer": "adam"}, "optimizer is 'adam'; use one of sgd, adamw"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0; use more than 0 and at most 1"),
        ({"rand_augment": 31}, "rand_augment is 31; give 0 to 30"),
        ({"mixup": -0.1}, "mixup is -0.1; use at least 0"),
        ({"schedule": "constant"}, "schedule is 'constant'; use one of cosine, linear"),
        ({"train_size": 200}, f"train_size is 200; give a multiple of {_SIZE_STEP}"),
        ({"low_size": 0}, "low_size is 0; give a multiple of 32"),
        ({"low_size": 256}, "low_size 256 is above train_size 224; change one"),
        ({"eval_size": 16}, "eval_size is 16; give at least 32"),
        ({"low_until_epoch": 91}, "low_until_epoch 91 and train_size_from_epoch 0; give them in"),
        ({"num_classes": 1}, "num_classes is 1; use at least 2"),
        ({"shuffle_window": 0}, "shuffle_window is 0; use at least 1"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; use more than 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; use at least 0"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; use at least 0 and less than 1"),
    ],
)
def test_fails_for_a_field_that_cannot_be(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        changed(ImagenetConfig(), **fields)


@pytest.mark.parametrize(("recipe", "searches"), [(_laptop, False), (_full, True)])
def test_the_fastest_convolutions_are_searched_for_where_bits_need_not_repeat(
    recipe: Any, searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not searches)
    stage = TrainClassifier(config=replace(recipe(), architecture="resnet8"))
    stage.model(standalone_inputs("classifier", stage.config))
    assert torch.backends.cudnn.benchmark == searches
