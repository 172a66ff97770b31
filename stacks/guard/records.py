"""A run's objects in S3 as the Guard reads them, its ledger, and what it sends: events, mails."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from contract.keys import (
    BUDGETS,
    CHECKPOINTS,
    EVENTS,
    GUARD,
    HEAD,
    SPOT_HISTORY,
    checkpoint_prefix,
    progress_key,
)
from contract.progress import read_progress
from sizing import PoolHistory, PoolRecord
from stacks.guard.budget import Budget
from stacks.guard.ledger import Ledger, Note
from stacks.guard.settings import GuardSettings, answer_or_none, quick_client

# Calls may overlap (schedule and events); the loser of a conditional write reads again.
MAX_WRITE_ATTEMPTS = 5
# Of what machines write, whose programs may write anything: bytes of one object (the Guard has
# 256 MiB of memory), and the newest messages.
MOST_BYTES, MOST_MESSAGES = 4 * 2**20, 50
# userdata leaves these when a machine gives up on itself, or on the run without being able to say
# so in its head, and one for each step of a boot.
MACHINE_FAILED, NOT_MARKED, BOOT_STEP = "machine-failed", "head-not-marked", "boot-"
_EVENT_KEY = re.compile(r"\d{8}T\d{6}[.\d]*Z-(?P<id>i-\w+)-(?P<name>[\w-]+)\.json")
_TIME = "%Y%m%dT%H%M%S"
# Lambda's clock and S3's differ by less.
CLOCKS_DIFFER_SECONDS = 60.0
_K = TypeVar("_K", Ledger, Budget)  # what Guards keep, each as one object


class LedgerBusyError(RuntimeError):
    """Other writers changed an object between each of our reads and writes."""


class LedgerLostError(RuntimeError):
    """No version of an object can be read, so what has been spent is unknown."""


class MachineEvents(NamedTuple):
    """The events that machines left: id, time and message of failures, numbers of boot steps."""

    failures: list[tuple[str, float, str]]
    given_up: list[tuple[str, float, str]]  # of the run, whose head does not say so
    steps: dict[str, int]


def read_head(settings: GuardSettings) -> tuple[dict[str, Any], float]:
    """Return head.json and its time in S3; {} and 0 before the first attempt."""
    found = _told(settings, HEAD)
    if found is None:
        return {}, 0.0
    head = json.loads(found["Body"].read())
    if not (isinstance(head, dict) and isinstance(head.get("state", ""), str)):
        raise ValueError(f"{settings.run_uri}/{HEAD} is no head")
    return head, found["LastModified"].timestamp()


def last_commit(settings: GuardSettings, head: dict[str, Any]) -> float:
    """Return the time in S3 of the newest committed checkpoint's last file; 0 without any."""
    if not head.get("checkpoints"):
        return 0.0
    files = quick_client("s3").list_objects_v2(
        Bucket=settings.run_bucket,
        Prefix=f"{settings.run_prefix}/{checkpoint_prefix(head['checkpoints'][-1]['name'])}",
    )
    return max((each["LastModified"].timestamp() for each in files.get("Contents", [])), default=0)


def progress_of(settings: GuardSettings, instance_id: str) -> tuple[str, int]:
    """Return a step of a machine's boot, and how much of it is done; 0 before its first report."""
    found = _told(settings, progress_key(instance_id))
    return read_progress(found["Body"].read()) if found else ("", 0)


def has_checkpoints(settings: GuardSettings) -> bool:
    """Return whether anything lies below checkpoints/."""
    prefix = f"{settings.run_prefix}/{CHECKPOINTS}"
    found = quick_client("s3").list_objects_v2(Bucket=settings.run_bucket, Prefix=prefix, MaxKeys=1)
    return bool(found.get("Contents"))


def machine_events(settings: GuardSettings, since: float) -> MachineEvents:
    """Read each machine's newest failure stored since `since`, and count its steps of a boot.

    By S3's clock: that of a machine, which names its events, may be wrong by days.
    """
    prefix, calls = f"{settings.run_prefix}/{EVENTS}", quick_client("s3")
    pages = calls.get_paginator("list_objects_v2").paginate(
        Bucket=settings.run_bucket, Prefix=prefix
    )
    steps: dict[str, set[str]] = {}
    newest: dict[tuple[str, str], tuple[float, str]] = {}
    for each in (each for page in pages for each in page.get("Contents", [])):
        key = each["Key"]
        if not (BOOT_STEP in key or MACHINE_FAILED in key or NOT_MARKED in key):
            continue  # of thousands, few are
        match = _EVENT_KEY.fullmatch(key.removeprefix(prefix))
        if match and match["name"].startswith(BOOT_STEP):
            steps.setdefault(match["id"], set()).add(match["name"])
        if match and match["name"] in (MACHINE_FAILED, NOT_MARKED):
            stored, of = (each["LastModified"].timestamp(), match[0]), (match["name"], match["id"])
            # What is mailed once may have been read by a call that ended before it could mail.
            if stored[0] >= since or match["name"] == NOT_MARKED:
                newest[of] = max(newest.get(of, stored), stored)
    told: dict[str, list[tuple[str, float, str]]] = {MACHINE_FAILED: [], NOT_MARKED: []}
    by_time = sorted(newest.items(), key=itemgetter(1))
    for (kind, instance_id), (when, name) in by_time[-MOST_MESSAGES:]:
        told[kind].append((instance_id, when, _message(settings, EVENTS + name)))
    counts = {name: len(names) for name, names in steps.items()}
    return MachineEvents(told[MACHINE_FAILED], told[NOT_MARKED], counts)


def read_kept(settings: GuardSettings, name: str, kind: type[_K]) -> tuple[_K, str | None]:
    """Return an object and its ETag; an empty one and None before the first write.

    If it was deleted or damaged, its newest readable version counts; LedgerLostError if there is
    none.
    """
    found = _get(settings, name)
    etag = None if found is None else str(found["ETag"])
    with suppress(ValueError):
        if found is not None:
            return kind.from_json(found["Body"].read()), etag
    versions = _versions(settings, name)
    for version in versions:
        older = _get(settings, name, VersionId=version)
        with suppress(ValueError):
            if older is not None:
                return kind.from_json(older["Body"].read()), etag
    if versions:
        place = f"{settings.run_bucket}/{_key(settings, name)}"
        raise LedgerLostError(f"no version of s3://{place} can be read")
    return kind(), None


def read_ledger(settings: GuardSettings) -> tuple[Ledger, str | None]:
    """Return guard.json and its ETag; an empty ledger and None before the first write."""
    return read_kept(settings, GUARD, Ledger)


def update_kept(
    settings: GuardSettings, name: str, kind: type[_K], change: Callable[[_K], None]
) -> _K:
    """Change an object and return it; a writer that loses to another starts over."""
    for _ in range(MAX_WRITE_ATTEMPTS):
        kept, etag = read_kept(settings, name, kind)
        before = kept.to_json()
        change(kept)
        after = kept.to_json()
        if after == before or _write(settings, name, after, etag):
            return kept
    raise LedgerBusyError(
        f"{name} was changed by others {MAX_WRITE_ATTEMPTS} times in a row; not written"
    )


def update_ledger(settings: GuardSettings, change: Callable[[Ledger], None]) -> Ledger:
    """Change guard.json and return it."""
    return update_kept(settings, GUARD, Ledger, change)


def share_pools(settings: GuardSettings, own: PoolHistory) -> PoolHistory:
    """Return what Spot did to every run of the bucket, with this one's part of it up to date.

    Written once a machine came or went, or hours later; what cannot be read begins anew. A writer
    that loses to another leaves it to its next call.
    """
    where = {"Bucket": settings.run_bucket, "Key": SPOT_HISTORY}
    found, kept = answer_or_none(quick_client("s3").get_object, "NoSuchKey", **where), PoolHistory()
    with suppress(ValueError):
        kept = PoolHistory.from_json(found["Body"].read()) if found else kept
    after, run = kept.merged(own), settings.run_id
    if own.pools and _moves(kept.runs.get(run, {})) != _moves(own.pools):
        condition = {"IfMatch": found["ETag"]} if found else {"IfNoneMatch": "*"}
        lost = ("PreconditionFailed", "ConditionalRequestConflict")
        write, data = quick_client("s3").put_object, after.to_json().encode()
        answer_or_none(write, *lost, **where, **condition, Body=data)
    return after


def _moves(pools: Mapping[str, PoolRecord]) -> list[int]:
    seen = sum(pools.values(), start=PoolRecord())
    return [round(each) for each in (seen.at / 7200, seen.losses, seen.waits)]


def record_event(settings: GuardSettings, note: Note) -> None:
    """Write a note as an event of the run, next to those of the instances."""
    when = datetime.fromtimestamp(note.time, UTC)
    record = {
        "time": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "instance_id": "guard",
        "name": note.name,
        "status": "info",
        **({"about": note.about} if note.about else {}),
        **note.fields,
    }
    name = "-".join(filter(None, (when.strftime(_TIME) + "Z", "guard", note.name, note.about)))
    quick_client("s3").put_object(
        Bucket=settings.run_bucket,
        Key=f"{settings.run_prefix}/{EVENTS}{name}.json",
        Body=json.dumps(record).encode(),
        ContentType="application/json",
    )


def publish(settings: GuardSettings, note: Note) -> None:
    """Send a note to the topic's subscribers."""
    quick_client("sns").publish(
        TopicArn=settings.topic_arn,
        # SNS takes fewer than 100 characters and no control characters, which a machine's last
        # message may have (a progress bar's); the mail's text has the complete headline.
        Subject=re.sub(r"[^ -~]", "?", f"{settings.stack_name}: {note.headline}")[:99],
        # What a machine said may have been cut within a letter.
        Message="\n".join([note.headline, "", *note.lines, "", f"Run: {settings.run_uri}"])
        .encode(errors="replace")
        .decode(),
    )


def _key(settings: GuardSettings, name: str) -> str:
    """Return the key of a run's object, or of one that runs share."""
    return name if name.startswith(BUDGETS) else f"{settings.run_prefix}/{name}"


def _versions(settings: GuardSettings, name: str) -> list[str]:
    """Return the ids of an object's versions, newest first."""
    key = _key(settings, name)
    found = quick_client("s3").list_object_versions(Bucket=settings.run_bucket, Prefix=key)
    return [each["VersionId"] for each in found.get("Versions", []) if each["Key"] == key]


def _told(settings: GuardSettings, name: str) -> Any | None:
    """Get what a machine may have written; ValueError for more than the Guard's memory holds."""
    found = _get(settings, name)
    if found and found["ContentLength"] > MOST_BYTES:
        size = found["ContentLength"]
        raise ValueError(f"{name} has {size:,} bytes, more than the Guard reads ({MOST_BYTES:,})")
    return found


def _message(settings: GuardSettings, event: str) -> str:
    with suppress(ValueError, RecursionError):
        found = _told(settings, event)
        match json.loads(found["Body"].read()) if found else None:
            case {"message": str(message)}:
                return message[:4000]
    return ""


def _get(settings: GuardSettings, name: str, **version: str) -> Any | None:
    call, key = quick_client("s3").get_object, _key(settings, name)
    return answer_or_none(call, "NoSuchKey", Bucket=settings.run_bucket, Key=key, **version)


def _write(settings: GuardSettings, name: str, data: bytes, etag: str | None) -> bool:
    """Write an object unless it changed since it was read; return whether it was written."""
    condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    try:
        quick_client("s3").put_object(
            Bucket=settings.run_bucket,
            Key=_key(settings, name),
            Body=data,
            ContentType="application/json",
            **condition,
        )
    except (ClientError, BotoCoreError) as error:
        answer: dict[str, Any] = getattr(error, "response", None) or {}  # a timeout has None
        if answer.get("ResponseMetadata", {}).get("HTTPStatusCode") in (409, 412):
            return False
        found = _get(settings, name)  # the answer alone may be lost
        if found is None or found["Body"].read() != data:
            raise
    return True
