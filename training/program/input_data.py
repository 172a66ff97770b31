"""The dataset of a program: any files, which become its channels."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contract.keys import MANIFEST
from training.errors import UserError
from training.report.progress import FileProgressBar
from training.store.dataset import sync_dataset
from training.store.local_dataset import ARRIVING, LocalDataset, open_dataset
from training.store.open import open_store


@dataclass(frozen=True, kw_only=True, slots=True)
class InputData:
    """A folder with every file in it, or none."""

    fingerprint: str
    opened: LocalDataset | None = None
    plain: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The folder. Waits for the sync if one is filling it."""
        return self.opened.folder if self.opened else self.plain


def open_input(uri: str | None, scratch: Path, beat: Callable[[], None]) -> InputData:
    """Open a dataset, synced first from S3; a local folder needs no manifest.

    `beat` is called while it is verified, fetched or waited for.
    """
    if uri is None:
        return InputData(fingerprint="none")
    folder = Path(uri)
    with FileProgressBar("verifying the dataset") as show:

        def report(done: int, total: int, size: int) -> None:
            beat()
            show(done, total, size)

        if uri.startswith("s3://"):
            folder = scratch / "dataset"
            sync_dataset(open_store(uri), folder, report)
        elif folder.is_dir() and not any((folder / n).exists() for n in (MANIFEST, ARRIVING)):
            return InputData(fingerprint=_fingerprint(folder), plain=folder)
        opened = open_dataset(folder, progress=report, waiting=beat)
    return InputData(fingerprint=opened.fingerprint, opened=opened)


def _fingerprint(folder: Path) -> str:
    """Of a folder without a manifest: names and sizes, as no checksum is known."""
    lines = []
    for below, _, names in os.walk(folder):
        for path in (Path(below, name) for name in names):
            lines.append(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n")
    if not lines:
        raise UserError(
            f"the dataset folder {folder} is empty; give one with files, or leave it out"
        )
    return "sizes-" + hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
