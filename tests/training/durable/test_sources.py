"""What users bring is found with its classes and splits; what cannot be used is named."""

import bz2
import errno
import gzip
import io
import logging
import lzma
import os
import shutil
import tarfile
import unicodedata
import zipfile
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UserError
from training.durable.sources import ImportSource, SourceFile, class_names, copy_in_splits

CHANGES = ("header", "stream", "follows")
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


@pytest.mark.parametrize("is_archive", [False, True])
def test_a_folder_that_cannot_be_listed_is_no_missing_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool
) -> None:
    own, scandir = tmp_path / "own", os.scandir
    if not is_archive:
        fill(own)
    for name in ("cats", "dogs") if is_archive else ():
        packed(own / f"{name}/1.tar", {"1.npy": b"x"})

    def scan(path: Path) -> Any:
        if Path(path).name == "dogs":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(UserError, match="own/dogs cannot be listed: Input/output error; make it"):
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
        ("file,class\na/1.npy,cats\n./a/1.npy,dogs\n", r"line 3: \./a/1\.npy is in line 2, too; "),
        ("file,class\na/1.npy,cats\na/2.npy,dogs\na/1.npy,cats\n", "line 4: .*; list each file"),
        ("file,class,split\na/1.npy,cats,part\n", "line 2: split is 'part'; use one of train, "),
        ("file,class,split\na/1.npy,cats,train\na/2.npy,cats,\n", r"a/2\.npy has no split, but "),
    ],
)
def test_fails_for_a_table_that_says_too_little_or_too_much(
    tmp_path: Path, table: str, message: str
) -> None:
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
    with pytest.raises(UserError, match=r"clips\.zip cannot be unpacked: File is not a zip"):
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


def test_what_a_mac_or_an_exfat_disk_leaves_is_no_sample(tmp_path: Path) -> None:
    own = fill(tmp_path / "own", ("set/cats/1.npy", "set/dogs/2.npy", "set/dogs/._2.npy"))
    fill(own, ("__MACOSX/set/cats/._1.npy", "__MACOSX/notes.npy", "set/._table.csv"))
    (own / "__MACOSX/set/birds").mkdir()
    archive = shutil.make_archive(str(tmp_path / "own"), "zip", own)
    for source in (own, Path(archive)):
        found = rows(ImportSource(source, tmp_path / "scratch").files())
        assert found == [("set/cats/1.npy", "cats", None), ("set/dogs/2.npy", "dogs", None)]


def test_both_forms_of_a_name_are_one_class_and_one_file(tmp_path: Path) -> None:
    composed, apart = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    names = (f"train/{composed}/1.npy", f"val/{apart}/2.npy")
    found = ImportSource(fill(tmp_path / "own", names), tmp_path).files()
    assert [file.label for file in found] == [composed, composed]
    table = f"file,class\n{apart}\\\\1.npy,{apart}\n{composed}/2.npy,b\n".replace("\\\\", "\\")
    (fill(tmp_path / "listed", (f"{composed}/1.npy", f"{apart}/2.npy")) / "t.csv").write_text(table)
    found = ImportSource(tmp_path / "listed", tmp_path).files()
    assert sorted(file.label or "" for file in found) == ["b", composed]
    assert all(file.path.is_file() for file in found)


SPLITS = [("train/cats/1.npy", "cats", "train"), ("val/cats/1.npy", "cats", "validation")]


@pytest.mark.parametrize("beside", ["birds.csv", "README.md", "LICENSE", "wnids.txt", "best.h5"])
def test_what_lies_beside_splits_is_left_out_and_named(
    tmp_path: Path, beside: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = fill(tmp_path / "own", tuple(name for name, *_ in SPLITS))
    text = "class id,filepaths,labels\n0,train/cats/1.npy,Kätzchen\n"
    (own / beside).write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert rows(ImportSource(own, tmp_path).files()) == SPLITS
    assert caplog.messages == [f"[data] left out, by name no sample: {beside}"]


def test_a_table_is_found_in_the_only_folder(tmp_path: Path) -> None:
    own = fill(tmp_path / "own/set", ("x/1.npy",))
    (own / "list.csv").write_text("file,class\nx/1.npy,cats\n")
    assert [file.label for file in ImportSource(tmp_path / "own", tmp_path).files()] == ["cats"]


def test_hugging_faces_folders_have_a_table_in_each_split(tmp_path: Path) -> None:
    own = fill(tmp_path / "own", ("train/1.npy", "train/2.npy", "test/1.npy", "README.md"))
    for split in ("train", "test"):
        (own / split / "metadata.csv").write_text("file_name,label\n1.npy,cats\n")
    assert rows(ImportSource(own, tmp_path).files()) == [
        ("test/1.npy", "cats", "test"),
        ("train/1.npy", "cats", "train"),
    ]


def packed(path: Path, members: dict[str, bytes]) -> bytes:
    """A tar of these members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path.read_bytes()


def test_a_tar_of_tars_has_a_class_in_each(tmp_path: Path) -> None:
    """ILSVRC2012_img_train.tar; as a folder of archives, the files that were brought stay."""
    own = tmp_path / "own"
    inner = {
        f"{name}.tar": packed(own / f"{name}.tar", {f"{name}_1.JPEG": b"x"})
        for name in ("n1", "n2")
    }
    packed(tmp_path / "ILSVRC2012_img_train.tar", inner)
    for number, source in enumerate((own, tmp_path / "ILSVRC2012_img_train.tar")):
        found = ImportSource(source, tmp_path / f"scratch{number}").files()
        expected = [(f"{name}/{name}_1.JPEG", name) for name in ("n1", "n2")]
        assert [(file.name, file.label) for file in found] == expected
    assert sorted(path.name for path in own.iterdir()) == ["n1.tar", "n2.tar"]


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_a_tar_that_ends_with_a_zip_is_no_zip(tmp_path: Path, kind: str) -> None:
    """A zip is known by its end, which is also that of this tar."""
    members = {}
    for name in ("cats", "dogs"):
        with zipfile.ZipFile(buffer := io.BytesIO(), "w") as inner:
            inner.writestr("1.jpg", b"x")
        members[f"in/x/{name}.zip"] = buffer.getvalue()
    outer = tmp_path / f"outer.{kind}"
    content = packed(tmp_path / "plain", members)
    outer.write_bytes(gzip.compress(content) if kind == "tar.gz" else content)
    found = ImportSource(outer, tmp_path / "scratch").files()
    assert [file.label for file in found] == ["cats", "dogs"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, change) for kind in ("tar.gz", "tar.bz2", "tar.xz") for change in CHANGES),
        *(("tar", "header"), ("tar", "follows"), ("zip", "stream")),
    ],
)
def test_fails_for_an_archive_that_would_yield_fewer_files(
    tmp_path: Path, kind: str, change: str
) -> None:
    """To tarfile a damaged header is the end: half of the classes would be missing."""
    members = {f"{name}/{n}.jpg": os.urandom(4000) for name in ("a", "b") for n in range(20)}
    content = packed(tmp_path / "whole.tar", members)
    if change == "header":
        at = content.index(b"b/0.jpg")
        content = content[:at] + b"c" + content[at + 1 :]
    elif change == "follows":
        content += content
    pack: dict[str, Any] = {"tar.gz": gzip.compress, "tar.bz2": bz2.compress}
    content = {**pack, "tar.xz": lzma.compress}.get(kind, bytes)(content)
    if kind == "zip":
        with zipfile.ZipFile(buffer := io.BytesIO(), "w", zipfile.ZIP_LZMA) as archive:
            for name, each in members.items():
                archive.writestr(name, each)
        content = buffer.getvalue()
    if change == "stream":
        half = len(content) // 2
        content = content[:half] + b"\xff" * 900 + content[half + 900 :]
    (tmp_path / f"own.{kind}").write_bytes(content)
    with pytest.raises(UserError, match=r"own\.\S+ cannot be unpacked: [^\n]*; make it again$"):
        ImportSource(tmp_path / f"own.{kind}", tmp_path / "scratch").files()


@pytest.mark.parametrize(("flag", "value", "says"), [(6, 1, "is encrypted"), (8, 9, "compression")])
def test_fails_for_a_zip_that_python_cannot_open(
    tmp_path: Path, flag: int, value: int, says: str
) -> None:
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        archive.writestr("cats/1.jpg", b"x")
    content = bytearray((tmp_path / "own.zip").read_bytes())
    for begins, more in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
        content[content.index(begins) + flag + more] = value
    (tmp_path / "own.zip").write_bytes(content)
    with pytest.raises(UserError, match=rf"own\.zip cannot be unpacked: .*{says}"):
        ImportSource(tmp_path / "own.zip", tmp_path / "scratch").files()


def test_a_zip_may_have_the_separators_of_windows(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "own.zip", "w") as archive:
        for system, name in ((0, "cats\\1.jpg"), (0, "dogs\\1.jpg"), (3, "dogs/a\\b.jpg")):
            info = zipfile.ZipInfo("x")
            info.filename, info.create_system = name, system
            archive.writestr(info, b"x")
    found = ImportSource(tmp_path / "own.zip", tmp_path / "scratch").files()
    assert [(file.name, file.label) for file in found] == [
        ("cats/1.jpg", "cats"),
        ("dogs/1.jpg", "dogs"),
        ("dogs/a\\b.jpg", "dogs"),
    ]


@pytest.mark.parametrize("prefix", ["", "images-"])
def test_a_shard_without_classes_is_no_class(tmp_path: Path, prefix: str) -> None:
    """Such as img2dataset's, whose text is a caption; as text they need no class."""
    for shard in range(2):
        members = {f"{shard}{n}.{kind}": b"x" for n in range(3) for kind in ("jpg", "txt")}
        packed(tmp_path / f"own/{prefix}{shard:05}.tar", members)
    found = ImportSource(tmp_path / "own", tmp_path / "scratch").files()
    assert len(found) == 12
    with pytest.raises(UserError, match=rf"archive {prefix}0000\d is named like a shard: add"):
        class_names(found)


def test_a_class_of_digits_within_an_archive_is_one(tmp_path: Path) -> None:
    for split in ("train", "val"):
        packed(tmp_path / f"own/{split}.tar", {f"{name}/1.jpg": b"x" for name in ("0001", "0002")})
    packed(tmp_path / "one/all.tar", {f"{name}/1.jpg": b"x" for name in ("0001", "0002")})
    for own in ("own", "one"):
        found = ImportSource(tmp_path / own, tmp_path / "scratch").files()
        assert set(class_names(found)) == {"0001", "0002"}


def test_ilsvrcs_own_folder_has_classes_in_train_alone(tmp_path: Path) -> None:
    inner = {f"{name}.tar": packed(tmp_path / "x.tar", {"1.JPEG": b"x"}) for name in ("n1", "n2")}
    packed(tmp_path / "own/ILSVRC2012_img_train.tar", inner)
    packed(tmp_path / "own/ILSVRC2012_img_val.tar", {"ILSVRC2012_val_00000001.JPEG": b"x"})
    found = ImportSource(tmp_path / "own", tmp_path / "scratch").files()
    splits = [(file.label, file.split) for file in found]
    assert splits == [("n1", "train"), ("n2", "train"), (None, "validation")]


def test_archives_named_like_splits_are_splits(tmp_path: Path) -> None:
    for split, kind in (("train", "cats"), ("test1", "cats")):
        packed(tmp_path / f"own/{split}.tar", {f"{split}/{kind}/1.jpg": b"x"})
    found = ImportSource(tmp_path / "own", tmp_path / "scratch").files()
    assert [(file.label, file.split) for file in found] == [("cats", "test"), ("cats", "train")]


def test_webdatasets_shards_as_its_own_writer_makes_them(tmp_path: Path) -> None:
    import webdataset

    shards = {"set-train-000000": 3, "set-train-000001": 3, "set-val-000000": 2}
    (tmp_path / "own").mkdir()
    for shard, count in shards.items():
        with webdataset.TarWriter(str(tmp_path / f"own/{shard}.tar")) as writer:
            for n in range(count):
                writer.write({"__key__": f"s{n:03}", "jpg": b"x", "cls": n % 2, "json": {}})
    found = ImportSource(tmp_path / "own", tmp_path / "scratch").files()
    assert [(file.label, file.split) for file in found] == [
        *[(str(n % 2), "train") for _ in range(2) for n in range(3)],
        ("0", "validation"),
        ("1", "validation"),
    ]
    assert all(file.name.endswith(".jpg") for file in found)
