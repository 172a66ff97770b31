"""The benchmark of a program's checkpoints can tell a whole pair from a torn one."""

from pathlib import Path

import pytest

from benchmarks.program.measure import ScriptLife, measure
from benchmarks.program.script import FILES, found, write

_SIZE = 2 << 20


def test_what_a_lost_machine_left_is_told_apart(tmp_path: Path) -> None:
    model, optimizer = (tmp_path / name for name in FILES)
    assert found(tmp_path, _SIZE) == ("nothing", 0)
    write(model, 3, _SIZE)
    assert found(tmp_path, _SIZE) == ("half a file", 0)
    write(optimizer, 3, _SIZE)
    assert found(tmp_path, _SIZE) == ("whole", 3)
    write(model, 4, _SIZE)
    assert found(tmp_path, _SIZE) == ("torn pair", 0)
    write(optimizer, 4, _SIZE)
    data = optimizer.read_bytes()
    optimizer.write_bytes(data[:-1])
    assert found(tmp_path, _SIZE) == ("half a file", 0)
    write(tmp_path / "older", 3, _SIZE)
    optimizer.write_bytes(data[: 1 << 20] + (tmp_path / "older").read_bytes()[1 << 20 :])
    assert found(tmp_path, _SIZE) == ("half a file", 0)


def test_a_checkpoint_is_safe_when_what_was_sent_began_after_it() -> None:
    life = ScriptLife(written=[(1.0, 1), (5.0, 2)])
    life.note_safe(0.5, 2.0)
    assert life.safe == []
    life.note_safe(4.0, 9.0)
    life.note_safe(5.0, 11.0)
    assert life.safe == [8.0, 6.0]


def test_fails_a_benchmark_of_programs_of_one_life() -> None:
    with pytest.raises(ValueError, match="at least 2 lives"):
        measure(num_lives=1, megabytes=1, steps=1)


@pytest.mark.slow
def test_each_way_is_measured_and_ours_restores_what_is_whole() -> None:
    rows = {row["way"]: row for row in measure(num_lives=2, megabytes=1, steps=20)}
    assert len(rows) == 4 and all(row["step, ms"] > 0 for row in rows.values())
    assert rows["ours, with commit()"]["whole, torn, half, none"] == "1, 0, 0, 0"
    assert 0 < rows["ours, with commit()"]["sent per changed MB"] < 2
