"""Damage to files of a store."""

from pathlib import Path


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)
