"""What a program leaves: model/ and output/data/ as objects under final/, or why it failed."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from contract.keys import FINAL_FILES
from training.program.container import Container
from training.record.lease import Lease
from training.store.protocol import Store
from training.store.verified import sha256_of

_REASON_BYTES = 1024  # as SageMaker reads output/failure


def upload_final(container: Container, store: Store, lease: Lease) -> tuple[dict[str, str], int]:
    """Upload the artifacts; return their checksums by name below final/, and their bytes.

    The lease is renewed before each, so that no stale writer uploads one.
    """
    sums, size = {}, 0
    folders = {"model": container.model, "output/data": container.output / "data"}
    for name, path in sorted(_files(folders)):
        lease.beat()
        sums[name] = sha256_of(path)
        size += path.stat().st_size
        store.put_file(f"{FINAL_FILES}{name}", path)
    return sums, size


def digest_of_model(sums: Mapping[str, str]) -> str:
    """One checksum of all names and contents in model/."""
    model = {name: one for name, one in sums.items() if name.startswith("model/")}
    return hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()


def _files(folders: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    for prefix, folder in folders.items():
        for below, _, names in os.walk(folder):
            for path in (Path(below, name) for name in names):
                if path.is_file():
                    yield f"{prefix}/{path.relative_to(folder).as_posix()}", path


def failure_reason(container: Container, exit_code: int, last_line: str) -> str:
    """Why the program failed, in one line: output/failure if it wrote that, else its last words."""
    ended = f"exit code {exit_code}" if exit_code >= 0 else f"signal {-exit_code}"
    text = last_line
    try:
        with (container.output / "failure").open("rb") as stream:
            text = stream.read(_REASON_BYTES).decode(errors="replace") or last_line
    except OSError:
        pass
    hint = " (the kernel kills so where memory runs out)" if exit_code == -9 else ""
    said = " ".join(text.split())[:_REASON_BYTES]
    return f"the program ended with {ended}{hint}" + (f": {said}" if said else "")
