"""Boxes: conversions, generalized IoU against torchvision's, logits."""

import torch

from training.workloads.detection.decoder import corners, from_corners, giou, inverse_sigmoid


def test_a_box_and_its_corners_say_the_same() -> None:
    boxes = torch.rand(50, 4, dtype=torch.float64)
    assert torch.equal(corners(torch.tensor([0.5, 0.25, 1.0, 0.5])), torch.tensor([0, 0, 1, 0.5]))
    torch.testing.assert_close(from_corners(corners(boxes)), boxes)


def test_generalized_iou_is_torchvisions() -> None:
    from torchvision.ops import generalized_box_iou

    first, second = torch.rand(20, 4, dtype=torch.float64), torch.rand(30, 4, dtype=torch.float64)
    expected = generalized_box_iou(corners(first), corners(second))
    torch.testing.assert_close(giou(first[:, None], second), expected)


def test_boxes_without_an_area_have_an_overlap_and_gradients_that_are_numbers() -> None:
    boxes = torch.tensor([[0.0] * 4, [0.5, 0.5, 0.0, 0.2]], requires_grad=True)
    overlap = giou(boxes[:, None], boxes.detach())
    overlap.sum().backward()  # type: ignore[no-untyped-call]
    assert overlap.isfinite().all()
    assert boxes.grad is not None and boxes.grad.isfinite().all()


def test_a_logit_is_that_of_its_share_but_never_infinite() -> None:
    shares = torch.tensor([-0.5, 0.0, 0.3, 1.0, 2.0])
    odds = torch.tensor([0.001, 0.001, 0.3 / 0.7, 1000.0, 1000.0])
    torch.testing.assert_close(inverse_sigmoid(shares), odds.log())
