"""What a seed draws: every kind of kill, and notices with a time that end in every way."""

import random
from itertools import cycle, islice

from training.proof.experiment import Experiment
from training.proof.injector import SIGNALS, Kill
from training.proof.torture.series import KINDS, Size, draw_experiment


def experiments(seed: int, count: int) -> list[Experiment]:
    rng = random.Random(seed)
    return [
        draw_experiment(rng, kind, run_seconds=1.5, ttl_seconds=0.5, is_fresh=False, size=Size(2))
        for kind in islice(cycle(KINDS), count)
    ]


def kills(seed: int, count: int) -> list[Kill]:
    pairs = [(*experiment.kills, experiment.second) for experiment in experiments(seed, count)]
    return [kill for pair in pairs for kill in pair if kill is not None]


def test_a_seed_draws_the_same_again() -> None:
    assert experiments(1, 50) == experiments(1, 50)
    assert experiments(1, 50) != experiments(2, 50)


def test_every_kind_is_drawn_and_only_dated_notices_have_a_time() -> None:
    drawn = kills(3, 300)
    assert {kill.kind for kill in drawn} == set(SIGNALS)
    assert all((kill.kind == "dated") == bool(kill.follow_up) for kill in drawn)


def test_the_machine_of_a_dated_notice_ends_then_or_sooner_or_after_a_sigterm() -> None:
    endings = set()
    for kill in kills(4, 500):
        if kill.notice_seconds is None:
            continue
        assert 0.2 <= kill.notice_seconds <= 2.0
        assert kill.kill_seconds is not None
        assert 0 < kill.kill_seconds <= kill.notice_seconds
        if kill.term_seconds is not None:
            assert kill.term_seconds < kill.kill_seconds
        endings.add((kill.kill_seconds < kill.notice_seconds, bool(kill.term_seconds)))
    assert endings == {(False, False), (True, False), (False, True)}
