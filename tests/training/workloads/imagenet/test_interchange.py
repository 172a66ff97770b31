"""Weights come from torchvision and go back to it: equal logits in both directions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import get_model, resnet18

from tests.training.forked import in_fork
from training.durable.save.tensors.weights import Weights
from training.settings import changed
from training.workloads.imagenet.config import ImagenetConfig
from training.workloads.imagenet.imagenet_workload import TrainClassifier
from training.workloads.imagenet.model import (
    DEVIATION,
    MEAN,
    Classifier,
    pixels_of,
    write_program,
)


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    """A ResNet of torchvision's whose batch statistics are not those of a new one."""
    torch.manual_seed(1)
    model = resnet18(num_classes=7)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
    return model.eval()


def images() -> Tensor:
    return torch.randint(0, 256, (3, 64, 64, 3), dtype=torch.uint8)


def logits_of(model: nn.Module, images_BHWC: Tensor) -> Tensor:
    """Their model sees pixels as its library normalizes them, channels first."""
    mean, deviation = torch.tensor(MEAN), torch.tensor(DEVIATION)
    if hasattr(model, "pretrained_cfg"):
        from timm.data import resolve_data_config

        about = resolve_data_config({}, model=model)
        mean, deviation = (255 * torch.tensor(about[name]) for name in ("mean", "std"))
    pixels = (images_BHWC - mean) / deviation
    found: Tensor = model(pixels.permute(0, 3, 1, 2))
    return found


def stage_of(num_classes: int, architecture: str = "resnet18") -> TrainClassifier:
    config = changed(ImagenetConfig(), architecture=architecture, num_classes=num_classes)
    return TrainClassifier(config=config)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_file_of_torchvision_s_gives_the_same_logits(
    theirs: nn.Module, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"resnet18{suffix}"
    if suffix == ".pth":
        torch.save(theirs.state_dict(), path)
    else:  # as timm's, without the counters
        state = {n: t for n, t in theirs.state_dict().items() if "num_batches" not in n}
        save_file(state, path)
    stage = stage_of(7)
    ours = Classifier("resnet18", 7, blur_pool=False)
    found = stage.from_foreign(ours, Weights.read(str(path)).tensors)
    assert found is not None
    ours.load_state_dict(dict(found))
    batch = images()
    with torch.no_grad():
        torch.testing.assert_close(
            ours.eval()(batch), logits_of(theirs, batch), rtol=0.0, atol=1e-5
        )


def test_with_other_classes_the_last_layer_is_new(
    theirs: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Classifier("resnet18", 3, blur_pool=False)
    before = ours.state_dict()["network.fc.weight"].clone()
    with caplog.at_level("INFO"):
        found = stage_of(3).from_foreign(ours, theirs.state_dict())
    assert found is not None and torch.equal(found["network.fc.weight"], before)
    assert torch.equal(found["network.conv1.weight"], theirs.state_dict()["conv1.weight"])
    assert "7 classes there and 3 here: the last layer is new" in caplog.text
    assert stage_of(3).from_foreign(ours, ours.state_dict()) is None, "our own names"


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v3_small", "timm/resnet18", "timm/vit_tiny_patch16_224"]
)
def test_any_model_of_either_library_gives_equal_logits_in_both_directions(
    name: str, tmp_path: Path
) -> None:
    if name.startswith("timm/"):
        from timm import create_model as build
    else:
        build = get_model
    theirs = build(name.removeprefix("timm/"), num_classes=6).eval()
    ours = Classifier(name, 6, blur_pool=False).eval()
    stage = stage_of(6, name)
    found = stage.from_foreign(ours, theirs.state_dict())
    assert found is not None
    ours.load_state_dict(dict(found))
    batch = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)
    with torch.no_grad():
        wanted = logits_of(theirs, batch)
        torch.testing.assert_close(ours(batch), wanted, rtol=0.0, atol=1e-5)
        stage.formats()[name.rpartition("/")[0] or "torchvision"](ours, tmp_path / "out")
        back = build(name.removeprefix("timm/"), num_classes=6).eval()
        back.load_state_dict(load_file(tmp_path / "out"))
        torch.testing.assert_close(logits_of(back, batch), wanted, rtol=0.0, atol=1e-5)


def test_pixels_are_normalized_as_the_library_s_weights_expect() -> None:
    """Of timm, ResNets expect ImageNet's mean, as torchvision's do; many others 0.5."""
    for name in ("resnet18", "timm/resnet18", "timm/resnet18.a1_in1k"):
        assert pixels_of(name) == (MEAN, DEVIATION)
    files = stage_of(6, "timm/vit_tiny_patch16_224").companions({}, lambda name: b"")
    about = json.loads(files["preprocessing.json"])
    assert about["mean"] == about["deviation"] == [127.5] * 3


def test_a_model_s_last_layer_is_new_whatever_its_name(theirs: nn.Module) -> None:
    ours = Classifier("convnext_tiny", 3, blur_pool=False)
    own = ours.state_dict()
    found = stage_of(3, "convnext_tiny").from_foreign(
        ours, get_model("convnext_tiny", num_classes=7).state_dict()
    )
    assert found is not None
    assert torch.equal(found["network.classifier.2.weight"], own["network.classifier.2.weight"])
    assert {name: t.shape for name, t in found.items()} == {n: t.shape for n, t in own.items()}
    assert stage_of(3, "convnext_tiny").from_foreign(ours, theirs.state_dict()) is None


def test_only_what_a_library_knows_is_written_as_its_own() -> None:
    libraries = {
        name: sorted(stage_of(5, name).formats().keys() - {"torch.export"})
        for name in ("resnet8", "resnet18", "vit_b_16", "timm/vit_tiny_patch16_224")
    }
    assert [*libraries.values()] == [[], ["timm", "torchvision"], ["torchvision"], ["timm"]]
    blurred = changed(ImagenetConfig(), architecture="resnet18", blur_pool=True)
    assert [*TrainClassifier(config=blurred).formats()] == ["torch.export"]


@pytest.mark.slow
def test_a_program_of_a_model_for_one_size_of_images_is_made_with_it(tmp_path: Path) -> None:
    stage = stage_of(5, "timm/vit_tiny_patch16_224")
    ours = Classifier(stage.config.architecture, 5, blur_pool=False)
    in_fork(lambda: stage.formats()["torch.export"](ours, tmp_path / "out.pt2"))
    assert (tmp_path / "out.pt2").stat().st_size > 10_000_000


@pytest.mark.slow
def test_an_exported_program_computes_the_same_without_our_code(tmp_path: Path) -> None:
    ours = Classifier("resnet8", 5, blur_pool=False).eval()
    batch = torch.randint(0, 256, (5, 96, 96, 3), dtype=torch.uint8)

    def logits() -> tuple[Tensor, Tensor]:
        write_program(ours, tmp_path / "out.pt2")
        program = torch.export.load(tmp_path / "out.pt2").module()
        with torch.no_grad():
            return program(batch), ours(batch)

    found, wanted = in_fork(logits)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-5)
