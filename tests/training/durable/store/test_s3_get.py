"""Our own GET requests: signed as botocore signs, and left to it wherever an answer is unusual."""

import datetime
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import CredentialRetrievalError
from botocore.httpsession import get_cert_path
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from training.durable.store.folder import open_store
from training.durable.store.protocol import StoreError
from training.durable.store.s3 import S3Store
from training.durable.store.s3_ranges import Bucket, RangeReader, UnsureError, reader_like

KEY = "a/b c+1.bin"
BODY = bytes(range(256)) * 40
HEAD = "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes 3-{}/9999"
Answer = tuple[bytes, bool]  # what is sent, and whether the connection is closed then


def usual(size: int, more: str = "") -> bytes:
    return (HEAD.format(size, 3 + size - 1) + more + "\r\n\r\n").encode() + BODY[3 : 3 + size]


class Server:
    """Answers each request with the next answer, on as many connections as are opened."""

    def __init__(self, answers: list[Answer], context: ssl.SSLContext | None = None) -> None:
        self.answers, self.requests, self.num_connections = answers, list[bytes](), 0
        self._context = context
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self.answers:
            connection, _ = self._listening.accept()
            self.num_connections += 1
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            with connection:
                while self.answers and (request := connection.recv(65536)):
                    self.requests.append(request)
                    content, closes = self.answers.pop(0)
                    connection.sendall(content)
                    if closes:
                        break

    def close(self) -> None:
        self._listening.close()
        self._thread.join(20)


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(*answers: Answer, context: ssl.SSLContext | None = None) -> Server:
            server = Server(list(answers), context)
            stack.callback(server.close)
            return server

        yield start


def reader(server: Server, *, token: str | None = None, **settings: ssl.SSLContext) -> RangeReader:
    credentials = ReadOnlyCredentials("AKID", "secret", token)
    bucket = Bucket(host="localhost", port=server.port, path="/bucket", region="eu-west-1")
    return RangeReader(bucket, lambda: credentials, settings.get("context"))


def read(source: RangeReader, size: int = 1000) -> bytes:
    data = bytearray(size)
    source.read_into(KEY, 3, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("token", [None, "a role's"])
def test_a_request_is_signed_as_botocore_signs_it(serve: Serve, token: str | None) -> None:
    server = serve((usual(1000), True))
    read(reader(server, token=token))
    first, *lines = server.requests[0].decode().rstrip().split("\r\n")
    sent = dict(line.split(": ", 1) if ": " in line else line.split(":", 1) for line in lines)
    url = f"http://localhost:{server.port}{first.split()[1]}"
    names = ("x-amz-content-sha256", "x-amz-date", "x-amz-security-token")
    request = AWSRequest("GET", url, headers={n: sent[n] for n in names if n in sent})
    request.context["timestamp"] = sent["x-amz-date"]
    signer = S3SigV4Auth(ReadOnlyCredentials("AKID", "secret", token), "s3", "eu-west-1")
    canonical = signer.canonical_request(request)
    assert f"/{sent['x-amz-date'][:8]}/eu-west-1/s3/aws4_request" in sent["Authorization"]
    signature = signer.signature(signer.string_to_sign(request, canonical), request)
    assert sent["Authorization"].endswith(f"Signature={signature}")
    assert sent["Range"] == "bytes=3-1002"


def test_a_connection_is_used_again_until_the_server_closes_it(serve: Serve) -> None:
    kept, told, closed = (usual(1000), False), (usual(1000, "\r\nConnection: close"), True), True
    older = (usual(1000).replace(b"1.1 206", b"1.0 200"), True)
    server = serve(kept, kept, told, older, (usual(1000), closed), kept)
    source = reader(server)
    assert [read(source) for _ in range(6)] == [BODY[3:1003]] * 6
    # Two were announced, the next was not: its request is made again.
    assert server.num_connections == 4


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + BODY[:1000],
        usual(999),
        usual(1000)[:-1],
        usual(1000) + b"x" * 20,
        b"nothing of the kind",
        b"",
    ],
)
def test_any_other_answer_is_left_to_another_client(serve: Serve, answer: bytes) -> None:
    with pytest.raises(UnsureError):
        read(reader(serve((answer, True))))


def test_an_answer_of_another_kind_is_not_asked_for_again(serve: Serve) -> None:
    slow_down = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
    server = serve((usual(1000), False), (slow_down, True), (usual(1000), True))
    source = reader(server)
    read(source)
    with pytest.raises(UnsureError):
        read(source)
    assert len(server.requests) == 2
    read(source)


def test_a_role_whose_credentials_cannot_be_renewed_is_left_to_another_client(serve: Serve) -> None:
    def renew() -> ReadOnlyCredentials:
        raise CredentialRetrievalError(provider="iam-role", error_msg="the metadata is silent")

    server = serve()
    bucket = Bucket(host="localhost", port=server.port, path="/bucket", region="eu-west-1")
    with pytest.raises(UnsureError, match="the metadata is silent"):
        read(RangeReader(bucket, renew, None))


def test_a_fork_leaves_the_connections_of_its_parent_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve((usual(1000), False), (usual(1000), False))
    source = reader(server)
    read(source)
    (kept,) = source._idle
    monkeypatch.setattr("os.getpid", lambda: -1)
    with kept:  # the server waits for its end
        kept.shutdown(socket.SHUT_RDWR)
        read(source)
    assert server.num_connections == 2


def test_a_server_that_is_not_there_is_left_to_another_client(serve: Serve) -> None:
    server = serve()
    server.close()
    with pytest.raises(UnsureError):
        read(reader(server))


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key and a certificate of localhost, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "cert").write_bytes(made.public_bytes(pem))
    (folder / "key").write_bytes(private)
    return folder / "cert", folder / "key"


def test_over_tls_the_server_has_to_be_the_one_that_it_says(serve: Serve, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    theirs = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    theirs.load_cert_chain(cert, key)
    size = 9_000
    server = serve((usual(size), False), (usual(size), True), context=theirs)
    trusting = reader(server, context=ssl.create_default_context(cafile=str(cert)))
    assert [read(trusting, size) for _ in range(2)] == [BODY[3 : 3 + size]] * 2
    assert server.num_connections == 1


def test_the_store_reads_by_itself_once_botocore_has_shown_the_way(bucket_uri: str) -> None:
    store = open_store(f"{bucket_uri}/some")
    assert isinstance(store, S3Store)
    store.put("k y", BODY)
    assert store.get("k y") is not None
    assert store._reader is not None
    data = bytearray(500)
    store.read_into("k y", 7, memoryview(data))
    assert data == BODY[7:507]
    assert store._doubts < 0, "it was not botocore that read"
    with pytest.raises(FileNotFoundError):
        store.read_into("nothing", 0, memoryview(data))


@pytest.mark.parametrize(
    ("authorization", "found"),
    [
        ("AWS4-HMAC-SHA256 Credential=A/20261122/us-west-2/s3/aws4_request, ...", True),
        ("AWS4-HMAC-SHA256 Credential=A/20261122/us-west-2/s3express/aws4_request, ...", False),
        ("", False),
    ],
)
def test_a_bucket_that_is_signed_for_in_another_way_is_left_to_botocore(
    authorization: str, found: bool
) -> None:
    credentials = SimpleNamespace(get_frozen_credentials=None)
    url = "https://my-bucket.s3.us-west-2.amazonaws.com/a/b"
    request = SimpleNamespace(url=url, headers={"Authorization": authorization})
    reader = reader_like(request, "my-bucket", credentials, get_cert_path(True))
    assert (reader is not None) == found


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://data.s3.eu-west-1.amazonaws.com/data/manifest.json", ""),
        ("https://s3.eu-west-1.amazonaws.com/data/manifest.json", "/data"),
        ("http://127.0.0.1:9000/data/manifest.json", "/data"),
    ],
)
def test_a_folder_named_as_the_bucket_is_not_taken_for_it(url: str, path: str) -> None:
    authorization = "AWS4-HMAC-SHA256 Credential=A/20261122/eu-west-1/s3/aws4_request, ..."
    request = SimpleNamespace(url=url, headers={"Authorization": authorization})
    credentials = SimpleNamespace(get_frozen_credentials=None)
    reader = reader_like(request, "data", credentials, get_cert_path(True))
    assert reader is not None
    assert reader._bucket.path == path


def test_a_file_of_certificates_that_is_missing_is_botocores_to_complain_about(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://localhost:9")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    monkeypatch.setattr("training.durable.store.protocol._WINDOW_SECONDS", 0.0)
    with pytest.raises(StoreError, match="Could not connect"):
        open_store("s3://bucket/some").get("k")


@pytest.mark.parametrize(("own", "expected"), [("", "eu-central-1"), ("us-west-2", "us-west-2")])
def test_the_region_may_be_named_as_the_cli_and_sagemaker_name_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, expected: str
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", own)
    if not own:
        monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert S3Store("runs", "first")._client_for(8.0).meta.region_name == expected
