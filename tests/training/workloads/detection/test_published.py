"""Published weights: every name and shape of the reference's checkpoint has its place."""

import argparse
import re
import urllib.error
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import resnet18, resnet50
from torchvision.ops import FrozenBatchNorm2d

from contract.errors import UserError
from tests.training.workloads.detection.detectors import SMALL, images, small_detector
from tests.training.workloads.detection.watched import small
from training.durable.errors import RunFailedError
from training.engine.job import origin_from_weights, with_origin
from training.preflight.standalone import standalone_inputs
from training.workload import Train
from training.workloads.detection import detection_workload
from training.workloads.detection.coco import Category
from training.workloads.detection.config import Architecture
from training.workloads.detection.detection_workload import DETECTION, TrainDetector
from training.workloads.detection.detector import Detector
from training.workloads.detection.published import (
    _load_published,
    _our_name,
    _read_published,
    load_backbone,
    main,
)

# DINO-4scale with ResNet-50, as IDEA-Research/DINO's checkpoint0011_4scale.pth has it: read from
# models/dino/*.py and config/DINO/DINO_4scale.py at commit 66d7173.
_CLASSES, _WIDTH, _HIDDEN, _POINTS = 91, 256, 2048, 8 * 4 * 4

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str) -> Shapes:
    yield f"{name}.weight", (_WIDTH,)
    yield f"{name}.bias", (_WIDTH,)


def _resnet50() -> Shapes:
    """torchvision's, which the reference takes its backbone from."""
    with torch.device("meta"):
        state = resnet50(norm_layer=FrozenBatchNorm2d).state_dict()
    for name, tensor in state.items():
        if not name.startswith("fc."):
            yield f"backbone.0.body.{name}", tuple(tensor.shape)


def _attention(name: str) -> Shapes:
    yield from _linear(f"{name}.sampling_offsets", _WIDTH, 2 * _POINTS)
    yield from _linear(f"{name}.attention_weights", _WIDTH, _POINTS)
    yield from _linear(f"{name}.value_proj", _WIDTH, _WIDTH)
    yield from _linear(f"{name}.output_proj", _WIDTH, _WIDTH)


def _layer(name: str, num_norms: int) -> Shapes:
    yield from _linear(f"{name}.linear1", _WIDTH, _HIDDEN)
    yield from _linear(f"{name}.linear2", _HIDDEN, _WIDTH)
    for number in range(1, num_norms + 1):
        yield from _norm(f"{name}.norm{number}")


def _perceptron(name: str, *widths: int) -> Shapes:
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        yield from _linear(f"{name}.layers.{number}", inputs, outputs)


def _transformer() -> Shapes:
    yield "transformer.level_embed", (4, _WIDTH)
    yield "transformer.tgt_embed.weight", (900, _WIDTH)
    for number in range(6):
        encoder = f"transformer.encoder.layers.{number}"
        yield from _attention(f"{encoder}.self_attn")
        yield from _layer(encoder, num_norms=2)
        decoder = f"transformer.decoder.layers.{number}"
        yield from _attention(f"{decoder}.cross_attn")
        yield f"{decoder}.self_attn.in_proj_weight", (3 * _WIDTH, _WIDTH)
        yield f"{decoder}.self_attn.in_proj_bias", (3 * _WIDTH,)
        yield from _linear(f"{decoder}.self_attn.out_proj", _WIDTH, _WIDTH)
        yield from _layer(decoder, num_norms=3)
    yield from _norm("transformer.decoder.norm")
    yield from _perceptron("transformer.decoder.ref_point_head", 2 * _WIDTH, _WIDTH, _WIDTH)
    yield from _linear("transformer.enc_output", _WIDTH, _WIDTH)
    yield from _norm("transformer.enc_output_norm")
    yield from _perceptron("transformer.enc_out_bbox_embed", _WIDTH, _WIDTH, _WIDTH, 4)
    yield from _linear("transformer.enc_out_class_embed", _WIDTH, _CLASSES)


def _published_shapes() -> Shapes:
    yield from _resnet50()
    for number, channels in enumerate((512, 1024, 2048)):
        yield f"input_proj.{number}.0.weight", (_WIDTH, channels, 1, 1)
    yield "input_proj.3.0.weight", (_WIDTH, 2048, 3, 3)
    for number in range(4):
        yield f"input_proj.{number}.0.bias", (_WIDTH,)
        yield from _norm(f"input_proj.{number}.1")
    yield from _transformer()
    # One module under many names.
    for place in ("transformer.decoder.", ""):
        for number in range(6):
            yield from _perceptron(f"{place}bbox_embed.{number}", _WIDTH, _WIDTH, _WIDTH, 4)
            yield from _linear(f"{place}class_embed.{number}", _WIDTH, _CLASSES)
    yield "label_enc.weight", (_CLASSES + 1, _WIDTH)


def _theirs(detector: Detector) -> dict[str, Tensor]:
    """A small detector's state under the reference's names."""
    mine = detector.state_dict()
    state = {name: mine[_our_name(name)] for name, _ in SHAPES if _our_name(name) in mine}
    state["label_enc.weight"] = torch.cat([mine["labels.weight"], torch.zeros(1, SMALL.width)])
    return state


SHAPES = tuple(_published_shapes())


def test_every_name_and_shape_has_its_place() -> None:
    with torch.device("meta"):
        detector = Detector(Architecture(num_classes=_CLASSES))
    known = {name: tuple(tensor.shape) for name, tensor in detector.state_dict().items()}
    found = {_our_name(name): shape for name, shape in SHAPES if _our_name(name) in known}
    # Theirs has a row more, which nothing uses.
    assert found.pop("labels.weight") == (_CLASSES + 1, _WIDTH)
    assert known.pop("labels.weight") == (_CLASSES, _WIDTH)
    assert found == known


def test_only_what_is_there_several_times_has_no_place() -> None:
    with torch.device("meta"):
        known = Detector(Architecture(num_classes=_CLASSES)).state_dict()
    others = [name for name, _ in SHAPES if _our_name(name) not in known]
    heads = r"(transformer\.decoder\.(bbox|class)_embed\.[0-5]|(bbox|class)_embed\.[1-5])\."
    assert all(re.match(heads, name) for name in others)
    assert len(others) == 11 * (6 + 2)


def test_a_detector_with_published_weights_predicts_what_theirs_did() -> None:
    trained, other, batch = small_detector(seed=1), small_detector(seed=2), images(1)
    _load_published(other, _theirs(trained), rows=range(SMALL.num_classes))
    expected = trained.eval()(batch.images, batch.sizes)
    assert torch.equal(other.eval()(batch.images, batch.sizes).logits_LBQC, expected.logits_LBQC)


def test_classes_take_the_rows_of_their_category_ids() -> None:
    trained = small_detector(seed=1)
    fewer = small_detector(seed=2, num_classes=2, num_queries=5)
    _load_published(fewer, _theirs(trained), rows=[2, 0])
    for mine, theirs in zip(fewer.modules(), trained.modules(), strict=True):
        if isinstance(mine, nn.Linear) and mine.out_features == 2:
            assert torch.equal(mine.weight, theirs.weight[[2, 0]])  # type: ignore[index, arg-type]
    assert torch.equal(fewer.labels.weight, trained.labels.weight[[2, 0]])
    assert torch.equal(fewer.queries.weight, trained.queries.weight[:5])


def test_other_classes_start_anew_and_all_else_as_published() -> None:
    trained, other = small_detector(seed=1), small_detector(seed=2, num_classes=2)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    _load_published(other, _theirs(trained))
    # Without what every new backbone has alike.
    same = {
        name
        for name, tensor in other.state_dict().items()
        if torch.equal(tensor, before[name]) and not name.startswith("backbone.")
    }
    heads = {f"{part}.class_head.{of}" for part in ("selection", "decoder") for of in _LINEAR}
    assert same == {"labels.weight", *heads}


_LINEAR = ("weight", "bias")


def test_fails_on_weights_of_another_architecture() -> None:
    theirs = _theirs(small_detector())
    with pytest.raises(UserError, match=r"it has transformer\.encoder\.layers\.1\."):
        _load_published(small_detector(encoder_layers=1), theirs)
    with pytest.raises(UserError, match=r"it lacks encoder\.layers\.2\."):
        _load_published(small_detector(encoder_layers=3), theirs)
    with pytest.raises(UserError, match=r"has the shape \(48, 32\), this one's \(64, 32\)"):
        _load_published(small_detector(feed_forward=64), theirs)


def test_a_checkpoint_is_read_with_the_arguments_beside_its_weights(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0)}
    arguments = argparse.Namespace(lr=1e-4, backbone="resnet50")
    torch.save({"model": state, "args": arguments, "epoch": 11}, tmp_path / "theirs.pth")
    save_file(state, tmp_path / "theirs.safetensors")
    for name in ("theirs.pth", "theirs.safetensors"):
        assert torch.equal(_read_published(tmp_path / name)["a"], state["a"])


def test_fails_on_a_checkpoint_that_could_run_code(tmp_path: Path) -> None:
    torch.save({"model": {}, "args": Path("anything")}, tmp_path / "theirs.pth")
    with pytest.raises(UserError, match="save its state dict as safetensors"):
        _read_published(tmp_path / "theirs.pth")


def test_fails_on_what_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("theirs.pth", "theirs.safetensors"):
        (tmp_path / name).write_text("not found")
        with pytest.raises(UserError, match="is not a readable checkpoint"):
            _read_published(tmp_path / name)
        with pytest.raises(UserError, match="does not exist"):
            _read_published(tmp_path / f"other-{name}")


def test_a_published_checkpoint_becomes_a_file_to_start_from(tmp_path: Path) -> None:
    """What `run --init-from` takes: every tensor of the recipe's model, by name and shape."""
    state = {name: torch.zeros(shape) for name, shape in SHAPES}
    state["label_enc.weight"] += torch.arange(_CLASSES + 1)[:, None]
    save_file(state, tmp_path / "theirs.safetensors")
    arguments = [str(tmp_path / name) for name in ("theirs.safetensors", "ours.safetensors")]
    assert main([*arguments, "--classes", "coco", "--num-queries", "300"]) == 0
    written = load_file(tmp_path / "ours.safetensors")
    with torch.device("meta"):
        model = Detector(Architecture(num_classes=80, num_queries=300))
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in written.items()} == expected
    # The first class is category 1, the last 90.
    assert written["labels.weight"][[0, 79], 0].tolist() == [1, 90]


@pytest.mark.parametrize("is_given", [False, True])
def test_imagenets_weights_are_fetched_unless_others_replace_them(
    is_given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that reaches no index can start from a published checkpoint."""
    fetched: list[Detector] = []
    monkeypatch.setattr(detection_workload, "load_backbone", fetched.append)
    config = replace(small(), weights="pretrained")
    categories = tuple(Category(number, f"{number}") for number in range(config.num_classes))
    split = SimpleNamespace(categories=categories, objects_per_image=torch.tensor([1]))
    monkeypatch.setattr(detection_workload, "open_split", lambda *_: split)
    stage: Train = TrainDetector(config=config)
    inputs = standalone_inputs(stage.name, config)
    model = stage.model(inputs)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, tmp_path / "given.safetensors")
    if is_given:
        origin = origin_from_weights(str(tmp_path / "given.safetensors"), DETECTION, config)
        (stage,) = with_origin(DETECTION, origin).stages(config)  # type: ignore[assignment]
    assert not stage.start(model, inputs).failures
    assert len(fetched) == (not is_given)


def test_the_backbone_is_filled_with_imagenets_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = resnet18().state_dict()
    asked: list[Any] = []

    def fetched(url: str, **options: Any) -> dict[str, Tensor]:
        asked.append((url, options))
        return weights

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetched)
    detector = Detector(replace(SMALL, weights="pretrained"))
    load_backbone(detector)
    assert all(torch.equal(t, weights[n]) for n, t in detector.backbone.state_dict().items())
    [(url, options)] = asked
    assert "resnet18" in url and options["check_hash"]


def test_fails_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetched(url: str, **options: Any) -> dict[str, Tensor]:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetched)
    with pytest.raises(
        RunFailedError, match=r"resnet18 could not be fetched .* allow the download"
    ):
        load_backbone(Detector(replace(SMALL, weights="pretrained")))


def test_fails_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path / "theirs.pth"), str(tmp_path / "ours.safetensors")]
    assert main([*arguments, "--classes", "2"]) == 2
    assert "does not exist" in capsys.readouterr().err
