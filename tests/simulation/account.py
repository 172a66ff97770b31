"""Runs beside each other in one account and bucket: who is asked, who hears, what they may spend.

Each run has its stack, with its fleet, machines, Guard and persons, all of them on one clock. What
one stack's calls do to another's is refused, as the roles' policies do, and breaks a promise.
"""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from contract.keys import BUDGETS, SPOT_HISTORY
from tests.simulation import pools
from tests.simulation.bucket import Bucket, GuardService
from tests.simulation.clock import CLOCK
from tests.simulation.plan import DAY
from tests.simulation.versions import is_older
from tests.stacks.guard import answers
from tests.stacks.guard.world import HOUR, ON_DEMAND_USD, VOLUME_USD, World, error

if TYPE_CHECKING:
    from tests.simulation.world import Universe

# Calls that name whose they are, and the fields that do.
_NAMES = {
    "describe_spot_fleet_requests": "SpotFleetRequestIds",
    "modify_spot_fleet_request": "SpotFleetRequestId",
    "cancel_spot_fleet_requests": "SpotFleetRequestIds",
    "update_auto_scaling_group": "AutoScalingGroupName",
    "delete_auto_scaling_group": "AutoScalingGroupName",
    "terminate_instances": "InstanceIds",
}
_TICK_USD_PER_SECOND = (ON_DEMAND_USD + VOLUME_USD) / HOUR


@dataclass(kw_only=True)
class Account:
    """The stacks of one account, with the budget that they share."""

    bucket: Bucket = field(default_factory=Bucket)
    worlds: list["Universe"] = field(default_factory=list)
    budget_usd: float = 0.0  # 0: none
    budget_period: str = "month"
    raises: int = 0
    has_pools: bool = False
    raised: float = 0.0  # when
    services: dict[str, GuardService] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bucket.watch = self._watch

    def _watch(self, key: str, data: bytes | None) -> None:
        for world in self.worlds:
            if key.startswith(world.prefix):
                world.hear(key, data)

    # -- whose a call is

    def client(self) -> "AccountClient":
        """Return what boto3 makes, for whoever calls."""
        return AccountClient(self)

    def answer(self, caller: "Universe", operation: str, request: dict[str, Any]) -> Any:
        """Answer a call as the account does; `caller` may only read what is not its own."""
        if operation == "describe_subnets":
            return pools.subnets(request["SubnetIds"])
        answer = self._answer(caller, operation, request)
        return pools.zoned(operation, answer, self.worlds) if caller.has_pools else answer

    def _answer(self, caller: "Universe", operation: str, request: dict[str, Any]) -> Any:
        act = answers.__dict__[operation]
        if operation == "describe_instances":
            found = [act(world, **request)["Reservations"] for world in self.worlds]
            return {"Reservations": [one for each in found for one in each]}
        if operation == "describe_auto_scaling_groups":
            names = request["AutoScalingGroupNames"]
            found = [
                act(fleet, AutoScalingGroupNames=[name])["AutoScalingGroups"]
                for name in names
                if (fleet := self._part(caller, name, operation)) is not None
            ]
            return {"AutoScalingGroups": [one for each in found for one in each]}
        if operation == "get_parameter":
            return {"Parameter": {"Value": caller.parameter}}
        if operation not in _NAMES:
            return act(caller, **request)
        name = request[_NAMES[operation]]
        name = name if isinstance(name, str) else name[0]
        part = self._part(caller, name, operation)
        if part is None:
            raise _gone(operation, name)
        if {"LaunchTemplateConfigs", "VPCZoneIdentifier"} & request.keys():
            if part is caller:  # not the fleet that it had before
                pools.offer(caller, request)
            return {}
        return act(part, **request)

    def _part(self, caller: "Universe", name: str, operation: str) -> World | None:
        """Return the fleet that a name is of, or whose machine it is; None: nobody's, any more."""
        for world in self.worlds:
            if (part := world.part(name)) is not None:
                if world is not caller and not operation.startswith("describe"):
                    caller.breaks("a run leaves the others alone", f"{operation} of {name}")
                    raise error("UnauthorizedOperation", operation, 403)
                return part
        return None

    def hear(self, caller: "Universe", key: str) -> None:
        """A run's parts write below its prefix, or where all runs keep what is theirs together."""
        if not key.startswith((caller.prefix, BUDGETS, SPOT_HISTORY)):
            caller.breaks("a run leaves the others alone", f"writes {key}")

    # -- the budget

    def period_begins(self, now: float) -> float:
        """Return when the period of this time began, in UTC."""
        day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return (day if self.budget_period == "day" else day.replace(day=1)).timestamp()

    def next_period(self, now: float) -> float:
        days = 1 if self.budget_period == "day" else 32
        begun = datetime.fromtimestamp(self.period_begins(now), UTC)
        return self.period_begins((begun + timedelta(days=days)).timestamp())

    def seconds_for(self, usd: float) -> float:
        """Return what waiting for the next periods adds to work that costs so much, at most."""
        if not self.budget_usd:
            return 0.0
        if self.is_long_until_more(CLOCK.now):
            return 0.0
        if self.budget_period == "month":
            return self.next_period(CLOCK.now) - CLOCK.now + 48 * HOUR
        return 48 * HOUR * (1 + len(self.worlds) + usd / self.budget_usd)

    def is_long_until_more(self, when: float) -> bool:
        """Whether nobody waits for the next period, from then on."""
        return self.next_period(when) - when > 4 * DAY

    def spent_since(self, when: float) -> float:
        """Return what all runs have cost since then."""
        return sum(world.spent_since(when) for world in self.worlds)

    @property
    def tick_usd(self) -> float:
        """What a machine may cost until a call of its Guard could end it."""
        return self.worlds[0].guard.tick_seconds * _TICK_USD_PER_SECOND

    def has_room_since(self, when: float) -> bool:
        """Whether a run that the budget stopped then may go on: in a new period, or with more.

        If a person is to deploy with a larger budget, they do it now.
        """
        if self.budget_period == "month" and self.raised < when and self.raises:
            self.budget_usd, self.raises, self.raised = (
                2 * self.budget_usd,
                self.raises - 1,
                CLOCK.now,
            )
            self.worlds[0].tell(f"deploys with a budget of ${self.budget_usd:.2f}")
        return self.raised > when or CLOCK.now > self.next_period(when)

    def damage(self) -> None:
        """Garbage in the place of the period's budget."""
        for key, _ in [*self.bucket.below(BUDGETS)][-1:]:
            self.bucket.write(key, b"{")

    def is_spent(self, needs: float) -> bool:
        """Whether the budget may be told to be spent, as a Guard knows it: late, and rounded up."""
        if any(world.was_unguarded for world in self.worlds):
            return True  # what ends unseen is billed until EC2 has forgotten it
        since = self.period_begins(CLOCK.now)
        recent = [
            each
            for world in self.worlds
            for each in world.machines
            if (each.ended or math.inf) > since - HOUR
        ]
        # What ends is billed until it is seen to have ended, and at the end of a period in the new.
        late = (len(recent) + len(self.worlds)) * self.tick_usd
        most = self.spent_since(since) + late + max(needs, self.tick_usd)
        return most > self.budget_usd

    def judge(self) -> None:
        """What all runs together may cost, looked at now and then."""
        if not self.budget_usd:
            return
        # What is spent under a Guard that knows no budgets is not counted.
        if any(world.was_unguarded or world.facts["older guard"] for world in self.worlds):
            return
        since = self.period_begins(CLOCK.now - 1.0)
        spent = self.spent_since(since)
        # Each resume is a machine more until a call; a call that fails is one tick longer.
        ticks = sum(1 + world.resumes + world.facts["guard errors"] for world in self.worlds)
        if spent > self.budget_usd + ticks * self.tick_usd:
            self.worlds[0].breaks("the budget holds", f"${spent:.2f} of ${self.budget_usd:.2f}")

    # -- a life

    def live_on(self, limit: float, *, until_broken: bool = False) -> None:
        """From the deploys to the end of all."""
        for world in self.worlds:
            world.begin()
        while CLOCK.now < limit and not (until_broken and self.broken):
            CLOCK.run(min(limit, CLOCK.now + HOUR))
            for world in self.worlds:
                world.now = CLOCK.now
            self.judge()
            if all(world.is_over for world in self.worlds):
                return

    @property
    def broken(self) -> tuple[str, ...]:
        return tuple(each for world in self.worlds for each in world.broken)


def _gone(operation: str, name: str) -> ClientError:
    """What AWS says of what does not exist."""
    if "group" in operation:
        gone = error("ValidationError", operation)
        gone.response["Error"]["Message"] = f"AutoScalingGroup name not found - {name}"
        return gone
    is_machine = operation == "terminate_instances"
    return error(f"Invalid{'InstanceID' if is_machine else 'SpotFleetRequestId'}.NotFound")


class AccountClient:
    """boto3's client of any service: whoever calls is asked for the world that it is of."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def __getattr__(self, name: str) -> Any:
        world: Universe = CLOCK.process.supervisor
        services = self._account.services
        if world.prefix not in services:
            services[world.prefix] = GuardService(
                world=world, who="guard", connect_seconds=3, read_seconds=8
            )
        return getattr(services[world.prefix], name)


def settings_of(world: "Universe") -> dict[str, Any]:
    """Return what the settings of a stack's Guard have of the account."""
    account = world.account
    found: dict[str, Any] = {
        "stack_name": world.stack_name,
        "fleet_parameter": f"/{world.stack_name}/fleet-id",
        "run_prefix": world.prefix.rstrip("/"),
    }
    if world.has_pools and not is_older():
        found["subnets"] = tuple(pools.ZONES)
    if account.budget_usd and not is_older():  # 0.1.0 knew no budgets
        found |= {
            "budget_name": "team",
            "budget_usd": account.budget_usd,
            "budget_period": account.budget_period,
        }
    return found
