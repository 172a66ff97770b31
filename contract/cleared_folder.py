"""The output folder of a command, emptied of what its last run left; never a user's own folder."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contract.errors import UserError

MARK = "made-by-training"


@contextmanager
def cleared_folder(folder: Path) -> Iterator[Path]:
    """Hold an empty folder for one command: a new or empty one, or one that has our mark.

    UserError, and nothing deleted, if it has files but no mark, or if another command holds it.
    """
    mark = folder / MARK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.is_file() and any(folder.iterdir()):
            raise UserError(
                f"{folder} has files that this command did not make, and the command first empties "
                "its output folder; choose a new or empty one, or delete it yourself"
            )
        lock = mark.open("a")
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror}; choose another folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another command is writing to {folder}; wait until it ends, or choose another"
            ) from None
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()
        yield folder
