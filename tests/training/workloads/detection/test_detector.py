"""The detector: who influences whom, what padding changes, precision, recomputation, backbone."""

import copy
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18
from torchvision.ops import FrozenBatchNorm2d as TorchvisionsNorm

from contract.errors import UserError
from tests.training.workloads.detection.detectors import (
    SMALL,
    images,
    small_detector,
)
from training.workloads.detection.detection_workload import criterion
from training.workloads.detection.detector import (
    Detector,
    Predictions,
    _Backbone,
    denoising,
    parameter_groups,
    postprocess,
)

# Channels and stride of the backbone's maps.
_MAPS = ((128, 8), (256, 16), (512, 32))
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def test_a_narrower_detector_of_three_levels_predicts_as_many_boxes() -> None:
    torch.manual_seed(0)
    detector = Detector(replace(SMALL, width=192, num_heads=8, num_levels=3)).eval()
    batch = images(1, 1)
    p = detector(batch.images, batch.sizes)
    assert p.logits_LBQC.shape == (3, 2, 12, 3)
    assert p.boxes_LBQ4.shape == (3, 2, 12, 4)
    # Nothing is learned yet: no box has moved, and every class has the prior's probability.
    torch.testing.assert_close(p.boxes_LBQ4[2], p.boxes_LBQ4[0])
    assert (p.logits_LBQC.sigmoid() - 0.01).abs().max() < 0.05


def test_no_denoising_group_changes_what_another_or_the_queries_predict() -> None:
    detector, batch = small_detector().eval(), images(2, 1)
    noise = denoising(batch.labels, batch.boxes, SMALL)
    assert noise.num_groups == 5
    labels, boxes = noise.labels_BK.clone(), noise.boxes_BK4.clone()
    second_group = slice(4, 8)
    labels[:, second_group] = (labels[:, second_group] + 1) % 3
    boxes[:, second_group] = torch.rand_like(boxes[:, second_group])
    before = detector(batch.images, batch.sizes, noise)
    after = detector(batch.images, batch.sizes, noise._replace(labels_BK=labels, boxes_BK4=boxes))
    assert torch.equal(before.logits_LBQC, after.logits_LBQC)
    assert torch.equal(before.boxes_LBQ4, after.boxes_LBQ4)
    is_same = torch.isclose(before.denoising_logits_LBKC, after.denoising_logits_LBKC, **EXACT)
    assert is_same[:, :, :4].all() and is_same[:, :, 8:].all()
    assert not is_same[:, :, second_group].any()


def test_the_queries_predict_the_same_without_denoising() -> None:
    detector, batch = small_detector().eval(), images(2, 1)
    with_noise = detector(batch.images, batch.sizes, denoising(batch.labels, batch.boxes, SMALL))
    without = detector(batch.images, batch.sizes)
    torch.testing.assert_close(with_noise.logits_LBQC, without.logits_LBQC, **EXACT)
    torch.testing.assert_close(with_noise.boxes_LBQ4, without.boxes_LBQ4, **EXACT)
    assert without.denoising_logits_LBKC.shape[2] == 0


class _HeadOfEachCall(nn.Module):
    """A copy of the box head for each of the decoder's calls, which otherwise share one."""

    def __init__(self, head: nn.Module, num_calls: int) -> None:
        super().__init__()
        self.heads = [copy.deepcopy(head) for _ in range(num_calls)]
        self.num_calls = 0

    def forward(self, x: Tensor) -> Any:
        self.num_calls += 1
        return self.heads[self.num_calls - 1](x)


def test_a_layers_loss_reaches_the_boxes_of_the_layer_before_and_no_further() -> None:
    detector, batch = small_detector(decoder_layers=4), images(1)
    heads = _HeadOfEachCall(detector.decoder.box_head, num_calls=4)
    detector.decoder.box_head = heads  # type: ignore[assignment]
    p = detector(batch.images, batch.sizes)
    # Calls 0 to 2 make the boxes that layers 1 to 3 start from; call 3 makes all predictions.
    for layer in range(4):
        reached = []
        for call in range(3):
            weight = heads.heads[call].layers[-1].weight  # type: ignore[union-attr, index]
            (gradient,) = torch.autograd.grad(
                p.boxes_LBQ4[layer].sum(), weight, retain_graph=True, allow_unused=True
            )
            reached.append(gradient is not None and bool(gradient.abs().sum() > 0))
        assert reached == [call == layer - 1 for call in range(3)], layer


def test_the_encoders_selection_learns_from_its_own_loss_alone() -> None:
    detector, batch = small_detector(), images(1)
    p = detector(batch.images, batch.sizes)
    p.boxes_LBQ4.sum().backward(retain_graph=True)
    assert all(each.grad is None for each in detector.selection.parameters())
    p.encoder_boxes_BQ4.sum().backward()
    assert detector.selection.project.weight.grad is not None


def _on_maps(detector: Detector, maps: list[Tensor], sizes: Tensor, padded: int) -> Predictions:
    """The predictions from maps of the backbone, instead of those that it would make."""
    given = [each.clone() for each in maps]
    detector.backbone.forward = lambda images: list(given)  # type: ignore[method-assign]
    shape = (len(sizes), 3, padded, padded)
    predictions: Predictions = detector(torch.zeros(shape, dtype=torch.uint8), sizes)
    return predictions


def test_padding_changes_nothing_after_the_projections() -> None:
    """Whatever stands there: the maps' padding is noise, and there is more of it."""
    detector = small_detector().eval()
    for project in detector.input_proj:
        # These alone see a whole map: what they make of padding is another test's.
        project[1] = nn.Identity()  # type: ignore[index]
        if project[0].kernel_size == (3, 3):  # type: ignore[index, union-attr]
            project[0] = nn.Conv2d(512, 32, 1, stride=2).double()  # type: ignore[index]
    torch.manual_seed(0)
    sizes = torch.tensor([[128, 100], [70, 128]])
    small, large = 128, 256
    found = []
    most = [torch.randn(2, c, large // s, large // s).double() for c, s in _MAPS]
    for padded in (small, large):
        maps = [
            each[:, :, : padded // s, : padded // s]
            for each, (_, s) in zip(most, _MAPS, strict=True)
        ]
        found.append(_on_maps(detector, maps, sizes, padded))
    torch.testing.assert_close(found[0].logits_LBQC, found[1].logits_LBQC, **EXACT)
    torch.testing.assert_close(found[0].boxes_LBQ4, found[1].boxes_LBQ4, **EXACT)
    torch.testing.assert_close(found[0].encoder_boxes_BQ4, found[1].encoder_boxes_BQ4, **EXACT)


def test_what_stands_in_the_padding_is_never_seen() -> None:
    detector, batch = small_detector().eval(), images(1, 1)
    other = batch.images.clone()
    other[1, :, 44:], other[1, :, :, 86:] = 7, 9
    assert not torch.equal(other, batch.images)
    found, again = (detector(each, batch.sizes) for each in (batch.images, other))
    assert torch.equal(found.logits_LBQC, again.logits_LBQC)
    assert torch.equal(found.boxes_LBQ4, again.boxes_LBQ4)


def test_recomputing_the_encoder_changes_no_bit() -> None:
    batch, gradients = images(2, 3), []
    for recompute in (False, True):
        detector = small_detector(recompute_encoder=recompute)
        torch.manual_seed(1)
        p = detector(batch.images, batch.sizes, denoising(batch.labels, batch.boxes, SMALL))
        criterion(p, batch.labels, batch.boxes).total.backward()  # type: ignore[no-untyped-call]
        gradients.append([each.grad for each in detector.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert kept is not None and recomputed is not None
        assert torch.equal(kept, recomputed)


def test_a_step_works_under_autocast_with_boxes_in_float32() -> None:
    detector, batch = small_detector().float(), images(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        noise = denoising(batch.labels, batch.boxes.float(), SMALL)
        p = detector(batch.images, batch.sizes, noise)
        losses = criterion(p, batch.labels, batch.boxes.float())
    assert p.boxes_LBQ4.dtype == losses.total.dtype == torch.float32
    losses.total.backward()  # type: ignore[no-untyped-call]
    assert all(bool(each.grad.isfinite().all()) for each in detector.parameters())  # type: ignore[union-attr]


def test_an_image_with_fewer_tokens_than_queries_has_fewer_predictions() -> None:
    detector, batch = small_detector(num_queries=300).eval(), images(1, 1, height=64, width=64)
    p = detector(batch.images, torch.tensor([[64, 64], [64, 64]]))
    # 8 x 8, 4 x 4, 2 x 2 and 1.
    assert p.logits_LBQC.shape[2] == 85
    assert p.boxes_LBQ4.isfinite().all()


def test_the_best_pairs_of_query_and_class_are_in_pixels_of_the_image() -> None:
    logits = torch.tensor([[[[-4.0, 2.0], [1.0, 0.0], [-5.0, -6.0]]]])
    boxes = torch.tensor([[[[0.5, 0.5, 1.0, 1.0], [0.25, 0.5, 0.5, 0.2], [0.1, 0.1, 0.1, 0.1]]]])
    none = torch.zeros(0)
    found = postprocess(
        Predictions(logits, boxes, none, none, none, none), torch.tensor([[100, 200]]), num_select=3
    )
    assert found.labels_BN.tolist() == [[1, 0, 1]]
    torch.testing.assert_close(found.scores_BN[0], torch.tensor([2.0, 1.0, 0.0]).sigmoid())
    expected = [[0.0, 0.0, 200.0, 100.0], [0.0, 40.0, 100.0, 60.0], [0.0, 40.0, 100.0, 60.0]]
    torch.testing.assert_close(found.boxes_BN4[0], torch.tensor(expected))


def test_the_backbone_learns_at_its_own_rate() -> None:
    detector = Detector(SMALL)
    rest, backbone = parameter_groups(detector, 1e-4, 1e-5)
    assert (rest["lr"], backbone["lr"]) == (1e-4, 1e-5)
    ids = {id(each) for each in detector.backbone.parameters()}
    assert {id(each) for each in backbone["params"]} == ids
    assert len(ids) + len(rest["params"]) == len(list(detector.parameters()))


def resnet_and_backbone() -> tuple[nn.Module, _Backbone]:
    """torchvision's network with frozen norms, and ours with its weights."""
    torch.manual_seed(0)
    net = resnet18(norm_layer=TorchvisionsNorm)
    for name, tensor in net.state_dict().items():
        if tensor.ndim == 1 and "fc" not in name:
            tensor.uniform_(0.5, 1.5)
    backbone = _Backbone(replace(SMALL, weights="pretrained"))
    state = net.state_dict()
    backbone.load_state_dict({name: state[name] for name in backbone.state_dict()})
    return net, backbone


def test_a_backbone_with_its_norms_folded_gives_torchvisions_maps_and_gradients() -> None:
    net, backbone = resnet_and_backbone()
    x = torch.randn(1, 3, 64, 64)
    expected = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x)))))
    found, maps = backbone(x), []
    for stage in (net.layer2, net.layer3, net.layer4):
        expected = stage(expected)
        maps.append(expected)
    torch.testing.assert_close(found, maps, rtol=1e-4, atol=1e-4)
    found[-1].square().mean().backward()
    maps[-1].square().mean().backward()
    theirs = dict(net.named_parameters())
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-4, msg=name
            )


def test_a_folded_backbone_computes_in_channels_last_and_in_the_precision_asked_for() -> None:
    _, backbone = resnet_and_backbone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = backbone(torch.randn(1, 3, 64, 64))
    assert {x.dtype for x in maps} == {torch.bfloat16}
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in maps)


def test_with_frozen_statistics_stem_and_first_stage_do_not_learn() -> None:
    backbone = _Backbone(replace(SMALL, weights="pretrained"))
    learning = {n.split(".")[0] for n, p in backbone.named_parameters() if p.requires_grad}
    assert learning == {"layer2", "layer3", "layer4"}
    assert all(p.requires_grad for p in _Backbone(SMALL).parameters())


def test_fails_on_an_image_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="the detector's backbone needs the package torchvision"):
        _Backbone(SMALL)
