"""The cross-entropy in chunks is F.cross_entropy, gradients included, in less memory."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.training.forked import in_fork
from training.preflight.footprint import LiveMemory
from training.workloads.growth.model import _sum_cross_entropy


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_chunks_give_the_sum_of_all_and_its_gradients(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    x_ND = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets_N = torch.randint(11, (7,))
    ours = _sum_cross_entropy(x_ND, weight_VD, targets_N, chunk_tokens=chunk_tokens)
    theirs = F.cross_entropy(F.linear(x_ND, weight_VD), targets_N, reduction="sum")
    found = [torch.autograd.grad(loss / 7, (x_ND, weight_VD)) for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0.0)
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-15)


def test_a_weight_that_is_used_twice_gets_both_gradients() -> None:
    torch.manual_seed(0)
    weight_VD = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    tokens_N, targets_N = torch.randint(11, (2, 7))
    x_ND = F.embedding(tokens_N, weight_VD)
    ours = _sum_cross_entropy(x_ND, weight_VD, targets_N, chunk_tokens=2)
    theirs = F.cross_entropy(F.linear(x_ND, weight_VD), targets_N, reduction="sum")
    found = [torch.autograd.grad(loss, weight_VD, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-14)


def test_huge_logits_stay_finite() -> None:
    x_ND = torch.full((2, 4), 1e4, requires_grad=True)
    weight_VD = torch.eye(4).mul(1e4).requires_grad_()
    loss = _sum_cross_entropy(x_ND, weight_VD, torch.tensor([0, 1]))
    found = torch.autograd.grad(loss, (x_ND, weight_VD))
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in found)


def test_without_gradients_nothing_is_kept_for_them() -> None:
    x_ND, weight_VD = torch.randn(3, 4), torch.randn(6, 4, requires_grad=True)
    with torch.no_grad():
        assert _sum_cross_entropy(x_ND, weight_VD, torch.zeros(3, dtype=torch.long)).grad_fn is None


def test_it_takes_a_quarter_of_the_memory() -> None:
    def peak(is_chunked: bool) -> int:
        memory = LiveMemory()
        with FakeTensorMode(), memory:
            x_ND = torch.zeros(4096, 64, requires_grad=True)
            weight_VD = torch.zeros(8192, 64, requires_grad=True)
            targets_N = torch.zeros(4096, dtype=torch.long)
            memory.begin()
            if is_chunked:
                loss = _sum_cross_entropy(x_ND, weight_VD, targets_N, chunk_tokens=512)
            else:
                loss = F.cross_entropy(F.linear(x_ND, weight_VD), targets_N, reduction="sum")
            torch.autograd.grad(loss, (x_ND, weight_VD))
        return memory.peak_bytes

    chunked, whole = in_fork(lambda: (peak(True), peak(False)))
    # All logits are 134 MB, and a copy or two of them; a chunk's are an eighth.
    assert whole > 2 * 134e6
    assert chunked < whole / 4
