"""Files that people bring: where they are, which are hidden, when two names are one, and HEIC."""

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from contract.errors import UserError

# Of one name on a disk: ext4, and XFS, which the machines' data volumes have.
MOST_NAME_BYTES = 255
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


def walked(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each folder with its folders, which may be pruned, and its files; follow links.

    UserError for a folder that cannot be listed, or is a link to one that contains it.
    """
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        yield folder, folders, names
        for path in (Path(folder, name) for name in folders):
            above = path.absolute().parents
            if path.is_symlink() and path.resolve() in [up.resolve() for up in above]:
                raise UserError(f"{path} is a link to a folder that contains it; delete it")


def _refuse(error: OSError) -> None:
    # os.walk would skip the folder, and the files in it would seem not to exist.
    where = str(error.filename)
    if not where.endswith("/lost+found") and not isinstance(error, FileNotFoundError):
        raise UserError(f"{where} cannot be listed: {error.strerror}; make it readable")
