"""Drills one after the other: a folder for each."""

from pathlib import Path
from types import SimpleNamespace

from rehearsal.drills.drill import choose
from rehearsal.drills.series import DrillSeries


def test_a_drill_that_is_named_twice_has_two_folders(tmp_path: Path) -> None:
    stacks = SimpleNamespace(folder=tmp_path)
    drills = choose(["notice", "reboot", "notice"])
    series = DrillSeries(drills=drills, stacks=stacks, say=print, kind="spot")  # type: ignore[arg-type]
    folders = [series._folder(index).name for index in range(3)]
    assert folders == ["notice", "reboot", "notice-2"]
