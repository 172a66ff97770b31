"""Which class and split a user's file belongs to, by the folders that it is in.

Splits go by the names that public datasets give them. What could be read in two ways is no guess:
it gets a `doubt`, a sentence with both readings, which an import of classes refuses.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import PurePosixPath
from typing import NamedTuple, TypeAlias

SPLITS = ("train", "validation", "test")
# What systems and people leave among samples. Text may end the same, and is then all there is.
BESIDE = {".db", ".ini", ".txt", ".md", ".csv", ".json", ".xml", ".html", ".pdf", ".log"}
# Such as Training, test_set and val2017.
_WORD = (
    "(?:(?P<train>train(?:ing)?|trn)|(?P<validation>val(?:id(?:ation|ate)?)?|dev(?:el(?:opment)?)?)"
    "|(?P<test>test(?:ing|-?dev)?|tst|eval(?:uation|uate)?|hold_?out|held_?out))"
)
_FILLER = "(?:set|data|images?|imgs?|pictures?|photos?|videos?|clips?|frames?|samples?|split)"
_WHOLE = re.compile(f"{_FILLER}*{_WORD}{_FILLER}*")
_PART = re.compile(f"(?<![a-z]){_WORD}{_FILLER}*(?![a-z])")
_TABLE = "or list file, class and split in a CSV"

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
    those in hidden folders, and files of other kinds beside splits.
    """
    # A store may also list folders, which S3's console makes.
    visible = [name for name in names if not re.search(r"(^|/)(\.|$)", name)]
    around = {up for name in visible for up in PurePosixPath(name).parent.parents}
    kinds = {_kind(name) for name in visible if PurePosixPath(name).parent not in around} - BESIDE
    samples = {name for name in visible if _kind(name) in kinds or not kinds}
    folders = {_folder(name) for name in samples}
    place = _layout(folders)
    doubt = _doubt({place(folder) for folder in folders})
    has_splits = any(place(folder).split for folder in folders)
    for name in visible:
        label, split, _ = place(_folder(name))
        if split or not has_splits or name in samples:
            yield name, label, split, doubt


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
                f"all its files into it; if {more!r} is one, move it beside {label!r}, {_TABLE}"
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
