"""Samples of equal shapes are stacked as torch stacks them; others are refused in a sentence."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from contract.errors import UserError
from training.stacking import ItemLayout, stack


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


def test_rows_are_written_where_they_belong_whatever_kind_of_tensor_they_are() -> None:
    class Own(torch.Tensor):
        pass

    first = {"x": torch.ones(2, requires_grad=True), "n": [1]}
    others = [{"x": torch.full((2,), 2.0).as_subclass(Own), "n": [np.int64(2)]}]
    layout = ItemLayout.of(first)
    columns = layout.columns(torch.zeros(layout.num_bytes(3), dtype=torch.uint8), 3)
    layout.write(columns, 1, [first, *others])
    assert [column.tolist() for column in columns] == [[[0, 0], [1, 1], [2, 2]], [0, 1, 2]]
    assert {type(column) for column in columns} == {torch.Tensor}


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([1, 1.5], r"one is int64\[\], another float32\[\]; let `get` return equal shapes"),
        ([torch.ones(2), torch.ones(2, 1)], r"one is float32\[2\], another float32\[2, 1\]"),
        ([(1,), [1]], "cannot be stacked: one is"),
        ([{"a": 1}, {"b": 1}], r"one is \{a: int64\[\]\}, another \{b: int64\[\]\}"),
        ([(1,), (1, 2)], "cannot be stacked: one is"),
        ([torch.ones(1), [torch.ones(1)]], "cannot be stacked: one is"),
        (["a", "b"], "a sample with a str cannot be stacked; let `get` return tensors"),
    ],
)
def test_fails_to_stack_what_differs(items: list[Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        stack(items)
