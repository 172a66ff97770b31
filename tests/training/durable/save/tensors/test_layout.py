"""Our safetensors bytes are the library's, in any order and piece by piece."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from contract.errors import UserError
from training.durable.save.tensors.state import (
    HostCopy,
    LiveState,
    _LiveFile,
    header_bytes,
    lay_out,
    parse_header,
)

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.arange(count, dtype=torch.int64).remainder(2 if dtype == torch.bool else 251)
    return data.to(torch.uint8).view(dtype).view(shape)


def spare(size: int) -> memoryview:
    return memoryview(bytearray(b"\xee" * size))


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(DTYPES), SHAPES),
    max_size=6,
).map(lambda about: {name: tensor_of(*parts) for name, parts in about.items()})


def same(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            one.contiguous().view(-1).view(torch.uint8),
            other.contiguous().view(-1).view(torch.uint8),
        )
    )


@given(tensors=TENSORS, cuts=st.lists(st.integers(0, 600), max_size=4))
def test_any_tensors_cut_anywhere_are_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], cuts: list[int]
) -> None:
    live = _LiveFile("model", tensors)
    image = HostCopy(LiveState(tensors={"model": tensors}, state={}))
    image.fill(LiveState(tensors={"model": tensors}, state={}))
    edges = sorted({0, live.size, *(cut for cut in cuts if cut < live.size)})
    pieces = [bytes(live.read(a, b, spare)) for a, b in itertools.pairwise(edges)]
    whole = b"".join(pieces)
    assert whole == bytes(image.files[0].read(0, live.size, spare))
    path = tmp_path_factory.getbasetemp() / "model.safetensors"
    path.write_bytes(whole)
    back = load_file(path)
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensors[name]) for name in tensors)
    layout = parse_header(whole[: header_bytes(whole[:8], len(whole))], len(whole))
    assert layout == lay_out(tensors)


@pytest.mark.parametrize("dims", [(1, 0), (2, 0, 1)])
def test_tensors_in_another_memory_order_are_written_in_theirs(
    tmp_path: Path, dims: tuple[int, ...]
) -> None:
    shape = (3, 4, 5)[: len(dims)]
    tensor = tensor_of(torch.float32, shape).permute(dims)
    live = _LiveFile("model", {"w": tensor})
    data = b"".join(
        bytes(live.read(a, min(a + 7, live.size), spare)) for a in range(0, live.size, 7)
    )
    (tmp_path / "x").write_bytes(data)
    assert same(load_file(tmp_path / "x")["w"], tensor)


def test_large_items_come_first_so_that_all_are_aligned() -> None:
    tensors = {"flag": torch.ones(3, dtype=torch.bool), "w": torch.ones(2), "n": torch.tensor(1)}
    places = lay_out(tensors).spans
    assert [place.name for place in places] == ["n", "w", "flag"]
    assert all(place.start % place.dtype.itemsize == 0 for place in places)
    assert places[0].start % 64 == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex128),
        torch.ones(2, 2).to_sparse(),
        TwoTensor(torch.ones(2), torch.ones(2)),  # several in one, as torchao's moments
    ],
)
def test_fails_for_what_safetensors_cannot_hold(tensor: Tensor) -> None:
    with pytest.raises(
        UserError, match=r"^w is a torch\.\S+ \w*Tensor of .* which no checkpoint can hold"
    ):
        lay_out({"w": tensor})


def header(record: object) -> bytes:
    text = json.dumps(record).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("record", "size"),
    [
        ([], 0),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8),
        ({"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, 4),
        ({"w": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, 4),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 9),
        ({"w": {"dtype": "F32", "shape": [10**15], "data_offsets": [0, 4 * 10**15]}}, 4),
        ({"w": 3}, 0),
    ],
)
def test_fails_for_a_header_that_cannot_be(record: object, size: int) -> None:
    data = header(record)
    with pytest.raises(ValueError):
        parse_header(data, len(data) + size)


@pytest.mark.parametrize("first", [b"", b"123", b"\xff" * 8])
def test_fails_for_a_file_that_does_not_begin_with_a_header(first: bytes) -> None:
    with pytest.raises(ValueError):
        header_bytes(first, 1000)
