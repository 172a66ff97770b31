"""Jobs of several hosts keep their promises, and planted faults are found."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.host_faults import FAULTS
from tests.simulation.hosts import draw, live_through_job, simulated_job
from tests.simulation.jobs import JobPlan
from tests.simulation.plan import Happening
from tests.simulation.story import shrink


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with simulated_job():
        yield


def _host(at: float, how: str, whose: int = 0, seconds: float = 0.0) -> Happening:
    return Happening(at=at, what="host", how=how, whose=f"{whose}", seconds=seconds)


def _plan(*happenings: Happening, **more: Any) -> JobPlan:
    """Two hosts, sixty steps of ten seconds, saves of a second or two."""
    plan, changes = draw(3), {**_KIND, "at_the_end": None, **more}
    return replace(plan, life=replace(plan.life, first_step=0.0), happenings=happenings, **changes)


_KIND = {
    "steps": 60,
    "step_seconds": 10.0,
    "evaluation_every": 20,
    "evaluation_seconds": 10.0,
    "state_bytes": 1e8,
    "upload_rate": 1e8,
    "interval": "600s",
    "hosts": 2,
    "ranks": 2,
    "is_gpu": True,
    "is_sharded": False,
    "restarts": "all",
    "ends_others": "late",
}
_KEPT = {
    "a power cut": (
        _plan(_host(500.0, "power off")),
        ("a lost host that nobody watches", "no probes", "no exit after a lost host"),
    ),
    "a power cut just before all have met": (
        _plan(_host(282.0, "power off", 1), restarts="one", hosts=4, ranks=1, seed=1),
        ("no end to what is repeated",),
    ),
    "a cut": (
        _plan(_host(500.0, "cut", 1, 90.0), restarts="one"),
        ("no probes",),
    ),
    "a notice to one host": (
        _plan(_host(500.0, "notice to one", 1)),
        ("75 is not waited for",),
    ),
    "a notice to all": (
        _plan(_host(500.0, "notice to all")),
        ("SIGTERM is not passed on", "no wait for the end"),
    ),
    "kills here and there": (
        _plan(_host(400.0, "kill", 1), _host(500.0, "kill", 1), _host(600.0, "kill")),
        ("others' losses are counted", "one failure ends the job"),
    ),
    "data that changes": (
        _plan(_host(450.0, "other data"), _host(500.0, "power off"), restarts="one"),
        ("facts are not compared",),
    ),
    "a kill at the end": (
        _plan(restarts="one", at_the_end=_host(0.0, "kill", 1, 0.5)),
        ("a finished run is met for",),
    ),
    "steps longer than a notice": (
        replace(
            _plan(_host(900.0, "notice to one", 1)),
            steps=10,
            step_seconds=300.0,
            interval="7steps",
        ),
        (),
    ),
    "a host lost after the end": (
        _plan(restarts="one", at_the_end=_host(0.0, "power off", 1)),
        ("an end waits for who is gone",),
    ),
    "calm": (_plan(), ("two leaders",)),
}


@pytest.mark.parametrize("name", _KEPT)
def test_a_kept_job_keeps_every_promise_and_shows_its_faults(name: str) -> None:
    plan, faults = _KEPT[name]
    found = live_through_job(plan)
    assert found.broken == ()
    assert found.state == "finished"
    for each in faults:
        with FAULTS[each].plant():
            found = live_through_job(plan)
        assert FAULTS[each].is_found(found.broken), f"{each}: {found.story}"


def test_a_plan_is_one_job() -> None:
    first, again = live_through_job(draw(20)), live_through_job(draw(20))
    assert first.story == again.story


@pytest.mark.parametrize("seed", range(1, 6))
def test_jobs_keep_every_promise(seed: int) -> None:
    _live(seed)


@pytest.mark.slow
def test_many_jobs_keep_every_promise() -> None:
    for seed in range(1, 1001):
        _live(seed)


def _live(seed: int) -> None:
    found = live_through_job(draw(seed))
    assert found.broken == (), shrink(found, live_through_job).plan
