"""A second stage that is slower than its plan, against a deadline: how many of 100 jobs are late.

pytest -m slow -s tests/stacks/guard/test_pace.py
"""

import io
import random
from contextlib import redirect_stdout
from dataclasses import replace
from unittest import mock

import pytest

from sizing.fallback.decision import PRIOR_LIFE_HOURS, PRIOR_WAIT_HOURS
from stacks.guard import handler
from stacks.guard import settings as guard_settings
from stacks.guard.settings import Forecast
from tests.stacks.guard.answers import Service
from tests.stacks.guard.model import TICK, DeadlineMachine
from tests.stacks.guard.world import BOOT_SECONDS, COMMIT_SECONDS, HOUR, MINUTE, SPOTS, World

STAGES = {"first": 2 * HOUR, "second": 2 * HOUR}
DEADLINE_HOURS = 6.0
PERIOD = 2 * MINUTE
# A notice and its event in 95 % of losses, as sizing/spot assumes.
NOTICE_ARRIVES = 0.95


def hours_of_a_job(slowness: float, forecast: Forecast, seed: int) -> float:
    """Run one job with its Guard to its end, on Spot that lives and waits as the prior says."""
    luck = random.Random(seed)
    world = World(stages={**STAGES, "second": slowness * STAGES["second"]})
    settings = replace(DeadlineMachine.settings, deadline_hours=DEADLINE_HOURS, forecast=forecast)
    guard_settings.quick_client.cache_clear()
    began, is_up = world.now, luck.random() < 0.5
    world.has_capacity = is_up
    means = {True: PRIOR_LIFE_HOURS, False: PRIOR_WAIT_HOURS}
    turn = world.now + luck.expovariate(1 / means[is_up]) * HOUR
    with mock.patch("boto3.client", lambda service, **_: Service(world, service)):
        while world.state == "running":
            world.advance(PERIOD)
            if world.now >= turn:
                is_up = not is_up
                turn = world.now + luck.expovariate(1 / means[is_up]) * HOUR
                world.has_capacity = is_up
                for machine in world.live if not is_up else ():
                    if machine.market == "spot":
                        world.end(machine, SPOTS, saves=luck.random() < NOTICE_ARRIVES)
            with redirect_stdout(io.StringIO()):
                handler.respond(settings, TICK, world.now)
    guard_settings.quick_client.cache_clear()
    return (world.now - began) / HOUR


@pytest.mark.slow
@pytest.mark.parametrize(("slow", "may_be_late"), [(1.0, 100), (1.2, 5), (1.3, 0)])
def test_how_many_of_100_jobs_are_late(
    slow: float, may_be_late: int, capsys: pytest.CaptureFixture[str]
) -> None:
    forecast = Forecast(
        stages=STAGES,
        restart_seconds=1.5 * BOOT_SECONDS,
        save_seconds=15.0,
        interval_seconds=COMMIT_SECONDS,
        slow_stages={stage: slow * seconds for stage, seconds in STAGES.items()},
    )
    hours = [hours_of_a_job(1.3, forecast, seed) for seed in range(100)]
    late = sum(each > DEADLINE_HOURS for each in hours)
    with capsys.disabled():
        print(f"\nstages reckoned at {slow:g} x their plan: {late} of 100 late, by at most "
              f"{60 * max(0.0, max(hours) - DEADLINE_HOURS):.0f} min")  # fmt: skip
    assert late <= may_be_late
