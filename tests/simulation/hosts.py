"""A run of two to four hosts, as a SageMaker job: python -m tests.simulation.hosts 1..200.

Real are the restart rules of the container's entry point (training/cli/sagemaker.py), the meeting
of the hosts with its probes, and all that an attempt of several ranks is (ranks.py); `JobWorld`
stands for SageMaker, and for the person who submits a failed job again.
"""

import io
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from tests.simulation import plan as plan_file
from tests.simulation.account import Account
from tests.simulation.clock import CLOCK, sleep
from tests.simulation.containers import STUBS
from tests.simulation.habits import log_uniform
from tests.simulation.jobs import OUTAGE, JobPlan, JobWorld
from tests.simulation.life import BEGIN, Outcome, _memory, simulated
from tests.simulation.plan import Happening, Plan
from tests.simulation.story import shortened, shrink
from tests.simulation.stubs import place_of, stubbed
from tests.stacks.guard.world import HOUR, MINUTE
from training.cli import sagemaker


@contextmanager
def simulated_job() -> Iterator[None]:
    """Context in which the project's code knows the simulation alone."""
    begin: Any = sagemaker._Command.__init__
    own = mock.patch.object(begin, "__defaults__", (sleep, *begin.__defaults__[1:]))
    with simulated(), stubbed(STUBS), own:
        yield


def live_through_job(plan: Any) -> Outcome:
    """Let a plan happen, within `simulated_job`; return what came of it."""
    began = time.process_time()
    CLOCK.restart(BEGIN, plan.seed)
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=_memory()))
    account = Account()
    troubles = [OUTAGE, *(each for each in plan.happenings if each.what == "s3")]
    world = JobWorld(
        account=account, plan=plan, folder=folder, prefix="runs/run-1/", troubles=troubles
    )

    def died(task: Any, error: BaseException) -> None:
        if task.process is world.process:
            raise error
        world.breaks("a thread died", f"{task.process.name}: {place_of(error)}")

    CLOCK.died = died
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        world.live_on(BEGIN + plan.most_seconds)
        world.judge_end()
        CLOCK.died = lambda task, error: None
        for process in {task.process for _, _, task, _ in CLOCK.queue}:
            process.end()
        for container in world.hosts.values():
            for process in container.processes:
                process.end()
        world.process.end()
        CLOCK.run(CLOCK.now)
    shutil.rmtree(folder, ignore_errors=True)
    hours = sum((each.ended or CLOCK.now) - each.launched for each in world.machines) / HOUR
    return Outcome(
        plan=plan,
        broken=tuple(world.broken),
        story=tuple(world.story),
        state=world.state_now or "none",
        hours=hours,
        days=(CLOCK.now - BEGIN) / plan_file.DAY,
        cpu_seconds=time.process_time() - began,
        attempts=int(world.head_now.get("generation", 0)),
        facts=world.facts,
    )


_HOWS = (
    "notice to one", "notice to one", "notice to all", "stop", "power off", "power off", "cut",
    "cut", "cut from all", "cut between two", "kill", "pause", "hang in a step",
    "hang in an evaluation", "slow", "other data",
)  # fmt: skip


def draw(seed: int) -> JobPlan:
    """Draw a job's plan: a shorter run than a fleet's, its hosts and what happens to them."""
    luck = random.Random(f"{seed}-hosts")
    found = plan_file._one(luck.randrange(10**9))
    work = log_uniform(luck, 0.3 * HOUR, 8 * HOUR)
    step = min(found.step_seconds, work / 20, luck.choice([30.0, 240.0]))
    steps = max(4, min(600, round(work / step)))
    happenings = list[Happening]()
    for _ in range(luck.choice([0, 1, 2, 3, 5, 8])):
        at = luck.uniform(0, 1.2 * steps * step + 10 * MINUTE)
        if luck.random() < 0.25:
            trouble = luck.choice(["outage", "throttle", "slow", "lost"])
            seconds, share = log_uniform(luck, 20, 20 * MINUTE), luck.choice([1.0, 0.5, 0.1])
            one = Happening(
                at=at, what="s3", how=trouble, whose="all", seconds=seconds, share=share
            )
        else:
            how = luck.choice(_HOWS)
            lasting = how.startswith("cut") or how in ("pause", "slow")
            seconds = log_uniform(luck, 1, 30 * MINUTE) if lasting else 0.0
            share = luck.choice([1.0, luck.random()]) if lasting else 1.0
            whose = f"{luck.randrange(8)}"
            one = Happening(at=at, what="host", how=how, whose=whose, seconds=seconds, share=share)
        happenings.append(one)
    own = {each.name: getattr(found, each.name) for each in fields(Plan)}
    own |= {
        "seed": seed,
        "steps": steps,
        "step_seconds": step,
        "state_bytes": log_uniform(luck, 1e6, luck.choice([2e9, 60e9])),
        "upload_rate": log_uniform(luck, 1e8, 1e9),
        "evaluation_seconds": log_uniform(luck, 5, luck.choice([60, 20 * MINUTE])),
        "evaluation_every": luck.choice([0, max(2, steps // 7)]),
        "happenings": tuple(sorted(happenings, key=lambda each: each.at)),
        "deadline_hours": 0.0,
        "max_usd": 0.0,
        "max_hours": 1e4,
        "ranks": luck.choice([1, 1, 2]),
        "is_sharded": luck.random() < 0.4,
        "is_gpu": luck.random() < 0.5,
    }
    last = None
    if luck.random() < 0.3:
        how, seconds = luck.choice(["kill", "power off", "notice to one"]), luck.uniform(0, 4)
        whose = f"{luck.randrange(8)}"
        last = Happening(at=0.0, what="host", how=how, whose=whose, seconds=seconds)
    return JobPlan(
        **own,
        at_the_end=last,
        hosts=luck.choice([2, 2, 3, 4]),
        restarts=luck.choice(["all", "all", "one"]),
        ends_others=luck.choice(["notice", "kill", "late"]),
    )


def main() -> int:
    """Live through the seeds; tell what broke a promise, in short."""
    first, _, last = sys.argv[1].partition("..")
    cpu, hours, failed, num = time.process_time(), 0.0, list[int](), 0
    with simulated_job():
        for seed in range(int(first), int(last or first) + 1):
            found = live_through_job(draw(seed))
            hours, num = hours + found.hours, num + 1
            if found.broken:
                failed.append(seed)
                found = shrink(found, live_through_job)
            if found.broken or "--story" in sys.argv:
                print("\n".join(shortened(found)), flush=True)
    cpu = time.process_time() - cpu
    print(f"{num} seeds, {len(failed)} failed {failed}: {hours:.0f} machine hours in {cpu:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
