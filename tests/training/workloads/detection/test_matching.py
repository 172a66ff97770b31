"""Matching: the cheapest assignment, against all there are and against scipy's."""

import itertools

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torchvision.ops import generalized_box_iou

from training.workloads.detection import losses
from training.workloads.detection.architecture import LossWeights
from training.workloads.detection.boxes import corners
from training.workloads.detection.losses import costs, hungarian, in_order


def _paid(matrix: torch.Tensor, queries: torch.Tensor) -> float:
    return float(sum(matrix[query, place] for place, query in enumerate(queries.tolist())))


@pytest.mark.parametrize("seed", range(5))
def test_no_other_assignment_is_cheaper(seed: int) -> None:
    torch.manual_seed(seed)
    matrices, labels = torch.randn(2, 6, 3), torch.zeros(2, 3, dtype=torch.long)
    for matrix, queries in zip(matrices, hungarian(matrices, labels), strict=True):
        others = itertools.permutations(range(6), 3)
        least = min(_paid(matrix, torch.tensor(other)) for other in others)
        assert len(set(queries.tolist())) == 3
        assert _paid(matrix, queries) == pytest.approx(least)


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
    found = costs(logits, boxes, labels, true, LossWeights())
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


def test_a_machine_without_scipy_is_told_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert losses.missing_packages() == []
    monkeypatch.setattr(losses, "find_spec", lambda name: None)
    (message,) = losses.missing_packages()
    assert "needs the package scipy, which is not installed" in message
