"""The benchmark of a GPU: refused without one, and known to work up to the device."""

import json
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main, parse_arguments
from benchmarks.gpu import runs, table
from benchmarks.gpu.session import Session, steps_of

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif("torch.cuda.is_available()", reason="there is a GPU")
def test_fails_without_a_gpu_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "gpu"])
    assert main() == 2
    said = capsys.readouterr().err
    assert said.startswith("this machine has no GPU that torch can use; pass --cpu for a dry run")
    assert said.count("\n") == 1


def test_fails_for_a_measurement_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="unknown measurement 'sped'; known: machine, equality, "):
        table.measure(parse_arguments(["gpu", "--cpu", "--only", "sped"]))


def test_every_measurement_is_a_function_of_its_file() -> None:
    for name, (file, seconds) in table.MEASUREMENTS.items():
        assert callable(getattr(import_module(f"benchmarks.gpu.{file}"), name)) and seconds > 0


def test_what_needs_no_run_works_up_to_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.machine(Session(device=torch.device("cpu"), folder=tmp_path, deadline=1e12))
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["value"] == "none: a dry run on the CPU"
    assert torch.__version__ in second["value"]


def test_steps_are_read_while_a_run_is_writing_them(tmp_path: Path) -> None:
    step = {"kind": "step", "stage": "language", "step": 1, "loss": 2.0}
    line = json.dumps(step)
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line[:20]}")
    assert steps_of(tmp_path, "a", "language") == [step]
    assert steps_of(tmp_path, "a", "other") == steps_of(tmp_path, "b") == []


# Of what this project installs, what a GPU's image may lack.
NOT_HERE = (
    *("aws_cdk", "boto3", "botocore", "constructs", "hypothesis", "moto", "pil", "psutil"),
    *("pytest_timeout", "rich", "scipy", "torchvision", "werkzeug", "yaml"),
)
DRY = "-m benchmarks gpu --cpu --only machine"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(
            DRY,
            "machine | GPU, driver, memory | none: a dry run on the CPU",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{DRY} equality",
            "equality | bfloat16, average | equal bits",
            marks=pytest.mark.slow,
        ),
        ("-m pytest -q -m gpu --collect-only", "::test_a_gpu_does_what_the_engine_promises"),
    ],
)
def test_torch_numpy_and_safetensors_are_enough(words: str, says: str, tmp_path: Path) -> None:
    from rehearsal.machines.quirks import lend_environment

    lend_environment(Path(sys.prefix), tmp_path / "venv", NOT_HERE)
    command = [tmp_path / "venv" / "bin" / "python", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout


def test_a_measurement_that_takes_too_long_is_said_to_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))
    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", lambda seconds, *given: timer(0.1, *given))
    (row,) = table._measured("steps", 30.0, cpu=True)
    assert row["verdict"] == "not done after 30 s; raise --seconds"
    assert not table.is_damaged([row])


def failures(*options: str) -> list[str]:
    """What the benchmark found to be wrong, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "gpu", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = json.loads(done.stdout)["rows"]
    assert {row["measured"] for row in rows} == set(table.MEASUREMENTS)
    assert done.returncode == table.is_damaged(rows)
    return [str(row) for row in rows if table.is_damaged([row])]


@pytest.mark.slow
@pytest.mark.skipif("torch.cuda.is_available()", reason="there is a GPU")
def test_the_dry_run_finds_nothing_wrong() -> None:
    assert failures("--cpu", "--seconds=850") == []


@pytest.mark.gpu
def test_a_gpu_does_what_the_engine_promises() -> None:
    assert failures() == []
