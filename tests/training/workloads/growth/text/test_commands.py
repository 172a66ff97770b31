"""`data make` and `data import` of text: options by name, what was made, going on after a stop."""

import json
from pathlib import Path

import pytest

from contract.keys import UNFINISHED
from training.cli.main import main
from training.durable.store.local_dataset import LocalDataset


def test_stories_are_made_with_a_vocabulary_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["data", "make", "--workload=growth", "--count=40", f"--out={out}"]
    assert main([*command, "--override=vocab_size=300"]) == 0
    said = capsys.readouterr().out
    assert "making 40 samples: 40/40" in said
    assert "vocabulary: 300 tokens, tokenizer: trained on this text" in said
    assert " tokens, 2 documents, " in said
    meta = json.loads((out / "manifest.json").read_text())["meta"]
    assert meta["splits"]["train"]["documents"] == 38


def test_a_dataset_that_has_no_manifest_yet_is_not_lost_and_not_uploaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["data", "make", "--workload=growth", "--count=40", "--override=vocab_size=300"]

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LocalDataset, "complete", stop)
        assert main([*command, f"--out={out}"]) == 130
    assert main(["data", "upload", str(out), f"--dataset-uri={tmp_path / 'store'}"]) == 2
    assert f"{out} has an unfinished dataset; finish it" in capsys.readouterr().err
    assert not (tmp_path / "store" / "manifest.json").exists()
    assert main([*command, f"--out={out}"]) == 0
    assert main([*command, f"--out={tmp_path / 'whole'}"]) == 0
    ours, whole = (json.loads((f / "manifest.json").read_text()) for f in (out, tmp_path / "whole"))
    assert (ours["files"], ours["meta"]) == (whole["files"], whole["meta"])
    assert not (out / UNFINISHED).exists()
    assert main(["data", "upload", str(out), f"--dataset-uri={tmp_path / 'store'}"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload=growth", "--override=vocab=9"], "did you mean 'vocab_size'? known are tok"),
        (["--workload=growth", "--override=vocab_size=9"], "vocab_size is 9; give at least 257"),
        (["--workload=detection", "--override=a=1"], "makes its datasets in one way: it has no"),
    ],
)
def test_fails_for_an_option_that_there_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["data", "make", "--count=40", f"--out={tmp_path / 'out'}", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_fails_in_a_folder_that_another_workload_has_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / UNFINISHED).write_text('{"workload": "other"}')
    command = ["data", "make", "--workload=growth", "--count=40", f"--out={tmp_path}"]
    assert main(command) == 2
    assert "has an unfinished dataset of another workload" in capsys.readouterr().err
