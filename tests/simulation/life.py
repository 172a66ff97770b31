"""One life, from a plan to what came of it."""

import io
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from stacks.guard import handler
from stacks.guard import settings as guard_settings
from tests.simulation.bucket import GuardService
from tests.simulation.clock import CLOCK, Task
from tests.simulation.machine import place_of
from tests.simulation.plan import DAY, Plan
from tests.simulation.promises import BEGIN
from tests.simulation.shortcuts import quick
from tests.simulation.stubs import stubbed
from tests.simulation.world import PATIENCE, Universe
from tests.stacks.guard.world import HOUR


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a seed."""

    plan: Plan
    broken: tuple[str, ...]
    story: tuple[tuple[float, str], ...]
    state: str
    hours: float  # of machines
    days: float
    cpu_seconds: float
    attempts: int
    facts: Counter[str]


def _hear(text: str) -> None:
    CLOCK.process.said = text


@contextmanager
def simulated() -> Iterator[None]:
    """Context in which the project's code knows the simulation alone; once for many seeds."""
    with ExitStack() as stack:
        stack.enter_context(stubbed())
        stack.enter_context(CLOCK.patched())
        stack.enter_context(quick())
        stack.enter_context(mock.patch.object(handler, "print", _hear, create=True))
        yield


def live_through(plan: Plan, *, sees_all: bool = False, until_broken: bool = False) -> Outcome:
    """Let a plan happen, within `simulated`; return what came of it."""
    began = time.process_time()
    CLOCK.restart(BEGIN, plan.seed)
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=_memory()))
    world = Universe(
        plan=plan, folder=folder, kind=plan.fleet, sees_all=sees_all, until_broken=until_broken
    )
    world.troubles = [each for each in plan.happenings if each.what == "s3"]
    services: dict[str, Any] = defaultdict(
        lambda: GuardService(world=world, who="guard", connect_seconds=3, read_seconds=8)
    )

    def died(task: Task, error: BaseException) -> None:
        name = task.process.name
        if name == "world":
            raise error
        world.breaks("a thread died", f"{name}: {place_of(error)}")

    CLOCK.died = died
    work = 2 * plan.saving_share * plan.work_seconds
    limit = BEGIN + work + plan.troubled_until + len(plan.happenings) * (
        plan.life.ready + HOUR
    ) + PATIENCE + 30 * HOUR  # fmt: skip
    guard_settings.quick_client.cache_clear()
    handler.warm_memory.cache_clear()
    with mock.patch("boto3.client", lambda service, **_: services[service]):
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            world.live_on(limit)
            world.judge_end()
            _end_all(world)
    guard_settings.quick_client.cache_clear()
    shutil.rmtree(folder, ignore_errors=True)
    hours = sum((each.ended or CLOCK.now) - each.launched for each in world.machines) / HOUR
    return Outcome(
        plan=plan,
        broken=tuple(world.broken),
        story=tuple(world.story),
        state=world.state_now or "none",
        hours=hours,
        days=(CLOCK.now - BEGIN) / DAY,
        cpu_seconds=time.process_time() - began,
        attempts=int(world.head_now.get("generation", 0)),
        facts=world.facts,
    )


def _end_all(world: Universe) -> None:
    """Unwind every thread, so that none is collected in a later seed's time."""
    CLOCK.died = lambda task, error: None
    processes = {task.process for _, _, task, _ in CLOCK.queue} | {world.process}
    for host in world.hosts.values():
        processes |= {host.process, *([host.trainer] if host.trainer else [])}
    for process in processes:
        process.end()
    CLOCK.run(CLOCK.now)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
