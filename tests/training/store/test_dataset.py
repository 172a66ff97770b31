"""Datasets: made, uploaded, synced again only where something is missing, and always verified."""

import json
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.training.runs import WORKLOAD
from training.cli.main import main
from training.errors import UserError
from training.store.dataset import LocalDataset, open_dataset, sync_dataset, upload_dataset
from training.store.open import open_store


def silent(done: int, total: int, size: int) -> None:
    pass


def test_what_is_uploaded_comes_back(store_uri: str, dataset: Path, tmp_path: Path) -> None:
    store = open_store(store_uri)
    assert upload_dataset(dataset, store, silent).fetched_files == 2
    assert upload_dataset(dataset, store, silent).fetched_files == 0
    synced = sync_dataset(store, tmp_path / "out", silent)
    assert (synced.files, synced.fetched_files) == (2, 2)
    assert open_dataset(tmp_path / "out", verify=True).meta == {"rows": 42}
    assert (tmp_path / "out" / "notes" / "about.txt").read_text() == "42 rows\n"


def test_a_sync_fetches_only_what_is_missing_or_damaged(
    store_uri: str, dataset: Path, tmp_path: Path
) -> None:
    store = open_store(store_uri)
    upload_dataset(dataset, store, silent)
    out = tmp_path / "out"
    sync_dataset(store, out, silent)
    assert sync_dataset(store, out, silent).fetched_files == 0
    damaged = bytearray((out / "x.safetensors").read_bytes())
    damaged[-1] ^= 1
    (out / "x.safetensors").write_bytes(damaged)
    assert sync_dataset(store, out, silent).fetched_files == 1
    (out / "notes" / "about.txt").unlink()
    assert sync_dataset(store, out, silent).fetched_files == 1
    open_dataset(out, verify=True)


def test_killed_syncs_leave_nothing_behind(
    store_uri: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = open_store(store_uri), tmp_path / "out"
    upload_dataset(dataset, store, silent)

    def kill(path: Path) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    for _ in range(3):
        before = set(out.rglob(".*"))
        with monkeypatch.context() as patched:
            patched.setattr("training.store.dataset.sha256_of", kill)
            process = multiprocessing.get_context("fork").Process(
                target=sync_dataset, args=(store, out, silent)
            )
            process.start()
            process.join(120)
        assert process.exitcode == -signal.SIGKILL
        left = set(out.rglob(".*"))
        assert left, "it was killed with a file that was fetched and not yet verified"
        assert not left & before
    sync_dataset(store, out, silent)
    assert {path.name for path in out.iterdir()} == {"manifest.json", "notes", "x.safetensors"}


def test_fails_to_sync_what_was_uploaded_wrong(
    store_uri: str, dataset: Path, tmp_path: Path
) -> None:
    store = open_store(store_uri)
    upload_dataset(dataset, store, silent)
    store.put("x.safetensors", b"something else")
    with pytest.raises(UserError, match=r"x\.safetensors does not match its checksum"):
        sync_dataset(store, tmp_path / "out", silent)
    assert not (tmp_path / "out" / "manifest.json").exists()
    store.delete_below("notes/")
    with pytest.raises(UserError, match=r"notes/about\.txt"):
        sync_dataset(store, tmp_path / "again", silent)


def test_fails_for_a_manifest_that_points_outside(dataset: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["files"][0]["name"] = "../outside"
    store.put("manifest.json", json.dumps(manifest).encode())
    with pytest.raises(UserError, match="outside the dataset"):
        sync_dataset(store, tmp_path / "out", silent)


def test_the_sync_command_says_what_it_did_and_leaves_an_event(
    bucket_uri: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "upload", str(dataset), "--dataset-uri", f"{bucket_uri}/tiny"]) == 0
    run_uri = f"{bucket_uri}/runs/run-1"
    arguments = [
        "data",
        "sync",
        "--dataset-uri",
        f"{bucket_uri}/tiny",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*arguments, "--run-uri", run_uri, "--writer", "i-1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("[ok] dataset synced: 2 files, 0.0 MB, ")
    assert last.endswith(" MB/s")
    store = open_store(run_uri)
    (key,) = store.sizes("events/")
    assert key.endswith("-i-1-dataset-synced.json")
    found = store.get(key)
    assert found is not None
    event = json.loads(found.data)
    assert event["files"] == 2
    assert event["bytes"] > 0
    assert event["seconds"] >= 0


def test_the_sync_command_waits_for_a_manifest(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = str(tmp_path / "late")
    later = threading.Timer(0.5, upload_dataset, (dataset, open_store(uri), silent))
    later.start()
    out = str(tmp_path / "out")
    assert main(["data", "sync", "--dataset-uri", uri, "--out", out, "--wait-seconds", "20"]) == 0
    assert "data upload DIR --dataset-uri" in capsys.readouterr().out


def test_the_sync_command_ends_with_3_when_no_manifest_came(tmp_path: Path) -> None:
    uri, out = str(tmp_path / "empty"), str(tmp_path / "out")
    assert main(["data", "sync", "--dataset-uri", uri, "--out", out, "--wait-seconds", "0.2"]) == 3


def test_the_check_command_verifies_checksums(dataset: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "copy"))
    upload_dataset(dataset, store, silent)
    assert main(["data", "check", str(tmp_path / "copy")]) == 0
    store.put("notes/about.txt", b"43 rows\n")
    assert main(["data", "check", str(tmp_path / "copy")]) == 2


def test_what_is_made_is_uploaded_too_where_a_uri_is_given(tmp_path: Path) -> None:
    out, uri = tmp_path / "made", str(tmp_path / "store")
    arguments = ["data", "make", "--workload", WORKLOAD, "--out", str(out), "--count", "3"]
    assert main([*arguments, "--dataset-uri", uri]) == 0
    sync_dataset(open_store(uri), tmp_path / "back", silent)
    made, back = open_dataset(out), open_dataset(tmp_path / "back", verify=True)
    assert made.fingerprint == back.fingerprint


def test_fails_to_make_a_dataset_where_something_is(
    dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["data", "make", "--workload", WORKLOAD, "--out", str(dataset), "--count", "3"]
    assert main(arguments) == 2
    assert "is not empty; give a new folder" in capsys.readouterr().err


def test_the_fingerprint_depends_on_every_checksum() -> None:
    files = [{"name": "a", "bytes": 1, "sha256": "x"}, {"name": "b", "bytes": 1, "sha256": "y"}]
    one = LocalDataset(folder=Path(), manifest={"files": files, "meta": {}})
    files_two = [files[0], {**files[1], "sha256": "z"}]
    two = LocalDataset(folder=Path(), manifest={"files": files_two, "meta": {}})
    assert one.fingerprint != two.fingerprint
