"""`check` finds what is wrong with a workload, and says nothing against one that is right."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.training.forked import command
from tests.training.proof.check.faulty import STAGES
from training.cli.main import main

FAULTY = "tests.training.proof.check.faulty"


def checked(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The record of a `check` that must end with exit code 1."""
    assert main(["check", name, "--json"]) == 1
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not record["resumes_exactly"]
    return record


def findings(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `check` says against a workload."""
    return "\n".join(checked(name, capsys)["problems"])


def test_a_workload_that_resumes_exactly_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "tests.training.tiny:TINY", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["resumes_exactly"]
    assert len(record["interruptions"]) == 11
    assert "interrupted at stage 'doubled', shard 2" in record["interruptions"]


def test_attempts_may_have_threads_though_they_are_forked() -> None:
    done = command(["check", f"{FAULTY}:WIDE", "--override=num_threads=2", "--json"])
    assert done.code == 0, done.err


@pytest.mark.slow
def test_many_steps_are_killed_between_commits_too(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps=24", "--checkpoint-interval=2epochs", "--json"]
    assert main(["check", "tests.training.tiny:TINY", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    killed = [said for said in record["interruptions"] if said.startswith("killed")]
    assert len(record["interruptions"]) == 15 and len(killed) == 4
    # Two epochs have eight steps.
    assert re.fullmatch(
        r"killed at stage 'second', step 22; resumes from the periodic commit at step (32|40) of "
        r"the run, epoch (2|4)",
        killed[-1],
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_ranks_that_share_more_weights_than_a_bucket_holds_resume_exactly(
    num_processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--recipe=large", f"--num-processes={num_processes}", "--count=77", "--json"]
    assert main(["check", "training.proof.torture.small_workload:SMALL", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["interruptions"]) == 11
    assert "interrupted at stage 'wide', step 6" in record["interruptions"]


def test_fails_where_a_stage_has_too_few_samples_for_so_many_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "tests.training.tiny:TINY", "--count=20", "--steps=40"]) == 2
    assert "so few samples that it took" in capsys.readouterr().err


def test_fails_for_a_stage_that_was_never_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    said = findings(f"{FAULTY}:DOUBLING", capsys)
    assert said.startswith("stage 'again' was never interrupted, so nothing is known about it: ")
    assert "give it its own key" in said


def test_state_that_no_checkpoint_holds_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    record = checked(f"{FAULTY}:REMEMBERING", capsys)
    # An attempt ended after the stage's ninth step; what it remembered is missing from there on.
    said = "\n".join(record["problems"])
    assert "the interrupted run differs: step 10 (stage 'third'): loss is" in said
    assert "the first tensor that differs is '0.bias' by up to" in said
    # All stages, although none has the second epoch in which another interruption is due.
    places = ("step 1", "step 3", "step 4", "evaluation batch 1")
    trained = [f"interrupted at stage '{s}', {place}" for s in STAGES for place in places]
    assert record["interruptions"] == ["interrupted at stage 'doubled', shard 2", *trained]


def test_a_run_that_is_never_the_same_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    said = findings(f"{FAULTY}:TIMED", capsys)
    assert "two runs without interruption differ: step 5 (stage 'second'): loss is" in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("AUGMENTED", "goes below `with drawing_from(rng):` (from training import"),
        ("MISCOUNTED", "split 'train': files must take (indices)"),
    ],
)
def test_fails_for_what_the_loop_relies_on(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{FAULTY}:{name}", "--count=42"]) == 2
    error = capsys.readouterr().err
    assert "a plain run of the workload ended with exit code 2" in error
    assert says in error


def test_what_is_wrong_with_the_protocol_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = findings(f"{FAULTY}:NOTHING", capsys)
    assert "the workload has no recipes; see training.Workload" in said
    assert "the workload has no stages(c): The stages in order" in said
    said = findings(f"{FAULTY}:HALF", capsys)
    assert "placement_fields names loaders, which the config lacks" in said
    assert "stage 'half': model must take (i)" in said
    assert "stage 'half' has no loss(m, b, step, num_steps): Forward in train mode" in said
    said = findings(f"{FAULTY}:BAD_CONFIG", capsys)
    assert "recipe 'quick': the config is a dict; make it a frozen dataclass" in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("BadConfig", "is a class; name an object: BADCONFIG = BadConfig()"),
        ("DUCK", "is an instance of Duck; let that class subclass training.Workload"),
    ],
)
def test_fails_for_what_is_not_a_workload(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{FAULTY}:{name}"]) == 2
    assert says in capsys.readouterr().err


def test_a_workload_may_ask_for_gpus_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import torch\n\nassert torch.cuda.is_available()\nASKS = object()\n"
    (tmp_path / "asks_for_gpus.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    assert main(["check", "asks_for_gpus:ASKS"]) == 2
    assert "is an instance of object" in capsys.readouterr().err, "found without CUDA"
