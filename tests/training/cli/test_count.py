"""`python -m training count`: any model's footprints, in the form that sizing reads."""

import json
from pathlib import Path

import pytest

from tests.training.forked import command
from training.cli.main import main

MODELS = "tests.training.preflight.models_to_count"


def test_footprints_of_a_function_are_written_beside_those_of_others(tmp_path: Path) -> None:
    out = tmp_path / "footprints.json"
    for name in ("linear", "with_loss"):
        done = command(["count", f"{MODELS}:{name}", "--batch", "8", "--out", str(out)])
        assert done.code == 0
        assert json.loads(done.out)
    content = json.loads(out.read_text())
    assert content["command"] == "python -m training count"
    kept = {row["workload"]: row for row in content["footprints"]}
    assert set(kept) == {f"{MODELS}:linear", f"{MODELS}:with_loss"}
    assert kept[f"{MODELS}:with_loss"]["loss"] == "the function's"
    assert "for want of another" in kept[f"{MODELS}:linear"]["loss"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([f"{MODELS}:linear", "--batch", "8", "--micro-batch", "3"], "not a multiple"),
        ([f"{MODELS}:linear", "--batch", "0"], "global_batch is 0"),
    ],
)
def test_fails_in_one_sentence(
    asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["count", *asked]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


@pytest.mark.parametrize("option", ["--samples", "--micro-batch", "--tokens"])
def test_fails_for_a_zero_which_is_no_default(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, says in (("0", "0 is not positive"), ("-3", "'-3' is not a whole number")):
        with pytest.raises(SystemExit, match="2"):
            main(["count", f"{MODELS}:linear", f"{option}={number}"])
        assert f"argument {option}: {says}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"),
    [("raises", "KeyError: 'width' (models_to_count.py, line"), ("misfit", "RuntimeError: a and")],
)
def test_fails_in_one_sentence_for_a_function_that_raises(name: str, says: str) -> None:
    done = command(["count", f"{MODELS}:{name}"])
    (said,) = done.err.splitlines()
    assert said.startswith(f"error: model '{MODELS}:{name}' raised {says}")
    assert done.code == 2
