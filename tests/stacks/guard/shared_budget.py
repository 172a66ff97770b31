"""Eight Guards under one budget, of both kinds of fleet, in one bucket: a model of what they spend.

Calls come twice, at once with those of others, and with clocks that differ; answers are lost,
ledgers damaged, machines taken back, prices change, persons resume runs, a month ends.
"""

import io
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stacks.guard import handler
from stacks.guard import settings as guard_settings
from tests.stacks.guard.answers import Service
from tests.stacks.guard.model import PERIOD, SETTINGS, TICK
from tests.stacks.guard.world import HOUR, MINUTE, ON_DEMAND_USD, SPOTS, VOLUME_USD, World

NUM_GUARDS, USD = 8, 8.0
# Shortly before a month ends.
BEGIN = datetime(2026, 11, 30, 18, tzinfo=UTC).timestamp()
MONTH = datetime(2026, 12, 1, tzinfo=UTC).timestamp()


class EightGuards(RuleBasedStateMachine):
    """`examples` counts them; `most` is the most that was spent beyond the budget."""

    examples = 0
    most = 0.0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        shared: dict[str, Any] = {}
        kinds = ("spot", "asg")
        self.worlds = [
            World(now=BEGIN, kind=kinds[n % 2], prefix=f"runs/run-{n}/", objects=shared)  # type: ignore[arg-type]
            for n in range(NUM_GUARDS)
        ]
        self.clocks = [0.0] * NUM_GUARDS
        self.next_call = [BEGIN + n * PERIOD / NUM_GUARDS for n in range(NUM_GUARDS)]
        self.before = 0.0  # spent when the month ended
        self.resumed = 0  # each is a machine more, until its Guard's next call
        self.current = self.worlds[0]
        machine = self
        self.patch = mock.patch(
            "boto3.client", lambda service, **_: Service(machine.current, service)
        )
        self.patch.start()

    def teardown(self) -> None:
        self.patch.stop()
        guard_settings.quick_client.cache_clear()

    @initialize(clocks=st.lists(st.floats(-90, 90), min_size=NUM_GUARDS, max_size=NUM_GUARDS))
    def clocks_differ(self, clocks: list[float]) -> None:
        self.clocks = clocks

    def respond(self, number: int) -> None:
        world, before = self.worlds[number], self.current
        self.current = world
        guard_settings.quick_client.cache_clear()
        own = replace(
            SETTINGS,
            run_prefix=world.prefix.rstrip("/"),
            max_usd=0.0,
            max_billed_hours=1e6,
            budget_name="team",
            budget_usd=USD,
        )
        with suppress(handler.GuardError), redirect_stdout(io.StringIO()):
            handler.respond(own, TICK, world.now + self.clocks[number])
        self.current = before
        guard_settings.quick_client.cache_clear()

    @rule(minutes=st.sampled_from([1, 30, 120, 300]))
    def time_passes(self, minutes: int) -> None:
        for _ in range(minutes):
            for world in self.worlds:
                world.advance(MINUTE)
            if self.worlds[0].now == MONTH:
                self.before = self.spent
            for number, due in enumerate(self.next_call):
                if self.worlds[number].now >= due:
                    self.next_call[number] += PERIOD
                    self.respond(number)
            self.the_bound_holds()

    @rule(number=st.integers(0, NUM_GUARDS - 1))
    def an_event(self, number: int) -> None:
        self.respond(number)

    @rule(one=st.integers(0, NUM_GUARDS - 1), other=st.integers(0, NUM_GUARDS - 1))
    def twice_at_once(self, one: int, other: int) -> None:
        self.worlds[one].between["put_object"] = lambda: self.respond(other)

    @rule(number=st.integers(0, NUM_GUARDS - 1), times=st.integers(1, 3))
    def answers_are_lost(self, number: int, times: int) -> None:
        self.worlds[number].losing["put_object"] = times

    @rule(usd=st.sampled_from([0.2, 0.4, 0.9]))
    def price(self, usd: float) -> None:
        for world in self.worlds:
            world.spot_usd = usd

    @rule(number=st.integers(0, NUM_GUARDS - 1))
    def spot_takes_back(self, number: int) -> None:
        for machine in self.worlds[number].live:
            self.worlds[number].end(machine, SPOTS)

    @rule(number=st.integers(0, NUM_GUARDS - 1))
    def a_person_resumes(self, number: int) -> None:
        world, self.resumed = self.worlds[number], self.resumed + 1
        world.target, world.sizes = 1, {"spot": (0, 1), "on-demand": (0, 1)}

    @rule(number=st.integers(0, NUM_GUARDS - 1))
    def the_ledger_is_damaged(self, number: int) -> None:
        if self.worlds[number].get("guard.json"):
            self.worlds[number].put("guard.json", b"{")

    @property
    def spent(self) -> float:
        return sum(world.spent for world in self.worlds)

    @invariant()
    def the_bound_holds(self) -> None:
        """One tick of each machine that may run: at most that is spent beyond the budget."""
        tick = SETTINGS.tick_seconds / HOUR * (ON_DEMAND_USD + VOLUME_USD)
        spent = self.spent - self.before
        EightGuards.most = max(self.most, spent - USD)
        assert spent <= USD + (NUM_GUARDS + self.resumed) * tick, f"${spent:.2f} of ${USD:g}"
