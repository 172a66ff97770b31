"""The lineage: repeated steps count once, whatever the order in which the objects were listed."""

import itertools

from contract.lineage import newest_by_step

FIRST = [{"kind": "step", "generation": 1, "step": step} for step in (1, 2)]
SECOND = [{"kind": "step", "generation": 2, "step": 2}, {"kind": "resume", "generation": 2}]
TENTH = [{"kind": "step", "generation": 10, "step": 3}]
NINTH = [{"kind": "step", "generation": 9, "step": 3}]


def test_the_newest_generation_wins_in_any_order() -> None:
    for order in itertools.permutations([FIRST, SECOND, NINTH, TENTH]):
        steps = newest_by_step(itertools.chain(*order), "step")
        assert {step: line["generation"] for step, line in steps.items()} == {1: 1, 2: 2, 3: 10}


def test_of_one_generation_the_later_line_counts() -> None:
    lines = [{"kind": "evaluation", "generation": 1, "step": 4, "n": n} for n in (1, 2)]
    assert newest_by_step(lines, "evaluation")[4]["n"] == 2
