"""Contrastive denoising: how many queries, how noisy, and who sees whom."""

from dataclasses import replace

import torch

from tests.training.workloads.detection.detectors import SMALL, images
from training.workloads.detection.config import Architecture
from training.workloads.detection.decoder import corners
from training.workloads.detection.detector import _hidden_queries, denoising, denoising_targets

LARGE = Architecture(num_classes=10, denoising_queries=100)


def test_there_are_as_many_groups_as_the_queries_suffice_for() -> None:
    batch = images(3, 7)
    noise = denoising(batch.labels, batch.boxes, LARGE)
    assert noise.num_groups == 14  # 100 // 7
    assert noise.labels_BK.shape == (2, 14 * 2 * 7)
    assert noise.boxes_BK4.shape == (2, 14 * 2 * 7, 4)


def test_more_objects_than_queries_are_one_group() -> None:
    batch = images(130, 2)
    noise = denoising(batch.labels, batch.boxes, LARGE)
    assert noise.num_groups == 1
    assert noise.labels_BK.shape == (2, 260)


def test_without_objects_there_are_no_queries() -> None:
    batch = images(0, 0)
    noise = denoising(batch.labels, batch.boxes, LARGE)
    assert noise.labels_BK.shape == (2, 0)
    assert _hidden_queries(noise, 5) is None


def test_positives_stay_near_their_object_and_negatives_move_further() -> None:
    torch.manual_seed(0)
    # Far enough from the borders that nothing is clamped.
    true = torch.tensor([[0.5, 0.5, 0.2, 0.4], [0.4, 0.6, 0.3, 0.1]], dtype=torch.float64)
    labels = torch.zeros(1, 2, dtype=torch.long)
    noise = denoising(labels, true[None], replace(LARGE, denoising_queries=5000, box_noise=0.4))
    boxes = noise.boxes_BK4.view(noise.num_groups, 2, 2, 4)
    away = (corners(boxes) - corners(true)).abs() / (true[:, 2:] / 2).repeat(1, 2)
    # In shares of half the box's size: below 0.4 x 1, and from 0.4 x 1 to 0.4 x 2.
    assert 0.39 < away[:, 0].max() < 0.4 + 1e-9
    assert 0.4 - 1e-9 < away[:, 1].min() < 0.41
    assert 0.79 < away[:, 1].max() < 0.8 + 1e-9


def test_noised_boxes_stay_in_the_image() -> None:
    labels, boxes = torch.zeros(1, 1, dtype=torch.long), torch.tensor([[[0.5, 0.5, 1.0, 1.0]]])
    found = corners(denoising(labels, boxes, LARGE).boxes_BK4)
    assert found.min() >= -1e-6 and found.max() <= 1 + 1e-6


def test_a_quarter_of_the_labels_is_drawn_anew() -> None:
    batch = images(4)
    torch.manual_seed(0)
    noise = denoising(batch.labels, batch.boxes, replace(LARGE, denoising_queries=4000))
    is_other = noise.labels_BK.view(-1, 4) != batch.labels[0]
    # A label noise of 0.5, half of it; a tenth of what is drawn from 10 classes is the same class.
    assert abs(is_other.float().mean() - 0.25 * 0.9) < 0.02


def test_what_is_no_object_has_no_label() -> None:
    batch = images(1, 4)
    noise = denoising(batch.labels, batch.boxes, LARGE)
    of_first = noise.labels_BK[0].view(-1, 4)
    assert (of_first[:, 0] >= 0).all() and (of_first[:, 1:] == -1).all()


def test_no_query_sees_denoising_queries_but_those_of_its_own_group() -> None:
    batch = images(2)
    noise = denoising(batch.labels, batch.boxes, replace(SMALL, denoising_queries=6))
    hidden = _hidden_queries(noise, num_queries=4)
    assert hidden is not None and noise.num_groups == 3
    for row in range(12 + 4):
        for column in range(12 + 4):
            same_group = row < 12 and row // 4 == column // 4
            assert hidden[row, column] == (column < 12 and not same_group), (row, column)


def test_only_positive_queries_have_a_true_label() -> None:
    labels = torch.tensor([[2, -1], [0, 1]])
    targets = denoising_targets(labels, num_groups=2)
    assert targets[:, 0, 0].tolist() == targets[:, 1, 0].tolist() == [[2, -1], [0, 1]]
    assert (targets[:, :, 1] == -1).all()


def test_noise_is_that_of_torchs_generator() -> None:
    batch = images(2, 3)
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(denoising(batch.labels, batch.boxes, LARGE).boxes_BK4)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
