"""The Guard: sends a run's fleet to zero when it no longer pays, and ends what runs for nothing.

Plain Python and boto3: AWS Lambda runs these files (all of stacks/guard but construct.py) as they
are, with contract/ next to them. It needs nothing from the instance.
"""

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import boto3  # noqa: F401 - loaded as Lambda starts, not in the first call, which has a time limit

from stacks.guard import duties
from stacks.guard.fleet import instances_of_stack
from stacks.guard.market import choose_market
from stacks.guard.pools import prefer_calm_pools
from stacks.guard.settings import GuardSettings
from stacks.guard.tick import Tick

# In this order; each is tried, whatever happened to those before it.
DUTIES = (
    *(duties.stop, duties.start, prefer_calm_pools, choose_market, duties.end_instances),
    *(duties.tell_given_up, Tick.send_notes),
)
# How often each execution environment of Lambda may ask EC2 for the stack's instances because of
# unknown ones, of which an account may have thousands an hour, and how many times at once.
ASK_SECONDS, ASK_AT_ONCE = 600.0, 2.0


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
    tick, memory = Tick(settings=settings, now=now), warm_memory(settings.stack_name)
    if event.get("source") == "aws.ec2":  # of any instance of the account
        instance_id = event["detail"]["instance-id"]
        if not memory.knows(instance_id, tick):
            why = "".join(tick.failed) or "is not known as an instance of this stack"
            return {"action": "none", "reason": f"{instance_id} {why}"}
    tick.look()
    memory.own.update(tick.ledger.attempts, (each.id for each in tick.instances or ()))
    for duty in DUTIES:
        tick.does(duty.__name__, partial(duty, tick))
    if tick.failed:
        print(json.dumps({"done": tick.done, "failed": tick.failed}))
        raise GuardError(f"{len(tick.failed)} calls failed: {'; '.join(tick.failed)}")
    return {
        "action": ", ".join(action for action, _ in tick.done) or "none",
        "reason": "; ".join(reason for _, reason in tick.done) or "no reason to stop",
    }


@dataclass(kw_only=True, slots=True)
class WarmMemory:
    """What an execution environment of Lambda knows from its earlier calls."""

    own: set[str] = field(default_factory=set)  # instances of the stack, of any run
    questions: float = ASK_AT_ONCE
    counted: float = 0.0

    def knows(self, instance_id: str, tick: Tick) -> bool:
        """Whether it is the stack's; asks EC2, once for all unknown ones and not too often.

        A question that is throttled or not due waits for the clock's next call, which looks anyway.
        """
        if instance_id not in self.own and self._may_ask(tick.now):
            found = tick.known("whose event", partial(instances_of_stack, tick.settings))
            self.own.update(each.id for each in found or ())
        return instance_id in self.own

    def _may_ask(self, now: float) -> bool:
        more = max(0.0, now - self.counted) / ASK_SECONDS
        self.questions, self.counted = min(ASK_AT_ONCE, self.questions + more), now
        if self.questions < 1:
            return False
        self.questions -= 1
        return True


@cache
def warm_memory(stack_name: str) -> WarmMemory:
    """Return the memory of this execution environment."""
    return WarmMemory()
