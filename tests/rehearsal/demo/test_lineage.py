"""The lineage promise, held against runs that keep it and runs that break it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rehearsal.demo.receipt import compare_runs, inequalities
from rehearsal.demo.run_files import FolderFiles, losses, read_events, read_json, read_steps
from training.engine.step_log import _sample_digest


def step(
    number: int, ids: list[int], *, generation: int = 1, epoch: int = 0, num_samples: int = 4
) -> dict[str, Any]:
    return {
        "kind": "step",
        "stage": "head",
        "step": number,
        "stage_step": number,
        "epoch": epoch,
        "generation": generation,
        "loss": number + generation / 10,
        **_sample_digest(ids, num_samples),
    }


@pytest.fixture
def run(tmp_path: Path) -> FolderFiles:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "events").mkdir()
    return FolderFiles(folder=tmp_path)


def write(run: FolderFiles, name: str, records: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (run.folder / "metrics" / name).write_text(lines)


def problems(run: FolderFiles) -> list[str]:
    """What a run that equals itself breaks."""
    receipt = {"weights_sha256": "aa"}
    found = inequalities(compare_runs(run, run, receipt, receipt))
    return found[: len(found) // 2]  # those of both runs


def test_a_repeated_step_counts_once_and_the_newest_generation_wins(run: FolderFiles) -> None:
    write(run, "0001-a-00001.jsonl", [step(1, [0, 1]), step(2, [2, 3])])
    write(run, "0002-b-00001.jsonl", [step(2, [2, 3], generation=2)])
    assert losses(read_steps(run)) == [1.1, 2.2]
    assert problems(run) == []


def test_events_come_in_the_order_of_time(run: FolderFiles) -> None:
    for name, time in (("b", "2026-01-01T00:00:01Z"), ("a", "2026-01-01T00:00:02Z")):
        content = json.dumps({"name": name, "time": time})
        (run.folder / "events" / f"{name}.json").write_text(content)
    assert [event["name"] for event in read_events(run)] == ["b", "a"]


def test_what_is_not_there_reads_as_none(run: FolderFiles) -> None:
    assert read_json(run, "head.json") is None
