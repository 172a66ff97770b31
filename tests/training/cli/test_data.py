"""`training data`: a program's own folder; the commands that an import prints, which work."""

import argparse
import errno
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import UserError
from contract.progress import progress_record
from tests.training.conftest import lacking
from tests.training.documented import own_workload
from tests.training.workloads.imagenet.photographs import command as importing
from tests.training.workloads.imagenet.photographs import fill
from training.cli import data
from training.cli.main import main
from training.durable.sources import SourceFile
from training.durable.store.local_dataset import ARRIVING
from training.registry import load_workload, workable
from training.workload import Progress, Workload
from training.workloads.imagenet.imagenet_workload import IMAGENET


def unlistable(name: str, code: int = errno.EACCES) -> Any:
    """os.scandir, but for folders of this name: root may list what permissions forbid."""
    scandir = os.scandir

    def scan(path: Any) -> Any:
        if Path(path).name == name:
            raise OSError(code, os.strerror(code), str(path))
        return scandir(path)

    return scan


def test_a_programs_folder_is_uploaded_as_it_is_and_again_as_it_became(tmp_path: Path) -> None:
    folder, bucket = tmp_path / "data", tmp_path / "bucket"
    (folder / "train").mkdir(parents=True)
    (folder / "train/a.csv").write_text("1,2")
    upload = ["data", "upload", str(folder), "--dataset-uri", str(bucket)]
    assert main(upload) == 0
    (folder / "train/a.csv").write_text("1,2,3")
    (folder / "b.csv").write_text("4")
    assert main(upload) == 0
    manifest = json.loads((bucket / "manifest.json").read_text())
    assert manifest["workload"] == "program"
    assert {file["name"]: file["bytes"] for file in manifest["files"]} == {
        "b.csv": 1,
        "train/a.csv": 5,
    }
    assert (bucket / "train/a.csv").read_text() == "1,2,3"


def test_an_upload_follows_links_and_refuses_folders_that_it_cannot_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kept, bucket = tmp_path / "data", tmp_path / "kept", tmp_path / "bucket"
    for path in (folder, kept):
        path.mkdir()
    (kept / "a.csv").write_text("1,2")
    (folder / "train").symlink_to(kept)
    (folder / "gone").symlink_to(tmp_path / "nothing")
    upload = ["data", "upload", str(folder), "--dataset-uri", str(bucket)]
    assert main(upload) == 0
    manifest = json.loads((bucket / "manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == ["train/a.csv"]
    assert (bucket / "train/a.csv").read_text() == "1,2"
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", unlistable("train"))
        assert main(upload) == 2
    assert f"{folder}/train cannot be listed: Permission denied; " in capsys.readouterr().err
    (folder / "lost+found").mkdir()  # at the root of each disk, and root's alone
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", unlistable("lost+found"))
        assert main(upload) == 0
    (kept / "all").symlink_to(folder)
    monkeypatch.chdir(folder)
    for named in (str(folder), "."):
        assert main(["data", "upload", named, "--dataset-uri", str(bucket)]) == 2
        said = capsys.readouterr().err
        assert "train/all is a link to a folder that contains it" in said
    (kept / "all").unlink()
    (kept / "all").symlink_to(tmp_path.parent)
    assert main(["data", "upload", ".", "--dataset-uri", str(bucket)]) == 2
    assert "error: train/all is a link to a folder that contains it" in capsys.readouterr().err


def test_an_upload_writes_nothing_into_a_programs_folder(tmp_path: Path) -> None:
    folder, bucket = tmp_path / "data", tmp_path / "bucket"
    (folder / "train").mkdir(parents=True)
    (folder / "train/manifest.json").write_text("[]")  # the user's own, like any file
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}
    for _ in range(2):
        assert main(["data", "upload", str(folder), "--dataset-uri", str(bucket)]) == 0
        assert {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]} == before
    assert (bucket / "train/manifest.json").read_text() == "[]"
    manifest = json.loads((bucket / "manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == ["train/manifest.json"]
    # What an older version wrote is replaced in the store by what is there now.
    (bucket / "manifest.json").replace(folder / "manifest.json")
    (folder / "b.csv").write_text("4")
    assert main(["data", "upload", str(folder), "--dataset-uri", str(bucket)]) == 0
    assert len(json.loads((bucket / "manifest.json").read_text())["files"]) == 2
    assert len(json.loads((folder / "manifest.json").read_text())["files"]) == 1


def test_a_workload_of_ones_own_reads_a_folder_as_it_is_and_its_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_workload(tmp_path / "mine", name="flowers.py")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    (table := tmp_path / "table").mkdir()
    rows = [f"{n % 3},0,1,{n % 3},{('iris', 'lily', 'rose')[n % 3]}" for n in range(90)]
    (table / "flowers.csv").write_text("\n".join(["a,b,c,d,name", *rows]))
    before = {path: path.stat().st_mtime_ns for path in [table, *table.rglob("*")]}
    own = ["--workload", "flowers:FLOWERS"]
    assert main(["data", "import", str(table), *own, "--out", str(tmp_path / "out")]) == 2
    assert f"training data upload {table} --dataset-uri s3://" in capsys.readouterr().err
    assert main(["data", "upload", str(table), "--dataset-uri", str(tmp_path / "bucket")]) == 0
    run = ["run", *own, "--recipe", "laptop", "--override", "epochs=1"]
    for number, uri in enumerate((table, tmp_path / "bucket")):
        run_uri = str(tmp_path / f"run-{number}")
        assert main([*run, "--dataset-uri", str(uri), "--run-uri", run_uri]) == 0
    receipts = [json.loads((tmp_path / f"run-{n}" / "receipt.json").read_text()) for n in (0, 1)]
    assert receipts[0]["weights_sha256"] == receipts[1]["weights_sha256"]
    assert {path: path.stat().st_mtime_ns for path in [table, *table.rglob("*")]} == before
    # A workload whose datasets have a form of their own says how to get there.
    known = ["run", "--workload", "trajectory", "--recipe", "laptop"]
    for uri in (table, tmp_path / "bucket"):
        capsys.readouterr()
        command = [*known, "--dataset-uri", str(uri), "--run-uri", str(tmp_path / "no")]
        assert main(command) == 2
        assert f"data import {uri} --workload trajectory --out data" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_sync_keeps_its_counts_in_a_file_and_does_not_fail_where_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "more-begun":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    (folder := tmp_path / "data").mkdir()
    (folder / "a.bin").write_bytes(bytes(1000))
    assert main(["data", "upload", str(folder), "--dataset-uri", str(tmp_path / "bucket")]) == 0
    sync = ["data", "sync", "--dataset-uri", str(tmp_path / "bucket"), "--out"]
    assert main([*sync, str(tmp_path / "out"), "--begun-file", str(tmp_path / "begun")]) == 0
    assert (tmp_path / "begun").read_bytes() == progress_record("dataset", 1, 1000)
    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([*sync, str(tmp_path / "more"), "--begun-file", str(tmp_path / "more-begun")]) == 0


def test_fails_to_upload_what_a_sync_left_unfinished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ARRIVING).write_text("{}")
    (tmp_path / "data/a.csv").write_text("1")
    assert main(["data", "upload", str(tmp_path / "data"), "--dataset-uri", str(tmp_path)]) == 74
    assert "data was interrupted; sync it again" in capsys.readouterr().err


def test_fails_to_upload_a_name_that_is_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own := tmp_path / "data").mkdir()
    Path(os.fsdecode(os.fsencode(own) + b"/caf\xe9")).write_text("1")
    assert main(["data", "upload", str(own), "--dataset-uri", str(tmp_path / "bucket")]) == 2
    assert "/caf\\xe9' has a name that is not UTF-8; rename it" in capsys.readouterr().err
    assert not (tmp_path / "bucket").exists()


def test_fails_for_a_wait_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sync = ["data", "sync", "--dataset-uri", str(tmp_path), "--out", str(tmp_path / "out")]
    for wait in ("nan", "inf", "-1"):
        with pytest.raises(SystemExit, match="2"):
            main([*sync, f"--wait-seconds={wait}"])
        assert f"--wait-seconds: {wait} is not a positive number" in capsys.readouterr().err
    assert main([*sync, "--wait-seconds=0"]) == 3


@pytest.mark.parametrize("command", ["import", "check", "upload"])
def test_fails_for_an_empty_name_which_is_not_the_current_folder(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["data", command, "", "--workload=imagenet", "--dataset-uri=bucket"])
    *_, said = capsys.readouterr().err.splitlines()
    assert said.endswith(": it is empty; name a folder (. is the current one)")


META = {"classes": ["a", "b"], "splits": {"train": 291, "validation": 33}}


def parameters(deploy: str) -> dict[str, str]:
    """What a printed `cdk deploy` sets."""
    words = shlex.split(deploy)
    assert words[:4] == ["npx", "cdk", "deploy", "TrainingStack"]
    pairs = [word for word in words[4:] if word != "-c"]
    return dict(pair.split("=", 1) for pair in pairs)


def test_few_photographs_get_commands_that_synth_accepts_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As typed in another folder, with spaces in the paths; synth accepted what cannot run."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "my photos", 60, splits=())
    assert main([*importing("my photos", Path("my data")), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["meta"]["classes"] == ["cats", "dogs", "häuser"]
    assert "[data] 3 classes (cats, dogs, häuser), train 54, " in said.err
    assert "drop_last with 54 training samples leaves no step of 1024" in said.err
    assert found["recipes"]["full"]["needed"] == {"global_batch": "4", "micro_batch": "4"}
    (run,) = found["here"]
    assert "--dataset-uri" in shlex.split(run) and "my data" in shlex.split(run)
    move, upload, deploy = found["on_ec2"]
    assert shlex.split(move) == ["cd", str(data._ROOT)]
    assert shlex.split(upload)[5] == str(tmp_path / "my data")
    assert upload.endswith(" --dataset-uri s3://DATASET-BUCKET/my-data")
    given = parameters(deploy)
    assert given["dataset_manifest"] == str(tmp_path / "my data/manifest.json")
    assert given["overrides"] == "global_batch=4 micro_batch=4" and given["dataset"] == "my-data"
    # A step of 4 on a machine with one GPU costs what is printed, and synth has no objection.
    stacks = pytest.importorskip("stacks.parameters", reason="where the stacks are not")
    planned = stacks.StackParameters.for_size(given.pop("size"), **given)
    assert planned.overrides[0] == "global_batch=4"


@pytest.mark.parametrize(
    ("where", "uri", "dataset"),
    [
        ("data", "s3://bucket/clips/v2/", "clips/v2"),
        ("s3://bucket/clips/v2", "s3://bucket/clips/v2", "clips/v2"),
        ("my own data!", None, "my-own-data"),
        ("данные", None, "dataset"),
        ("data", "elsewhere", "data"),
    ],
)
def test_a_deploy_reads_the_dataset_where_it_was_stored(
    monkeypatch: pytest.MonkeyPatch, where: str, uri: str | None, dataset: str
) -> None:
    monkeypatch.setattr(data, "_advised", lambda *_: ("", {"size": "g5.xlarge"}))
    monkeypatch.setattr(data, "_refused", lambda _: "")
    manifest = {"meta": META, "files": []}
    found = data.show_next("imagenet", IMAGENET, manifest, where, uri)
    given = parameters(found["on_ec2"][-1])
    assert given["dataset"] == dataset
    assert ("dataset_manifest" in given) == (not where.startswith("s3://"))


def test_a_dataset_that_a_volume_does_not_hold_gets_a_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where neither sizing nor stacks are installed."""
    monkeypatch.setattr(data, "subprocess", SimpleNamespace(run=lacking))
    manifest = {"meta": META, "files": [{"name": "a", "bytes": 300 << 30}]}
    found = data.show_next("imagenet", IMAGENET, manifest, "s3://b/large", None)
    assert parameters(found["on_ec2"][-1])["data_volume.gib"] == "330"


def test_a_deploy_is_on_demand_where_sizing_buys_that(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"size": "g5.xlarge", "why_not": "", "market": "on-demand", "hours_p50": 1.0,
           "usd_p50": 2.0, "usd_on_demand": 2.0}  # fmt: skip
    said = json.dumps({"take": "g5.xlarge", "candidates": [one]})
    done = SimpleNamespace(returncode=0, stdout=said)
    monkeypatch.setattr(data, "_run", lambda *_, **given: done)
    _, context = data._advised("imagenet", "full", [], {"files": []})
    assert context == {"size": "g5.xlarge", "on_demand_base": "1"}


def test_fails_to_pack_into_a_prefix_that_has_something(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    options = argparse.Namespace(out=None, dataset_uri=str(tmp_path))
    with pytest.raises(UserError, match="is not empty: it has mine; use a new prefix"):
        data._output(options, "imagenet")


def test_fails_to_print_a_deploy_that_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    meta = {**META, "splits": {"train": 2000, "validation": 0}}
    found = data.show_next("imagenet", IMAGENET, {"meta": meta, "files": []}, "data", None)
    assert found["here"] == found["on_ec2"] == []
    assert found["on_ec2_refused"] == (
        "split validation has no samples; add some: without splits, a class needs two files"
    )
    assert "deploy" not in capsys.readouterr().out
    found = data.show_next("imagenet", IMAGENET, {"meta": META, "files": []}, "s3://bucket", None)
    assert "dataset is ''; use a key prefix" in found["on_ec2_refused"]


@pytest.mark.parametrize(
    ("workload", "recipe", "meta", "needed"),
    [
        ("imagenet", "full", META, {"global_batch": "32", "micro_batch": "32"}),
        (
            "imagenet",
            "full",
            {"splits": {"train": 3, "validation": 1}},
            {"global_batch": "1", "micro_batch": "1"},
        ),
        ("imagenet", "full", {"splits": {"train": 1024, "validation": 1}}, {}),
        ("imagenet", "laptop", META, {}),
        ("trajectory", "full", {"count": 18, "splits": {"train": 6, "validation": 6}}, {}),
        ("trajectory", "magvit_full", {"splits": {"train": 2, "validation": 2}}, {}),
        ("detection", "full", {"splits": {"train": 1, "validation": 1}}, {}),
        (
            "growth",
            "full",
            {"vocab_size": 50257, "splits": {"train": {"tokens": 90}, "validation": {"tokens": 9}}},
            {"context": "8"},
        ),
    ],
)
def test_a_small_dataset_trains_with_the_overrides_that_its_refusals_name(
    workload: str, recipe: str, meta: Mapping[str, Any], needed: Mapping[str, str]
) -> None:
    found, without, refused = workable(load_workload(workload), recipe, meta)
    assert found == needed and refused == [] and bool(without) == bool(needed)


class _Counts(Workload[Any]):
    """A user's own, whose manifest says neither splits nor classes."""

    name = "counts"
    recipes = IMAGENET.recipes
    stages = IMAGENET.stages

    def import_dataset(
        self, files: Sequence[SourceFile], out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        (out / "count.txt").write_text(f"{len(files)}")
        return {"rows": len(files)}


class _Folder(_Counts):
    """The same, from a folder with a layout of its own."""

    name = "folder"

    def import_folder(
        self, folder: Path, out: Path, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        (out / "count.txt").write_text(folder.name)
        return {"vocab_size": 3, "splits": ["train"]}


COUNTS, FOLDER = _Counts(), _Folder()


@pytest.mark.parametrize("name", ["COUNTS", "FOLDER"])
def test_a_workload_of_one_s_own_need_not_count_splits_or_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """It ended in KeyError: 'splits', with the dataset made."""
    fill(tmp_path / "own", 3)
    own = f"{__name__}:{name}"
    words = ["data", "import", str(tmp_path / "own"), f"--workload={own}"]
    assert main([*words, f"--out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr()
    assert f"-m training run --workload {own} --recipe laptop " in said.out
    assert f"the module of {own} is in " in said.out and "npx cdk" not in said.out
