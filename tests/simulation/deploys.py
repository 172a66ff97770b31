"""Deploys in mid-life: a new launch template, another kind of fleet, another version of the Guard.

CloudFormation creates what is new, writes the fleet's parameter, and then deletes what was: for a
while there are two fleets. Groups, and a Spot fleet that AWS updates in place, get the template's
sizes again. A run keeps the bundle that it began with, so its trainer is another's only where a
person starts it with another version.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from contract.stack_names import NEW_GROUP, ON_DEMAND_GROUP
from tests.simulation.clock import CLOCK, sleep
from tests.simulation.plan import Happening
from tests.simulation.pools import ZONES
from tests.simulation.stack import Stack
from tests.simulation.versions import OLDER
from tests.stacks.guard.world import MINUTE, USERS, Machine, World

if TYPE_CHECKING:
    from tests.stacks.guard.world import Market


@dataclass(kw_only=True)
class FormerFleet(World):
    """A fleet that a deploy has replaced, until CloudFormation has deleted it."""

    stack: "Deployed"
    id: str

    @property
    def fleet_id(self) -> str:
        return self.id

    @property
    def live(self) -> list[Machine]:
        return [each for each in self.stack.paid if self.stack.fleets[each.id] == self.id]

    def end(self, machine: Machine, why: str, *, saves: bool = False) -> None:
        self.stack.end(machine, why, saves=saves)


@dataclass(kw_only=True)
class Deployed(Stack):
    """A stack that may be deployed again."""

    former: list[FormerFleet] = field(default_factory=list)
    replaced: int = 0  # Spot fleets
    parameter: str = ""  # the fleet's id, as the stack's parameter has it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameter = self.fleet_id

    @property
    def fleet_id(self) -> str:
        return super().fleet_id + "x" * (self.replaced if self.kind == "spot" else 0)

    @property
    def live(self) -> list[Machine]:
        own, fleets = self.fleet_id, self.fleets
        return [m for m in self.machines if m.ended is None and fleets[m.id] == own]

    def part(self, name: str) -> World | None:
        """Return the fleet that a name is of, or whose machine it is; None: not the stack's."""
        for fleet in self.former:
            fleet.now = CLOCK.now
            if name.removesuffix(ON_DEMAND_GROUP) == fleet.id:
                return fleet
            if any(each.id == name for each in fleet.live):
                return fleet
        return self if self.owns(name) else None

    def deploy(self, each: Happening) -> None:
        """Deploy what is new, as CloudFormation does it."""
        if self.is_away:
            return
        act: dict[str, Callable[[], Any]] = {
            "other run": lambda: self._other_run(each.seconds),
            "template": self._new_template,
            "template in place": self._update_in_place,
            "kind": self._new_kind,
            "guard": lambda: self._other_guard(each.seconds),
            "trainer": lambda: self._other_trainer(each.seconds),
        }
        act[each.how]()

    def _new_template(self) -> None:
        if self.kind == "asg":
            self._update_in_place()
        else:
            self._replace("spot")

    def _new_kind(self) -> None:
        self._replace("asg" if self.kind == "spot" else "spot")

    def _update_in_place(self) -> None:
        if self.is_cancelled:
            return  # CloudFormation fails, and rolls back
        self.stopped_until = 0.0
        if self.kind == "asg":
            sizes: dict[Market, tuple[int, int]] = {"spot": (0, NEW_GROUP), "on-demand": (0, 1)}
            self.sizes = {name: each for name, each in sizes.items() if name not in self.deleted}
        else:
            self.target, self.on_demand = 1, 0
        self.deployed_at, self.offered = CLOCK.now, tuple(ZONES)

    def _replace(self, kind: Literal["spot", "asg"]) -> None:
        """Create the new fleet, let the stack's parameter name it, then delete the former."""
        luck, was = CLOCK.luck, self.fleet_id
        if self.former:
            return  # CloudFormation refuses a second update
        former = FormerFleet(
            stack=self, id=was, kind=self.kind, now=CLOCK.now, is_cancelled=self.is_cancelled
        )
        former.target, former.on_demand = self.target, self.on_demand
        former.sizes, former.deleted = dict(self.sizes), set(self.deleted)
        self.former.append(former)
        self.kind, self.is_cancelled, self.deleted = kind, False, set()
        self.target, self.on_demand, self.sizes = 1, 0, {}
        if kind == "asg":
            self.target, self.sizes = 0, {"spot": (0, NEW_GROUP), "on-demand": (0, 1)}
        else:
            self.replaced += 1
        self.stopped_until, self.deployed_at, self.offered = 0.0, CLOCK.now, tuple(ZONES)
        sleep(luck.uniform(5, MINUTE))
        self.parameter = self.fleet_id
        sleep(luck.uniform(20, 5 * MINUTE))
        former.is_cancelled, former.target, former.on_demand = True, 0, 0
        former.deleted = {"spot", "on-demand"} if former.kind == "asg" else set()
        for machine in former.live:
            self.end(machine, USERS, saves=True)
        self.deployed_at = CLOCK.now
        sleep(10 * MINUTE)
        self.former.remove(former)

    def _other_run(self, seconds: float) -> None:
        """Give the stack another run_id, and later this run's again: nobody looks in between."""
        if self.former:
            return
        self.is_away, self.away_until, self.is_cancelled = True, math.inf, True
        self.target, self.on_demand = 0, 0
        self.deleted = {"spot", "on-demand"} if self.kind == "asg" else set()
        self.facts["other run"] += 1
        for machine in self.live:
            self.end(machine, USERS, saves=True)
        sleep(seconds)
        self.is_away, self.stopped_until = False, 0.0
        sleep(CLOCK.luck.uniform(5, MINUTE))  # the Guard is deployed before the fleet
        self.replaced += self.kind == "spot"
        self.is_cancelled, self.deleted, self.offered = False, set(), tuple(ZONES)
        self.target = int(self.kind == "spot")
        self.sizes = {} if self.target else {"spot": (0, NEW_GROUP), "on-demand": (0, 1)}
        self.parameter, self.deployed_at, self.away_until = self.fleet_id, CLOCK.now, 0.0
        self.tell("this run's deploy again")

    def _other_guard(self, seconds: float) -> None:
        """Roll the Guard back, and deploy the newer version again later."""
        self.guard_version, self.facts["older guard"] = OLDER, 1
        sleep(seconds)
        self.guard_version = ""
        self.tell("the newer Guard again")

    def _other_trainer(self, seconds: float) -> None:
        """A person starts the run with an older version, and later with the newer one."""
        self.trainer_version = OLDER
        sleep(seconds)
        self.trainer_version = ""
        self.tell("the newer trainer again")
