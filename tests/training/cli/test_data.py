"""`training data upload` of a folder that no workload made: a program's own data."""

import errno
import json
import os
from pathlib import Path

import pytest

from contract.progress import progress_record
from training.cli.main import main
from training.durable.store.local_dataset import ARRIVING


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
    (data := tmp_path / "data").mkdir()
    Path(os.fsdecode(os.fsencode(data) + b"/caf\xe9")).write_text("1")
    assert main(["data", "upload", str(data), "--dataset-uri", str(tmp_path / "bucket")]) == 2
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


def test_fails_for_an_address_that_is_none_and_leaves_the_folder_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("1")
    assert main(["data", "upload", str(tmp_path), "--dataset-uri", "s4://bucket/x"]) == 2
    assert "s4://bucket/x" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.parametrize("command", ["import", "check", "upload"])
def test_fails_for_an_empty_name_which_is_not_the_current_folder(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["data", command, "", "--workload=imagenet", "--dataset-uri=bucket"])
    *_, said = capsys.readouterr().err.splitlines()
    assert said.endswith(": it is empty; name a folder (. is the current one)")
