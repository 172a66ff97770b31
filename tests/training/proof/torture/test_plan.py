"""What a seed deals: every kind of trouble, and notices with a time that end in every way."""

import random
from itertools import cycle, islice

from training.proof.torture.plan import KINDS, SIGNALS, Scene, Trouble, draw_scene


def scenes(seed: int, count: int) -> list[Scene]:
    rng = random.Random(seed)
    return [
        draw_scene(rng, kind, run_seconds=1.5, ttl_seconds=0.5, is_fresh=False, num_processes=2)
        for kind in islice(cycle(KINDS), count)
    ]


def troubles(seed: int, count: int) -> list[Trouble]:
    pairs = [(scene.trouble, scene.second) for scene in scenes(seed, count)]
    return [trouble for pair in pairs for trouble in pair if trouble is not None]


def test_a_seed_deals_the_same_again() -> None:
    assert scenes(1, 50) == scenes(1, 50)
    assert scenes(1, 50) != scenes(2, 50)


def test_every_kind_is_dealt_and_only_dated_notices_have_a_time() -> None:
    dealt = troubles(3, 300)
    assert {trouble.kind for trouble in dealt} == set(SIGNALS)
    assert all((trouble.kind == "dated") == bool(trouble.aftermath) for trouble in dealt)


def test_the_machine_of_a_dated_notice_ends_then_or_sooner_or_after_a_sigterm() -> None:
    endings = set()
    for trouble in troubles(4, 500):
        if trouble.notice_seconds is None:
            continue
        assert 0.2 <= trouble.notice_seconds <= 2.0
        assert trouble.kill_seconds is not None
        assert 0 < trouble.kill_seconds <= trouble.notice_seconds
        if trouble.term_seconds is not None:
            assert trouble.term_seconds < trouble.kill_seconds
        endings.add((trouble.kill_seconds < trouble.notice_seconds, bool(trouble.term_seconds)))
    assert endings == {(False, False), (True, False), (False, True)}
