"""Files that people bring: which are hidden, when two names are one, and what HEIC begins with."""

import unicodedata

# Brands of ISO/IEC 23008-12, annex B: images in HEVC, after the four bytes "ftyp".
HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})


def is_visible(name: str) -> bool:
    """Return whether no part of the path is hidden, or a Mac's own, as in its archives."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def composed(name: str) -> str:
    """Return a name in the one form of Unicode (NFC) in which names are compared.

    A Mac decomposes them.
    """
    return unicodedata.normalize("NFC", name)
