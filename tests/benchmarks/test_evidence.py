"""`python -m benchmarks evidence`: the documents' numbers and the fit, as tables and as JSON."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.seeds.tables import SEEDS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pipe_gets_at_most_100_columns_and_json_can_be_read(
    seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evidence", seed]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 100
    assert main(["evidence", seed, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "evidence"


@pytest.mark.parametrize("arguments", [["evidence"], ["evidence", "001", "--fit"]])
def test_fails_without_one_question(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "pass either a document's number or --fit" in capsys.readouterr().err
