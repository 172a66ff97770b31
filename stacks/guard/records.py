"""What the Guard reads of a run in S3, and what it tells: events in S3, messages to the topic."""

import json
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import ClientError

from contract.keys import EVENTS, HEAD, checkpoint_prefix
from stacks.guard.settings import Settings, client


def read_head(settings: Settings) -> tuple[dict[str, Any], float]:
    """Return head.json and its time in S3; {} and 0 before the first attempt."""
    try:
        answer = client("s3").get_object(
            Bucket=settings.run_bucket, Key=f"{settings.run_prefix}/{HEAD}"
        )
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchKey":
            return {}, 0.0
        raise
    return json.loads(answer["Body"].read()), answer["LastModified"].timestamp()


def last_commit(settings: Settings, head: dict[str, Any]) -> float:
    """Return the time in S3 of the newest committed checkpoint's last file; 0 without any."""
    if not head.get("checkpoints"):
        return 0.0
    files = client("s3").list_objects_v2(
        Bucket=settings.run_bucket,
        Prefix=f"{settings.run_prefix}/{checkpoint_prefix(head['checkpoints'][-1]['name'])}",
    )
    return max((each["LastModified"].timestamp() for each in files.get("Contents", [])), default=0)


def record_event(
    settings: Settings, name: str, message: str, now: float, **extra: str
) -> dict[str, Any]:
    """Write one event beside those of the instances, and return it."""
    when = datetime.fromtimestamp(now, UTC)
    record = {
        "time": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "instance_id": "guard",
        "name": name,
        "status": "info",
        "message": message,
        **extra,
    }
    client("s3").put_object(
        Bucket=settings.run_bucket,
        Key=f"{settings.run_prefix}/{EVENTS}{when:%Y%m%dT%H%M%SZ}-guard-{name}.json",
        Body=json.dumps(record).encode(),
        ContentType="application/json",
    )
    return record


def publish(settings: Settings, headline: str, document: dict[str, Any]) -> None:
    """Send a message to the topic's subscribers."""
    client("sns").publish(
        TopicArn=settings.topic_arn,
        # SNS takes 100 characters; the message has the whole headline.
        Subject=f"{settings.stack_name}: {headline}"[:100],
        Message=json.dumps({"headline": headline, **document}, indent=1, default=str),
    )
