"""When a demo of several hosts takes one: at the progress of those that train now."""

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from rehearsal.demo.actions import parse_interruption
from rehearsal.demo.hosts_demo import HostsDemo


class _Log:
    """Says nothing."""

    def __call__(self, text: str) -> None: ...

    def begin(self, what: str) -> None: ...


@pytest.mark.parametrize("do", ["kill", "notice"])
def test_an_interruption_waits_for_the_progress_of_those_who_came_after_the_one_before(
    do: str,
) -> None:
    taken: list[str] = []

    def take(name: str, host: str) -> None:
        taken.append(host)

    jobs = SimpleNamespace(interrupt=take, lose=take)
    demo = HostsDemo(
        trained=None,  # type: ignore[arg-type]
        plan=[parse_interruption(f"{do}:head:{step}") for step in (4, 6)],
        options=argparse.Namespace(hosts=2),
        stacks=SimpleNamespace(aws=SimpleNamespace(service_jobs=jobs)),  # type: ignore[arg-type]
        log=_Log(),  # type: ignore[arg-type]
    )
    job: Any = SimpleNamespace(
        name="job", network=None, ending="", containers=[SimpleNamespace(host="algo-2")]
    )
    run: Any = SimpleNamespace(read=lambda name: None)

    def look(generation: int, **progress: Any) -> int:
        demo._latest = {"kind": "step", "generation": generation, **progress}
        demo._look(job, run)
        return len(taken)

    assert look(1, stage="head", stage_step=3) == 0
    assert look(1, stage="head", stage_step=7) == 1
    # The job has started again, and has said nothing yet.
    assert look(1, stage="head", stage_step=7) == 1
    assert look(2, stage="head", stage_step=5) == 1
    assert look(2, stage="head", stage_step=6) == 2
