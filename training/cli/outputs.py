"""Checks a command's output paths before its work starts, not when it is done.

Imports no torch.
"""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import MachineError, UserError


def checked_file(path: Path) -> Path:
    """Check that a file can be written, creating its folder; UserError says why not."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file to write")
    checked_folder(path.parent)
    return path


def checked_folder(path: Path) -> Path:
    """Check that a folder can be written to, creating it; UserError says why not."""
    if path.is_file():
        raise UserError(f"{path} is a file; give a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Not os.access: root may write anywhere except on a read-only file system.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        why = error.strerror or os.strerror(error.errno or 0)
        raise (MachineError if error.errno == errno.ENOSPC else UserError)(
            f"cannot write to {path}: {why}; give another path"
        ) from error
    return path


@contextmanager
def whole_folder(path: Path, keep: str) -> Iterator[None]:
    """Fill a new folder or leave it empty; with the file `keep` in it, it can be continued."""
    try:
        yield
    except BaseException as error:
        if not (path / keep).exists():
            shutil.rmtree(path, ignore_errors=True)
        # Some libraries, such as safetensors, have an error of their own with the system's text.
        if full := re.search("No space left on device|File too large|quota exceeded", str(error)):
            raise MachineError(
                f"{path} cannot be written: {full[0]}; what was made of it is deleted again: make "
                "room, or give a folder on another disk with --out"
            ) from error
        raise
