"""The backbone: torchvision's weights fit; frozen norms compute what they did, in few bits too."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from tests.training.workloads.detection.detectors import SMALL
from training.errors import UserError
from training.workloads.detection.detector import Backbone, FrozenBatchNorm2d


def test_frozen_norms_compute_what_batch_norm_evaluates_to() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6).eval()
    for tensor in norm.state_dict().values():
        if tensor.ndim:
            tensor.uniform_(0.5, 1.5)
    frozen = FrozenBatchNorm2d(6)
    frozen.load_state_dict({name: norm.state_dict()[name] for name in frozen.state_dict()})
    x = torch.randn(2, 6, 4, 5)
    torch.testing.assert_close(frozen(x), norm(x))
    assert frozen(x.bfloat16()).dtype == torch.bfloat16


def test_torchvisions_weights_give_torchvisions_maps() -> None:
    torch.manual_seed(0)
    net = resnet18().eval()
    backbone = Backbone(replace(SMALL, backbone_norm="frozen_batch"))
    state = net.state_dict()
    backbone.load_state_dict({name: state[name] for name in backbone.state_dict()})
    x = torch.randn(1, 3, 64, 64)
    expected = net.layer1(net.maxpool(net.relu(net.bn1(net.conv1(x)))))
    for stage, found in zip((net.layer2, net.layer3, net.layer4), backbone(x), strict=True):
        expected = stage(expected)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_with_frozen_statistics_stem_and_first_stage_do_not_learn() -> None:
    backbone = Backbone(replace(SMALL, backbone_norm="frozen_batch"))
    learning = {n.split(".")[0] for n, p in backbone.named_parameters() if p.requires_grad}
    assert learning == {"layer2", "layer3", "layer4"}
    assert all(p.requires_grad for p in Backbone(SMALL).parameters())


def test_fails_on_an_image_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="the detector's backbone needs the package torchvision"):
        Backbone(SMALL)
