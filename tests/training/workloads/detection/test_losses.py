"""The loss against a plain transcription, object by object; the cheapest assignment is scipy's."""

import itertools

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torchvision.ops import generalized_box_iou, sigmoid_focal_loss

from tests.training.workloads.detection.detectors import SMALL, Images, images, small_detector
from training.workloads.detection.decoder import corners
from training.workloads.detection.detection_workload import _costs, criterion, hungarian, in_order
from training.workloads.detection.detector import Predictions, denoising


def _predicted(num_objects: int, num_images: int = 2, seed: int = 0) -> Predictions:
    torch.manual_seed(seed)
    num_noised = 2 * 2 * num_objects
    return Predictions(
        torch.randn(3, num_images, 12, 3, requires_grad=True),
        torch.rand(3, num_images, 12, 4, requires_grad=True),
        torch.randn(num_images, 12, 3, requires_grad=True),
        torch.rand(num_images, 12, 4, requires_grad=True),
        torch.randn(3, num_images, num_noised, 3, requires_grad=True),
        torch.rand(3, num_images, num_noised, 4, requires_grad=True),
    )


def _wrong(logits_QC: Tensor, boxes_Q4: Tensor, pairs: list[tuple[int, int, Tensor]]) -> Tensor:
    """One image's loss in torchvision's words: (query, label, true box) of each pair."""
    targets_QC = torch.zeros_like(logits_QC)
    total = torch.zeros(())
    for query, label, true_4 in pairs:
        targets_QC[query, label] = 1
        overlap = generalized_box_iou(corners(boxes_Q4[query])[None], corners(true_4)[None])
        total = total + 5 * (boxes_Q4[query] - true_4).abs().sum() + 2 * (1 - overlap[0, 0])
    focal = sigmoid_focal_loss(logits_QC, targets_QC, alpha=0.25, gamma=2, reduction="sum")
    return total + focal


def _plain(p: Predictions, batch: Images, num_groups: int) -> Tensor:
    """The whole loss, image by image and layer by layer."""
    total = torch.zeros(())
    sets = [*zip(p.logits_LBQC, p.boxes_LBQ4, strict=True)]
    for logits_BQC, boxes_BQ4 in [*sets, (p.encoder_logits_BQC, p.encoder_boxes_BQ4)]:
        for b in range(len(batch.labels)):
            places = [n for n, label in enumerate(batch.labels[b]) if label >= 0]
            of_image = batch.labels[b : b + 1, places], batch.boxes[b : b + 1, places].float()
            matrix = _costs(logits_BQC[b : b + 1], boxes_BQ4[b : b + 1], *of_image)
            queries = hungarian(matrix, of_image[0])[0].tolist()
            pairs = [(q, int(of_image[0][0, n]), of_image[1][0, n]) for n, q in enumerate(queries)]
            total = total + _wrong(logits_BQC[b], boxes_BQ4[b], pairs)
    most = batch.labels.shape[1]
    for logits_BKC, boxes_BK4 in zip(p.denoising_logits_LBKC, p.denoising_boxes_LBK4, strict=True):
        for b, labels_N in enumerate(batch.labels.tolist()):
            pairs = [
                (group * 2 * most + n, label, batch.boxes[b, n].float())
                for group in range(num_groups)
                for n, label in enumerate(labels_N)
                if label >= 0
            ]
            total = total + _wrong(logits_BKC[b], boxes_BK4[b], pairs) / num_groups
    return total


def test_the_loss_is_the_plain_sum_over_layers_images_and_objects() -> None:
    batch, p = images(4, 1), _predicted(4)
    losses = criterion(p, batch.labels, batch.boxes.float())
    expected = _plain(p, batch, num_groups=2)
    torch.testing.assert_close(losses.total, expected, rtol=1e-5, atol=1e-4)
    gradients = torch.autograd.grad(losses.total, p)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, p), rtol=1e-4, atol=1e-5)


def test_what_does_not_count_is_neither_in_the_loss_nor_in_its_gradient() -> None:
    batch, p = images(2, 3), _predicted(3)
    labels, boxes = batch.labels.clone(), batch.boxes.float()
    losses = criterion(p, labels, boxes)
    boxes[labels < 0] = torch.tensor([0.9, 0.9, 0.01, 0.02])
    assert torch.equal(criterion(p, labels, boxes).total, losses.total)


def test_the_sums_of_two_micro_batches_are_those_of_one() -> None:
    batch, p = images(3, 3, 3, 3), _predicted(3, num_images=4)
    whole = criterion(p, batch.labels, batch.boxes.float()).total
    parts = []
    for half in (slice(0, 2), slice(2, 4)):
        of_half = Predictions(*(t[half] if t.ndim == 3 else t[:, half] for t in p))
        parts.append(criterion(of_half, batch.labels[half], batch.boxes[half].float()).total)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-6, atol=1e-4)


def test_the_parts_for_the_log_are_those_of_the_sum() -> None:
    batch, p = images(4, 2), _predicted(4)
    losses = criterion(p, batch.labels, batch.boxes.float())
    last = p._replace(logits_LBQC=p.logits_LBQC[-1:], boxes_LBQ4=p.boxes_LBQ4[-1:])
    of_last = criterion(last, batch.labels, batch.boxes.float())
    without_denoising = of_last.total - of_last.denoising - of_last.encoder
    torch.testing.assert_close(losses.classes + losses.boxes + losses.giou, without_denoising)


def test_images_without_objects_have_a_loss_of_classes_alone() -> None:
    batch, p = images(0, 0), _predicted(0)
    losses = criterion(p, batch.labels, batch.boxes.float())
    assert losses.boxes == losses.giou == losses.denoising == 0
    expected = _plain(p, batch, num_groups=1)
    torch.testing.assert_close(losses.total, expected)


def test_more_objects_than_queries_are_all_counted_that_have_one() -> None:
    batch, p = images(120, 1), _predicted(120)
    losses = criterion(p, batch.labels, batch.boxes.float())
    assert losses.total.isfinite()
    assert losses.boxes > 0


def test_a_loss_of_what_is_no_number_is_none() -> None:
    batch, p = images(2), _predicted(2, num_images=1)
    p = p._replace(boxes_LBQ4=p.boxes_LBQ4 * float("nan"))
    assert criterion(p, batch.labels, batch.boxes.float()).total.isnan()


def test_every_parameter_has_a_gradient_also_without_objects() -> None:
    for counts in ((3, 0), (0, 0)):
        detector, batch = small_detector(), images(*counts)
        noise = denoising(batch.labels, batch.boxes, SMALL)
        p = detector(batch.images, batch.sizes, noise)
        criterion(p, batch.labels, batch.boxes).total.backward()  # type: ignore[no-untyped-call]
        without = [name for name, each in detector.named_parameters() if each.grad is None]
        assert not without, counts


def test_each_image_and_layer_is_matched_as_by_scipy() -> None:
    torch.manual_seed(0)
    labels = torch.full((3, 40), -1)
    for image, number in enumerate((40, 0, 17)):
        labels[image, torch.randperm(40)[:number]] = 1
    matrices = torch.randn(2 * 3, 50, 40)
    for number, found in enumerate(hungarian(matrices, labels)):
        objects = (labels[number % 3] >= 0).nonzero()[:, 0]
        queries, places = linear_sum_assignment(matrices[number][:, objects].numpy())
        expected = torch.full((40,), 50)
        expected[objects[places]] = torch.from_numpy(queries)
        assert torch.equal(found, expected)


def test_more_objects_than_queries_leave_some_without_one() -> None:
    torch.manual_seed(0)
    found = hungarian(torch.randn(1, 5, 120), torch.zeros(1, 120, dtype=torch.long))[0]
    assert sorted(found.tolist())[:5] == [0, 1, 2, 3, 4]
    assert (found == 5).sum() == 115


def test_costs_are_the_references_formula() -> None:
    torch.manual_seed(0)
    logits, boxes = torch.randn(2, 5, 4), torch.rand(2, 5, 4)
    labels, true = torch.randint(4, (2, 3)), torch.rand(2, 3, 4)
    found = _costs(logits, boxes, labels, true)
    for t, q, n in itertools.product(range(2), range(5), range(3)):
        p = logits[t, q, labels[t, n]].sigmoid()
        of_class = 0.25 * (1 - p) ** 2 * -p.log() - 0.75 * p**2 * -(1 - p).log()
        away = (boxes[t, q] - true[t, n]).abs().sum()
        overlap = generalized_box_iou(corners(boxes[t, q])[None], corners(true[t, n])[None])
        expected = 2 * of_class + 5 * away - 2 * overlap[0, 0]
        torch.testing.assert_close(found[t, q, n], expected, rtol=1e-4, atol=1e-5)


def test_what_is_no_number_is_matched_all_the_same() -> None:
    matrix = torch.tensor([[[float("nan"), 1.0], [0.0, float("inf")], [2.0, 3.0]]])
    assert hungarian(matrix, torch.zeros(1, 2, dtype=torch.long)).tolist() == [[1, 0]]


def test_a_match_by_shapes_alone_gives_each_object_a_query_while_there_are_some() -> None:
    found = in_order(torch.zeros(2, 3, 5), torch.zeros(1, 5, dtype=torch.long))
    assert found.tolist() == [[0, 1, 2, 3, 3]] * 2
