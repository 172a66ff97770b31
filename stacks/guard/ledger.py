"""The Guard's ledger, <run>/guard.json: what must outlive an instance (billed hours, attempts)."""

import json
from dataclasses import dataclass, field
from typing import Any

from botocore.exceptions import ClientError

from contract.keys import GUARD
from stacks.guard.settings import Settings, client

LIVE_STATES = frozenset(["pending", "running"])
# Invocations may overlap (schedule and events); the loser of a conditional write reads again.
MAX_WRITE_ATTEMPTS = 5


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
        """Hours from launch to end, over all attempts."""
        return sum(max(0.0, each.seen - each.launched) for each in self.attempts.values()) / 3600

    def barren_attempts(self) -> int:
        """Count ended attempts launched after the last commit and the Guard's last stop."""
        since = max(self.committed, self.stopped)
        ended = [each for each in self.attempts.values() if not each.is_live]
        return sum(each.launched > since for each in ended)


def update_ledger(
    settings: Settings,
    instances: list[dict[str, Any]],
    now: float,
    *,
    stopped: float = 0.0,
    committed: float = 0.0,
) -> Ledger:
    """Update guard.json and return it; a writer that loses to another tries again."""
    for _ in range(MAX_WRITE_ATTEMPTS):
        ledger, etag = read_ledger(settings)
        before = _encode(ledger)
        ledger.observe(instances, now)
        ledger.stopped = stopped or ledger.stopped
        ledger.committed = max(committed, ledger.committed)
        if _encode(ledger) == before or _write_ledger(settings, ledger, etag):
            return ledger
    raise RuntimeError(
        f"guard.json was changed by others {MAX_WRITE_ATTEMPTS} times in a row; not written"
    )


def read_ledger(settings: Settings) -> tuple[Ledger, str | None]:
    """Return guard.json and its ETag; an empty ledger and None before the first write."""
    try:
        answer = client("s3").get_object(
            Bucket=settings.run_bucket, Key=f"{settings.run_prefix}/{GUARD}"
        )
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchKey":
            return Ledger(), None
        raise
    document = json.loads(answer["Body"].read())
    attempts = {name: Attempt(**each) for name, each in document["attempts"].items()}
    times = {name: document.get(name, 0.0) for name in ("stopped", "committed")}
    return Ledger(attempts=attempts, **times), answer["ETag"]


def _encode(ledger: Ledger) -> bytes:
    attempts = {
        name: {"launched": each.launched, "seen": each.seen, "is_live": each.is_live}
        for name, each in ledger.attempts.items()
    }
    times = {"stopped": ledger.stopped, "committed": ledger.committed}
    return json.dumps({"format": 1, **times, "attempts": attempts}, indent=1).encode()


def _write_ledger(settings: Settings, ledger: Ledger, etag: str | None) -> bool:
    """Write guard.json unless it changed since it was read; return whether it was written."""
    condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    try:
        client("s3").put_object(
            Bucket=settings.run_bucket,
            Key=f"{settings.run_prefix}/{GUARD}",
            Body=_encode(ledger),
            ContentType="application/json",
            **condition,
        )
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in (409, 412):
            return False
        raise
    return True
