"""What users bring is found with its classes and splits; what cannot be used is named."""

import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from contract.errors import UserError
from training.durable.sources import ImportSource, SourceFile, class_names, copy_in_splits

FILES = ("cats/1.npy", "cats/2.npy", "dogs/häßlich 1.npy", "dogs/.DS_Store", ".git/x")


def fill(folder: Path, names: tuple[str, ...] = FILES) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def rows(files: list[SourceFile]) -> list[tuple[str, str | None, str | None]]:
    """Name, class and split; and every file can be read."""
    assert all(file.path.read_text().endswith(file.path.name) for file in files)
    return [(file.name, file.label, file.split) for file in files]


EXPECTED = [
    ("cats/1.npy", "cats", None),
    ("cats/2.npy", "cats", None),
    ("dogs/häßlich 1.npy", "dogs", None),
]


def test_a_folder_per_class(tmp_path: Path) -> None:
    files = ImportSource(fill(tmp_path / "own"), tmp_path).files()
    assert rows(files) == EXPECTED
    assert class_names(files) == ["cats", "dogs"]


@pytest.mark.parametrize("kind", ["zip", "tar", "gztar"])
def test_an_archive_of_such_a_folder(tmp_path: Path, kind: str) -> None:
    archive = shutil.make_archive(str(tmp_path / "own"), kind, fill(tmp_path / "own"))
    assert rows(ImportSource(Path(archive), tmp_path / "scratch").files()) == EXPECTED


def test_a_folder_per_split_and_class(tmp_path: Path) -> None:
    names = ("train/cats/1.npy", "train/cats/more/2.npy", "val/dogs/1.npy")
    assert rows(ImportSource(fill(tmp_path / "own", names), tmp_path).files()) == [
        ("train/cats/1.npy", "cats", "train"),
        ("train/cats/more/2.npy", "cats", "train"),
        ("val/dogs/1.npy", "dogs", "validation"),
    ]


def test_folders_may_be_links_but_not_to_what_they_are_in(tmp_path: Path) -> None:
    """As a subset of ImageNet is often made: a class that was left out would be missed late."""
    own, kept = fill(tmp_path / "own"), tmp_path / "kept"
    (own / "dogs").rename(kept)
    (own / "dogs").symlink_to(kept)
    assert rows(ImportSource(own, tmp_path).files()) == EXPECTED
    (kept / "all").symlink_to(own)
    with pytest.raises(UserError, match="dogs/all is a link to a folder that contains it"):
        ImportSource(own, tmp_path).files()


def test_files_without_classes(tmp_path: Path) -> None:
    own = fill(tmp_path / "own", ("train/1.txt", "val/2.txt"))
    files = ImportSource(own, tmp_path).files()
    assert rows(files) == [("train/1.txt", None, "train"), ("val/2.txt", None, "validation")]
    with pytest.raises(UserError, match=r"train/1\.txt is in no class; .* as SPLIT/CLASS/FILE"):
        class_names(files)
    flat = ImportSource(fill(tmp_path / "flat", ("1.txt",)), tmp_path).files()
    assert rows(flat) == [("1.txt", None, None)]
    assert flat[0].path.name == ImportSource(tmp_path / "flat" / "1.txt", tmp_path).files()[0].name
    with pytest.raises(UserError, match=r"1\.txt is in no class; lay the files out as CLASS/FILE"):
        class_names(flat)
    fill(own, ("3.txt",))
    with pytest.raises(UserError, match=r"3\.txt has no split, but other files do"):
        ImportSource(own, tmp_path).files()


def test_a_table_alone_or_in_a_folder_or_an_archive(tmp_path: Path) -> None:
    own = fill(tmp_path / "own", ("a/1.npy", "a/2.npy"))
    text = "\ufefffile,class,split,width\na/2.npy,dogs,val,7\na/1.npy,cats,train,8\n"
    (own / "table.csv").write_text(text, encoding="utf-8")
    expected = [("a/1.npy", "cats", "train"), ("a/2.npy", "dogs", "validation")]
    assert rows(ImportSource(own / "table.csv", tmp_path).files()) == expected
    assert rows(ImportSource(own, tmp_path).files()) == expected
    archive = shutil.make_archive(str(tmp_path / "own"), "zip", own)
    assert rows(ImportSource(Path(archive), tmp_path).files()) == expected


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("name,label\na,b\n", "has no column 'file'; its first line must name"),
        ("", "has no column 'file'"),
        ("file,class\na/3.npy,cats\n", r"line 2: the file .*a/3\.npy"),
        ("file,class\na/1.npy\n", r"line 2: a/1\.npy has no class"),
        ("file,class,split\na/1.npy,cats,part\n", "line 2: split is 'part'; use one of train, "),
        ("file,class,split\na/1.npy,cats,train\na/2.npy,cats,\n", r"a/2\.npy has no split, but "),
    ],
)
def test_fails_for_a_table_that_says_too_little(tmp_path: Path, table: str, message: str) -> None:
    own = fill(tmp_path / "own", ("a/1.npy", "a/2.npy"))
    (own / "table.csv").write_text(table)
    with pytest.raises(UserError, match=message):
        ImportSource(own / "table.csv", tmp_path).files()


@pytest.mark.parametrize("content", ["file,class\na,b\n".encode("utf-16"), b"file,class\n\xfc,b\n"])
def test_fails_for_a_table_in_another_encoding_than_utf_8(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "table.csv").write_bytes(content)
    with pytest.raises(
        UserError, match=r"table\.csv cannot be read: .*; save it as a CSV in UTF-8"
    ):
        ImportSource(tmp_path / "table.csv", tmp_path).files()


def test_fails_for_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; name a folder, a file or an archive"):
        ImportSource(tmp_path / "none", tmp_path).files()
    (tmp_path / "clips.zip").write_text("")
    with pytest.raises(UserError, match=r"clips\.zip is not a zip archive, despite its name"):
        ImportSource(tmp_path / "clips.zip", tmp_path / "a").files()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no files; add some"):
        ImportSource(tmp_path / "empty", tmp_path).files()
    (tmp_path / "torn.tar.gz").write_bytes(b"\x1f\x8b\x08 torn")
    with pytest.raises(UserError, match="cannot be unpacked"):
        ImportSource(tmp_path / "torn.tar.gz", tmp_path / "b").files()


def test_no_archive_reaches_outside(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr("../../outside", "x")
    (file,) = ImportSource(tmp_path / "evil.zip", tmp_path / "a").files()
    assert file.path.is_relative_to(tmp_path / "a")
    with tarfile.open(tmp_path / "evil.tar", "w") as packed:
        packed.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    with pytest.raises(UserError, match=r"evil\.tar cannot be unpacked: '\.\./outside' would be "):
        ImportSource(tmp_path / "evil.tar", tmp_path / "b").files()
    assert not (tmp_path / "outside").exists()


def test_files_are_copied_into_splits_the_same_for_the_same_seed(tmp_path: Path) -> None:
    names = tuple(f"{kind}/{number}.png" for kind in ("cats", "dogs") for number in range(20))
    files = ImportSource(fill(tmp_path / "own", (*names, "mice/1.png")), tmp_path).files()
    held_out = []
    for out in ("one", "two"):
        meta = copy_in_splits(files, tmp_path / out, 3, lambda done, total: None)
        found = sorted((tmp_path / out / "validation").rglob("*.png"))
        held_out.append([path.relative_to(tmp_path / out) for path in found])
    assert meta == {"classes": ["cats", "dogs", "mice"], "splits": {"train": 37, "validation": 4}}
    assert held_out[0] == held_out[1]
    assert (tmp_path / "one/train/mice/1.png").read_text() == "mice/1.png", "the only one is kept"


def test_fails_for_two_files_of_a_class_with_one_name(tmp_path: Path) -> None:
    own = fill(tmp_path / "own", ("cats/1.png", "cats/more/1.png", "cats/2.png"))
    table = "file,class,split\ncats/1.png,cats,train\ncats/more/1.png,cats,train\n"
    table += "cats/2.png,cats,val\n"
    (own / "table.csv").write_text(table)
    files = ImportSource(own, tmp_path).files()
    with pytest.raises(UserError, match=r"more/1\.png has the same name as a file of its class"):
        copy_in_splits(files, tmp_path / "out", 0, lambda done, total: None)
