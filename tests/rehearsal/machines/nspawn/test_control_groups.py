"""What is counted in a machine's control group, and how its memory is limited."""

from pathlib import Path

import pytest

from rehearsal.machines.nspawn import control_groups
from rehearsal.machines.nspawn.control_groups import ControlGroup, are_possible


@pytest.fixture
def hierarchy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups as plain folders."""
    monkeypatch.setattr(control_groups, "ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "VERSION_1_MEMORY", tmp_path / "memory")
    return tmp_path


def test_a_service_that_ends_while_processes_are_counted_is_passed_over(hierarchy: Path) -> None:
    group = ControlGroup(machine="i-1")
    for name in ("", "one.service", "ends.service"):
        (group.folder / name).mkdir(parents=True)
    (group.folder / "cgroup.procs").write_text("7\n")
    (group.folder / "one.service/cgroup.procs").write_text("8\n9\n")
    (group.folder / "ends.service/cgroup.procs").mkdir()  # which cannot be read
    assert sorted(group.processes()) == [7, 8, 9]


def test_a_machine_short_of_memory_cannot_go_on_in_swap(hierarchy: Path) -> None:
    group = ControlGroup(machine="i-1", memory_mib=3)
    (folder,) = group.make()
    assert (folder / "memory.max").read_text() == str(3 * 2**20)
    assert (folder / "memory.swap.max").read_text() == "0"
    (hierarchy / "memory").mkdir()
    _, folder = ControlGroup(machine="i-2", memory_mib=3).make()
    assert (folder / "memory.memsw.limit_in_bytes").read_text() == str(3 * 2**20)


def test_groups_that_cannot_be_killed_are_none(hierarchy: Path) -> None:
    assert not are_possible()
    assert list(hierarchy.iterdir()) == []
    (hierarchy / "unified").touch()
    assert not are_possible()
