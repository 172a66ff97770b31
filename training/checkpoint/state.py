"""A boundary's state, live or copied to the host, as the bytes of its files.

Nothing here writes: a `Contents` gives any part of a file, straight from the live tensors or from
an `HostCopy`, the copy that lets training go on.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from training.checkpoint.layout import Layout, TensorSpan, lay_out
from training.checkpoint.memory import allocate, view_of

STATE = "state.json"

# Gives so many bytes of host memory, until it is asked again by the same thread.
Spare: TypeAlias = Callable[[int], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """Everything that a step boundary is: live tensors by part, and what JSON can hold."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # part -> name -> tensor on any device
    state: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for tensors in self.tensors.values() for t in tensors.values())

    @property
    def device(self) -> torch.device:
        """Where the tensors are; the GPU if some are there."""
        found = {t.device for tensors in self.tensors.values() for t in tensors.values()}
        return max(found, key=lambda device: device.type != "cpu", default=torch.device("cpu"))


class Contents(Protocol):
    """One file that is yet to be written."""

    @property
    def name(self) -> str:
        """Of the file."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        """Those bytes, in place where they lie in one piece, else copied into spare memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A small file."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        return memoryview(self.data)[start:stop]


class LiveFile:
    """A safetensors file of tensors that must not change while it is read."""

    def __init__(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = f"{part}.safetensors"
        self._layout = lay_out(tensors)
        self._tensors = tensors

    @property
    def size(self) -> int:
        return self._layout.size

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        header = self._layout.header
        out = spare(stop - start)
        if start < len(header):
            piece = header[start:stop]
            out[: len(piece)].copy_(torch.frombuffer(bytearray(piece), dtype=torch.uint8))
        for place in self._layout.overlapping(start, stop):
            first, last = max(start, place.start), min(stop, place.stop)
            _copy_bytes(
                self._tensors[place.name], first - place.start, out[first - start : last - start]
            )
        return view_of(out)


class HostCopyFile:
    """A safetensors file that lies in host memory exactly as it will be written."""

    def __init__(self, part: str, layout: Layout, device: torch.device) -> None:
        self.name = f"{part}.safetensors"
        self._block = allocate(layout.size, device)
        header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        self._block[: len(header)].copy_(header)
        self._bytes = view_of(self._block)
        self.tensors = {place.name: tensor_at(self._block, place) for place in layout.spans}

    @property
    def size(self) -> int:
        return len(self._bytes)

    def read(self, start: int, stop: int, spare: Spare) -> memoryview:
        return self._bytes[start:stop]


class HostCopy:
    """A copy of a capture on the host; its memory serves every later capture of the same shapes."""

    def __init__(self, capture: LiveState) -> None:
        self.state: Mapping[str, Any] = {}
        self._shapes = _shapes(capture)
        self._files = {
            part: HostCopyFile(part, lay_out(tensors), capture.device)
            for part, tensors in capture.tensors.items()
        }

    def fits(self, capture: LiveState) -> bool:
        """Whether the capture has the shapes that this image was made for."""
        return self._shapes == _shapes(capture)

    def fill(self, capture: LiveState) -> None:
        """Copy the capture; when this returns, training may change its tensors."""
        self.state = capture.state
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for part, tensors in capture.tensors.items():
            mine = self._files[part].tensors
            targets += [mine[name] for name in tensors]
            sources += [tensor.detach() for tensor in tensors.values()]
        if targets:
            # One call for all: a loop in Python costs as much as the copies of small tensors.
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if capture.device.type == "cuda":
            torch.cuda.synchronize(capture.device)

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The copies by part."""
        return {part: file.tensors for part, file in self._files.items()}

    @property
    def files(self) -> list[Contents]:
        """The safetensors files of the checkpoint."""
        return list(self._files.values())


def live_files(capture: LiveState) -> list[Contents]:
    """The safetensors files, read from tensors that must not change meanwhile."""
    return [LiveFile(part, own) for part, own in capture.tensors.items()]


def state_file(state: Mapping[str, Any]) -> Text:
    """The file for what JSON can hold."""
    return Text(name=STATE, data=json.dumps(state).encode())


def tensor_at(block: Tensor, place: TensorSpan) -> Tensor:
    """The tensor whose bytes lie at `place` of a block of bytes."""
    return block[place.start : place.stop].view(place.dtype).view(place.shape)


def _shapes(capture: LiveState) -> dict[str, list[tuple[str, torch.dtype, torch.Size]]]:
    return {
        part: [(name, t.dtype, t.shape) for name, t in tensors.items()]
        for part, tensors in capture.tensors.items()
    }


def _copy_bytes(tensor: Tensor, start: int, out: Tensor) -> None:
    """Copy bytes from `start` on, in the order of a contiguous tensor, until `out` is full."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        data = tensor.view(-1).view(torch.uint8)
        out.copy_(data[start : start + len(out)])
        return
    # Row by row: a contiguous copy of the whole could need memory that is not there.
    row_bytes = tensor[0].numel() * tensor.element_size()
    stop = start + len(out)
    for row in range(start // row_bytes, -(-stop // row_bytes)):
        base = row * row_bytes
        first, last = max(start, base), min(stop, base + row_bytes)
        data = tensor[row].contiguous().view(-1).view(torch.uint8)
        out[first - start : last - start].copy_(data[first - base : last - base])
