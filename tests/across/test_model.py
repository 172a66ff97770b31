"""`sizing model`, of a function or a config.json: counted by the trainer, priced as any plan."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sizing.__main__ import main
from tests.forked_trainer import run_in_fork
from tests.sizing import sample_footprints

MODEL = "tests.training.preflight.models_to_count:with_loss"


def test_a_model_without_a_workload_is_counted_planned_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.json"
    asked = ["--batch", "16", "--samples", "4000", "--epochs", "2", "--keep", str(kept)]
    assert main(["model", MODEL, "--size", "g5.xlarge", "--json", *asked]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["workload"], plan["fits"]) == (MODEL, True)
    assert plan["stages"][0]["steps"] == 2 * 4000 / 16
    # What was counted answers later questions without counting again.
    again = ["plan", MODEL, "--footprints", str(kept), "--size", "g6.xlarge", "--json"]
    assert main([*again, "--samples", "8000", "--epochs", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["steps"] == 4 * 8000 / 16
    assert main(["advise", MODEL, "--footprints", str(kept), "--sizes", "g5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"]


def test_a_config_is_priced_like_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "out/config.json"

    def count(arguments: argparse.Namespace) -> None:
        sample_footprints.write(arguments.footprints, workload=arguments.workload)

    monkeypatch.setattr("sizing.cli.model_command.count", count)
    for given in (["--size", "g5.xlarge"], ["--sizes", "g5"]):
        kept = ["--keep", str(tmp_path / "kept.json"), "--batch", "32"]
        assert main(["model", config, "--json", *kept, *given]) == 0
        assert json.loads(capsys.readouterr().out)["command"] == "model"


def test_fails_on_an_unknown_family_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The test at the top starts a real process.
    monkeypatch.setattr("sizing.cli.model_command.subprocess", SimpleNamespace(run=run_in_fork))
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "t55"}')
    assert main(["model", str(config)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "model type `t55` but Transformers does not recognize this architecture" in said
    assert "Traceback" not in said
