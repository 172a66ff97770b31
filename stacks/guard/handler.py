"""The Guard: sends a run's fleet to zero when it is finished, over budget, silent or stuck.

One file of plain Python and boto3, which AWS Lambda runs as it is. It needs nothing from the
instance; what must outlive one (billed hours, attempts) it keeps in <run>/guard.json. Being one
file, it cannot import contract/keys.py: a test compares the names that it spells out.
"""

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

import boto3
from botocore.exceptions import ClientError

LIVE_STATES = frozenset(["pending", "running"])
DONE_STATES = frozenset(["finished", "failed"])
# Invocations may overlap (schedule and events); the loser of a conditional write reads again.
MAX_WRITE_ATTEMPTS = 5


@cache
def client(service: str) -> Any:
    """Return the client of a service, made once: creating one costs more than a call."""
    return boto3.client(service)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The construct's decisions, as the function's environment gives them."""

    stack_name: str
    fleet_parameter: str
    run_bucket: str
    run_prefix: str
    topic_arn: str
    max_billed_hours: float
    heartbeat_timeout_seconds: float
    max_barren_attempts: int

    @classmethod
    def from_environment(cls, environment: Any) -> "Settings":
        """Read the eight variables; a missing one is a KeyError with its name."""
        return cls(
            stack_name=environment["STACK_NAME"],
            fleet_parameter=environment["FLEET_PARAMETER"],
            run_bucket=environment["RUN_BUCKET"],
            run_prefix=environment["RUN_PREFIX"],
            topic_arn=environment["TOPIC_ARN"],
            max_billed_hours=float(environment["MAX_BILLED_HOURS"]),
            heartbeat_timeout_seconds=float(environment["HEARTBEAT_TIMEOUT_SECONDS"]),
            max_barren_attempts=int(environment["MAX_BARREN_ATTEMPTS"]),
        )


@dataclass(kw_only=True, slots=True)
class Attempt:
    """What the Guard saw of one instance of the run; times are seconds since 1970."""

    launched: float
    seen: float
    is_live: bool


@dataclass(kw_only=True, slots=True)
class Ledger:
    """All attempts of the run, including instances that EC2 no longer lists (after an hour)."""

    attempts: dict[str, Attempt] = field(default_factory=dict)
    # When the Guard last stopped the fleet: a deploy after that starts a new series of attempts.
    stopped: float = 0.0
    # The newest commit so far: `reopen --from-checkpoint` leaves only older ones in the head.
    committed: float = 0.0

    def observe(self, instances: list[dict[str, Any]], now: float) -> None:
        """Bring the attempts up to date with what EC2 says about the run's instances."""
        live = set()
        for instance in instances:
            instance_id, launched = instance["InstanceId"], instance["LaunchTime"].timestamp()
            known = self.attempts.get(instance_id)
            if known is None:
                known = Attempt(launched=launched, seen=now, is_live=True)
                self.attempts[instance_id] = known
            if instance["State"]["Name"] in LIVE_STATES:
                live.add(instance_id)
        for instance_id, attempt in self.attempts.items():
            # The end counts from when it is first seen, at most one schedule interval too late.
            if attempt.is_live:
                attempt.seen = now
            attempt.is_live = instance_id in live

    def billed_hours(self) -> float:
        return sum(max(0.0, each.seen - each.launched) for each in self.attempts.values()) / 3600

    def barren_attempts(self) -> int:
        """Count ended attempts launched after the last commit and the Guard's last stop."""
        since = max(self.committed, self.stopped)
        ended = [each for each in self.attempts.values() if not each.is_live]
        return sum(each.launched > since for each in ended)


def handler(event: dict[str, Any], context: object) -> dict[str, str]:
    """Handle one event; return what was done (none, forward, to-zero) and why."""
    settings = Settings.from_environment(os.environ)
    done = respond(settings, event, datetime.now(UTC).timestamp())
    print(json.dumps({"event": event.get("detail-type"), **done}))
    return done


def respond(settings: Settings, event: dict[str, Any], now: float) -> dict[str, str]:
    """Forward an event of this stack's instances; send the fleet to zero if there is a reason."""
    done = {"action": "none", "reason": "no reason to stop"}
    if event.get("source") == "aws.ec2":
        instance_id = event["detail"]["instance-id"]
        if not _is_ours(settings, instance_id):
            return {"action": "none", "reason": f"{instance_id} is not an instance of this stack"}
        headline = f"{event['detail-type']}: {instance_id}"
        _publish(settings, headline, event)
        done = {"action": "forward", "reason": headline}
    fleet_id = _fleet_id(settings)
    if fleet_id is None:
        return {**done, "reason": f"{done['reason']}; no fleet of this stack is above zero"}
    reason = _reason_to_stop(settings, now)
    if reason is None:
        return done
    _send_to_zero(settings, fleet_id, reason, now)
    return {"action": "to-zero", "reason": reason}


def _is_ours(settings: Settings, instance_id: str) -> bool:
    mine = [
        {"Name": "instance-id", "Values": [instance_id]},
        {"Name": "tag:Stack", "Values": [settings.stack_name]},
    ]
    if client("ec2").describe_instances(Filters=mine)["Reservations"]:
        return True
    # EC2 no longer lists it, but the Guard has seen it alive.
    return instance_id in _read_ledger(settings)[0].attempts


def _fleet_id(settings: Settings) -> str | None:
    """Return the id of the fleet to stop; None if there is no fleet or it is at zero."""
    try:
        parameter = client("ssm").get_parameter(Name=settings.fleet_parameter)
        fleet_id: str = parameter["Parameter"]["Value"]
        fleets = client("ec2").describe_spot_fleet_requests(SpotFleetRequestIds=[fleet_id])
    except ClientError as error:
        # While the stack is created or destroyed, one of the two does not exist.
        if error.response["Error"]["Code"] in (
            "ParameterNotFound",
            "InvalidSpotFleetRequestId.NotFound",
        ):
            return None
        raise
    for fleet in fleets["SpotFleetRequestConfigs"]:
        is_active = fleet["SpotFleetRequestState"] in ("submitted", "active", "modifying")
        if is_active and fleet["SpotFleetRequestConfig"]["TargetCapacity"] > 0:
            return fleet_id
    return None


def _reason_to_stop(settings: Settings, now: float) -> str | None:
    """Return which of the four reasons to stop applies, if any."""
    head, head_written = _read_head(settings)
    ledger = _update_ledger(settings, now, committed=_last_commit(settings, head))
    if head.get("state") in DONE_STATES:
        return f"the run is {head['state']}"
    hours = ledger.billed_hours()
    if hours > settings.max_billed_hours:
        return f"{hours:.1f} hours billed; max_hours is {settings.max_billed_hours:g}"
    barren = ledger.barren_attempts()
    if barren >= settings.max_barren_attempts:
        return f"{barren} attempts in a row committed nothing"
    live = [each.launched for each in ledger.attempts.values() if each.is_live]
    if live:
        # A replacement gets the full timeout: it boots and syncs before its first heartbeat.
        silence = now - max(max(live), head_written)
        if silence > settings.heartbeat_timeout_seconds:
            return f"no heartbeat for {silence:.0f} s while an instance runs"
    return None


def _read_head(settings: Settings) -> tuple[dict[str, Any], float]:
    """Return head.json and its time in S3; {} and 0 before the first attempt."""
    try:
        answer = client("s3").get_object(
            Bucket=settings.run_bucket, Key=f"{settings.run_prefix}/head.json"
        )
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchKey":
            return {}, 0.0
        raise
    return json.loads(answer["Body"].read()), answer["LastModified"].timestamp()


def _last_commit(settings: Settings, head: dict[str, Any]) -> float:
    """Return the time in S3 of the newest committed checkpoint's last file; 0 without any."""
    if not head.get("checkpoints"):
        return 0.0
    files = client("s3").list_objects_v2(
        Bucket=settings.run_bucket,
        Prefix=f"{settings.run_prefix}/checkpoints/{head['checkpoints'][-1]['name']}/",
    )
    return max((each["LastModified"].timestamp() for each in files.get("Contents", [])), default=0)


def _update_ledger(
    settings: Settings, now: float, *, stopped: float = 0.0, committed: float = 0.0
) -> Ledger:
    """Update guard.json and return it; a writer that loses to another tries again."""
    instances = _instances(settings)
    for _ in range(MAX_WRITE_ATTEMPTS):
        ledger, etag = _read_ledger(settings)
        before = _encode(ledger)
        ledger.observe(instances, now)
        ledger.stopped = stopped or ledger.stopped
        ledger.committed = max(committed, ledger.committed)
        if _encode(ledger) == before or _write_ledger(settings, ledger, etag):
            return ledger
    raise RuntimeError(
        f"guard.json was changed by others {MAX_WRITE_ATTEMPTS} times in a row; not written"
    )


def _instances(settings: Settings) -> list[dict[str, Any]]:
    run_id = settings.run_prefix.rpartition("/")[2]
    mine = [
        {"Name": "tag:Stack", "Values": [settings.stack_name]},
        {"Name": "tag:RunId", "Values": [run_id]},
    ]
    pages = client("ec2").get_paginator("describe_instances").paginate(Filters=mine)
    reservations = [each for page in pages for each in page["Reservations"]]
    return [instance for each in reservations for instance in each["Instances"]]


def _encode(ledger: Ledger) -> bytes:
    attempts = {
        name: {"launched": each.launched, "seen": each.seen, "is_live": each.is_live}
        for name, each in ledger.attempts.items()
    }
    times = {"stopped": ledger.stopped, "committed": ledger.committed}
    return json.dumps({"format": 1, **times, "attempts": attempts}, indent=1).encode()


def _read_ledger(settings: Settings) -> tuple[Ledger, str | None]:
    try:
        answer = client("s3").get_object(
            Bucket=settings.run_bucket, Key=f"{settings.run_prefix}/guard.json"
        )
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchKey":
            return Ledger(), None
        raise
    document = json.loads(answer["Body"].read())
    attempts = {name: Attempt(**each) for name, each in document["attempts"].items()}
    times = {name: document.get(name, 0.0) for name in ("stopped", "committed")}
    return Ledger(attempts=attempts, **times), answer["ETag"]


def _write_ledger(settings: Settings, ledger: Ledger, etag: str | None) -> bool:
    """Write guard.json unless it changed since it was read; return whether it was written."""
    condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    try:
        client("s3").put_object(
            Bucket=settings.run_bucket,
            Key=f"{settings.run_prefix}/guard.json",
            Body=_encode(ledger),
            ContentType="application/json",
            **condition,
        )
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
            return False
        raise
    return True


def _send_to_zero(settings: Settings, fleet_id: str, reason: str, now: float) -> None:
    client("ec2").modify_spot_fleet_request(
        SpotFleetRequestId=fleet_id, TargetCapacity=0, OnDemandTargetCapacity=0
    )
    _update_ledger(settings, now, stopped=now)
    when = datetime.fromtimestamp(now, UTC)
    record = {
        "time": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "instance_id": "guard",
        "name": "to-zero",
        "status": "info",
        "message": reason,
        "fleet_id": fleet_id,
    }
    client("s3").put_object(
        Bucket=settings.run_bucket,
        Key=f"{settings.run_prefix}/events/{when:%Y%m%dT%H%M%SZ}-guard-to-zero.json",
        Body=json.dumps(record).encode(),
        ContentType="application/json",
    )
    _publish(settings, f"Fleet to zero: {reason}", record)


def _publish(settings: Settings, headline: str, document: dict[str, Any]) -> None:
    client("sns").publish(
        TopicArn=settings.topic_arn,
        # SNS takes 100 characters; the message has the whole headline.
        Subject=f"{settings.stack_name}: {headline}"[:100],
        Message=json.dumps({"headline": headline, **document}, indent=1, default=str),
    )
