"""Both stores keep the same promises: whole objects and conditional writes with one winner."""

import fcntl
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.response import StreamingBody
from urllib3.exceptions import SSLError

from contract.errors import Exit, UserError
from training.durable.errors import exit_code_of
from training.durable.store.folder import FolderStore, open_store
from training.durable.store.protocol import (
    AnswerLostError,
    LastingError,
    PreconditionFailedError,
    Store,
    StoreError,
    Upload,
    put_unless_changed,
    writing,
)
from training.durable.store.s3 import _CONDITIONAL_SECONDS, _READ_SECONDS, Body, S3Store


def test_a_download_onto_a_full_disk_ends_in_one_sentence(store_uri: str) -> None:
    store = open_store(store_uri)
    store.put("a", b"some bytes")
    with pytest.raises(StoreError, match="No space left on device"):
        store.get_file("a", Path("/dev/full"))


def test_of_many_writers_at_once_one_wins(store_uri: str) -> None:
    store = open_store(store_uri)
    etag = store.put_if("head.json", b"start", None)
    wins: list[int] = []
    barrier = threading.Barrier(4)

    def write(number: int) -> None:
        barrier.wait()
        try:
            store.put_if("head.json", b"writer %d" % number, etag)
        except PreconditionFailedError:
            return
        wins.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = store.get("head.json")
    assert found is not None
    assert [b"writer %d" % number for number in wins] == [found.data]


def test_a_big_file_goes_in_parts(bucket_uri: str, tmp_path: Path) -> None:
    store = open_store(f"{bucket_uri}/big")
    path = tmp_path / "big"
    path.write_bytes(b"start" * (17 * 2**20 // 5))
    store.put_file("big", path)
    store.get_file("big", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("uri", ["http://bucket/prefix", "s3://", "gs://x", ""])
def test_fails_for_a_bad_uri(uri: str) -> None:
    with pytest.raises(UserError, match="URI"):
        open_store(uri)


OUTSIDE = ["..", "../x", "a/../../x", "/x", "//", "a//", "./", "a/./", "checkpoints/../"]


def test_credentials_that_are_not_there_now_are_no_users_mistake(
    bucket_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance whose metadata is down for a moment has none either: another try may help."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
    store = open_store(bucket_uri)
    with pytest.raises(StoreError, match="no AWS credentials found; configure a role or"):
        store.get("head.json")
    with pytest.raises(StoreError, match="no AWS credentials found"):
        store.put_if("head.json", b"one", None)


@pytest.mark.parametrize("key", OUTSIDE)
def test_fails_for_a_key_that_leaves_the_store(store_uri: str, tmp_path: Path, key: str) -> None:
    store, path = open_store(store_uri), tmp_path / "path"
    store.put("a/b", b"mine")
    (tmp_path / "x").write_bytes(b"mine")
    path.write_bytes(b"new")
    calls: list[Callable[[], object]] = [
        lambda: store.get(key),
        lambda: store.put(key, b"new"),
        lambda: store.put_if(key, b"new", None),
        lambda: store.get_file(key, path),
        lambda: store.put_file(key, path),
        lambda: _upload(store, b"new", key).finish(),
        lambda: store.read_into(key, 0, memoryview(bytearray(1))),
        lambda: store.sizes(key),
        lambda: store.delete_below(key),
    ]
    for call in calls:
        with pytest.raises(UserError, match="is not a key of"):
            call()
    assert store.sizes("") == {"a/b": 4}
    assert (tmp_path / "x").read_bytes() == b"mine"


def test_a_conflict_of_concurrent_writes_is_repeated(bucket_uri: str) -> None:
    store = open_store(f"{bucket_uri}/x")
    assert isinstance(store, S3Store)
    met = [_error("ConditionalRequestConflict", 409, "PutObject") for _ in range(2)]
    _trouble(store, "put_object", met, seconds=_CONDITIONAL_SECONDS)
    put_unless_changed(store, "head.json", b"one", None)
    assert met == []
    assert store.get("head.json") is not None


def test_an_error_names_the_key(bucket_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    store = open_store("s3://bucket/run")
    with pytest.raises(StoreError, match=r"s3://bucket/run/head\.json"):
        store.put_if("head.json", b"x", None)


def test_the_boot_commands_import_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys, training.cli.main as r, training.cli.data\n"
        "assert r.main(['fail', '--run-uri', sys.argv[1], '--reason', 'x']) == 0\n"
        "assert not {'torch', 'numpy', 'boto3', 'safetensors'} & set(sys.modules)\n"
    )
    root = Path(__file__).parents[4]
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    subprocess.run(command, cwd=root, check=True, timeout=60)


MEBIBYTE = 1024 * 1024


def _error(code: str, status: int, operation: str, message: str = "x") -> Exception:
    from botocore.exceptions import ClientError

    answer = {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, operation)  # type: ignore[arg-type]


def _trouble(
    store: S3Store,
    operation: str,
    met: list[Exception],
    *,
    after: bool = False,
    seconds: float = _READ_SECONDS,
) -> None:
    """Let the next calls of an operation end in errors, before or after S3 does what it says."""
    client = store._client_for(seconds)
    real = getattr(client, operation)

    def call(**arguments: Any) -> Any:
        if met and not after:
            raise met.pop(0)
        answer = real(**arguments)
        if met:
            raise met.pop(0)
        return answer

    setattr(client, operation, call)


def _upload(store: Store, data: bytes, key: str = "a/big") -> Upload:
    """Every part of an upload in parts of 5 MiB, last first; not finished."""
    view = memoryview(data)
    upload = store.upload(key, len(data), 5 * MEBIBYTE, threading.Event())
    for number in reversed(range(-(-len(data) // (5 * MEBIBYTE)))):
        start = number * 5 * MEBIBYTE
        part = view[start : start + 5 * MEBIBYTE]
        upload.put(number, start, part, hashlib.sha256(part).digest())
    return upload


@pytest.fixture
def s3(bucket_uri: str, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    monkeypatch.setattr("training.durable.store.protocol._LONGEST_PAUSE_SECONDS", 0.01)
    store = open_store(f"{bucket_uri}/x")
    assert isinstance(store, S3Store)
    return store


def test_an_upload_in_parts_is_whole_once_it_is_finished(store_uri: str) -> None:
    store = open_store(store_uri)
    data = b"0123456789ab" * MEBIBYTE
    upload = _upload(store, data)
    assert store.sizes("") == {}
    upload.finish()
    back = bytearray(len(data) - 7)
    store.read_into("a/big", 7, memoryview(back))
    assert bytes(back) == data[7:]


def test_an_upload_that_is_given_up_leaves_nothing(store_uri: str) -> None:
    store = open_store(store_uri)
    _upload(store, bytes(6 * MEBIBYTE)).abort()
    assert store.sizes("") == {}
    if isinstance(store, S3Store):
        answer = store._client_for(_READ_SECONDS).list_multipart_uploads(Bucket=store._bucket)
        assert "Uploads" not in answer


def test_a_part_that_arrived_damaged_is_sent_again(s3: S3Store) -> None:
    met = [_error("BadDigest", 400, "UploadPart")]
    _trouble(s3, "upload_part", met)
    _upload(s3, bytes(6 * MEBIBYTE)).finish()
    assert met == []
    assert s3.sizes("") == {"a/big": 6 * MEBIBYTE}


def test_a_completion_whose_answer_was_lost_counts(s3: S3Store) -> None:
    met = [_error("InternalError", 500, "CompleteMultipartUpload")]
    upload = _upload(s3, bytes(6 * MEBIBYTE))
    _trouble(s3, "complete_multipart_upload", met, after=True)
    upload.finish()
    assert s3.sizes("") == {"a/big": 6 * MEBIBYTE}


def test_fails_for_trouble_that_does_not_pass(s3: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.durable.store.protocol._WINDOW_SECONDS", 0.1)
    _trouble(s3, "upload_part", [_error("SlowDown", 503, "UploadPart") for _ in range(10**4)])
    with pytest.raises(StoreError, match=r"a/big.*SlowDown"):
        _upload(s3, bytes(6 * MEBIBYTE))


def test_fails_to_delete_what_s3_keeps_though_the_call_succeeds(s3: S3Store) -> None:
    for key in ("kept", "gone"):
        s3.put(key, b"x")
    kept = f"arn:aws:s3:::{s3.uri.removeprefix('s3://')}/kept"
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": kept}
    bucket, policy = {"Bucket": s3.uri.split("/")[2]}, {"Statement": [deny]}
    s3._client_for(_READ_SECONDS).put_bucket_policy(**bucket, Policy=json.dumps(policy))
    with pytest.raises(StoreError, match=r"AccessDenied.*DeleteObjects"):
        s3.delete(["gone", "kept"])
    assert s3.sizes("") == {"kept": 1}


def test_fails_at_once_for_what_no_repetition_mends(s3: S3Store) -> None:
    met = [_error("AccessDenied", 403, "UploadPart") for _ in range(2)]
    _trouble(s3, "upload_part", met)
    with pytest.raises(StoreError, match="AccessDenied"):
        _upload(s3, bytes(6 * MEBIBYTE))
    assert len(met) == 1


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("KeyTooLongError", 400, "shorten"),
        ("InvalidObjectState", 403, "restore-object"),
        ("KMS.DisabledException", 400, "enable-key"),
        ("KMS.KMSInvalidStateException", 400, "cancel-key-deletion"),
        ("KMS.NotFoundException", 404, "key of the bucket's region"),
    ],
)
def test_fails_for_good_for_what_no_other_machine_mends(
    s3: S3Store, capsys: pytest.CaptureFixture[str], code: str, status: int, words: str
) -> None:
    _trouble(s3, "put_object", [_error(code, status, "PutObject")])
    assert exit_code_of(lambda: s3.put("k", b"x") or 0) == Exit.USER  # type: ignore[func-returns-value]
    (said,) = capsys.readouterr().err.splitlines()
    assert code in said and words in said


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("no details", "these credentials may not call PutObject"),
        ("perform: s3:PutObject on x with an explicit deny in a service control policy: arn:aws:x",
         "a service control policy denies s3:PutObject: only the organization's administrators"),
        ("perform: s3:PutObject on x because no permissions boundary allows the action",
         "a permissions boundary would have to allow s3:PutObject"),
        ("perform: s3:PutObject on x with an explicit deny in a resource-based policy",
         "the bucket's policy denies s3:PutObject: whoever owns the bucket"),
        ("perform: kms:Decrypt on x because no resource-based policy allows kms:Decrypt",
         "the key's policy would have to allow kms:Decrypt"),
        ("perform: s3:PutObject on x because no identity-based policy allows the action",
         "an identity-based policy would have to allow s3:PutObject"),
    ],
)  # fmt: skip
def test_a_denial_says_whose_and_may_pass(s3: S3Store, message: str, words: str) -> None:
    """A policy takes minutes to take effect: another machine may not meet it any more."""
    _trouble(s3, "put_object", [_error("AccessDenied", 403, "PutObject", message)])
    with pytest.raises(StoreError) as denied:
        s3.put("k", b"x")
    assert denied.value.exit_code == Exit.STORE
    assert words in str(denied.value)


def test_an_archived_object_ends_the_run(s3: S3Store) -> None:
    client = s3._client_for(_READ_SECONDS)
    client.put_object(**s3._at("old"), Body=b"x", StorageClass="GLACIER")
    with pytest.raises(LastingError, match=r"InvalidObjectState.*restore-object"):
        s3.get("old")


def test_names_of_a_folder_may_have_as_many_bytes_as_the_disk_takes(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    longest = "ä" * 127 + "x"
    store.put(longest, b"1")
    assert store.sizes("") == {longest: 1}
    with pytest.raises(LastingError, match=r"has 256 bytes.*shorten it"):
        store.put(f"{longest}y", b"1")
    with pytest.raises(LastingError, match="shorten it"):
        store.get(f"{longest}y")


def test_a_part_is_sent_from_where_it_lies() -> None:
    data = bytearray(range(256)) * 8192
    body = Body(memoryview(data))
    assert len(body) == len(data)
    block = body.read(16384)
    assert isinstance(block, memoryview)
    assert block.obj is data
    assert len(block) == MEBIBYTE, "no interpreter round for every 16 KiB"
    assert bytes(block) + bytes(body.read()) == data
    assert body.read(1) == b""
    assert body.seek(0) == 0
    assert body.read(1)[0] == 0


def test_fails_for_a_file_or_a_range_that_is_not_there(store_uri: str, tmp_path: Path) -> None:
    store = open_store(store_uri)
    store.put("k", b"0123")
    with pytest.raises(FileNotFoundError, match="nothing"):
        store.get_file("nothing", tmp_path / "back")
    with pytest.raises(FileNotFoundError, match="nothing"):
        store.read_into("nothing", 0, memoryview(bytearray(1)))
    with pytest.raises(StoreError):
        store.read_into("k", 2, memoryview(bytearray(3)))


@pytest.mark.parametrize("lost", [[], ["before"], ["after"], ["before", "before", "after"]])
def test_a_key_is_created_once_whatever_answers_are_lost(tmp_path: Path, lost: list[str]) -> None:
    class Lossy(FolderStore):
        def put_if(self, key: str, data: bytes, etag: str | None) -> str:
            when = lost.pop(0) if lost else None
            if when == "before":
                raise AnswerLostError(key)
            tag = super().put_if(key, data, etag)
            if when == "after":
                raise AnswerLostError(key)
            return tag

    store = Lossy(tmp_path)
    assert put_unless_changed(store, "config.json", b"mine", None)
    assert not put_unless_changed(store, "config.json", b"theirs", None)
    found = store.get("config.json")
    assert found is not None
    assert found.data == b"mine"


def test_fails_when_a_key_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.store.protocol._WINDOW_SECONDS", 0.05)

    class Silent(FolderStore):
        def put_if(self, key: str, data: bytes, etag: str | None) -> str:
            raise AnswerLostError(f"{key}: no answer")

    with pytest.raises(StoreError, match=r"config\.json could not be written: .*no answer"):
        put_unless_changed(Silent(tmp_path), "config.json", b"mine", None)


def test_a_folder_write_that_breaks_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path)
    store.put("a", b"old")

    def broken(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(StoreError, match="a: disk full"):
        store.put("a", b"new")
    monkeypatch.undo()
    assert store.get("a") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_fails_when_a_stopped_process_holds_the_folder_s_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.durable.store.folder._LOCK_SECONDS", 0.1)
    with (tmp_path / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"\.lock was locked by another process"):
            FolderStore(tmp_path).put_if("head.json", b"x", None)
    FolderStore(tmp_path).put_if("head.json", b"x", None)


def test_an_upload_that_s3_no_longer_knows_is_trouble_of_the_store(s3: S3Store) -> None:
    """As after a rule that aborts it: the save is repeated, and training goes on."""
    _trouble(s3, "upload_part", [_error("NoSuchUpload", 404, "UploadPart")])
    with pytest.raises(StoreError, match="NoSuchUpload"):
        _upload(s3, bytes(6 * MEBIBYTE))


def test_a_body_that_breaks_off_in_tls_is_asked_for_again(
    s3: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore passes that error on as urllib3's."""
    s3.put("a", b"x")
    met, read = [SSLError("decryption failed")], StreamingBody.read

    def fails_once(body: StreamingBody, *given: Any) -> bytes:
        if met:
            raise met.pop()
        return read(body, *given)

    monkeypatch.setattr(StreamingBody, "read", fails_once)
    found = s3.get("a")
    assert found is not None
    assert (found.data, met) == (b"x", [])


def test_of_a_path_the_part_that_is_too_long_is_named(tmp_path: Path) -> None:
    """The file's own name may be short, as sweep.json in a folder with a long name."""
    path = tmp_path / ("l" * 300) / "sweep.json"
    with pytest.raises(LastingError, match=f"'{'l' * 300}' has 300 bytes"), writing(path):
        path.write_bytes(b"{}")
