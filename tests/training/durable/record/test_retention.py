"""What is kept: the newest, every Nth, each stage's best, and what those began from."""

import random
from dataclasses import replace

from contract.grammar import Span
from training.durable.record.head import CheckpointEntry, Kind, Retention


def entry(
    step: int,
    stage: str = "a",
    kind: Kind = "periodic",
    *,
    epoch: int = 0,
    is_best: bool = False,
    is_tentative: bool = False,
    program_step: int | None = None,
) -> CheckpointEntry:
    return CheckpointEntry(
        name=f"{step:08d}-{stage}-{kind}",
        step=step,
        stage=stage,
        epoch=epoch,
        kind=kind,
        files=(),
        is_best=is_best,
        is_tentative=is_tentative,
        program_step=program_step,
    )


def live_through(retention: Retention, entries: list[CheckpointEntry]) -> list[int]:
    """Publish one after the other; the steps that are left."""
    kept: tuple[CheckpointEntry, ...] = ()
    for published in entries:
        kept = retention.kept((*kept, published))
    return [one.step for one in kept]


def test_those_that_may_hold_half_of_a_save_take_the_place_of_none_that_does_not() -> None:
    firm = [entry(step) for step in (1, 2, 3)]
    maybe = [entry(step, is_tentative=True) for step in (4, 5, 6, 7)]
    assert live_through(Retention(), [*firm, *maybe]) == [1, 2, 3, 5, 6, 7]
    assert live_through(Retention(), [*firm, *maybe, entry(8)]) == [2, 3, 6, 7, 8]


def test_the_furthest_step_of_a_program_stays_until_another_passes_it() -> None:
    maybe = entry(4, is_tentative=True, program_step=390)
    far = [*(entry(number, program_step=100 * number) for number in (1, 2, 3)), maybe]
    again = [entry(5 + number, program_step=10 * number) for number in range(4)]
    two = Retention(newest=2)
    assert live_through(two, [*far, *again]) == [3, 4, 7, 8]
    assert live_through(two, [*far, *again, entry(9, program_step=301)]) == [4, 8, 9]
    assert live_through(two, [*far, *again, entry(9, program_step=390)]) == [8, 9]


def test_the_first_of_every_so_many_steps_stays() -> None:
    retention = Retention(newest=1, every=Span(value=100, unit="steps"))
    entries = [entry(step) for step in (40, 90, 130, 170, 210, 250, 420, 430)]
    assert live_through(retention, entries) == [130, 210, 420, 430]


def test_the_first_of_every_so_many_epochs_of_a_stage_stays() -> None:
    retention = Retention(newest=1, every=Span(value=2, unit="epochs"))
    one = [entry(step, epoch=step) for step in range(1, 6)]
    two = [entry(10 + epoch, "b", epoch=epoch) for epoch in range(1, 5)]
    assert live_through(retention, [*one, *two]) == [2, 4, 12, 14]


def test_each_stage_s_best_stays_until_a_better_one_comes() -> None:
    retention = Retention(newest=1)
    entries = [entry(1, is_best=True), entry(2), entry(3, is_best=True), entry(4), entry(5)]
    assert live_through(retention, entries) == [3, 5]
    entries += [entry(6, "b"), entry(7, "b", is_best=True), entry(8, "b")]
    assert live_through(retention, entries) == [3, 7, 8]


def test_a_kept_one_keeps_the_stage_end_that_it_began_from() -> None:
    retention = Retention(newest=1, every=Span(value=10, unit="steps"))
    first = [entry(3), entry(4, kind="stage-end")]
    second = [entry(12, "b"), entry(15, "b", kind="stage-end")]
    third = [entry(16, "c"), entry(17, "c")]
    assert live_through(retention, [*first, *second, *third]) == [4, 12, 15, 17]


def test_the_newest_and_its_origin_are_never_dropped() -> None:
    rng = random.Random(1)
    for _ in range(200):
        retention = Retention(
            newest=rng.randint(1, 4),
            every=rng.choice([None, Span(value=rng.randint(1, 9), unit="steps")]),
        )
        kept: tuple[CheckpointEntry, ...] = ()
        ends: dict[str, CheckpointEntry] = {}
        stage: str = "0"
        before: str | None = None
        for step in range(1, 30):
            ended = rng.random() < 0.15
            kind: Kind = "stage-end" if ended else "periodic"
            new = entry(step, stage, kind, is_best=rng.random() < 0.2)
            kept = retention.kept((*kept, new))
            assert kept[-1] == new
            assert before is None or ends[before] in kept
            if ended:
                ends[stage], before = new, stage
                stage = str(step)


def test_the_furthest_stays_until_another_passes_it() -> None:
    """A machine that could not read it goes on from an older one; the next one may read it."""
    entries = [entry(step) for step in (100, 200, 300, 110, 120, 130, 140)]
    assert live_through(Retention(), entries) == [300, 120, 130, 140]
    assert live_through(Retention(), [*entries, entry(310)]) == [130, 140, 310]


def test_what_is_left_behind_goes_only_once_there_is_more_of_the_new_than_is_kept() -> None:
    rng = random.Random(2)
    for _ in range(200):
        retention = Retention(
            newest=rng.randint(1, 4),
            every=rng.choice([None, Span(value=rng.randint(1, 9), unit="steps")]),
        )
        old = tuple(
            replace(entry(step, is_best=rng.random() < 0.2), is_left_behind=True)
            for step in range(100, 100 + rng.randint(1, 5))
        )
        kept, new = old, tuple[CheckpointEntry, ...]()
        for step in range(1, 12):
            may_be_torn = rng.random() < 0.3
            new = (*new, entry(step, is_best=rng.random() < 0.2, is_tentative=may_be_torn))
            kept = retention.kept((*kept, new[-1]))
            is_beyond = sum(not one.is_tentative for one in new) > retention.newest
            assert [one for one in kept if one.is_left_behind] == ([] if is_beyond else [*old])
            alone: tuple[CheckpointEntry, ...] = ()
            for one in new:
                alone = retention.kept((*alone, one))
            assert tuple(one for one in kept if not one.is_left_behind) == alone
