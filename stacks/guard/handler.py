"""The Guard: sends a run's fleet to zero when it is finished, over budget, silent or stuck.

Plain Python and boto3: AWS Lambda runs these files (all of stacks/guard but construct.py) as they
are, with contract/ beside them. It needs nothing from the instance.
"""

import json
import os
from datetime import UTC, datetime
from typing import Any

from stacks.guard.fleet import fleet_above_zero, instances_of_run, is_of_stack, send_to_zero
from stacks.guard.ledger import read_ledger, update_ledger
from stacks.guard.reasons import reason_to_stop
from stacks.guard.records import last_commit, publish, read_head, record_event
from stacks.guard.settings import Settings


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
        publish(settings, headline, event)
        done = {"action": "forward", "reason": headline}
    fleet_id = fleet_above_zero(settings)
    if fleet_id is None:
        return {**done, "reason": f"{done['reason']}; no fleet of this stack is above zero"}
    reason = _reason_to_stop(settings, now)
    if reason is None:
        return done
    _stop(settings, fleet_id, reason, now)
    return {"action": "to-zero", "reason": reason}


def _is_ours(settings: Settings, instance_id: str) -> bool:
    # EC2 no longer lists an instance after an hour, but the Guard has seen it alive.
    return is_of_stack(settings, instance_id) or instance_id in read_ledger(settings)[0].attempts


def _reason_to_stop(settings: Settings, now: float) -> str | None:
    head, head_written = read_head(settings)
    committed = last_commit(settings, head)
    ledger = update_ledger(settings, instances_of_run(settings), now, committed=committed)
    return reason_to_stop(settings, ledger, head, head_written, now)


def _stop(settings: Settings, fleet_id: str, reason: str, now: float) -> None:
    send_to_zero(fleet_id)
    update_ledger(settings, instances_of_run(settings), now, stopped=now)
    record = record_event(settings, "to-zero", reason, now, fleet_id=fleet_id)
    publish(settings, f"Fleet to zero: {reason}", record)
