"""Samples of equal shapes are stacked as torch stacks them; others are refused in a sentence."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from contract.errors import UserError
from training.stacking import stack


class Labelled(NamedTuple):
    image: Any
    rest: dict[str, Any]


def test_every_tensor_array_and_number_is_stacked_as_by_torch() -> None:
    images = torch.rand(3, 5, 4, 2).permute(0, 3, 1, 2)  # as views that are not contiguous
    rests = [{"label": n, "size": n / 2, "a": np.full(3, n)} for n in range(3)]
    batch = stack([Labelled(*both) for both in zip(images, rests, strict=True)])
    assert isinstance(batch, Labelled)
    stacked, rest = batch
    assert torch.equal(stacked, torch.stack(list(images)))
    assert stacked.is_contiguous()
    assert [(t.dtype, t.tolist()) for t in rest.values()] == [
        (torch.int64, [0, 1, 2]),
        (torch.float32, [0.0, 0.5, 1.0]),
        (torch.int64, [[0, 0, 0], [1, 1, 1], [2, 2, 2]]),
    ]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([1, 1.5], r"one is int64\[\], another float32\[\]; let `get` return equal shapes"),
        ([torch.ones(2), torch.ones(2, 1)], r"one is float32\[2\], another float32\[2, 1\]"),
        ([(1,), [1]], "cannot be stacked: one is"),
        (["a", "b"], "a sample with a str cannot be stacked; let `get` return tensors"),
    ],
)
def test_fails_to_stack_what_differs(items: list[Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        stack(items)
