"""The root of the container contract on this machine: one run's at a time, its source copied in."""

import contextlib
import errno
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from contract.source import find_files
from training.errors import MachineError, UserError
from training.program.container import Container
from training.store.unfinished import write_whole

SAGEMAKER_ROOT = Path("/opt/ml")
_LOCK, _RUN = ".lock", ".run"


@contextlib.contextmanager
def claimed(root: Path, run_uri: str) -> Iterator[None]:
    """Hold the root for one run; UserError if another one uses it, or has left files there."""
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((root / _LOCK).open("a"))
        except OSError as error:
            raise (MachineError if error.errno == errno.ENOSPC else UserError)(
                f"the folder {root} cannot be used ({error.strerror}); give another --ml-root"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another program runs in {root}; wait for its end, or give another --ml-root"
            ) from None
        _claim_files(root, run_uri)
        yield


def _claim_files(root: Path, run_uri: str) -> None:
    container, marker = Container(root=root), root / _RUN
    checkpoints, whose = container.checkpoints, marker.read_text() if marker.is_file() else ""
    if not whose:
        # What `Container.prepare` and `copy_source` replace.
        for folder in (container.code, root / "input", container.model, container.output):
            if folder.is_dir() and any(folder.iterdir()):
                raise UserError(
                    f"{folder} has files of something else, which this run would replace; "
                    "move them away, or give another --ml-root"
                )
    if whose != run_uri and checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise UserError(
            f"{checkpoints} has files of {whose or 'something else'}, which this run would "
            "replace; move them away, or give another --ml-root"
        )
    if whose != run_uri:  # else not written again: what this run left may have filled the disk
        write_whole(marker, run_uri.encode())


def copy_source(source: Path, code: Path) -> None:
    """Copy what travels of a source folder to where the program runs; what was there goes."""
    shutil.rmtree(code, ignore_errors=True)
    for path in find_files(source):
        target = code / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, target)
