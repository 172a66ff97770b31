"""A failed run is taken back, and a run resumes from the checkpoint that somebody chose."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from tests.training import tiny
from tests.training.hooks import interrupt_at
from tests.training.runs import Run, assert_equal
from training.cli.main import main
from training.durable.record.history import History
from training.durable.record.lease import Lease, acquire
from training.durable.store.folder import FolderStore


def reopen(run: Run, *more: str) -> int:
    return main(["reopen", f"--run-uri={run.uri}", "--writer=ada", *more])


@pytest.fixture(scope="module")
def made(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that failed in step 11 for a reason that is gone now."""
    root = tmp_path_factory.mktemp("failed")
    run = Run(dataset=dataset, uri=str(root / "run-1"), scratch=root / "scratch")
    tiny.LOSSES["first"] = lambda step, total: total * float("inf") if step == 10 else total
    assert run.attempt("--nan-retries=0", "--keep=5") == 1
    tiny.LOSSES.clear()
    assert [entry.step for entry in run.head.checkpoints] == [3, 6, 9]
    return run


@pytest.fixture
def failed(made: Run, run: Run) -> Run:
    """A copy of it."""
    shutil.copytree(made.uri, run.uri)
    return run


def test_a_failed_run_says_how_it_is_taken_back_and_then_goes_on(
    made: Run, failed: Run, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    how = f"python -m training reopen --run-uri {made.store.uri}"
    assert failed.attempt() == 1
    assert how in capfd.readouterr().out
    assert reopen(failed, "--reason=the disk was replaced") == 0
    assert "was failed; its next attempt resumes from step 9" in capfd.readouterr().out
    assert (failed.head.state, failed.head.reason) == ("released", None)
    (event,) = failed.events("reopened")
    assert (event["instance_id"], event["reason"]) == ("ada", "the disk was replaced")
    assert "step 11: the loss is inf" in event["failed_because"]
    assert failed.attempt() == 0
    assert_equal(failed, whole)
    assert failed.json("receipt.json")["state"] == "finished"
    assert min(line["step"] for line in failed.lines("step") if line["generation"] == 2) == 10


def test_a_run_resumes_from_a_chosen_checkpoint_and_the_later_ones_go(
    failed: Run, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    later = [entry.name for entry in failed.head.checkpoints[1:]]
    capfd.readouterr()
    assert reopen(failed, "--from-checkpoint=3", "--json") == 0
    said = json.loads(capfd.readouterr().out)
    assert (said["was"], said["state"], said["step"]) == ("failed", "released", 3)
    assert said["dropped"] == later
    assert [entry.step for entry in failed.head.checkpoints] == [3]
    folder = Path(failed.uri) / "checkpoints"
    assert failed.attempt("--keep=9") == 0
    assert_equal(failed, whole)
    assert not {path.name for path in folder.iterdir()} & set(later)
    assert min(line["step"] for line in failed.lines("step") if line["generation"] == 2) == 4


def test_a_run_starts_over_by_a_person_and_its_checkpoints_stay_until_there_are_new_ones(
    failed: Run, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert reopen(failed, "--from-scratch") == 0
    said = capfd.readouterr().out
    assert "resumes from its beginning: 3 checkpoints are left behind" in said
    names = {entry.name for entry in failed.head.checkpoints}
    interrupt_at("first", 7)
    assert failed.attempt("--keep=5") == 75
    assert [entry.step for entry in failed.head.checkpoints] == [3, 6, 9, 3, 6, 8]
    assert {path.name for path in Path(failed.uri, "checkpoints").iterdir()} >= names
    assert failed.attempt() == 0
    assert_equal(failed, whole)
    assert min(line["step"] for line in failed.lines("step") if line["generation"] == 2) == 1
    assert not {path.name for path in Path(failed.uri, "checkpoints").iterdir()} & names


def test_one_that_was_left_behind_may_be_chosen_after_all(failed: Run, whole: Run) -> None:
    assert reopen(failed, "--from-scratch") == 0
    assert reopen(failed, "--from-checkpoint=6") == 0
    assert failed.attempt() == 0
    assert_equal(failed, whole)
    assert min(line["step"] for line in failed.lines("step") if line["generation"] == 2) == 7


def test_two_machines_that_can_verify_no_checkpoint_start_over(failed: Run, whole: Run) -> None:
    assert reopen(failed) == 0
    for entry in failed.head.checkpoints:
        state = Path(failed.uri) / "checkpoints" / entry.name / "state.json"
        state.write_bytes(b"?" * state.stat().st_size)
    assert failed.attempt("--writer=i-1") == 4
    assert failed.attempt("--writer=i-1") == 4
    assert len(failed.head.checkpoints) == 3
    assert failed.attempt("--writer=i-2") == 0
    assert_equal(failed, whole)
    assert [event["starts_over"] for event in failed.events("none-valid")] == [False, False, True]


def test_a_failed_attempt_is_over_when_it_failed(failed: Run) -> None:
    """And not when somebody reopens the run on the same machine."""
    before = History.read(failed.store).attempts
    assert main(["reopen", f"--run-uri={failed.uri}"]) == 0
    assert failed.events("reopened")
    assert History.read(failed.store).attempts == before


def test_a_second_failure_has_its_own_receipt(failed: Run) -> None:
    assert failed.json("receipt.json")["generations"] == 1
    assert reopen(failed) == 0
    tiny.LOSSES["first"] = lambda step, total: total * float("nan")
    assert failed.attempt("--nan-retries=0") == 1
    receipt = failed.json("receipt.json")
    assert receipt["generations"] == 2
    assert "step 10: the loss is nan" in receipt["reason"]


def test_an_interrupted_run_may_go_further_back(run: Run, whole: Run) -> None:
    interrupt_at("second", 2)
    assert run.attempt("--keep=9") == 75
    assert reopen(run, "--from-checkpoint=12") == 0
    assert [(entry.step, entry.kind) for entry in run.head.checkpoints][-2:] == [
        (12, "periodic"),
        (12, "stage-end"),
    ], "of two of one step the newer one"
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_fails_for_a_step_without_a_checkpoint(
    failed: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert reopen(failed, "--from-checkpoint=5") == 2
    assert "has no checkpoint of step 5; it has those of steps 3, 6, 9" in (capfd.readouterr().err)
    assert failed.head.state == "failed"


def test_fails_where_there_is_no_run_and_for_a_finished_one(
    run: Run, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert reopen(run) == 2
    assert "no run found at" in capfd.readouterr().err
    assert reopen(whole, "--from-checkpoint=3") == 2
    assert "has finished; to train on, start a new run with --init-from" in capfd.readouterr().err
    assert whole.head.state == "finished"


def held(run: Run) -> Lease:
    lease = acquire(run.store, "run-1", "i-1", 60, lambda s: False, lambda holder: None)
    assert isinstance(lease, Lease)
    return lease


def test_fails_while_a_writer_is_alive(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    lease, is_over = held(run), threading.Event()

    def beat() -> None:
        while not is_over.wait(0.02):
            lease.beat()

    heart = threading.Thread(target=beat)
    heart.start()
    assert reopen(run, "--lease-ttl-seconds=60") == 2
    is_over.set()
    heart.join()
    assert "is held by i-1, which is alive: first runs stop" in capfd.readouterr().err
    assert run.head.state == "running"


def test_a_run_whose_writer_is_gone_is_released(run: Run) -> None:
    held(run)
    assert reopen(run, "--lease-ttl-seconds=0.1") == 0
    assert run.head.state == "released"


def test_a_write_in_between_is_seen(failed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else reopens and an attempt takes the lease, just before this one writes."""
    put_if = FolderStore.put_if

    def late(self: FolderStore, key: str, data: bytes, etag: str | None) -> str:
        monkeypatch.setattr(FolderStore, "put_if", put_if)
        assert reopen(failed) == 0
        holders.append(held(failed))
        return put_if(self, key, data, etag)

    holders: list[Lease] = []
    monkeypatch.setattr(FolderStore, "put_if", late)
    assert reopen(failed, "--from-checkpoint=3", "--lease-ttl-seconds=0.3") == 0
    with pytest.raises(RuntimeError, match="taken over"):
        holders[0].beat()


def test_a_run_without_a_checkpoint_changes_its_config_and_is_the_run_it_would_have_been(
    run: Run, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt("--override=bad_start=true", "--override=learning_rate=0.5") == 1
    # The stack gives the same options until it is told of others.
    change = ["--override=bad_start=false", "--override=learning_rate=0.01"]
    assert reopen(run, *change, "--override=speed=1") == 2
    assert "has no field 'speed'" in capfd.readouterr().err and run.head.state == "failed"
    assert reopen(run, *change) == 0
    assert "its overrides are now: bad_start=false learning_rate=0.01" in capfd.readouterr().out
    assert run.attempt() == 2
    assert "belongs to overrides bad_start=false" in capfd.readouterr().err
    assert run.attempt(*change) == 0
    assert_equal(run, whole)
    assert run.json("receipt.json")["numerics_changed"] == []


def test_a_run_of_an_older_version_keeps_the_fields_that_it_had(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own bundle compares them with what it knows, and with what its recipe says."""
    assert run.attempt("--override=bad_start=true") == 1
    record = run.json("config.json")
    del record["config"]["blocks"]
    before = record["config"]
    Path(run.uri, "config.json").write_text(json.dumps(record))
    edited = {"quick": lambda: tiny.tiny_config(dropout=0.5, seed=8)}
    monkeypatch.setattr(tiny.Tiny, "recipes", edited)
    rungs = Path(run.uri, "adaptation.json")
    rungs.write_text('{"format": 1, "rungs": ["micro-batch 1"]}')
    assert reopen(run, "--override=bad_start=false", "--override=seed=8") == 0
    assert not rungs.exists(), "they were measured with another config"
    assert run.json("config.json")["config"] == before | {"bad_start": False, "seed": 8}


def test_fails_to_change_the_config_of_checkpoints(
    failed: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert reopen(failed, "--override=learning_rate=0.1") == 2
    assert "has 3 checkpoints with its config; only a failed run" in capfd.readouterr().err
    assert failed.head.state == "failed" and failed.json("config.json")["overrides"] == {}
