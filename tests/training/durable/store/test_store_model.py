"""Both stores against a dictionary: several writers with their tags, in any order.

Hypothesis draws what happens and shrinks what breaks a promise to its shortest form.
"""

import hashlib
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from training.durable.store.folder import FolderStore, _FileUpload, open_store
from training.durable.store.protocol import (
    PreconditionFailedError,
    Store,
    Upload,
    put_unless_changed,
)

KEYS = st.sampled_from(["head.json", "a/one", "a/two", "a/b/three", "ab/four"])
PREFIXES = st.sampled_from(["a/", "a/b/", "ab/", "nothing/"])
WRITERS = st.integers(0, 1)
# Few, so that contents recur: an ETag identifies the content, not how often it was written.
CONTENTS = st.sampled_from([b"", b"x", b"y", bytes(range(256)) * 300])


class AnyStore(RuleBasedStateMachine):
    """Two writers on one store; each remembers the tag that it saw last of each key."""

    def __init__(self, stores: Sequence[Store], root: str, folder: Path) -> None:
        super().__init__()
        self.stores = stores
        self.root = root  # below which this example's keys are
        self.file = folder / "file"
        self.model: dict[str, bytes] = {}
        self.tags: dict[tuple[int, str], tuple[str, bytes] | None] = {}
        self.numbers = itertools.count()
        self.under_way: list[tuple[str, bytes, Upload]] = []

    @rule(writer=WRITERS, key=KEYS)
    def get(self, writer: int, key: str) -> None:
        found = self.stores[writer].get(self.root + key)
        assert (found.data if found else None) == self.model.get(key)
        self.tags[writer, key] = (found.etag, found.data) if found else None

    @rule(writer=WRITERS, key=KEYS, data=CONTENTS)
    def put(self, writer: int, key: str, data: bytes) -> None:
        self.stores[writer].put(self.root + key, data)
        self.model[key] = data

    @rule(writer=WRITERS, key=KEYS, data=CONTENTS)
    def put_if(self, writer: int, key: str, data: bytes) -> None:
        known = self.tags.get((writer, key))
        tag, expected = known or (None, None)
        if self.model.get(key) == expected:
            new = self.stores[writer].put_if(self.root + key, data, tag)
            self.model[key], self.tags[writer, key] = data, (new, data)
            found = self.stores[writer].get(self.root + key)
            assert found is not None
            assert found.etag == new
        else:
            with pytest.raises(PreconditionFailedError):
                self.stores[writer].put_if(self.root + key, data, tag)

    @rule(writer=WRITERS, key=KEYS, data=CONTENTS)
    def create(self, writer: int, key: str, data: bytes) -> None:
        is_there = self.model.setdefault(key, data) == data
        etag = put_unless_changed(self.stores[writer], self.root + key, data, None)
        assert (etag is not None) == is_there

    @rule(writer=WRITERS, key=KEYS, data=CONTENTS)
    def put_file(self, writer: int, key: str, data: bytes) -> None:
        self.file.write_bytes(data)
        self.stores[writer].put_file(self.root + key, self.file)
        self.model[key] = data

    @rule(writer=WRITERS, key=KEYS)
    def get_file(self, writer: int, key: str) -> None:
        if key in self.model:
            self.stores[writer].get_file(self.root + key, self.file)
            assert self.file.read_bytes() == self.model[key]
        else:
            with pytest.raises(FileNotFoundError):
                self.stores[writer].get_file(self.root + key, self.file)

    @rule(writer=WRITERS, key=KEYS, data=CONTENTS.filter(len))
    def upload(self, writer: int, key: str, data: bytes) -> None:
        key = f"{key}-{next(self.numbers)}"  # which nobody else writes
        upload = self.stores[writer].upload(
            self.root + key, len(data), 5 * 2**20, threading.Event()
        )
        self.under_way.append((key, data, upload))

    @precondition(lambda self: self.under_way)
    @rule()
    def finish(self) -> None:
        key, data, upload = self.under_way.pop(0)
        upload.put(0, 0, memoryview(data), hashlib.sha256(data).digest())
        upload.finish()
        self.model[key] = data

    @precondition(lambda self: self.under_way)
    @rule()
    def abort(self) -> None:
        self.under_way.pop()[2].abort()

    @precondition(lambda self: self.under_way)
    @rule()
    def die(self) -> None:
        """The writer of an upload is killed: the system closes its files."""
        upload = self.under_way.pop()[2]
        if isinstance(upload, _FileUpload):
            upload._close_direct()
            upload._unfinished._close()

    @rule(writer=WRITERS)
    def sweep(self, writer: int) -> None:
        self.stores[writer].sweep(self.root)
        if isinstance(self.stores[0], FolderStore):
            left = list((Path(self.stores[0].uri) / self.root).rglob(".*"))
            assert len(left) == len(self.under_way), "those of writers at work, and no other"

    @rule(writer=WRITERS, key=KEYS, start=st.integers(0, 90_000), size=st.integers(0, 90_000))
    def read_into(self, writer: int, key: str, start: int, size: int) -> None:
        data = self.model.get(key)
        if data is not None and start + size <= len(data):
            back = bytearray(size)
            self.stores[writer].read_into(self.root + key, start, memoryview(back))
            assert back == data[start : start + size]

    @rule(writer=WRITERS, prefix=PREFIXES)
    def delete_below(self, writer: int, prefix: str) -> None:
        if any(key.startswith(prefix) for key, _, _ in self.under_way):
            return  # nobody deletes what somebody else writes
        self.stores[writer].delete_below(self.root + prefix)
        self.model = {k: v for k, v in self.model.items() if not k.startswith(prefix)}

    @rule(writer=WRITERS, keys=st.sets(KEYS))
    def delete(self, writer: int, keys: set[str]) -> None:
        self.stores[writer].delete([self.root + key for key in keys])
        self.model = {k: v for k, v in self.model.items() if k not in keys}

    @rule(writer=WRITERS, prefix=PREFIXES)
    def sizes(self, writer: int, prefix: str) -> None:
        expected = {
            self.root + k: len(v) for k, v in sorted(self.model.items()) if k.startswith(prefix)
        }
        assert self.stores[writer].sizes(self.root + prefix) == expected

    @rule(writer=WRITERS, prefix=st.sampled_from(["", "a/", "a/b/", "nothing/"]))
    def folders(self, writer: int, prefix: str) -> None:
        below = [key.removeprefix(prefix) for key in self.model if key.startswith(prefix)]
        expected = {key.partition("/")[0] for key in below if "/" in key}
        found = self.stores[writer].folders(self.root + prefix)
        empty = [name for name in found - expected if not name.startswith(".")]
        assert expected <= found
        assert all(not self.stores[writer].sizes(f"{self.root}{prefix}{name}/") for name in empty)

    @invariant()
    def what_is_listed_is_what_there_is(self) -> None:
        expected = {self.root + key: len(data) for key, data in self.model.items()}
        assert self.stores[0].sizes(self.root) == expected

    def teardown(self) -> None:
        for _, _, upload in self.under_way:
            upload.abort()
        for key, data in self.model.items():
            found = self.stores[1].get(self.root + key)
            assert found is not None
            assert found.data == data


def test_a_store_does_what_a_dictionary_does(store_uri: str, tmp_path: Path) -> None:
    stores, numbers = [open_store(store_uri), open_store(store_uri)], itertools.count()
    is_folder = isinstance(stores[0], FolderStore)
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: AnyStore(stores, f"{next(numbers)}/", tmp_path),
        settings=settings(
            max_examples=60 if is_folder else 8,
            stateful_step_count=30,
            derandomize=True,
            # Hundreds of requests for each example: what breaks a promise is shown as it was drawn.
            phases=[phase for phase in Phase if is_folder or phase is not Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
