"""A program that is killed at any moment finds files that it wrote whole, or together."""

import operator
from pathlib import Path

import pytest

from tests.training.durable.save.snapshots.kills import Series, kill_again_and_again


@pytest.mark.parametrize("says_when", [True, False], ids=["commit", "quiet"])
def test_a_killed_program_finds_what_it_wrote(tmp_path: Path, says_when: bool) -> None:
    refuse_problems(kill_again_and_again(tmp_path, 8, 1, says_when=says_when))


@pytest.mark.slow
@pytest.mark.parametrize("says_when", [True, False], ids=["commit", "quiet"])
def test_a_hundred_kills(tmp_path: Path, says_when: bool) -> None:
    found = kill_again_and_again(tmp_path, 100, 1000, says_when=says_when)
    print(
        f"{found.restored[-1]} epochs kept, {sum(found.lost)} finished ones lost to 100 kills; "
        f"{found.torn} starts failed on what a crash left"
    )
    refuse_problems(found)


def refuse_problems(found: Series) -> None:
    assert found.problems == []
    assert found.firm == sorted(found.firm), "an older state came back"
    assert all(map(operator.ge, found.restored, found.firm))
    assert found.restored[-1] > 0, "nothing was ever kept"
