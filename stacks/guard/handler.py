"""The Guard: sends a run's fleet to zero when it no longer pays, and ends what runs for nothing.

Plain Python and boto3: AWS Lambda runs these files (all of stacks/guard but construct.py) as they
are, with contract/ next to them. It needs nothing from the instance.
"""

import json
import os
from datetime import UTC, datetime
from functools import partial
from typing import Any

from stacks.guard import duties
from stacks.guard.fleet import is_of_stack
from stacks.guard.market import choose_market
from stacks.guard.records import read_ledger
from stacks.guard.settings import GuardSettings
from stacks.guard.tick import Tick

# In this order; each is tried, whatever happened to those before it.
DUTIES = (duties.stop, duties.start, choose_market, duties.end_instances, Tick.send_notes)


class GuardError(RuntimeError):
    """A part of a call failed, after everything else was done; Lambda calls again."""


def handler(event: dict[str, Any], context: object) -> dict[str, str]:
    """Handle one event; return what was done (none, start, to-zero, terminate) and why."""
    settings = GuardSettings.from_environment(os.environ)
    done = respond(settings, event, datetime.now(UTC).timestamp())
    print(json.dumps({"event": event.get("detail-type"), "of": event.get("detail"), **done}))
    return done


def respond(settings: GuardSettings, event: dict[str, Any], now: float) -> dict[str, str]:
    """Look, do every duty, report failures; an event of another stack's instance is ignored."""
    tick = Tick(settings=settings, now=now)
    if event.get("source") == "aws.ec2":
        instance_id = event["detail"]["instance-id"]
        # The rule matches the account's events. One that cannot be attributed counts as ours.
        if tick.known("whose event", lambda: _is_ours(settings, instance_id)) is False:
            return {"action": "none", "reason": f"{instance_id} is not an instance of this stack"}
    tick.look()
    for duty in DUTIES:
        tick.does(duty.__name__, partial(duty, tick))
    if tick.failed:
        print(json.dumps({"done": tick.done, "failed": tick.failed}))
        raise GuardError(f"{len(tick.failed)} calls failed: {'; '.join(tick.failed)}")
    return {
        "action": ", ".join(action for action, _ in tick.done) or "none",
        "reason": "; ".join(reason for _, reason in tick.done) or "no reason to stop",
    }


def _is_ours(settings: GuardSettings, instance_id: str) -> bool:
    # EC2 no longer lists an instance after an hour, but the Guard has seen it alive.
    return is_of_stack(settings, instance_id) or instance_id in read_ledger(settings)[0].attempts
