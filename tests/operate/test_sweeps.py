"""`runs` on a sweep whose jobs are in a queue: states, dollars and a stop, whatever Batch says."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.sweep import Sweep, drawn_runs
from operate.command import main
from stacks import JobState, QueuedSweep

_RUNS = drawn_runs(["epochs=1,2,3"], [], None, 0)
_HEAD = {
    "format": 1,
    "run_id": "epochs-1",
    "generation": 1,
    "writer": "i-1",
    "nonce": "a",
    "state": "running",
    "checkpoints": [],
}


class _Batch:
    """The queue: a job's status and dollars by its ID."""

    def __init__(self, folder: Path, jobs: Mapping[str, JobState]) -> None:
        self.folder, self.jobs = folder, dict(jobs)
        self.when_ended: Callable[[], None] = lambda: None

    def record(self, jobs: Mapping[str, list[str]]) -> None:
        kept = QueuedSweep(
            arguments=[], usd_per_hour=1.0, max_usd=None, usd_of_job=9.0, jobs=dict(jobs)
        )
        (self.folder / "jobs.json").write_bytes(kept.to_bytes())

    def look(self, queued: QueuedSweep) -> dict[str, list[JobState]]:
        return {run: [self.jobs[each] for each in ids] for run, ids in queued.jobs.items()}

    def end(self, queued: QueuedSweep, jobs: list[str], reason: str) -> None:
        self.jobs |= {each: JobState(status="FAILED", usd=1.0) for each in jobs}
        self.when_ended()


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Batch:
    made = Sweep(workload="trajectory", recipe="laptop", drawn="grid", runs=_RUNS)
    (tmp_path / "sweep.json").write_bytes(made.to_bytes())
    (tmp_path / "epochs-1").mkdir()
    (tmp_path / "epochs-1" / "head.json").write_text(json.dumps(_HEAD))
    states = {"a": "gone", "b": "RUNNING", "c": "RUNNABLE", "d": "RUNNABLE"}
    usd = {"a": None, "b": 1.5}
    jobs = {job: JobState(status=status, usd=usd.get(job, 0.0)) for job, status in states.items()}
    queue = _Batch(tmp_path, jobs)
    queue.record({"epochs-1": ["a"], "epochs-2": ["b"], "epochs-3": ["c"]})
    monkeypatch.setattr(QueuedSweep, "look", lambda queued: queue.look(queued))
    monkeypatch.setattr(QueuedSweep, "end", lambda *asked: queue.end(*asked))
    return queue


def _runs(batch: _Batch, verb: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main([verb, str(batch.folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_whose_job_is_over_does_not_run(
    batch: _Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _runs(batch, "status", capsys)
    assert [row["state"] for row in rows] == ["interrupted", "running", "queued"]
    batch.record({"epochs-1": ["a", "b"], "epochs-2": ["b"]})
    assert _runs(batch, "status", capsys)[0]["state"] == "running", "its newest job"


def test_a_total_is_the_least_where_a_cost_is_not_known(
    batch: _Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["usd"] for row in _runs(batch, "cost", capsys)] == [None, 1.5, 0.0]
    assert main(["cost", str(batch.folder)]) == 0
    assert "at least $1.50 in total" in capsys.readouterr().out
    done = _runs(batch, "open", capsys)["done"]
    assert done.endswith("0 of 3 runs have finished, for at least $1.50 so far.")


def test_a_run_that_has_not_begun_and_has_no_job_has_cost_nothing(
    batch: _Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.record({"epochs-2": ["b"]})
    assert [row["usd"] for row in _runs(batch, "cost", capsys)] == [None, 1.5, 0.0]
    (batch.folder / "epochs-1" / "head.json").unlink()
    assert main(["cost", str(batch.folder)]) == 0
    assert "at least" not in capsys.readouterr().out


def test_a_stop_ends_the_jobs_that_are_queued_meanwhile_too(
    batch: _Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    def queue_another() -> None:
        batch.record({"epochs-1": ["a", "d"], "epochs-2": ["b"], "epochs-3": ["c"]})

    batch.when_ended = queue_another
    assert _runs(batch, "stop", capsys)["done"] == "is stopped: 3 jobs have ended"
    assert {job: state.is_over for job, state in batch.jobs.items()} == dict.fromkeys("abcd", True)


def test_what_has_finished_is_not_said_to_resume(
    batch: _Batch, capsys: pytest.CaptureFixture[str]
) -> None:
    (batch.folder / "jobs.json").unlink()
    assert main(["resume", str(batch.folder)]) == 0
    assert capsys.readouterr().out.endswith(" resumes what is unfinished once started again\n")
    for each in _RUNS:
        (batch.folder / each.name).mkdir(exist_ok=True)
        head = json.dumps(_HEAD | {"run_id": each.name, "state": "finished"})
        (batch.folder / each.name / "head.json").write_text(head)
    assert main(["resume", str(batch.folder)]) == 2
    assert "has finished: there is nothing to resume" in capsys.readouterr().err
