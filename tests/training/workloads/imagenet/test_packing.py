"""`data import` of images: whole, resumable, straight to a store; what is wrong is named."""

import json
import os
import resource
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contract.errors import UserError
from tests.training.workloads.imagenet.photographs import (
    CLASSES,
    command,
    content,
    fill,
    manifest,
    photograph,
)
from training.cli.main import main
from training.durable.store.folder import open_store
from training.durable.store.local_dataset import checksums_of
from training.durable.store.transfer import has_fast_hash
from training.workloads.imagenet import packing
from training.workloads.imagenet.image_dataset import _read_validation_classes
from training.workloads.imagenet.packing import INDEX


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests need no other processes."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def test_others_read_the_shards_and_every_image_is_in_them_once(tmp_path: Path) -> None:
    source, out = fill(tmp_path / "own", 30), tmp_path / "out"
    assert main(command(source, out)) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import webdataset

        urls = sorted(str(path) for path in out.glob("train-*.tar"))
        found = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    assert len(urls) == 8
    index = np.load(out / "train.index.npy")
    assert index.dtype == INDEX
    pairs = [(sample["jpg"], CLASSES[int(sample["cls"])]) for sample in found]
    brought = [(path.read_bytes(), path.parent.name) for path in (source / "train").rglob("*.jpg")]
    assert sorted(pairs) == sorted(brought)
    assert [int(sample["cls"]) for sample in found] == index["label"].tolist()
    for sample, row in zip(found, index, strict=True):
        shard = (out / f"train-{row['shard']:05d}.tar").read_bytes()
        assert shard[row["offset"] : row["offset"] + row["length"]] == sample["jpg"]
    files: Any = manifest(out)["files"]
    shards = [one for one in files if one["name"].endswith(".tar")]
    checksums = ("sha256", "xxh128") if has_fast_hash() else ("sha256",)
    assert {tuple(one) for one in shards} == {("name", "bytes", *checksums)}
    assert all(
        checksums_of(out / one["name"])[name] == one[name] for one in shards for name in checksums
    )


def test_the_meta_tells_sizing_what_an_image_is_like(tmp_path: Path) -> None:
    source = fill(tmp_path / "own", 12)
    (source / "train/cats/table.jpg").write_bytes(photograph(7, "PNG"))
    assert main(command(source, tmp_path / "out", "--override=shorter_side=16")) == 0
    meta = manifest(tmp_path / "out")["meta"]
    assert isinstance(meta, dict)
    index = [np.load(tmp_path / f"out/{split}.index.npy") for split in ("train", "validation")]
    assert meta["image_bytes"] == round(float(np.mean(np.concatenate(index)["length"])))
    assert 256 <= meta["image_pixels"] < 400
    assert (meta["classes"], meta["splits"]) == (list(CLASSES), {"train": 13, "validation": 12})
    assert (meta["shorter_side"], meta["quality"], meta["converted"]) == (16, 90, 25)


def test_a_folder_without_splits_is_divided_by_the_seed_class_by_class(tmp_path: Path) -> None:
    source = fill(tmp_path / "own", 60, splits=())
    labels = {}
    for seed in (0, 1):
        assert main(command(source, tmp_path / f"{seed}", f"--seed={seed}")) == 0
        labels[seed] = np.load(tmp_path / f"{seed}/validation.index.npy")
        assert np.bincount(labels[seed]["label"]).tolist() == [2, 2, 2]
    assert labels[0]["length"].tolist() != labels[1]["length"].tolist()


def test_a_split_for_test_stays_one_and_validation_is_held_out_of_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training/CLASS and Testing/CLASS once gave the two classes Training and Testing."""
    source = fill(tmp_path / "own/tumors/set", 60, splits=("Training", "Testing"))
    assert main(command(tmp_path / "own", tmp_path / "out")) == 0
    meta = manifest(tmp_path / "out")["meta"]
    assert isinstance(meta, dict)
    assert meta["classes"] == list(CLASSES)
    assert meta["splits"] == {"train": 54, "validation": 6, "test": 60}
    assert "[data] 3 classes (cats, dogs, häuser), " in capsys.readouterr().out
    tested = np.load(tmp_path / "out/test.index.npy")
    assert sorted(tested["length"]) == sorted(
        path.stat().st_size for path in source.glob("Testing/*/*.jpg")
    )


def test_fails_for_a_class_that_another_split_spells_differently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = fill(tmp_path / "own", 12)
    (source / "val/cats").rename(source / "val/Cats")
    assert main(command(source, tmp_path / "out")) == 2
    said = "class 'Cats' of validation has no files in train, which has 'cats'; use one name for"
    assert said in capsys.readouterr().err


def test_fails_for_folders_that_may_be_classes_or_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = fill(tmp_path / "own", 12, splits=("train", "unseen"))
    assert main(command(source, tmp_path / "out")) == 2
    said = (
        "the folders train, unseen may be splits: if they are, name each train, validation or test"
    )
    assert said in capsys.readouterr().err
    assert not any((tmp_path / "out").iterdir())


def test_shards_have_the_size_of_what_is_packed_and_not_of_what_was_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_SHARD_BYTES", 12_000)
    monkeypatch.setattr(packing, "_MIN_SHARDS", 1)
    source = tmp_path / "own"
    for number in range(40):
        path = source / CLASSES[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photograph(number, "PNG", side=48))
    assert main(command(source, tmp_path / "out", "--override=shorter_side=16")) == 0
    lengths = np.load(tmp_path / "out/train.index.npy")["length"]
    assert len(list((tmp_path / "out").glob("train-*"))) == -(-int(lengths.sum()) // 12_000)


def test_what_is_no_image_is_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, out = fill(tmp_path / "own", 30), tmp_path / "out"
    (source / "train/dogs/torn.jpg").write_bytes(photograph(5, side=64)[:-700])
    (source / "train/cats/half.png").write_bytes(b"\x89PNG")
    for name in ("Thumbs.db", "notes.txt", ".DS_Store"):  # no images by their names
        (source / "train/cats" / name).write_bytes(b"\xd0\xcf\x11\xe0")
    (source / "train/LICENSE.txt").write_text("")
    allowed = "--override=left_out_share=0.05"
    assert main(command(source, out, allowed)) == 0
    left_out = json.loads((out / "left_out.json").read_text())
    assert sorted(each["file"] for each in left_out) == [
        "train/cats/half.png",
        "train/dogs/torn.jpg",
    ]
    assert any("truncated" in each["why"] for each in left_out)
    said = caplog.text
    assert "1 cannot identify the image file, such as train/cats/half.png" in said
    assert "truncated" in said and "by name no sample: train/LICENSE.txt (and 2 more)" in said
    assert manifest(out)["meta"]["left_out"] == 2  # type: ignore[index]
    assert main(["data", "check", str(out)]) == 0


def test_the_same_command_again_is_no_way_around_the_share(tmp_path: Path) -> None:
    source, out = fill(tmp_path / "own", 8), tmp_path / "out"
    for number in range(3):
        (source / f"train/dogs/{number}.jpg").write_text("a list")
    assert [main(command(source, out)) for _ in range(20)] == [2] * 20


def test_left_out_files_are_named_in_the_same_words_each_time(tmp_path: Path) -> None:
    source = fill(tmp_path / "own", 8)
    (source / "train/dogs/torn.gif").write_bytes(b"\xd0\xcf\x11\xe0")
    for out in ("a/out", "b/out"):
        assert main(command(source, tmp_path / out)) == 0
    assert content(tmp_path / "a/out") == content(tmp_path / "b/out")
    assert "0x" not in (tmp_path / "a/out/left_out.json").read_text()


def test_names_need_not_be_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = fill(tmp_path / "own", 8), tmp_path / "out"
    folder = Path(os.fsdecode(os.fsencode(source / "train") + b"/caf\xe9"))
    folder.mkdir()
    for number in range(3):
        (source / f"train/dogs/{number}.png").write_text("no image")
        (folder / f"{number}.jpg").write_bytes(photograph(number))
    assert main(command(source, out)) == 2
    (folder / "2.jpg").unlink()
    assert main(command(source, out)) == 2
    assert "train train/caf\\udce9/2.jpg' is not in both" in capsys.readouterr().err
    (folder / "2.jpg").write_bytes(photograph(2))
    assert main(command(source, out, "--override=left_out_share=0.2")) == 0
    assert manifest(out)["meta"]["classes"][0] == "caf\udce9"  # type: ignore[index]


def test_a_disk_that_is_full_is_named_and_the_import_goes_on_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = fill(tmp_path / "own", 24), tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
    try:
        assert main(command(source, out)) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    assert f"{out} cannot be written: File too large; run the same command again" in said
    assert main(command(source, out)) == 0
    assert main(["data", "check", str(out)]) == 0


def test_a_folder_is_packed_straight_into_a_store(
    tmp_path: Path,
    store_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same bytes, by processes that open the store themselves."""
    source = fill(tmp_path / "own", 12)
    assert main(command(source, tmp_path / "run-1")) == 0
    whole = content(tmp_path / "run-1")
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    straight = ["data", "import", str(source), "--workload=imagenet", f"--dataset-uri={store_uri}"]
    assert main(straight) == 0
    store = open_store(store_uri)
    assert set(store.sizes("")) == set(whole)
    assert all(store.get(name).data == kept for name, kept in whole.items())  # type: ignore[union-attr]
    assert main(straight) == 2
    assert "is not empty: it has manifest.json; use a new prefix" in capsys.readouterr().err


def test_images_come_from_a_bucket(
    tmp_path: Path, bucket_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store = fill(tmp_path / "own", 12), open_store(f"{bucket_uri}/photos")
    for path in source.rglob("*.jpg"):
        store.put(path.relative_to(source).as_posix(), path.read_bytes())
    assert main(command(source, tmp_path / "a/out")) == 0
    assert main(command(f"{bucket_uri}/photos", tmp_path / "b/out")) == 0
    assert content(tmp_path / "a/out") == content(tmp_path / "b/out")
    assert main(command(f"{bucket_uri}/nothing", tmp_path / "c/out")) == 2
    assert "/nothing has no files; use a prefix that has some" in capsys.readouterr().err


def test_keys_of_a_bucket_that_no_folder_can_have_are_named(
    tmp_path: Path, bucket_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """S3's console makes an empty key for each folder: neither an image nor a class."""
    import boto3

    source, client = fill(tmp_path / "own", 12), boto3.client("s3")
    bucket, _, prefix = bucket_uri.removeprefix("s3://").partition("/")
    prefix = f"{prefix}/photos".lstrip("/")
    for path in source.rglob("*.jpg"):
        key = f"{prefix}/{path.relative_to(source).as_posix()}"
        client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
    for marker in ("", "train/", "train/birds/"):
        client.put_object(Bucket=bucket, Key=f"{prefix}/{marker}", Body=b"")
    assert main(command(f"s3://{bucket}/{prefix}", tmp_path / "out")) == 0
    assert manifest(tmp_path / "out")["meta"]["classes"] == list(CLASSES)  # type: ignore[index]
    for number, odd in enumerate(("train//cats/1.jpg", "/train/cats/1.jpg", "train/cats/1.jpg/")):
        client.put_object(Bucket=bucket, Key=f"{prefix}/{odd}", Body=b"x")
        capsys.readouterr()
        assert main(command(f"s3://{bucket}/{prefix}/", tmp_path / f"{number}")) == 2
        assert f"has the key {odd!r}, which has a / too many" in (said := capsys.readouterr().err)
        assert f"aws s3 mv s3://{bucket}/{prefix}/{odd} s3://{bucket}/{prefix}/train/cats/1" in said
        assert not list((tmp_path / f"{number}").glob("*"))
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{odd}")
    archived = {"Key": f"{prefix}/train/cats/of old.jpg", "StorageClass": "DEEP_ARCHIVE"}
    client.put_object(Bucket=bucket, Body=b"x", **archived)
    assert main(command(f"s3://{bucket}/{prefix}", tmp_path / "out1")) == 2
    (said,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"restore-object --bucket {bucket} --key '{archived['Key']}' --restore-request D" in said
    assert not (tmp_path / "out1/manifest.json").exists()
    client.put_object(Bucket=bucket, Key=f"{prefix}/shards/train-0.tar", Body=b"x")
    assert main(command(f"s3://{bucket}/{prefix}/shards", tmp_path / "out2")) == 2
    assert "aws s3 sync" in capsys.readouterr().err


def test_tiny_imagenet_s_own_list_gives_its_validation_images_their_classes(tmp_path: Path) -> None:
    source = tmp_path / "own"
    for number, name in enumerate(("n1", "n2")):
        for n in range(9):
            path = source / f"train/{name}/images/{name}_{n}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photograph(9 * number + n))
        (source / f"train/{name}/{name}_boxes.txt").write_text(f"{name}_0.JPEG\t0\t1\t6\t5\n")
    for split in ("val", "test"):
        (source / split / "images").mkdir(parents=True)
        for n in range(3):
            (source / split / f"images/{split}_{n}.JPEG").write_bytes(photograph(30 + n))
    lines = [f"val_{n}.JPEG\t{label}\t0\t1\t6\t5\n" for n, label in enumerate(("n2", "n1", "n2"))]
    (source / "val/val_annotations.txt").write_text("".join(lines))
    (source / "wnids.txt").write_text("n1\nn2\n")
    assert main(command(source, tmp_path / "out")) == 0
    assert manifest(tmp_path / "out")["meta"]["splits"] == {"train": 18, "validation": 3}  # type: ignore[index]
    labels = np.load(tmp_path / "out/validation.index.npy")["label"]
    assert np.bincount(labels).tolist() == [1, 2]


def test_tables_of_images_are_refused_with_the_command_that_converts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own/data").mkdir(parents=True)
    (tmp_path / "own/data/train-00000-of-00001.parquet").write_bytes(b"PAR1")
    (tmp_path / "own/README.md").write_text("")
    assert main(command(tmp_path / "own", tmp_path / "out")) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"datasets.load_dataset('{tmp_path}/own').items()" in said
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.parametrize("kind", ["devkit", "kaggle", "csv"])
def test_imagenets_validation_images_get_their_classes_from_a_list(
    tmp_path: Path, kind: str
) -> None:
    source = fill(tmp_path / "own", 9, splits=("train",))
    classes = [CLASSES[number] for number in (2, 0, 0, 1)]
    names = [f"ILSVRC2012_val_{number:08d}" for number in range(1, 5)]
    for number, name in enumerate(names):
        (source / "val").mkdir(exist_ok=True)
        (source / "val" / f"{name}.JPEG").write_bytes(photograph(number))
    listed = tmp_path / "list.csv"
    pairs = list(zip(names, classes, strict=True))
    if kind == "devkit":
        listed = devkit(tmp_path / "ILSVRC2012_devkit_t12", classes)
    elif kind == "kaggle":
        rows = [
            f"{name},{label} 1 2 3 4 {label} 5 6 7 8 "
            for name, label in zip(names, classes, strict=True)
        ]
        listed.write_text("\n".join(["ImageId,PredictionString", *rows]))
    else:
        rows = [f"val/{name}.JPEG,{label}" for name, label in pairs]
        listed.write_text("\n".join(["file,class", *rows]))
    (source / "test").mkdir()
    (source / "test/ILSVRC2012_test_00000001.JPEG").write_bytes(photograph(1))
    out = tmp_path / "out"
    assert main(command(source, out, f"--override=validation_classes={listed}")) == 0
    labels = np.load(out / "validation.index.npy")["label"]
    assert np.bincount(labels).tolist() == [2, 1, 1]
    assert set(manifest(out)["meta"]["splits"]) == {"train", "validation"}  # type: ignore[index]


def test_fails_for_a_list_of_classes_that_cannot_be_read(tmp_path: Path) -> None:
    listed = tmp_path / "list.csv"
    listed.write_bytes(b"file,class\n1.jpg,dogs\n2.jpg\n")
    assert _read_validation_classes(str(listed)) == {"1": "dogs"}
    listed.write_bytes(b"file,class\n\xff,cats\n")
    with pytest.raises(UserError, match=r"list\.csv cannot be read: .*; save it as a CSV in UTF-8"):
        _read_validation_classes(str(listed))


def devkit(folder: Path, classes: list[str]) -> Path:
    """ILSVRC2012's devkit with a numbering of its own, and a class that has others below it."""
    from scipy.io import savemat

    numbering = {"dogs": 1, "cats": 2, "häuser": 3, "animals": 1001}
    rows = np.array(
        [(number, name, 0) for name, number in numbering.items()],
        dtype=[("ILSVRC2012_ID", "<i8"), ("WNID", "O"), ("num_children", "<i8")],
    )
    (folder / "data").mkdir(parents=True)
    savemat(folder / "data/meta.mat", {"synsets": rows})
    truth = "\n".join(str(numbering[name]) for name in classes)
    (folder / "data/ILSVRC2012_validation_ground_truth.txt").write_text(truth)
    return folder


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("val/1.jpg", [], "val/1.jpg is in no class; lay the files out as SPLIT/CLASS/FILE, or"),
        ("val/1.jpg", ["--override=validation_classes=none"], "none does not exist; give a CSV"),
        ("val/cats/", [], "val is empty; add files, or delete it"),
        ("val/new/1.jpg", ["--override=sides=3"], "has no field 'sides'; known are shorter_side"),
    ],
)
def test_fails_for_what_cannot_be_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, options: list[str], message: str
) -> None:
    source = fill(tmp_path / "own", 9, splits=("train",))
    (source / file).parent.mkdir(parents=True, exist_ok=True)
    if not file.endswith("/"):
        (source / file).write_bytes(photograph(1))
    assert main(command(source, tmp_path / "out", *options)) == 2
    assert message in capsys.readouterr().err


def test_fails_with_one_image_of_a_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(("cats", "dogs")):
        (tmp_path / "own" / name).mkdir(parents=True)
        (tmp_path / f"own/{name}/{number}.jpg").write_bytes(photograph(number))
    assert main(command(tmp_path / "own", tmp_path / "out")) == 2
    assert "class 'cats' has a single image; give two or more" in capsys.readouterr().err
