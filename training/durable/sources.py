"""The files that users bring to `data import`: the class and split that their folders give them.

Splits go by the names that public datasets give them. What could be read in two ways is no guess:
it gets a `doubt`, a sentence with both readings, which an import of classes refuses. Imports no
torch.
"""

import csv
import hashlib
import logging
import math
import os
import re
import secrets
import shutil
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar, cast

from contract.errors import UserError
from contract.file_names import composed, is_visible, walked
from contract.keys import SPLITS

_log = logging.getLogger(__name__)

# What systems and people leave among samples. Text may end the same, and is then all there is.
_STRAY_KINDS = {".db", ".ini", ".txt", ".md", ".csv", ".json", ".xml", ".html", ".pdf", ".log"}
# Such as Training, test_set and val2017.
_WORD = (
    "(?:(?P<train>train(?:ing)?|trn)|(?P<validation>val(?:id(?:ation|ate)?)?|dev(?:el(?:opment)?)?)"
    "|(?P<test>test(?:ing|-?dev)?|tst|eval(?:uation|uate)?|hold_?out|held_?out))"
)
_FILLER = "(?:set|data|images?|imgs?|pictures?|photos?|videos?|clips?|frames?|samples?|split)"
_WHOLE = re.compile(f"{_FILLER}*{_WORD}{_FILLER}*")
_PART = re.compile(f"(?<![a-z]){_WORD}{_FILLER}*(?![a-z])")
_TABLE = "or list file, class and split in a CSV"
_NO_CLASS = "archive {} is named like a shard: add KEY.cls to its samples, or unpack it as a class"

_Folder: TypeAlias = tuple[str, ...]


class _Place(NamedTuple):
    """A folder's class and split, and the folders that it is in below these."""

    label: str | None
    split: str | None
    rest: _Folder = ()


def splits_of(names: Iterable[str]) -> dict[str, str]:
    """Return the split of each name that is one's, in any case, such as Testing or val_set."""
    found = {name: _WHOLE.fullmatch(_letters(name)) for name in names}
    return {name: str(match.lastgroup) for name, match in found.items() if match}


def split_within(name: str) -> str | None:
    """Return the split that a part of a name denotes: instances_train2017 and trainA are train."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
    found = {match.lastgroup for match in _PART.finditer(words)}
    return found.pop() if len(found) == 1 else None


def places_of(names: Iterable[str]) -> Iterator[tuple[str, str | None, str | None, str]]:
    """Yield name, class, split and doubt of files: FILE, CLASS/FILE, or either below splits.

    Also CLASS/SPLIT/FILE, and all of these in folders that hold everything. Skips hidden files,
    those in hidden folders, and files of other kinds next to splits, which it names.
    """
    # A store may also list folders, which S3's console makes.
    visible = [name for name in names if is_visible(name) and name.rpartition("/")[2]]
    around = {up for name in visible for up in PurePosixPath(name).parent.parents}
    inner = (name for name in visible if PurePosixPath(name).parent not in around)
    kinds = {*map(_kind, inner)} - _STRAY_KINDS
    samples = {name for name in visible if _kind(name) in kinds or not kinds}
    folders = {_folder(name) for name in samples}
    place = _layout(folders)
    doubt = _doubt({place(folder) for folder in folders})
    has_splits = any(place(folder).split for folder in folders)
    beside = []
    for name in visible:
        label, split, _ = place(_folder(name))
        if split or not has_splits or name in samples:
            yield name, label and composed(label), split, doubt
        else:
            beside.append(name)
    _name_left_out(beside)


def _name_left_out(names: Sequence[str]) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if names[1:] else ""
        _log.warning("[data] left out, by name no sample: %s%s", names[0], more)


def _layout(folders: Set[_Folder]) -> Callable[[_Folder], _Place]:
    """Return how to read a folder."""
    at = _inside(folders, 0)
    tops, inner = (_all_splits(folders, place) for place in (at, at + 1))
    if tops:
        below = {top: {f for f in folders if _name(f, at) == top} for top in tops}
        first = {top: _inside(below[top], at + 1, split) for top, split in tops.items()}

        def of_split(f: _Folder) -> _Place:
            if (top := _name(f, at) or "") not in tops:
                return _Place(None, None)
            return _Place(_name(f, first[top]), tops[top], f[first[top] + 1 :])

        return of_split
    if inner and all(len(f) > at + 1 for f in folders):
        return lambda f: _Place(_name(f, at), inner.get(_name(f, at + 1) or ""), f[at + 2 :])
    return lambda f: _Place(_name(f, at), None, f[at + 1 :])


def _inside(folders: Set[_Folder], at: int, split: str = "") -> int:
    """Return the first place below folders that only hold another, as archives unpack.

    Within a split also below one that is named like it, or like no class: test/test, val/images.
    """
    while len(names := _names(folders, at)) == 1 and all(len(f) > at for f in folders):
        named, is_around = splits_of(names), all(len(f) > at + 1 for f in folders)
        if split:
            is_around |= split in named.values() or _is_filler(*names)
        elif named:
            # It is a split itself, unless others are in it.
            is_around &= len(_all_splits(folders, at + 1)) > 1
        if not is_around:
            break
        at += 1
    return at


def _doubt(places: Set[_Place]) -> str:
    """Return both readings if classes are named like splits, or hold folders of files."""
    inner = dict[str, set[str]]()
    for label, _, rest in places:
        if label is not None:
            # Neither CLASS/CLASS nor CLASS/images is another class.
            while rest and (rest[0] == label or _is_filler(rest[0])):
                rest = rest[1:]
            inner.setdefault(label, set()).add("/".join(rest))
    has_splits = any(place.split for place in places)
    like = [name for name in sorted(inner) if not has_splits and split_within(name)]
    is_each = len(like) == len(inner) and "train" in map(split_within, like)
    if is_each or len(splits_of(like)) > 1 or any(inner[name] != {""} for name in like):
        return (
            f"the folders {', '.join(sorted(inner)[:5])} may be splits: if they are, name each "
            "train, validation or test, and move others away; if they are classes, rename "
            f"{like[0]!r}, {_TABLE}"
        )
    each = {path for paths in inner.values() for path in paths}
    for label, paths in sorted(inner.items()) if len(each) > 1 else ():
        for more in (path.partition("/")[0] for path in sorted(paths) if path):
            return (
                f"the folder {label!r} holds the folder {more!r}: if {label!r} is a class, move "
                f"all its files into it; if {more!r} is one, move it next to {label!r}, {_TABLE}"
            )
    return ""


def _all_splits(folders: Iterable[_Folder], at: int) -> dict[str, str]:
    """Return the folders in this place if each is named like another split, else none."""
    names = _names(folders, at)
    splits = splits_of(names)
    return splits if len({*splits.values()}) == len(names) else {}


def _names(folders: Iterable[_Folder], at: int) -> set[str]:
    return {folder[at] for folder in folders if len(folder) > at}


def _name(folder: _Folder, at: int) -> str | None:
    return folder[at] if len(folder) > at else None


def _letters(name: str) -> str:
    return re.sub(r"[\W\d_]", "", name.lower())


def _is_filler(name: str) -> bool:
    return re.fullmatch(f"{_FILLER}+", _letters(name)) is not None


def _kind(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _folder(name: str) -> _Folder:
    return tuple(name.split("/")[:-1])


_TAR = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
_CLASS_SUFFIX = ".cls"
# The columns of a CSV, each with its alternative names; Hugging Face's has file_name and label.
_COLUMNS = (("file", "path", "file_name"), ("class", "label"))
_FOLDERS_TABLE = "metadata.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Brought:
    """One file that a user brings, wherever it is stored; another process can read it too."""

    name: str  # within the source
    label: str | None  # the name of its class; None if it is not in a class's folder
    split: str | None  # train, validation or test; None if the workload decides
    doubt: str = ""  # why the folder `label` may be no class: both readings

    @property
    def num_bytes(self) -> int:
        """Its size."""
        raise NotImplementedError

    def read(self) -> bytes:
        """Return its content."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile(Brought):
    """One file that a user brings, on this machine."""

    folder: Path  # the source's, which a million files can share

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
    """The files that a user gives to an import; an archive is unpacked into `scratch` first."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self._path = path
        self._scratch = scratch

    def files(self) -> list[SourceFile]:
        """Return its files, sorted by name.

        A folder (or archive) contains FILE or CLASS/FILE, perhaps below folders of splits
        (`places_of`), or a single CSV. A CSV has the columns file, class (or path, label) and,
        optionally, split; its paths are relative to its own folder. Any other file is a source of
        one file.
        """
        source, archives = self._path, set[str]()
        if not source.exists():
            raise UserError(f"{source} does not exist; name a folder, a file or an archive")
        if source.is_file() and _is_archive(source):
            source = self.folder()
        elif source.is_file() and source.suffix != ".csv":
            return [SourceFile(name=source.name, folder=source.parent, label=None, split=None)]
        if source.is_dir():
            is_ours = source != self._path
            source = _archives_unpacked(source, self._scratch, archives, is_ours=is_ours)
        try:
            source = _table_in(source) or source
            found = list(_of_table(source) if source.is_file() else _of_folder(source))
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(
                f"{source} cannot be read: {error}; save it as a CSV in UTF-8"
            ) from error
        found.sort(key=attrgetter("name"))
        if not found:
            raise UserError(f"{self._path} has no files; add some")
        # As WebDataset's are named, 00012 or train-0012; classes are not (n01440764).
        shards = {name for name in archives if re.fullmatch(r"(.*[-_.])?\d{4,}", name)}
        if all(file.label in shards for file in found):
            found = [replace(file, doubt=_NO_CLASS.format(file.label)) for file in found]
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


def class_names(files: Iterable[Brought]) -> list[str]:
    """Return all classes, sorted; UserError for a file that has none, or one in doubt."""
    names = set[str]()
    for file in files:
        if file.label is None or file.doubt:
            raise UserError(file.doubt or classless(file))
        names.add(file.label)
    return sorted(names)


_B = TypeVar("_B", bound=Brought)


def without_strays(files: Sequence[_B], suffixes: Iterable[str]) -> Sequence[_B]:
    """Return the files but those that lie beside samples, which it names, such as README.md.

    `suffixes` are those of samples; if there is none, all files are returned.
    """
    taken, strays = list[_B](), list[_B]()
    kinds = frozenset(suffixes)
    for file in files:
        kind = _kind(file.name)
        is_stray = kind in _STRAY_KINDS or (not kind and file.label is None)
        (strays if is_stray and kind not in kinds else taken).append(file)
    if not taken:
        return files
    _name_left_out([file.name for file in strays])
    return taken


def classless(file: Brought) -> str:
    """Return what to do about a file without a class."""
    if file.split is None:
        return f"{file.name} is in no class; lay the files out as CLASS/FILE"
    return (
        f"{file.name} is in no class; lay the files out as SPLIT/CLASS/FILE, or, if "
        f"{file.name.rpartition('/')[0]!r} is a class and no split, list file and class in a "
        "CSV"
    )


def refuse_untrained(labels: Sequence[str], splits: Sequence[str]) -> None:
    """Refuse a class that has files, but none in train."""
    pairs = {*zip(splits, labels, strict=True)}
    trained = {_plain(label): label for split, label in pairs if split == "train"}
    for split, label in sorted(pairs):
        if ("train", label) not in pairs:
            same = trained.get(_plain(label))
            advice = f", which has {same!r}; use one name for both" if same else "; add some"
            raise UserError(f"class {label!r} of {split} has no files in train{advice}")


def copy_in_splits(
    files: Sequence[SourceFile], out: Path, seed: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Copy files to SPLIT/CLASS/FILE in `out`; return the manifest's `meta`.

    Without a split of their own for validation, it gets a tenth of each class, not of test;
    `seed` decides which.
    """
    classes, held_out = class_names(files), set[str]()
    for name in () if any(file.split == "validation" for file in files) else classes:
        of_class = [file.name for file in files if file.label == name and file.split != "test"]
        of_class.sort(key=lambda each: hashlib.sha256(f"{seed} {each}".encode()).digest())
        held_out.update(of_class[: min(math.ceil(len(of_class) / 10), len(of_class) - 1)])
    counts = Counter[str]()
    splits = ["validation" if f.name in held_out else f.split or "train" for f in files]
    refuse_untrained([str(file.label) for file in files], splits)
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
    names = [
        f"{folder}/{name}".removeprefix(f"{root}/")
        for folder, names in _walk(root)
        for name in names
    ]
    tables = [root / n for n in names if n.endswith(f"/{_FOLDERS_TABLE}") and is_visible(n)]
    if tables := [*filter(_has_columns, tables)]:
        for table in tables:
            split = split_within(table.parent.name)
            for file in _of_table(table):
                name = file.path.relative_to(root).as_posix()
                yield replace(file, name=name, folder=root, split=file.split or split)
        return
    if any(name.endswith(_CLASS_SUFFIX) for name in names):
        yield from _of_shards(root, sorted(filter(is_visible, names)))
        return
    for name, label, split, doubt in places_of(names):
        if (root / name).is_file():
            yield SourceFile(name=name, folder=root, label=label, split=split, doubt=doubt)


def _of_shards(root: Path, names: Sequence[str]) -> Iterator[SourceFile]:
    """Yield what WebDataset's shards hold: KEY.jpg with its class in KEY.cls."""
    keys = {name.removesuffix(_CLASS_SUFFIX) for name in names if name.endswith(_CLASS_SUFFIX)}
    left_out = []
    for name in names:
        key, kind = name.removesuffix(_kind(name)), _kind(name)
        if key in keys and kind not in {*_STRAY_KINDS, _CLASS_SUFFIX}:
            label = composed((root / f"{key}{_CLASS_SUFFIX}").read_text().strip()) or None
            split = split_within(_folder(f"{root.name}/{name}")[-1])
            yield SourceFile(name=name, folder=root, label=label, split=split)
        elif kind != _CLASS_SUFFIX:
            left_out.append(name)
    _name_left_out(left_out)


def _table_in(root: Path) -> Path | None:
    """Return the one CSV that lists what is in a folder, or in the only folder within it."""
    while root.is_dir():
        inside = [path for path in root.iterdir() if is_visible(path.name)]
        tables = [path for path in inside if path.suffix == ".csv"]
        if len(tables) == 1:
            # Beside folders it may be about anything.
            is_listed = _has_columns(tables[0]) or not any(path.is_dir() for path in inside)
            return tables[0] if is_listed else None
        if len(inside) != 1:
            return None
        root = inside[0]
    return None


def _has_columns(table: Path) -> bool:
    # One that lists nothing may be in any encoding.
    with table.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        there = csv.DictReader(stream).fieldnames or ()
    return all(set(names) & set(there) for names in _COLUMNS)


def _walk(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each visible folder and its files."""
    for folder, folders, names in walked(root):
        # The model would lack the class of a folder that was left empty by mistake.
        if not folders and not names and Path(folder) != root:
            raise UserError(f"{folder} is empty; add files, or delete it")
        folders[:] = filter(is_visible, folders)
        yield folder, names


def _of_table(table: Path) -> Iterator[SourceFile]:
    with table.open(newline="", encoding="utf-8-sig") as stream:
        rows = csv.DictReader(stream)
        named = rows.fieldnames or ()
        columns = [next((name for name in names if name in named), "") for names in _COLUMNS]
        if "" in columns:
            missing = _COLUMNS[columns.index("")][0]
            raise UserError(
                f"{table} has no column {missing!r}; its first line must name the columns file, "
                "class (or path, label) and, optionally, split"
            )
        lines = dict[str, int]()
        for row in rows:
            where = f"{table}, line {rows.line_num}"
            name, label, split = (row.get(key) or "" for key in (*columns, "split"))
            # As written, with Windows' separators, or in either form of Unicode.
            spelled = (name, name.replace("\\", "/"))
            forms = (
                unicodedata.normalize(form, text) for form in ("NFC", "NFD") for text in spelled
            )
            found = (text for text in (*spelled, *forms) if (table.parent / text).is_file())
            path = table.parent / name
            if not name or (there := next(found, None)) is None:
                raise UserError(
                    f"{where}: the file {str(path)!r} does not exist; paths are relative to the CSV"
                )
            # Twice it might be of two classes, or be learned from and tested on.
            line = lines.setdefault(os.path.normpath(there), rows.line_num)
            if line != rows.line_num:
                raise UserError(f"{where}: {name} is in line {line}, too; list each file once")
            if not label:
                raise UserError(f"{where}: {name} has no class; name one")
            split = splits_of([split]).get(split, split)
            if split and split not in SPLITS:
                raise UserError(f"{where}: split is {split!r}; use one of {', '.join(SPLITS)}")
            label = composed(label)
            yield SourceFile(name=there, folder=table.parent, label=label, split=split or None)


def _is_archive(path: Path) -> bool:
    return path.name.endswith((".zip", *_TAR)) or zipfile.is_zipfile(path)


def _archives_unpacked(root: Path, scratch: Path, unpacked: set[str], *, is_ours: bool) -> Path:
    """Return the folder, or another if it holds archives: ILSVRC's classes, WebDataset's shards.

    Each is unpacked to a folder of its name, which joins those in `unpacked`, or of the split that
    it alone is named like.
    """
    archives, beside = list[Path](), list[str]()
    for folder, folders, names in walked(root):
        folders[:] = sorted(filter(is_visible, folders))
        for path in (Path(folder, name) for name in sorted(filter(is_visible, names))):
            if path.name.endswith((".zip", *_TAR)):
                archives.append(path)
            elif (kind := _kind(path.name)) and kind not in _STRAY_KINDS:
                return root
            else:
                beside.append(path.relative_to(root).as_posix())
    if not archives:
        return root
    _name_left_out(beside)
    out = scratch / f"unpacked-{secrets.token_hex(4)}"
    splits = [split_within(_stem(path)) for path in archives]
    for path, split in zip(archives, splits, strict=True):
        name = split if split and splits.count(split) == 1 else _stem(path)
        unpacked.add(name)
        above = out / path.parent.relative_to(root)
        above.mkdir(parents=True, exist_ok=True)
        inner = scratch / f"unpacked-{secrets.token_hex(4)}"
        inner.mkdir()
        _unpack(path, inner)
        if is_ours:
            path.unlink()
        inner = _archives_unpacked(inner, scratch, unpacked, is_ours=True)
        inner.rename(above / (path.name if (above / name).exists() else name))
    return out


def _stem(path: Path) -> str:
    return re.sub(r"(\.zip|\.tgz|\.tar(\.\w+)?)$", "", path.name)


def _unpack(archive: Path, out: Path) -> None:
    """Unpack a zip or tar archive within `out`; UserError if it is damaged."""
    try:
        is_zip = zipfile.is_zipfile(archive)
        # A tar that ends with a small zip also ends as a zip does.
        if archive.name.endswith(_TAR) and (not is_zip or tarfile.is_tarfile(archive)):
            with tarfile.open(archive) as packed:
                packed.extractall(out, filter="data")
                # It takes a damaged header for the end, which only zeros follow.
                rest = cast(BinaryIO, packed.fileobj)
                rest.seek(packed.offset)
                if rest.read(1 << 20).strip(b"\0"):
                    raise tarfile.TarError(f"it is damaged at byte {packed.offset}")
        else:
            with zipfile.ZipFile(archive) as opened:
                for info in opened.infolist():
                    # One from Windows may have its separators.
                    if info.create_system == 0:
                        info.filename = info.filename.replace("\\", "/")
                    opened.extract(info, out)
    except Exception as error:  # of each compression its own; RuntimeError for a password
        if getattr(error, "errno", None):
            raise
        why = str(error).partition(":\n")[0]
        raise UserError(f"{archive} cannot be unpacked: {why}; make it again") from error
