"""`python -m training count`: any model's footprints, in the form that sizing reads."""

import json
from pathlib import Path

import pytest

from tests.training.forked import command
from training.cli.main import main

MODELS = "tests.training.preflight.models_to_count"
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
}


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


def test_a_config_is_counted_with_its_tokens(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))

    done = command(["count", str(config), "--batch", "2", "--tokens", "32"])
    assert done.code == 0
    first = json.loads(done.out)[0]
    # Two samples of 32 tokens, a score of two bytes for each of 64 words, and the loss.
    assert (first["micro_batch"], first["output_bytes"]) == (2, 2 * 32 * 64 * 2 + 4)


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
