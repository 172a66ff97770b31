"""Damage to files of a store."""

from pathlib import Path


def flip(path: Path, byte: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def make_unreadable(path: Path) -> Path:
    """Let every access to a file or folder fail, for root too; return what it was moved to."""
    kept = path.with_name(f".kept-{path.name}")
    path.rename(kept)
    path.symlink_to(path.name)  # to itself: ELOOP
    return kept


def make_readable(path: Path) -> None:
    """Undo `make_unreadable`."""
    path.unlink()
    path.with_name(f".kept-{path.name}").rename(path)
