"""The promises of a store: complete objects, conditional writes with one winner, clear errors."""

import errno
import itertools
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from contract.errors import Exit, UserError
from training.durable.errors import AttemptEndedError

# How long a call is repeated: a minute of trouble costs no commit, and S3's is mostly shorter.
_WINDOW_SECONDS = 90.0
_LONGEST_PAUSE_SECONDS = 10.0
# For a person who waits, while no call has been answered: a wrong endpoint, or no network.
_UNREACHED_SECONDS = 10.0


class StoreError(AttemptEndedError):
    """The store failed: one sentence with the key and the store's own message."""

    exit_code = Exit.STORE


class CredentialsError(StoreError):
    """No credentials: none were configured, or the instance's metadata does not answer."""


class LastingError(StoreError):
    """Neither a retry nor another machine would do better: somebody must change something first."""

    exit_code = Exit.USER


class PreconditionFailedError(StoreError):
    """The key is not, or is no longer, what the conditional write expected."""


class AnswerLostError(StoreError):
    """No response came: the conditional write may or may not have happened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One object's content, and the ETag that a conditional write names."""

    data: bytes
    etag: str


class Patience:
    """How long the calls of one store are repeated: for a window, but not beyond the deadline."""

    is_attended: ClassVar[bool] = False  # a person waits for this process's command

    def __init__(self) -> None:
        self.is_reached = False  # a call was answered
        # Of all calls, on the monotonic clock: a notice may come, and its end come nearer.
        self.deadline: Callable[[], float] = lambda: math.inf

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline() - time.monotonic()

    def pauses(self) -> Iterator[float]:
        """Yield how long to wait before each attempt of a call, the first at once."""
        yield 0.0
        began = time.monotonic()
        for attempt in itertools.count(1):
            is_short = self.is_attended and not self.is_reached
            window = _UNREACHED_SECONDS if is_short else _WINDOW_SECONDS
            left = min(began + window - time.monotonic(), self.seconds_left)
            if left <= 0:
                return
            # Shorter towards the end: the trouble may pass just before.
            longest = min(_LONGEST_PAUSE_SECONDS, max(1.0, left / 8), 0.1 * 2.0**attempt)
            # Not from the generator that a stage's code draws from, in another thread.
            yield min(left, random.SystemRandom().uniform(0, longest))


@contextmanager
def attended(is_attended: bool = True) -> Iterator[None]:
    """While a person waits for a command, fail soon if no call reaches the store."""
    Patience.is_attended = is_attended
    try:
        yield
    finally:
        Patience.is_attended = False


class Upload:
    """One object being uploaded, by any number of threads.

    The object counts only once `finish` returns; parts of a multipart upload are invisible before.
    """

    is_fast = False  # whether the digests of its parts are xxh128, not SHA-256

    def put(self, number: int, start: int, data: memoryview, digest: bytes) -> None:
        """Write part `number` (from 0), which starts at byte `start`."""
        raise NotImplementedError

    def finish(self) -> None:
        """Make the object visible and durable; call it once every part was put."""
        raise NotImplementedError

    def abort(self) -> None:
        """Abort; parts are deleted if the store responds.

        A single-part object may exist already: the caller that chose its key deletes it.
        """
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether another process can send parts out of shared memory; waits while it starts."""
        return False

    def put_shared(
        self, memory: int, size: int, part_bytes: int, must_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, bytes]]:
        """Make that process write every part of the memory with this file descriptor.

        Yields number and digest of each; ends early once it `must_stop`.
        """
        raise NotImplementedError


class PartSender(Protocol):
    """A process that sends from shared memory, so that hashing and sending happen there."""

    def start(self) -> bool:
        """Start it unless it is running; return False if it cannot run."""


class Store(Protocol):
    """Keys are relative, with slashes; prefixes end with a slash or are empty.

    A key or prefix that would leave the store, or name all of a folder, is refused by every method.
    """

    @property
    def num_threads(self) -> int:
        """How many parts are best transferred at once."""

    @property
    def part_process(self) -> PartSender | None:
        """The process that sends from shared memory; None if this process sends everything."""

    @property
    def patience(self) -> Patience:
        """How long calls are repeated."""

    @property
    def uri(self) -> str:
        """The URI as a person would write it."""

    def get(self, key: str) -> Stored | None:
        """Return the object, or None if the key does not exist."""

    def put(self, key: str, data: bytes) -> None:
        """Write unconditionally, replacing what is there."""

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        """Write if the key's ETag is `etag` (None: it does not exist); return the new one."""

    def get_file(self, key: str, path: Path) -> None:
        """Download into `path`, whose folder exists; FileNotFoundError for a missing key."""

    def put_file(self, key: str, path: Path) -> None:
        """Upload a file of any size."""

    def upload(
        self, key: str, size: int, part_bytes: int, stop: threading.Event, may_be_fast: bool = False
    ) -> "Upload":
        """Start writing a key that has no other writer, in parts of `part_bytes`.

        `may_be_fast`: nobody needs the SHA-256 of its parts.
        """

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        """Fill `data` with the key's bytes from `start`; FileNotFoundError without such a key."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the bytes of every key below `prefix`; keys are relative to the store."""

    def folders(self, prefix: str) -> set[str]:
        """Return the names of folders directly below `prefix`, even empty or unreadable ones."""

    def delete_below(self, prefix: str) -> None:
        """Delete every key below `prefix`, if any."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these keys, ignoring any that do not exist."""

    def sweep(self, prefix: str) -> None:
        """Delete what killed writers have left unfinished below `prefix`.

        These are not keys yet; what a living writer has begun stays.
        """


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into a StoreError, like a 500 from S3."""
    try:
        yield
    except OSError as error:
        raise refused_file(path, error) from error


def refused_file(path: Path, error: OSError) -> StoreError:
    """Return the error of a store for one of a file; only a name too long is so everywhere."""
    if error.errno == errno.ENAMETOOLONG:
        name = max(path.parts, key=lambda part: len(os.fsencode(part)))
        return LastingError(
            f"{name!r} has {len(os.fsencode(name))} bytes, more than this disk takes "
            "in a name (mostly 255), or its path has too many; shorten it"
        )
    return StoreError(f"{path}: {error.strerror or error}")


def read_all(stream: Any, data: memoryview, short: str) -> None:
    """Fill `data` from a stream; a StoreError that is `short` if it ends too early."""
    done = 0
    while done < len(data):
        if not (count := stream.readinto(data[done:])):
            raise StoreError(short)
        done += count


def refuse_outside(uri: str, key: str) -> None:
    """Raise UserError for a key or prefix that a file system would resolve to another place."""
    if key and {"", ".", ".."} & set(key.removesuffix("/").split("/")):
        raise UserError(
            f"{key!r} is not a key of {uri}; restore the last good version of the file it is from"
        )


def get_each(store: Store, keys: Sequence[str]) -> Iterator[Stored | None]:
    """Yield the objects of these keys in order, read in parallel, some ahead of the caller."""
    ahead = 2 * store.num_threads
    reading: deque[Future[Stored | None]] = deque()
    with ThreadPoolExecutor(max_workers=store.num_threads, thread_name_prefix="get") as pool:
        try:
            for key in keys:
                reading.append(pool.submit(store.get, key))
                if len(reading) > ahead:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()
        finally:
            for future in reading:
                future.cancel()


def put_unless_changed(store: Store, key: str, data: bytes, etag: str | None) -> str | None:
    """Write a key if its ETag is `etag` (None: missing); return its ETag if it now holds `data`.

    After a lost response the key is read: its content shows who was first.
    """
    failure: StoreError | None = None
    for pause in store.patience.pauses():
        time.sleep(pause)
        try:
            return store.put_if(key, data, etag)
        except (PreconditionFailedError, AnswerLostError) as error:
            failure, found = error, store.get(key)
            if (found.etag if found else None) != etag:
                return found.etag if found is not None and found.data == data else None
    raise StoreError(f"{store.uri}/{key} could not be written: {failure}") from failure
