"""What once broke a promise keeps it now, and the simulation is the same each time."""

import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from stacks.guard.ledger import Ledger
from tests.simulation.clock import CLOCK, Event, Lock, PoweredOffError, Process, sleep
from tests.simulation.faults import FAULTS
from tests.simulation.habits import Habit
from tests.simulation.kept import KEPT
from tests.simulation.life import live_through, simulated
from tests.simulation.plan import Happening, Plan, draw
from tests.simulation.shortcuts import (
    HeadText,
    LedgerText,
    quick_asdict,
    quick_table,
    real_bytes,
    real_ledger,
    real_reading,
    real_table,
)
from tests.simulation.story import shrink
from training.durable.record.head import Head


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with simulated():
        yield


# The budget of a month shows its fault, too, in half the time.
_LONG = "a budget of each day"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == _LONG else name for name in KEPT]
)
def test_a_kept_life_keeps_every_promise_and_shows_its_faults(name: str) -> None:
    plan, faults = KEPT[name]
    assert live_through(plan).broken == ()
    for each in faults:
        with FAULTS[each].plant():
            found = live_through(plan, until_broken=True)
        assert FAULTS[each].is_found(found.broken), f"{each}: {found.story}"


# A seed, and a life whose watchdog sees a machine stand still.
_PAUSED = replace(KEPT["a machine that hangs"][0], happenings=(
    Happening(at=1800.0, what="pause", seconds=1000.0), Happening(at=4000.0, what="hang", share=0.1)
))  # fmt: skip


@pytest.mark.parametrize("kind", ["rename", "numbered"])
def test_a_program_lives_through_a_loss_a_notice_and_its_own_death(kind: Any) -> None:
    habit = Habit(
        kind=kind, save_every=160.0, write_seconds=20.0, logs=("train.log",),
        handler="save", says_when=kind == "rename",
    )  # fmt: skip
    happenings = (
        Happening(at=2000.0, what="power off"),
        Happening(at=3600.0, what="crash"),
        Happening(at=4600.0, what="takeback", seconds=120.0),
    )
    plan = replace(KEPT["a machine that hangs"][0], program=habit, happenings=happenings)
    first, again = live_through(plan), live_through(plan)
    assert first.broken == ()
    assert first.state == "finished"
    assert first.facts["snapshots"] > 20
    assert first.story == again.story


@pytest.mark.parametrize("plan", [draw(9), _PAUSED], ids=["seed 9", "paused"])
def test_a_plan_is_one_life_and_the_shortcuts_change_nothing(plan: Plan) -> None:
    first, again = live_through(plan), live_through(plan)
    assert first.story == again.story
    in_full = live_through(plan, sees_all=True)
    assert [text for _, text in in_full.story] == [text for _, text in first.story]


def test_what_is_computed_quicker_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quick_asdict(draw(9)) == asdict(draw(9))
    luck, texts, shown = random.Random(1), HeadText(), list[bytes]()

    def compare(*arguments: Any, **reserves: Any) -> None:
        quick, real = (make(*arguments, **reserves) for make in (quick_table, real_table))
        for one, other in zip(quick, real, strict=True):
            rows = zip((*one.wait, *one.run), (*other.wait, *other.run), strict=True)
            assert all(list(row) == same for row, same in (*rows, (one.ride, other.ride)))

    for _ in range(3):
        compare(
            luck.randint(-9, 9), luck.randint(-9, 9), luck.random(), luck.random() / 4,
            luck.uniform(0, 3), reserve=luck.randint(1, 9), return_reserve=luck.randint(1, 9),
            units=8 * luck.randint(1, 20),
        )  # fmt: skip

    def text_of(head: Head) -> bytes:
        shown.append(texts.to_bytes(head))
        assert shown[-1] == real_bytes(head)
        return shown[-1]

    ledgers, read = LedgerText(), list[Any]()

    def ledger_of(kind: type[Ledger], data: bytes) -> Any:
        read.append(ledgers.from_json(kind, data))
        assert repr(read[-1]) == repr(real_reading(kind, data))
        return read[-1]

    def text_of_ledger(ledger: Ledger) -> bytes:
        text = ledgers.to_json(ledger)
        assert text == real_ledger(ledger)
        return text

    monkeypatch.setattr(Head, "to_bytes", text_of)
    monkeypatch.setattr(Ledger, "from_json", classmethod(ledger_of))
    monkeypatch.setattr(Ledger, "to_json", text_of_ledger)
    live_through(KEPT["takebacks in short order"][0])
    assert len(shown) > 100 and len(read) > 50


def test_threads_meet_at_events_and_locks_in_virtual_time() -> None:
    CLOCK.restart(0.0)
    process, told, lock, event = Process(name="one"), list[tuple[float, str]](), Lock(), Event()

    def hold() -> None:
        with lock:
            sleep(5)
            event.set()

    def wait() -> None:
        is_set = event.wait(2)
        told.append((CLOCK.now, f"event {is_set}"))
        with lock:
            told.append((CLOCK.now, "lock"))

    def end() -> None:
        try:
            sleep(100)
        except PoweredOffError:
            told.append((CLOCK.now, "powered off"))

    for act in (hold, wait, end):
        CLOCK.start(process, act)
    CLOCK.start(Process(name="two"), process.end, at=7.0)
    CLOCK.run(1000.0)
    assert told == [(2.0, "event False"), (5.0, "lock"), (7.0, "powered off")]


@pytest.mark.slow
def test_many_seeds_keep_every_promise() -> None:
    for seed in range(1, 1001):
        found = live_through(draw(seed))
        assert found.broken == (), shrink(found).plan


@pytest.mark.slow
def test_many_programs_keep_every_promise() -> None:
    for plan in filter(lambda plan: plan.program, map(draw, range(1, 1001))):
        found = live_through(plan)
        assert found.broken == (), shrink(found).plan
