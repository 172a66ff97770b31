"""What the lives of a run come to: what was lost, torn, mixed, repeated and skipped."""

import json
from pathlib import Path

from training.proof.check.lives import Account, Report, recorded


def steps(first: int, last: int, at: float) -> list[Report]:
    """A second each; the samples of a step are its number and ten times it."""
    return [{"at": at + n - first, "step": n, "ids": [n, 10 * n]} for n in range(first, last + 1)]


def test_lines_of_others_are_passed_over(tmp_path: Path) -> None:
    text = '{"at": 1, "step": 2}\nepoch {1}\nerror: {"at": 2, "torn": "a"}\n{"step": 3}\n{"at":'
    (tmp_path / "log").write_text(text)
    assert [one["at"] for one in recorded(tmp_path / "log", "at")] == [1]
    assert recorded(tmp_path / "none", "at") == []


def test_work_since_the_restored_step_is_lost_and_a_finished_save_that_is_not_restored() -> None:
    account = Account()
    account.live([{"at": 0, "restored": 0}, *steps(1, 6, 1), {"at": 6.5, "saved": 6}], "one")
    account.live([{"at": 50, "restored": 4}, *steps(5, 6, 51), {"at": 53, "final": "a"}], "two")
    assert account.lost == [2.5] and account.lost_saves == [2.5]
    assert account.final == "a"


def test_a_save_that_is_restored_is_not_lost() -> None:
    account = Account()
    account.live(
        [{"at": 0, "restored": 0}, *steps(1, 4, 1), {"at": 4.5, "saved": 4}, *steps(5, 6, 5)], "one"
    )
    account.live([{"at": 50, "restored": 4}, *steps(5, 5, 51)], "two")
    account.live([{"at": 90, "restored": 4}, *steps(5, 5, 91)], "three")
    assert account.lost == [2.0, 1.0] and account.lost_saves == [0.0, 0.0]


def test_a_torn_restore_is_counted_and_its_loss_belongs_to_the_start_that_works() -> None:
    account = Account()
    account.live(steps(1, 6, 1), "one")
    account.live([{"at": 50, "restored": None, "torn": "model.bin"}], "two")
    assert account.torn == ["two: model.bin"] and account.lost == []
    account.live([{"at": 90, "restored": 0}, *steps(1, 1, 91)], "three")
    assert account.lost == [5.0]


def test_files_of_two_steps_are_counted() -> None:
    account = Account()
    account.live([{"at": 0, "restored": 8, "mismatched": [4, 8]}], "one")
    assert account.mismatched == ["one: steps [4, 8]"] and account.torn == []


def test_samples_count_where_they_were_trained_on_in_the_end() -> None:
    whole, ours = Account(), Account()
    whole.live(steps(1, 6, 1), "whole")
    ours.live(steps(1, 6, 1), "one")
    ours.live(steps(4, 6, 50), "two")  # it does not say what it restored
    assert ours.lost == [3.0] and ours.samples(whole) == (0, 0)
    ours.live([{"at": 90, "restored": 6}, {"at": 91, "step": 7, "ids": [1, 2]}], "three")
    assert ours.samples(whole) == (2, 0)
    del ours.ids[2]
    assert ours.samples(whole) == (1, 1), json.dumps(ours.ids)
