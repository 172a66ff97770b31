"""The files that users bring to `data import`, with or without classes and splits.

Imports no torch.
"""

import csv
import hashlib
import math
import os
import re
import shutil
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from contract.errors import UserError
from training.durable.source_layout import SPLITS, places_of, splits_of

_TAR = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
# The columns of a CSV, each with its alternative name.
_COLUMNS = (("file", "path"), ("class", "label"))


class Brought(Protocol):
    """One file that a user brings, wherever it is stored; another process can read it too."""

    @property
    def name(self) -> str:
        """Its name within the source."""

    @property
    def label(self) -> str | None:
        """The name of its class; None if it is not in a class's folder."""

    @property
    def split(self) -> str | None:
        """train, validation or test; None if the workload decides."""

    @property
    def doubt(self) -> str:
        """Why the folder `label` may be no class: both readings. Empty if it is one."""

    @property
    def num_bytes(self) -> int:
        """Its size."""

    def read(self) -> bytes:
        """Its content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file that a user brings, on this machine."""

    name: str
    # The source's folder, which a million files can share.
    folder: Path
    label: str | None
    split: str | None
    doubt: str = ""

    @property
    def path(self) -> Path:
        """Its path on this machine."""
        return self.folder / self.name

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    def read(self) -> bytes:
        return self.path.read_bytes()


class ImportSource:
    """What a user gives to an import; an archive is unpacked into `scratch` first."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self._path = path
        self._scratch = scratch

    def files(self) -> list[SourceFile]:
        """Return its files, sorted by name.

        A folder (or archive) contains FILE or CLASS/FILE, perhaps below folders of splits
        (source_layout.py), or a single CSV. A CSV has the columns file, class (or path, label) and,
        optionally, split; its paths are relative to its own folder. Any other file is a source of
        one file.
        """
        source = self._path
        if not source.exists():
            raise UserError(f"{source} does not exist; name a folder, a file or an archive")
        if source.is_file() and _is_archive(source):
            source = self.folder()
        elif source.is_file() and source.suffix != ".csv":
            return [SourceFile(name=source.name, folder=source.parent, label=None, split=None)]
        if source.is_dir():
            tables = sorted(source.glob("*.csv"))
            source = tables[0] if len(tables) == 1 else source
        try:
            found = list(_of_table(source) if source.is_file() else _of_folder(source))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(
                f"{source} cannot be read: {error}; save it as a CSV in UTF-8"
            ) from error
        found.sort(key=attrgetter("name"))
        if not found:
            raise UserError(f"{source} has no files; add some")
        if {file.split is None for file in found} == {True, False}:
            without = next(file.name for file in found if file.split is None)
            raise UserError(
                f"{without} has no split, but other files do; assign one to every file or to none"
            )
        return found

    def folder(self) -> Path:
        """Return it as a folder; UserError for a file that is no archive."""
        source = self._path
        if source.is_dir():
            return source
        if not source.is_file() or not _is_archive(source):
            what = "is not an archive" if source.exists() else "does not exist"
            raise UserError(f"{source} {what}; name a folder, a zip or a tar archive")
        unpacked = self._scratch / "unpacked"
        unpacked.mkdir(parents=True)
        _unpack(source, unpacked)
        return unpacked


class ClassFolders:
    """Files whose folders are their classes."""

    @staticmethod
    def names(files: Iterable[Brought]) -> list[str]:
        """Return all classes, sorted; UserError for a file that has none, or one in doubt."""
        names = set[str]()
        for file in files:
            if file.label is None or file.doubt:
                raise UserError(file.doubt or ClassFolders.refusal(file))
            names.add(file.label)
        return sorted(names)

    @staticmethod
    def refusal(file: Brought) -> str:
        """Return what to do about a file without a class."""
        if file.split is None:
            return f"{file.name} is in no class; lay the files out as CLASS/FILE"
        return (
            f"{file.name} is in no class; lay the files out as SPLIT/CLASS/FILE, or, if "
            f"{file.name.rpartition('/')[0]!r} is a class and no split, list file and class in a "
            "CSV"
        )

    @staticmethod
    def check(labels: Sequence[str], splits: Sequence[str]) -> None:
        """Refuse a class that has files, but none in train."""
        pairs = {*zip(splits, labels, strict=True)}
        trained = {_plain(label): label for split, label in pairs if split == "train"}
        for split, label in sorted(pairs):
            if ("train", label) not in pairs:
                same = trained.get(_plain(label))
                advice = f", which has {same!r}; use one name for both" if same else "; add some"
                raise UserError(f"class {label!r} of {split} has no files in train{advice}")

    @staticmethod
    def copy_in_splits(
        files: Sequence[SourceFile], out: Path, seed: int, progress: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """Copy files to SPLIT/CLASS/FILE in `out`; return the manifest's `meta`.

        Without a split of their own for validation, it gets a tenth of each class, not of test;
        `seed` decides which.
        """
        classes, held_out = ClassFolders.names(files), set[str]()
        for name in () if any(file.split == "validation" for file in files) else classes:
            of_class = [file.name for file in files if file.label == name and file.split != "test"]
            of_class.sort(key=lambda each: hashlib.sha256(f"{seed} {each}".encode()).digest())
            held_out.update(of_class[: min(math.ceil(len(of_class) / 10), len(of_class) - 1)])
        counts = Counter[str]()
        splits = ["validation" if f.name in held_out else f.split or "train" for f in files]
        ClassFolders.check([str(file.label) for file in files], splits)
        for done, (file, split) in enumerate(zip(files, splits, strict=True), start=1):
            target = Path(out, split, str(file.label), Path(file.name).name)
            if target.exists():
                raise UserError(f"{file.name} has the same name as a file of its class; rename it")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.path, target)
            counts[split] += 1
            progress(done, len(files))
        return {"classes": classes, "splits": dict(counts)}


def _plain(name: str) -> str:
    """Return a name without what people and systems spell differently."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKC", name).casefold())


def _of_folder(root: Path) -> Iterator[SourceFile]:
    names = (
        f"{folder}/{name}".removeprefix(f"{root}/")
        for folder, names in _walk(root)
        for name in names
    )
    for name, label, split, doubt in places_of(names):
        if (root / name).is_file():
            yield SourceFile(name=name, folder=root, label=label, split=split, doubt=doubt)


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each visible folder and its files; follow links, but refuse one to a parent folder."""
    for folder, folders, names in os.walk(root, followlinks=True):
        # The model would lack the class of a folder that was left empty by mistake.
        if not folders and not names and Path(folder) != root:
            raise UserError(f"{folder} is empty; add files, or delete it")
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            path = Path(folder, name)
            if path.is_symlink() and path.resolve() in [up.resolve() for up in path.parents]:
                raise UserError(f"{path} is a link to a folder that contains it; delete it")
        yield folder, names


def _of_table(table: Path) -> Iterator[SourceFile]:
    with table.open(newline="", encoding="utf-8-sig") as stream:
        rows = csv.DictReader(stream)
        there = rows.fieldnames or ()
        columns = [next((name for name in names if name in there), "") for names in _COLUMNS]
        if "" in columns:
            missing = _COLUMNS[columns.index("")][0]
            raise UserError(
                f"{table} has no column {missing!r}; its first line must name the columns file, "
                "class (or path, label) and, optionally, split"
            )
        for row in rows:
            where = f"{table}, line {rows.line_num}"
            name, label, split = (row.get(key) or "" for key in (*columns, "split"))
            path = table.parent / name
            if not name or not path.is_file():
                raise UserError(
                    f"{where}: the file {str(path)!r} does not exist; paths are relative to the CSV"
                )
            if not label:
                raise UserError(f"{where}: {name} has no class; name one")
            split = splits_of([split]).get(split, split)
            if split and split not in SPLITS:
                raise UserError(f"{where}: split is {split!r}; use one of {', '.join(SPLITS)}")
            yield SourceFile(name=name, folder=table.parent, label=label, split=split or None)


def _is_archive(path: Path) -> bool:
    return path.name.endswith((".zip", *_TAR)) or zipfile.is_zipfile(path)


def _unpack(archive: Path, out: Path) -> None:
    """Unpack a zip or tar archive within `out`; UserError if it is damaged."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(out)
        elif archive.name.endswith(_TAR):
            with tarfile.open(archive) as packed:
                packed.extractall(out, filter="data")
        else:
            raise UserError(f"{archive} is not a zip archive, despite its name; create it again")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{archive} cannot be unpacked: {error}; make it again") from error
