"""Datasets: made, uploaded, synced again only where something is missing, and always verified."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

import pytest

from contract.errors import UserError
from contract.keys import MANIFEST
from tests.training.damage import flip
from tests.training.hooks import interrupt_at
from tests.training.runs import WORKLOAD, Run
from training.cli.main import main
from training.durable.dataset_output import FolderOutput
from training.durable.record.metrics import Events
from training.durable.store import local_dataset, transfer
from training.durable.store.dataset import StoredDataset
from training.durable.store.folder import open_store
from training.durable.store.local_dataset import (
    LocalDataset,
    checksums_of,
    for_each_file,
    is_syncing,
    manifest_of,
)
from training.durable.store.protocol import StoreError


def silent(done: int, total: int, size: int) -> None:
    pass


def entries_of(folder: Path) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = json.loads((folder / MANIFEST).read_bytes())["files"]
    return entries


def test_what_is_uploaded_comes_back(store_uri: str, dataset: Path, tmp_path: Path) -> None:
    store = open_store(store_uri)
    assert StoredDataset(store).upload(dataset, silent).fetched_files == 2
    assert StoredDataset(store).upload(dataset, silent).fetched_files == 0
    synced = StoredDataset(store).sync(tmp_path / "out", silent)
    assert (synced.files, synced.fetched_files) == (2, 2)
    assert LocalDataset.open(tmp_path / "out", again=True).meta == {"rows": 42}
    assert (tmp_path / "out" / "notes" / "about.txt").read_text() == "42 rows\n"


def test_fails_to_upload_a_key_that_s3_does_not_take(bucket_uri: str, tmp_path: Path) -> None:
    deep = tmp_path / "own" / "/".join(["a" * 200] * 5)
    deep.mkdir(parents=True)
    (tmp_path / "own" / "a.txt").write_text("a")
    (deep / "b.txt").write_text("b")
    for prefix, message in (("p" * 14, "a key of 1025 bytes"), ("p" * 13, "")):
        store = open_store(f"{bucket_uri}/{prefix}")
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            StoredDataset(store).upload(tmp_path / "own", silent)
        assert bool(store.sizes("")) is not bool(message)


def test_fails_to_sync_a_name_that_no_disk_takes(bucket_uri: str, tmp_path: Path) -> None:
    store, name = open_store(f"{bucket_uri}/long"), "é" * 128
    store.put(name, b"a")
    entry = {"name": name, "bytes": 1, "sha256": sha256(b"a").hexdigest()}
    store.put(MANIFEST, manifest_of("long", "program", {}, [entry]))
    with pytest.raises(UserError, match="is 256 bytes long, and a disk takes 255"):
        StoredDataset(store).sync(tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_fails_to_sync_more_than_the_whole_disk_holds(bucket_uri: str, tmp_path: Path) -> None:
    """Before the first byte, as the next machine's disk is hardly larger."""
    store, out = open_store(f"{bucket_uri}/large"), tmp_path / "out"
    entry = {"name": "a", "bytes": 2**60, "sha256": sha256(b"a").hexdigest()}
    store.put(MANIFEST, manifest_of("large", "program", {}, [entry]))
    with pytest.raises(UserError, match=r"/large takes 1073741824.00 GiB on a disk, and that of"):
        StoredDataset(store).sync(out, silent)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("other", ["", "an older manifest", "a reader without xxhash"])
def test_a_sync_fetches_only_what_is_missing_or_damaged(
    store_uri: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    pytest.importorskip("xxhash")
    store = open_store(store_uri)
    assert all(entry["sha256"] and entry["xxh128"] for entry in entries_of(dataset))
    if other == "an older manifest":
        dataset = shutil.copytree(dataset, tmp_path / "older")
        manifest = json.loads((dataset / MANIFEST).read_bytes())
        manifest["files"] = [{**e, "xxh128": ""} for e in manifest["files"]]
        (dataset / MANIFEST).write_text(json.dumps(manifest).replace(', "xxh128": ""', ""))
        assert not any("xxh128" in entry for entry in entries_of(dataset))
    elif other:
        monkeypatch.setattr(transfer, "xxh3_128", None)
    StoredDataset(store).upload(dataset, silent)
    out = tmp_path / "out"
    StoredDataset(store).sync(out, silent)
    assert StoredDataset(store).sync(out, silent).fetched_files == 0
    damaged = bytearray((out / "x.safetensors").read_bytes())
    damaged[-1] ^= 1
    (out / "x.safetensors").write_bytes(damaged)
    assert StoredDataset(store).sync(out, silent).fetched_files == 1
    (out / "notes" / "about.txt").unlink()
    assert StoredDataset(store).sync(out, silent).fetched_files == 1
    LocalDataset.open(out, again=True)


def test_a_sync_deletes_what_it_brought_and_the_dataset_has_no_more(
    store_uri: str, tmp_path: Path
) -> None:
    """A program reads the folder, which must be what its fingerprint says."""
    stored, own, out = StoredDataset(open_store(store_uri)), tmp_path / "own", tmp_path / "out"
    begun = list[bool]()
    for name in ("good/a", "bad/more/b", "bad/c", "edited"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(name)
    stored.upload(own, silent)
    stored.sync(out, silent)
    (out / "edited").write_text("by someone")
    (out / "mine").write_text("in no manifest")
    shutil.rmtree(own / "bad")
    (own / "edited").unlink()
    stored.upload(own, silent)
    stored.sync(out, silent, lambda: begun.append((out / "bad").exists()))
    assert begun == [False], "it is gone before anyone uses the folder"
    assert (out / "edited").read_text() == "by someone"
    assert (out / "mine").exists() and (out / "good/a").read_text() == "good/a"
    # What was made here may be the only copy.
    (made := tmp_path / "made").mkdir()
    (made / "only").write_text("copy")
    LocalDataset.complete(made, "nobody's", {})
    stored.sync(made, silent)
    assert (made / "only").exists()


def test_what_a_sync_that_was_cut_off_had_brought_is_deleted_by_the_next(
    store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, own, out = StoredDataset(open_store(store_uri)), tmp_path / "own", tmp_path / "out"
    own.mkdir()

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    def change(names: str) -> None:
        for path in own.iterdir():
            path.unlink()
        for name in names:
            (own / name).write_text(name)
        stored.upload(own, silent)

    def left() -> list[str]:
        return [name for name in "abcd" if (out / name).exists()]

    change("abc")
    stored.sync(out, silent)
    change("acd")
    with pytest.raises(KeyboardInterrupt):
        stored.sync(out, silent, cut_off)
    change("ad")
    stored.sync(out, silent)
    assert left() == ["a", "d"]
    change("a")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FolderOutput, "delete", cut_off)  # it deletes first of all
        stored.sync(out, silent)
    stored.sync(out, silent)
    assert left() == ["a"]


def test_killed_syncs_leave_nothing_behind(
    store_uri: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, out = open_store(store_uri), tmp_path / "out"
    StoredDataset(store).upload(dataset, silent)

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for _ in range(3):
        before = set(out.rglob(".*.????????.part"))
        with monkeypatch.context() as patched:
            patched.setattr("training.durable.store.dataset._ArrivingFile._place", kill)
            process = multiprocessing.get_context("fork").Process(
                target=StoredDataset(store).sync, args=(out, silent)
            )
            process.start()
            process.join(120)
        assert process.exitcode == -signal.SIGKILL
        left = set(out.rglob(".*.????????.part"))
        assert left, "it was killed with a file that was fetched and not yet verified"
        assert not left & before
    StoredDataset(store).sync(out, silent)
    LocalDataset.open(out)
    assert list(out.rglob("*.part*")) == []


def test_fails_to_sync_a_wrong_upload(store_uri: str, dataset: Path, tmp_path: Path) -> None:
    store = open_store(store_uri)
    StoredDataset(store).upload(dataset, silent)
    content = (dataset / "x.safetensors").read_bytes()
    for kind, data, said, sent in (
        (UserError, content[1:], r"has \d+ bytes.*; upload it again", 1),
        # An upload sees names and sizes only.
        (StoreError, content[1:] + b"?", "does not match .*; .*, copy it there again: ", 0),
    ):
        store.put("x.safetensors", data)
        with pytest.raises(kind, match=rf"x\.safetensors {said}"):
            StoredDataset(store).sync(tmp_path / "out", silent)
        assert StoredDataset(store).upload(dataset, silent).fetched_files == sent
    assert not (tmp_path / "out" / "manifest.json").exists()
    store.put("x.safetensors", content)
    store.delete_below("notes/")
    with pytest.raises(UserError, match=r"notes/about\.txt"):
        StoredDataset(store).sync(tmp_path / "again", silent)


@pytest.mark.parametrize("others", [{}, {"sha256": ""}, {"bytes": -1}], ids=repr)
def test_fails_for_a_manifest_that_points_outside(
    dataset: Path, tmp_path: Path, others: dict[str, Any]
) -> None:
    store = open_store(str(tmp_path / "store"))
    manifest = json.loads((dataset / "manifest.json").read_text())
    manifest["files"][0] |= {"name": "../outside/of/it", **others}
    store.put("manifest.json", json.dumps(manifest).encode())
    with pytest.raises(UserError, match=r"outside the dataset|unknown format"):
        StoredDataset(store).sync(tmp_path / "out", silent)
    assert not (tmp_path / "outside").exists()


def test_the_sync_command_says_what_it_did_and_leaves_an_event(
    bucket_uri: str, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "upload", str(dataset), "--dataset-uri", f"{bucket_uri}/tiny"]) == 0
    run_uri = f"{bucket_uri}/runs/run-1"
    sync = ["data", "sync", f"--dataset-uri={bucket_uri}/tiny", f"--out={tmp_path / 'o'}"]
    assert main([*sync, f"--run-uri={run_uri}", "--writer=i-1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("[ok] dataset synced: 2 files, 0.0 MB, ")
    assert last.endswith(" MB/s")
    store = open_store(run_uri)
    (key,) = store.sizes("events/")
    assert key.endswith("-i-1-dataset-synced.json")
    (event,) = Events.read(store, "dataset-synced")
    assert (event["files"], event["bytes"] > 0, event["seconds"] >= 0) == (2, True, True)


def test_what_is_made_is_uploaded_too_where_a_uri_is_given_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, store = tmp_path / "made", open_store(str(tmp_path / "store"))
    make = ["data", "make", f"--workload={WORKLOAD}", f"--out={out}", "--count=3"]
    assert main([*make, f"--dataset-uri={store.uri}"]) == 0
    StoredDataset(store).sync(tmp_path / "back", silent)
    made, back = LocalDataset.open(out), LocalDataset.open(tmp_path / "back", again=True)
    assert made.fingerprint == back.fingerprint
    assert main(make) == 2
    assert "is not empty; use a new folder" in capsys.readouterr().err
    assert main(["data", "check", store.uri]) == 0
    store.put("notes/about.txt", b"43 rows\n")
    assert main(["data", "check", store.uri]) == 2


def test_the_sync_command_waits_for_a_manifest(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = str(tmp_path / "late")
    later = threading.Timer(0.5, StoredDataset(open_store(uri)).upload, (dataset, silent))
    later.start()
    out = str(tmp_path / "out")
    assert main(["data", "sync", "--dataset-uri", uri, "--out", out, "--wait-seconds", "20"]) == 0
    assert "data upload DIR --dataset-uri" in capsys.readouterr().out


def test_the_sync_command_ends_with_3_when_no_manifest_came(tmp_path: Path) -> None:
    uri, out = str(tmp_path / "empty"), str(tmp_path / "out")
    assert main(["data", "sync", "--dataset-uri", uri, "--out", out, "--wait-seconds", "0.2"]) == 3


def test_the_fingerprint_depends_on_every_checksum() -> None:
    files = [{"name": "a", "bytes": 1, "sha256": "x"}, {"name": "b", "bytes": 1, "sha256": "y"}]
    one = LocalDataset(folder=Path(), manifest={"files": files, "meta": {}})
    files_two = [files[0], {**files[1], "sha256": "z"}]
    two = LocalDataset(folder=Path(), manifest={"files": files_two, "meta": {}})
    assert one.fingerprint != two.fingerprint


def test_of_many_files_few_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had a future of 1.4 KB: ten million files took 14 GB beside the manifest."""
    monkeypatch.setattr(local_dataset, "_MOST_FUTURES", 10)
    submitted, waiting = list[object](), list[int]()

    class Counted(ThreadPoolExecutor):
        def submit(self, *given: Any, **named: Any) -> Any:
            submitted.append(given)
            return super().submit(*given, **named)

    monkeypatch.setattr(local_dataset, "ThreadPoolExecutor", Counted)
    files = [{"name": str(number), "bytes": number} for number in range(95)]
    acted = for_each_file(
        files, lambda e: e["bytes"] % 2 == 1, lambda d, _, __: waiting.append(len(submitted) - d)
    )
    assert acted == files[1::2]
    assert (len(waiting), len(submitted)) == (95, 95)
    assert max(waiting) < 10


def test_a_file_is_hashed_once_per_machine(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, hashed = tmp_path / "out", list[str]()
    StoredDataset(open_store(str(dataset))).sync(out, silent)

    def hash_and_tell(path: Path, names: tuple[str, ...]) -> dict[str, str]:
        hashed.append(path.name)
        return checksums_of(path, names)

    monkeypatch.setattr(local_dataset, "checksums_of", hash_and_tell)
    LocalDataset.open(out)
    assert hashed == []
    (out / "notes" / "about.txt").touch()
    LocalDataset.open(out)
    assert hashed == ["about.txt"]
    monkeypatch.setattr(local_dataset, "_machine", lambda: "a machine with a copy of the disk")
    LocalDataset.open(out)
    LocalDataset.open(out)
    assert sorted(hashed) == ["about.txt", "about.txt", "x.safetensors"]


@pytest.mark.parametrize("line", [b'["half a li', b'["\xff', b"7\n", b"[1, 2, 3]\n"])
def test_a_damaged_record_of_what_was_verified_only_costs_time(
    dataset: Path, tmp_path: Path, line: bytes
) -> None:
    out = tmp_path / "out"
    StoredDataset(open_store(str(dataset))).sync(out, silent)
    with (out / ".verified.jsonl").open("ab") as record:
        record.write(line)
    LocalDataset.open(out)
    flip(out / "x.safetensors", 100)
    with pytest.raises(UserError, match=r"x\.safetensors does not match its checksum"):
        LocalDataset.open(out)


def test_a_bit_flipped_between_two_attempts_is_found(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.dataset = shutil.copytree(run.dataset, tmp_path / "data")
    interrupt_at("first", 5)
    assert run.attempt() == 75
    flip(run.dataset / "x.safetensors", 100)
    assert run.attempt() == 2
    assert "x.safetensors does not match its checksum" in capsys.readouterr().err


def test_a_run_syncs_from_s3_and_leaves_no_sync_behind(
    bucket_uri: str, dataset: Path, run: Run, whole: Run
) -> None:
    StoredDataset(open_store(f"{bucket_uri}/tiny")).upload(dataset, silent)
    run.options = [f"--dataset-uri={bucket_uri}/tiny"]
    assert run.attempt() == 0
    assert run.losses() == whole.losses()
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            commands.append(path.read_bytes().split(b"\0"))
    scratch = str(run.scratch).encode()
    syncs = [words for words in commands if b"sync" in words and words[-2].startswith(scratch)]
    assert syncs == []


def test_an_attempt_whose_sync_fails_may_be_restarted(
    bucket_uri: str, dataset: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 would say that the user made a mistake, and end the run on a machine."""
    StoredDataset(open_store(f"{bucket_uri}/tiny")).upload(dataset, silent)
    (tmp_path / "dataset" / "x.safetensors" / "in the way").mkdir(parents=True)
    assert run.attempt(f"--dataset-uri={bucket_uri}/tiny", f"--scratch={tmp_path}") == 74
    assert "sync" in capsys.readouterr().err.splitlines()[-1]


def test_a_process_forked_while_another_looks_for_a_sync_keeps_none_from_starting(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, flock, copies = tmp_path / "out", fcntl.flock, list[int]()
    StoredDataset(open_store(str(dataset))).sync(out, silent)

    def keep(file: TextIO, operation: int) -> None:
        flock(file, operation)
        copies.append(os.dup(file.fileno()))  # what a fork does at this moment

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", keep)
        assert not is_syncing(out)
    with (out / ".sync.lock").open() as lock:
        flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for copy in copies:
        os.close(copy)


def test_fails_to_sync_where_no_file_can_be_locked(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    out, store = tmp_path / "out", open_store(str(dataset))
    StoredDataset(store).sync(out, silent)
    monkeypatch.setattr(fcntl, "flock", refuse)
    LocalDataset.open(out)
    (out / "x.safetensors").unlink()
    for _ in range(3):
        with pytest.raises(StoreError, match=r"manifest\.json\.part: Function not implemented"):
            StoredDataset(store).sync(out, silent)
    assert list(out.rglob("*.part")) == []


def test_fails_to_train_on_a_dataset_that_is_not_in_s3(
    bucket_uri: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt(f"--dataset-uri={bucket_uri}/tiny") == 2
    assert "has no manifest.json; upload a dataset with" in capsys.readouterr().err
