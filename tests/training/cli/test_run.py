"""The command line: what ends a run and how, and one clear sentence for each mistake."""

import argparse
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from contract.errors import UserError
from tests.training import tiny
from tests.training.runs import ROOT, Run, wait_for
from training.cli.main import main
from training.cli.run import _attempt_options, checked_folder
from training.durable import Hosts, MachineError, open_store
from training.durable.attempt.notice import Interruption
from training.durable.record.lease import acquire


def fork_into_the_middle(run: Run) -> BaseProcess:
    """Start a slow attempt in a separate process and wait for its first commit."""
    run.options = ["--override=step_seconds=0.02"]
    process = run.fork("--lease-ttl-seconds=60")
    wait_for(lambda: bool(run.store.sizes("checkpoints/")))
    return process


def test_a_finished_run_has_its_deliverables(whole: Run) -> None:
    receipt = whole.json("receipt.json")
    assert receipt["state"] == "finished"
    assert receipt["steps"] == 24
    assert receipt["generations"] == 1
    assert receipt["validation_accuracy"] == receipt["stages"]["second"]["accuracy"]
    assert receipt["first_accuracy"] == receipt["stages"]["first"]["accuracy"]
    assert receipt["checkpoint_bytes"] > 0
    assert {"torch", "device", "threads"} <= receipt["numerics_key"].keys()
    assert receipt["numerics_key"]["stages"]["first"] == {
        "micro_batch": 4,
        "precision": "float32",
        "compile": None,
    }
    assert receipt["weights_sha256"] == whole.head.weights_sha256


def test_metrics_have_the_fields_of_the_contract(whole: Run) -> None:
    step = whole.lines("step")[0]
    fields = "kind stage step stage_step epoch generation loss lr samples_per_second metrics"
    fields += " time data_wait gradient_norm num_samples split_samples ids_sum ids_crc"
    assert set(step) == set(fields.split())
    assert (step["step"], step["stage_step"], step["epoch"]) == (1, 1, 0)
    evaluation = whole.lines("evaluation")[0]
    assert set(evaluation) == {
        "kind", "stage", "step", "epoch", "generation", "metrics", "seconds",
    }  # fmt: skip
    assert whole.lines("prepare")[0]["num_shards"] == 3
    assert whole.lines("resume")[0]["checkpoint"] is None
    commits = [(line["step"], line["checkpoint_kind"]) for line in whole.lines("commit")]
    assert commits[:5] == [
        (3, "periodic"),
        (6, "periodic"),
        (9, "periodic"),
        (12, "periodic"),
        (12, "stage-end"),
    ]


def test_a_run_records_its_plan_counts_by_its_price_and_tells_a_local_file(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log" / "metrics.jsonl"
    plan = "--prediction=size=g5.xlarge usd_spot_per_hour=0.5"
    assert run.attempt(plan, f"--metrics-file={path}") == 0
    assert "dollars so far (this attempt, 0.5/h)" in capsys.readouterr().out
    expected = {"size": "g5.xlarge", "usd_spot_per_hour": 0.5}
    assert run.json("config.json")["prediction"] == expected
    assert run.json("receipt.json")["prediction"] == expected
    local = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line for line in local if line["kind"] == "step"] == run.lines("step")


def test_each_of_several_machines_costs_and_every_nth_checkpoint_is_kept(tmp_path: Path) -> None:
    given = argparse.Namespace(
        hosts=Hosts.parse("a@a,b"), keep=(3, 7), usd_per_hour=2.0, prediction=None, run_id="r"
    )
    options = _attempt_options(given, open_store(str(tmp_path)), tmp_path)
    assert options["usd_per_hour"] == 4.0
    assert (options["retention"].newest, options["retention"].every) == (3, 7)


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, MachineError), (errno.EROFS, UserError)]
)
def test_a_full_disk_is_the_machines_fault_and_ends_no_run(
    number: int, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(error, match="use another path"):
        checked_folder(tmp_path)


def test_boot_into_a_finished_run_exits_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.attempt() == 0
    before = run.head
    assert run.attempt("--override=loader_workers=4") == 0
    run.dataset = Path("gone")
    monkeypatch.setattr(Interruption, "wait", lambda self, seconds: pytest.fail("it waited"))
    assert run.attempt() == 0
    assert run.head == before


def test_the_stale_one_of_two_writers_exits_76(run: Run) -> None:
    process = fork_into_the_middle(run)
    # A machine whose clock runs ahead: it sees no heartbeat for its whole TTL and takes over.
    lease = acquire(run.store, "run-1", "i-2", 0.0, lambda seconds: False, lambda holder: None)
    process.join(120)
    assert process.exitcode == 76
    assert run.head.writer == "i-2"
    assert run.head.state == "running"
    lease.release()  # type: ignore[union-attr]
    assert run.attempt() == 0


def test_a_notice_while_waiting_for_the_lease_exits_75(run: Run) -> None:
    acquire(run.store, "run-1", "i-1", 60, lambda seconds: False, lambda holder: None)
    process = run.fork("--lease-ttl-seconds=60")
    wait_for(lambda: run.store.get("config.json") is not None)
    time.sleep(0.1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 75
    assert run.head.writer == "i-1"


def test_a_notice_file_that_is_there_at_the_start_exits_75(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    path.write_text('{"action": "terminate", "time": "2026-01-01T00:00:00Z"}')
    assert run.attempt(f"--notice-file={path}") == 75


def test_fails_when_a_stage_s_own_check_fails(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.options = ["--override=bad_start=true"]
    assert run.attempt() == 1
    assert "cannot start: the outputs differ by 1.0" in capsys.readouterr().err


def test_fails_in_one_sentence_when_a_stage_s_settings_cannot_be(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.options = ["--override=clip_norm=-1"]
    assert run.attempt() == 2
    assert "clip_norm is -1.0; use a positive norm or None" in capsys.readouterr().err


def test_a_crash_releases_the_lease(run: Run, whole: Run) -> None:
    def hook(step: int) -> None:
        tiny.HOOKS.clear()
        raise ZeroDivisionError

    tiny.HOOKS["second"] = hook
    with pytest.raises(ZeroDivisionError):
        run.attempt()
    assert run.head.state == "released"
    assert run.attempt() == 0
    assert run.head.weights_sha256 == whole.head.weights_sha256


def test_another_interval_gives_the_same_weights(run: Run, whole: Run) -> None:
    assert run.attempt("--checkpoint-interval=2epochs") == 0
    assert run.losses() == whole.losses()
    periodic = [e["step"] for e in run.events("committed") if e["kind"] == "periodic"]
    assert periodic == [8, 20]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--workload=trajectorie"],
            "unknown workload 'trajectorie'; did you mean 'trajectory'? known are ",
        ),
        (
            ["--workload=growth", "--recipe=laptpo"],
            "workload 'growth' has no recipe 'laptpo'; did you mean 'laptop'? known are full,",
        ),
        (
            ["--workload=no.such.module:X"],
            "module 'no' was not found; check its name and its folder",
        ),
        (["--workload=tests.training.tiny:NOPE"], "has no 'NOPE'"),
        (["--recipe=fast"], "no recipe 'fast'; known are long, quick"),
        (["--override=epoch=5"], "no field 'epoch'; did you mean 'epochs'? known are"),
        (["--run-uri=ftp://x"], "neither s3://bucket/prefix nor a folder"),
        (["--run-uri=s3:/bucket/x"], "neither s3://bucket/prefix nor a folder"),
        (["--dataset-uri=no/such/folder"], "does not exist; make one with"),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert run.attempt(*arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert says in error
    assert len(error.splitlines()) == 1
    assert not Path(run.uri).exists(), "nothing was written"


def test_fails_for_an_option_that_cannot_be_read(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.attempt("--checkpoint-interval=often")
    *_, error = capsys.readouterr().err.splitlines()
    assert "error: argument --checkpoint-interval: " in error
    assert "write auto, 2epochs, 100steps or 600s" in error


@pytest.mark.parametrize("name", ["", "a/", "a b", "a" * 201])
@pytest.mark.parametrize("command", ["run", "fail", "reopen", "data sync"])
def test_fails_for_a_writer_that_is_no_name(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), f"--writer={name}"])
    *_, error = capsys.readouterr().err.splitlines()
    assert f"error: argument --writer: {name!r} is not a machine's name; use 1 to 200" in error


def test_fails_for_a_dataset_that_is_not_whole(
    run: Run, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    run.dataset = folder
    assert run.attempt() == 2
    assert "is empty" in capsys.readouterr().err
    shutil.copytree(dataset, folder, dirs_exist_ok=True)
    (folder / "notes" / "about.txt").write_text("short")
    assert run.attempt() == 2
    assert "about.txt has 5 bytes, not 8 as in the manifest" in capsys.readouterr().err
    (folder / "notes" / "about.txt").unlink()
    assert run.attempt() == 2
    assert "about.txt is missing; sync the dataset again" in capsys.readouterr().err


def test_the_fail_command_marks_the_run(run: Run) -> None:
    process = fork_into_the_middle(run)
    assert main(["fail", "--run-uri", run.uri, "--reason", "disk broke"]) == 0
    process.join(120)
    assert process.exitcode == 76
    way_back = f"take it back with: python -m training reopen --run-uri {run.uri}"
    assert (run.head.state, run.head.reason) == ("failed", f"disk broke; {way_back}")


_SLEEPS, _GROWS = {"OMP_WAIT_POLICY": "PASSIVE"}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, _SLEEPS | _GROWS),
        ({"PYTORCH_ALLOC_CONF": ""}, _SLEEPS | {"PYTORCH_ALLOC_CONF": ""}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            _SLEEPS | {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
        ),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, _GROWS | {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_a_run_lets_a_gpu_s_segments_grow_and_threads_sleep_unless_it_is_told_otherwise(
    given: dict[str, str], expected: dict[str, str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "OMP_WAIT_POLICY")
    for name in names:
        # Set first: a variable that was not there is otherwise not taken away again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert run.attempt("--override=no_such_field=1") == 2, "set before the checks import torch"
    assert {name: os.environ[name] for name in names if name in os.environ} == expected


ALLOCATOR = """
from training.cli.run import _set_up_torch
_set_up_torch()
import torch
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch knows no CUDA")
def test_torch_takes_the_setting_of_its_allocator() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATOR], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert [code for code in (0, 75, 76, 2, 1, 74, 3, 130) if f"{code} " not in said] == []


def test_the_engine_names_no_workload_and_no_stage() -> None:
    from training.registry import WORKLOADS, load_workload, module_of

    names = set(WORKLOADS)
    for known in WORKLOADS:
        workload = load_workload(known)
        names |= {s.name for make in workload.recipes.values() for s in workload.stages(make())}
    training = Path(__file__).parents[3] / "training"
    # A workload's package names what it likes: training/workloads/trajectory/.
    own = {training / module_of(known).split(".")[1] for known in WORKLOADS}
    for path in training.rglob("*.py"):
        if path.name != "registry.py" and own.isdisjoint(path.parents):
            text = path.read_text()
            assert not [name for name in names if f'"{name}"' in text], path.name
