"""The lineage: repeated steps count once, whatever the order in which the objects were listed."""

import itertools

from contract.lineage import newest_by_step, parse_lines

FIRST = (
    b'{"kind": "step", "generation": 1, "step": 1}\n{"kind": "step", "generation": 1, "step": 2}\n'
)
SECOND = b'{"kind": "step", "generation": 2, "step": 2}\n{"kind": "resume", "generation": 2}\n'
TENTH = b'{"kind": "step", "generation": 10, "step": 3}\n'
NINTH = b'{"kind": "step", "generation": 9, "step": 3}\n'


def test_the_newest_generation_wins_in_any_order() -> None:
    for order in itertools.permutations([FIRST, SECOND, NINTH, TENTH]):
        lines = [line for data in order for line in parse_lines(data)]
        steps = newest_by_step(lines, "step")
        assert {step: line["generation"] for step, line in steps.items()} == {1: 1, 2: 2, 3: 10}


def test_of_one_generation_the_later_line_counts() -> None:
    lines = [{"kind": "evaluation", "generation": 1, "step": 4, "n": n} for n in (1, 2)]
    assert newest_by_step(lines, "evaluation")[4]["n"] == 2
