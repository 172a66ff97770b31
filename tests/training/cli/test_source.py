"""A workload's source folder: every process imports from it, and another one is another run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from contract.source import source_sha256
from tests.training import documented
from tests.training.runs import ROOT, Run


def test_a_changed_source_folder_is_another_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    source = tmp_path / "mine"
    source.mkdir()
    (source / "net.py").write_text("WIDTH = 1\n")
    run.options = [f"--source={source}"]
    assert run.attempt() == 0
    record = run.json("config.json")
    assert record["config"]["source_sha256"] == source_sha256(source)
    # Shards that runs share depend on any of its modules.
    assert record["numerics_key"]["source"] == source_sha256(source)
    assert run.attempt() == 0
    assert "is finished already" in capfd.readouterr().out
    (source / "net.py").write_text("WIDTH = 2\n")
    assert run.attempt() == 2
    assert "belongs to config field source_sha256" in capfd.readouterr().err


@pytest.mark.slow  # interpreters that import torch: 20 s
def test_every_rank_and_loader_worker_imports_from_the_source_folder(tmp_path: Path) -> None:
    source = documented.own_workload(tmp_path / "mine")
    own = {**os.environ, "PYTHONPATH": str(source)}
    trainer, data = [sys.executable, "-m", "training"], str(tmp_path / "data")
    made = ["data", "make", "--workload=moons:MOONS", "--count=300", f"--out={data}"]
    subprocess.run([*trainer, *made], cwd=ROOT, env=own, check=True)
    more = ["--override=loader_workers=1", "--num-processes=2", f"--dataset-uri={data}"]
    what = ["--workload=moons:MOONS", f"--source={source}", "--recipe=small"]
    what.append("--override=micro_batch=8")
    subprocess.run(
        [*trainer, "run", *what, *more, f"--run-uri={tmp_path / 'run'}"], cwd=ROOT, check=True
    )
    receipt = json.loads((tmp_path / "run/receipt.json").read_text())
    assert (receipt["state"], "source" in receipt["numerics_key"]) == ("finished", True)
