"""One life, from a plan to what came of it."""

import io
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

from stacks.guard import handler
from stacks.guard import settings as guard_settings
from tests.simulation.account import Account
from tests.simulation.clock import CLOCK, Task
from tests.simulation.plan import DAY, Plan
from tests.simulation.programs import STUBS as PROGRAM_STUBS
from tests.simulation.ranks import STUBS as RANK_STUBS
from tests.simulation.shortcuts import quick
from tests.simulation.stubs import place_of, stubbed
from tests.simulation.versions import versioned
from tests.simulation.world import PATIENCE, Universe
from tests.stacks.guard.world import HOUR

BEGIN = datetime(2026, 11, 2, tzinfo=UTC).timestamp()  # 29 days before the month's end


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
    """Context in which the project's code knows the simulation alone, and says nothing.

    Once for many seeds.
    """
    with ExitStack() as stack:
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        stack.enter_context(stubbed(RANK_STUBS))
        for owner, name, stub in PROGRAM_STUBS:
            stack.enter_context(mock.patch.object(owner, name, stub))
        stack.enter_context(versioned())
        stack.enter_context(CLOCK.patched())
        stack.enter_context(quick())
        stack.enter_context(mock.patch.object(handler, "print", _hear, create=True))
        yield


def live_through(plan: Plan, *, sees_all: bool = False, until_broken: bool = False) -> Outcome:
    """Let a plan happen, within `simulated`; return what came of it."""
    began = time.process_time()
    begin = BEGIN + plan.after_seconds
    CLOCK.restart(begin, plan.seed)
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=_memory()))
    account = Account(
        budget_usd=plan.budget_usd,
        budget_period=plan.budget_period,
        raises=plan.raises,
        has_pools=plan.has_pools,
    )
    plans = (plan, *plan.beside)
    troubles = [each for one in plans for each in one.happenings if each.what == "s3"]
    for number, one in enumerate(plans, 1):
        Universe(
            account=account,
            plan=one,
            folder=folder / f"{number}",
            prefix=f"runs/run-{number}/",
            kind=one.fleet,
            sees_all=sees_all,
            troubles=troubles,
        )

    def died(task: Task, error: BaseException) -> None:
        name = task.process.name
        if name == "world":
            raise error
        account.worlds[0].breaks("a thread died", f"{name}: {place_of(error)}")

    CLOCK.died = died
    guard_settings.quick_client.cache_clear()
    handler.warm_memory.cache_clear()
    with mock.patch("boto3.client", lambda *_, **__: account.client()):
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            account.live_on(begin + _seconds(account), until_broken=until_broken)
            for world in account.worlds:
                world.judge_end()
                if world.record:
                    world.record.judge_end(world.state_now)
            _end_all(account)
    guard_settings.quick_client.cache_clear()
    shutil.rmtree(folder, ignore_errors=True)
    machines = [each for world in account.worlds for each in world.machines]
    first = account.worlds[0]
    return Outcome(
        plan=plan,
        broken=account.broken,
        story=tuple(first.story),
        state=first.state_now or "none",
        hours=sum((each.ended or CLOCK.now) - each.launched for each in machines) / HOUR,
        days=(CLOCK.now - begin) / DAY,
        cpu_seconds=time.process_time() - began,
        attempts=int(first.head_now.get("generation", 0)),
        facts=sum((world.facts for world in account.worlds), Counter()),
    )


def _seconds(account: Account) -> float:
    """Return the longest that all may take."""
    plans = [world.plan for world in account.worlds]
    most = max(
        2 * plan.saving_share * plan.work_seconds
        + plan.troubled_until
        + len(plan.happenings) * (plan.life.ready + HOUR)
        for plan in plans
    )
    return most + PATIENCE + 30 * HOUR + account.seconds_for(sum(each.usd for each in plans))


def _end_all(account: Account) -> None:
    """Unwind every thread, so that none is collected in a later seed's time."""
    CLOCK.died = lambda task, error: None
    processes = {task.process for _, _, task, _ in CLOCK.queue}
    processes |= {world.process for world in account.worlds}
    for host in (host for world in account.worlds for host in world.hosts.values()):
        processes |= {*host.processes}
    for process in processes:
        process.end()
    CLOCK.run(CLOCK.now)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
