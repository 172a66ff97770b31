"""`python -m benchmarks evidence`: the documents' numbers and the fit, as tables and as JSON."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.seeds.tables import SEEDS

SHOWN = [["evidence", seed] for seed in SEEDS] + [["evidence", "--fit", "--check"]]


@pytest.mark.parametrize("arguments", SHOWN, ids=" ".join)
def test_a_pipe_gets_at_most_100_columns_and_json_can_be_read(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 100
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "evidence"


@pytest.mark.parametrize("arguments", [["evidence"], ["evidence", "001", "--fit"]])
def test_fails_without_one_question(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "give either a document's number or --fit" in capsys.readouterr().err
