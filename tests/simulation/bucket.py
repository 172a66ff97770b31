"""S3 as its callers meet it: versions, conditional writes, latency, throttling, outages.

One bucket for all: `TrainerClient` is what S3Store makes of boto3, `GuardService` what the Guard
does. EC2, Auto Scaling, SSM and SNS answer as in the Guard's model.
"""

import io
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import ClientError, ConnectTimeoutError, ReadTimeoutError

from contract.keys import BLOBS, EVENTS, HEAD
from tests.simulation.clock import CLOCK, Lock, sleep
from tests.stacks.guard import answers
from tests.stacks.guard.world import error
from training.durable.store.protocol import Patience
from training.durable.store.s3 import S3Store
from training.durable.store.transfer import CancelledError

if TYPE_CHECKING:
    from tests.simulation.world import Universe

# What a program's tensors begin with, and how many bytes of them stand for its whole state.
TENSORS, FOLDER_BYTES = b"T:", 16384
ENDPOINT = "https://runs.s3.amazonaws.com"


class Version(NamedTuple):
    when: float
    data: bytes | None  # None: a delete marker
    number: int
    since: float  # when its content came, but for a heartbeat


def _time(when: float) -> datetime:
    return datetime.fromtimestamp(int(when), UTC)  # S3 tells whole seconds


@dataclass(kw_only=True)
class Bucket:
    """The objects of a bucket; `watch` hears of each change."""

    objects: dict[str, list[Version]] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    number: int = 0
    listed: dict[int, dict[str, Any]] = field(default_factory=dict)  # by a version's number
    events: dict[str, list[Any]] = field(default_factory=dict)  # as they are listed
    watch: Callable[[str, bytes | None], None] = lambda key, data: None

    def found(self, key: str, number: str = "") -> Version | None:
        versions = self.objects.get(key, ())
        for version in reversed(versions):
            if not number or number == str(version.number):
                return version if version.data is not None else None
        return None

    def write(self, key: str, data: bytes | None) -> str:
        self.number += 1
        now, versions = CLOCK.now, self.objects.get(key)
        version = Version(now, data, self.number, now)
        if versions is None:
            insort(self.keys, key)
            self.objects[key] = [version]
            if (events := self.events.get(key[: key.rfind("/") + 1])) is not None:
                insort(events, self._list(key, version), key=itemgetter("Key"))
        elif _is_heartbeat(key, versions[-1].data, data):
            versions[-1] = version._replace(since=versions[-1].since)  # no rule asks for each
        else:
            versions.append(version)
            self.events.pop(key[: key.rfind("/") + 1], None)
        self.watch(key, data)
        return f'"{self.number}"'

    def renew(self, key: str, data: bytes, when: float, count: int = 1) -> str:
        """Write a head, the last of so many that differ in nonce and heartbeat alone."""
        self.number += count
        last = self.objects[key][-1]
        self.objects[key][-1] = Version(when, data, self.number, last.since)
        return f'"{self.number}"'

    def below(self, prefix: str) -> Iterator[tuple[str, Version]]:
        for place in range(bisect_left(self.keys, prefix), len(self.keys)):
            key = self.keys[place]
            if not key.startswith(prefix):
                return
            if (version := self.objects[key][-1]).data is not None:
                yield key, version

    # -- S3's operations

    def get_object(
        self, Bucket: str, Key: str, VersionId: str = "", Range: str = "", **_: Any
    ) -> Any:
        version = self.found(Key, VersionId)
        if version is None:
            raise error("NoSuchKey", status=404)
        assert version.data is not None
        data = version.data
        if Range:
            first, _, last = Range.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1]
        return {
            "Body": io.BytesIO(data),
            "ContentLength": len(data),
            "LastModified": _time(version.when),
            "ETag": f'"{version.number}"',
        }

    def put_object(
        self, Bucket: str, Key: str, Body: Any, IfMatch: str = "", IfNoneMatch: str = "", **_: Any
    ) -> Any:
        version = self.found(Key)
        if IfMatch and version is None:
            raise error("NoSuchKey", status=404)
        if (IfNoneMatch and version) or (IfMatch and version and IfMatch != f'"{version.number}"'):
            raise error("PreconditionFailed", status=412)
        data = Body if isinstance(Body, bytes) else Body.read()
        return {"ETag": self.write(Key, bytes(data))}

    def list_objects_v2(
        self, Bucket: str, Prefix: str, Delimiter: str = "", StartAfter: str = "", **_: Any
    ) -> Any:
        is_all = not (Delimiter or StartAfter)
        if is_all and Prefix in self.events:
            return {"Contents": [*self.events[Prefix]]}
        found, folders = [], dict[str, None]()
        for key, version in self.below(Prefix):
            rest = key[len(Prefix) :]
            if Delimiter and Delimiter in rest:
                folders[Prefix + rest.partition(Delimiter)[0] + Delimiter] = None
            elif key > StartAfter:
                found.append(self.listed.get(version.number) or self._list(key, version))
        if is_all and Prefix.endswith(f"/{EVENTS}"):
            self.events[Prefix] = [*found]
        return {"Contents": found, "CommonPrefixes": [{"Prefix": one} for one in folders]}

    def _list(self, key: str, version: Version) -> dict[str, Any]:
        entry = {"Key": key, "Size": len(version.data or b""), "LastModified": _time(version.when)}
        self.listed[version.number] = entry
        return entry

    def list_object_versions(self, Bucket: str, Prefix: str) -> Any:
        found = [
            {"Key": key, "VersionId": str(one.number), "LastModified": _time(one.when)}
            for key, _ in self.below(Prefix)
            for one in reversed(self.objects[key])
            if one.data is not None
        ]
        for key, versions in self.objects.items():  # deleted ones have versions, too
            if key.startswith(Prefix) and versions[-1].data is None:
                found += [
                    {"Key": key, "VersionId": str(one.number), "LastModified": _time(one.when)}
                    for one in reversed(versions)
                    if one.data is not None
                ]
        return {"Versions": found}

    def delete_objects(self, Bucket: str, Delete: Any) -> Any:
        for each in Delete["Objects"]:
            if self.found(each["Key"]):
                self.write(each["Key"], None)
        return {"ResponseMetadata": {"HTTPStatusCode": 200}}


def _is_heartbeat(key: str, before: bytes | None, after: bytes | None) -> bool:
    """Whether a head differs from the one before in its nonce and heartbeat alone."""
    if not key.endswith(HEAD) or not before or not after:
        return False
    mark = b'"state"'
    return (
        before[before.find(mark) :] == after[after.find(mark) :]
        and before[: before.find(b'"nonce"')] == after[: after.find(b'"nonce"')]
    )


@dataclass(kw_only=True)
class _Caller:
    """One side's calls: how long each takes, and what becomes of it."""

    world: "Universe"
    who: str  # a machine's id, or "guard"
    connect_seconds: float
    read_seconds: float

    def call(self, operation: str, act: Callable[[], Any]) -> Any:
        world, luck = self.world, CLOCK.luck
        seconds = luck.lognormvariate(world.plan.latency, 0.5)
        trouble = world.trouble(self.who) if world.troubles else None
        if trouble is not None:
            is_hit = luck.random() < trouble.share
            if trouble.how == "slow":
                seconds *= 100 if is_hit else 10
            elif is_hit and trouble.how == "outage":
                sleep(self.connect_seconds)
                raise ConnectTimeoutError(endpoint_url=ENDPOINT)
            elif trouble.how == "denied":
                sleep(seconds)
                raise error("AccessDenied", operation, 403)
            elif is_hit and trouble.how == "throttle":
                sleep(seconds)
                raise error("SlowDown", operation, 503)
        if seconds > self.read_seconds:
            sleep(self.read_seconds)
            # The request is on its way, and is done behind the caller's back.
            if luck.random() < 0.5:
                CLOCK.start(world.process, lambda: _unheard(act))
            raise ReadTimeoutError(endpoint_url=ENDPOINT)
        sleep(seconds / 2)
        answer = act()
        sleep(seconds / 2)
        if trouble is not None and trouble.how == "lost" and luck.random() < trouble.share:
            sleep(self.read_seconds)
            raise ReadTimeoutError(endpoint_url=ENDPOINT)
        return answer


def _unheard(act: Callable[[], Any]) -> None:
    with suppress(ClientError):
        act()


class TrainerClient(_Caller):
    """boto3's client of S3, as S3Store uses it."""

    meta = SimpleNamespace(events=SimpleNamespace(register=lambda *_: None))

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        world, is_write = self.world, operation == "put_object"
        act = getattr(world.bucket, operation)

        def call(**request: Any) -> Any:
            if is_write:
                world.account.hear(world, request["Key"])
            return self.call(operation, partial(act, **request))

        self.__dict__[operation] = call
        return call

    def transmit(self, seconds: float) -> None:
        """Send a part of a file that takes so long; it has no object of its own."""

        def act() -> None:
            sleep(seconds)

        self.call("upload_part", act)


class SimulatedStore(S3Store):
    """The project's store, whose client reaches the simulated bucket."""

    def __init__(self, world: "Universe", who: str) -> None:
        self._bucket, self._prefix = "runs", world.prefix
        self.part_process = None  # type: ignore[assignment]
        self.patience = Patience()
        self._clients: dict[float, Any] = {}
        self._lock: Any = Lock()
        self._link: Any = Lock()  # what several threads send and read goes one after another
        self._warned, self._reader, self._doubts = 0.0, None, 0
        self.compares_fast = False

        def client(service: str, config: Any) -> TrainerClient:
            return TrainerClient(
                world=world,
                who=who,
                connect_seconds=config.connect_timeout,
                read_seconds=config.read_timeout,
            )

        self._session: Any = SimpleNamespace(
            create_client=client,
            get_credentials=lambda: SimpleNamespace(get_frozen_credentials=lambda: None),
        )
        self._world, self._who = world, who
        self._calm = client("s3", SimpleNamespace(connect_timeout=5.0, read_timeout=32.0))

    def is_calm(self, longest: float) -> bool:
        """Whether a request now meets no trouble, and no notice makes it shorter."""
        world = self._world
        return (
            not world.sees_all
            and self.patience.seconds_left > 2 * longest
            and (not world.troubles or world.trouble(self._who) is None)
        )

    def put_part(self, stop: Any, where: Any, number: int, data: memoryview, digest: bytes) -> str:
        """Blobs take the time of the files that they stand for, part by part."""
        key = where["Key"].removeprefix(self._prefix)
        if key.startswith(BLOBS):
            self._transmit(key, data, stop)
        return super().put_part(stop, where, number, data, digest)

    def read_into(self, key: str, start: int, data: memoryview) -> None:
        super().read_into(key, start, data)
        if key.startswith(BLOBS):
            self._transmit(key, data, None)

    def _transmit(self, key: str, data: memoryview, stop: Any) -> None:
        plan, begins_with = self._world.plan, bytes(data[: len(TENSORS)])
        share = plan.state_bytes / FOLDER_BYTES if begins_with == TENSORS else 1.0
        seconds = len(data) * share / plan.upload_rate
        count = max(1, min(40, round(seconds / 5.0)))
        for _ in range(count):
            if stop is not None and stop.is_set():
                raise CancelledError("the transfer was stopped")
            with self._link:
                self.repeating(key, lambda client: client.transmit(seconds / count), stop)

    def put(self, key: str, data: bytes) -> None:
        """Without the digest that the simulated S3 does not compare."""
        if self.is_calm(32.0):
            self.repeating(key, lambda client: client.put_object(**self._at(key), Body=data))
        else:
            super().put(key, data)

    def repeating(self, key: str, call: Any, stop: Any = None) -> Any:
        """Without what a request that fails would need, where none can."""
        if not self.is_calm(32.0):
            return super().repeating(key, call, stop)
        try:
            answer = call(self._calm)
        except ClientError as failure:
            with self._errors(key):
                raise failure
        finally:
            self.patience.is_reached = True
        return answer

    def put_if(self, key: str, data: bytes, etag: str | None) -> str:
        if not self.is_calm(8.0):
            return super().put_if(key, data, etag)
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        try:
            return str(self._calm.put_object(**self._at(key), Body=data, **condition)["ETag"])
        except ClientError as failure:
            with self._errors(key, conditional=True):
                raise failure
            raise AssertionError from failure


_OF_S3 = frozenset(
    ["get_object", "put_object", "list_objects_v2", "list_object_versions", "delete_objects"]
)
TRIES = 2  # of the Guard's clients (stacks/guard/settings.py)


class GuardService(_Caller):
    """boto3's client of a service, as the Guard and the machines' AWS CLI use it."""

    name = ""

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        world = self.world
        act = (
            getattr(world.bucket, operation)
            if operation in _OF_S3
            else lambda **request: world.account.answer(world, operation, request)
        )
        is_write = operation == "put_object"

        def call(**request: Any) -> Any:
            if is_write:
                world.account.hear(world, request["Key"])
            for left in reversed(range(TRIES)):
                try:
                    return self._once(operation, partial(act, **request))
                except Exception as failure:
                    if not left or not _passes(failure):
                        raise
                    sleep(CLOCK.luck.uniform(0, 1))
            raise AssertionError

        self.__dict__[operation] = call
        return call

    def _once(self, operation: str, act: Callable[[], Any]) -> Any:
        if operation in _OF_S3:
            return self.call(operation, act)
        sleep(CLOCK.luck.uniform(0.02, 0.3))
        self.world.allow(operation)
        answer = act()
        self.world.settle()
        if self.world.losing[operation] > 0:  # it was done, and nobody knows
            self.world.losing[operation] -= 1
            raise error("InternalError", operation, 500)
        return answer

    def get_paginator(self, operation: str) -> answers.Pages:
        return answers.Pages(getattr(self, operation))


def _passes(failure: Exception) -> bool:
    answer: Any = getattr(failure, "response", None)
    return answer is None or answer["ResponseMetadata"]["HTTPStatusCode"] >= 500
