"""Where a command is told to write: looked at before it begins to work, not when it is done.

Imports no torch.
"""

import os
import tempfile
from pathlib import Path

from training.errors import UserError


def checked_file(path: Path) -> Path:
    """A file that can be written, its folder made; UserError says why it cannot."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file to write")
    checked_folder(path.parent)
    return path


def checked_folder(path: Path) -> Path:
    """A folder that can be written into, made with its parents; UserError says why it cannot."""
    if path.is_file():
        raise UserError(f"{path} is a file, so nothing can be written below it; give a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Not os.access: root may write everywhere but on a read-only file system.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        why = error.strerror or os.strerror(error.errno or 0)
        raise UserError(f"nothing can be written to {path}: {why}; give another place") from error
    return path
