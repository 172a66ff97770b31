"""Reads scalars from a growing TensorBoard event file: TFRecord framing and protobuf, by hand.

Instances have no tensorboard, whose own reader also does not keep its place between reads.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

# Larger ones are images, audio or histograms; they are passed over without being read.
_MAX_RECORD_BYTES = 65536
# One read takes 0.3 s, as the checksums are computed in Python.
_MAX_READ_BYTES = 1 << 20
_HEADER = struct.Struct("<QI")  # the record's length and its checksum
_CRC = struct.Struct("<I")
_CRC_TABLE: list[int] = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _CRC_TABLE.append(_byte)

# A field's number, and its varint or bytes; fixed numbers come as their bytes.
_Field: TypeAlias = tuple[int, int | bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRow:
    """A metric's value, and its step if the program named one."""

    name: str
    value: float  # may be NaN or infinite, as the program computed it
    step: int | None


class EventFile:
    """Reads on from where the last read ended; an incomplete record is left for later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.has_more = False  # the last read ended before the file did
        self._is_damaged = False  # nothing after a wrong length can be read

    def skip(self) -> None:
        """Pass over what it holds now."""
        self._offset = self._path.stat().st_size

    def read(self) -> list[MetricRow]:
        """Return the scalars of the records that are now complete."""
        rows: list[MetricRow] = []
        with self._path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < self._offset:
                self._offset, self._is_damaged = 0, False
            until = min(size, self._offset + _MAX_READ_BYTES)
            while not self._is_damaged and self._offset < until:
                record = self._record(file, size)
                if record is None:
                    break
                rows.extend(_scalars(record))
        self.has_more = until <= self._offset < size
        return rows

    def _record(self, file: BinaryIO, size: int) -> bytes | None:
        """The next record, empty if it is damaged or large; None if it is incomplete."""
        file.seek(self._offset)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        length, crc = _HEADER.unpack(header)
        if crc != _masked_crc(header[:8]):
            self._is_damaged = True
            return None
        end = self._offset + _HEADER.size + length + _CRC.size
        if end > size:
            return None
        self._offset = end
        if length > _MAX_RECORD_BYTES:
            return b""
        data: bytes = file.read(length)
        return data if file.read(_CRC.size) == _CRC.pack(_masked_crc(data)) else b""


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and shifted as TFRecord does."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _scalars(event: bytes) -> list[MetricRow]:
    """The scalars of one tensorflow.Event; none if it cannot be read."""
    step, rows = 0, list[tuple[str, float]]()
    try:
        for number, value in _fields(event):
            if number == 2 and isinstance(value, int):
                step = value - (value >> 63 << 64)
            elif number == 5 and isinstance(value, bytes):
                rows.extend(_summary(value))
    except (IndexError, struct.error, ValueError):
        return []
    return [MetricRow(name=name, value=value, step=step) for name, value in rows]


def _summary(summary: bytes) -> Iterator[tuple[str, float]]:
    """Tag and value of each scalar of a tensorflow.Summary."""
    for number, entry in _fields(summary):
        if number != 1 or not isinstance(entry, bytes):
            continue
        fields = dict(_fields(entry))
        tag, simple, tensor = fields.get(1), fields.get(2), fields.get(8)
        if not isinstance(tag, bytes):
            continue
        if isinstance(simple, bytes):
            yield tag.decode(), struct.unpack("<f", simple)[0]
        elif isinstance(tensor, bytes) and (value := _scalar_of(tensor)) is not None:
            yield tag.decode(), value


def _scalar_of(tensor: bytes) -> float | None:
    """Return the number of a TensorProto with one float or double, as in TensorFlow 2's scalars."""
    fields = dict(_fields(tensor))
    form = {1: "<f", 2: "<d"}.get(int(fields.get(1, 0)))
    if form is None:
        return None
    for number in (4, 5, 6):  # tensor_content, float_val, double_val
        data = fields.get(number)
        if isinstance(data, bytes) and len(data) == struct.calcsize(form):
            return float(struct.unpack(form, data)[0])
    return None


def _fields(data: bytes) -> Iterator[_Field]:
    """Yield the fields of a protobuf message; IndexError or struct.error if it is not one."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise struct.error(f"unknown wire type {kind}")
        if at + size > len(data):
            raise IndexError("the message ends within a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
        if shift > 63:
            raise struct.error("a number of more than 64 bits")
