"""Runs that start from others: from weights, and from the final state of an extended run."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training import tiny
from tests.training.runs import Run
from training.checkpoint.weights import read_weights
from training.cli.main import main

CONSTANT = "--override=schedule=constant"
NewRun = Callable[[str], Run]


@pytest.fixture(scope="module")
def steady(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three epochs with a constant learning rate."""
    root = tmp_path_factory.mktemp("steady")
    run = Run(dataset=dataset, uri=str(root / "runs" / "three"), scratch=root / "scratch")
    run.options = [CONSTANT]
    assert run.attempt() == 0
    return run


def test_an_extended_run_equals_one_that_was_longer_from_the_beginning(
    steady: Run, dataset: Path, tmp_path: Path
) -> None:
    """Bit for bit, where the learning rate does not depend on the length; interrupted once."""
    ours = Run(dataset=dataset, uri=str(tmp_path / "ours"), scratch=tmp_path)
    ours.options = [CONSTANT, f"--init-from={steady.uri}", "--extend-to=5epochs"]
    tiny.HOOKS["second"] = lambda step: signal.raise_signal(signal.SIGUSR1) if step == 14 else None
    before = steady.store.sizes("")
    assert ours.attempt() == 75
    tiny.HOOKS.clear()
    # A replacement machine needs no options: config.json has the origin of the run.
    ours.options = [CONSTANT]
    assert ours.attempt() == 0
    longer = Run(dataset=dataset, uri=str(tmp_path / "longer"), scratch=tmp_path)
    longer.options = [CONSTANT, "--override=second_epochs=5"]
    assert longer.attempt() == 0
    assert ours.head.weights_sha256 == longer.head.weights_sha256
    assert ours.losses() == [line for line in longer.losses() if line[0] > 24]
    assert ours.json("receipt.json")["steps"] == longer.json("receipt.json")["steps"] == 32
    assert steady.store.sizes("") == before, "the old run is as it was"
    assert steady.head.state == "finished"


def test_a_run_begins_with_the_weights_of_another(
    whole: Run, dataset: Path, tmp_path: Path
) -> None:
    ours = Run(dataset=dataset, uri=str(tmp_path / "ours"), scratch=tmp_path)
    ours.options = [f"--init-from={whole.uri}", "--override=learning_rate=0"]
    assert ours.attempt() == 0
    theirs, mine = read_weights(whole.uri).tensors, read_weights(ours.uri).tensors
    # Without learning only the statistics of BatchNorm move.
    for name, tensor in theirs.items():
        assert torch.equal(tensor, mine[name]) or "running" in name or "tracked" in name, name
    origin = ours.json("config.json")["origin"]
    assert (origin["uri"], origin["stage"]) == (whole.uri, "second")


def test_weights_of_a_file_that_does_not_say_its_stage_go_into_the_first(
    dataset: Path, tmp_path: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(dict(read_weights(whole.uri, "24").tensors), path)
    ours = Run(dataset=dataset, uri=str(tmp_path / "ours"), scratch=tmp_path)
    ours.options = [f"--init-from={path}"]
    assert ours.attempt() == 2
    said = capsys.readouterr().err
    assert "do not fit the model of stage 'first': 0.weight is 8x6 there and 4x6 here; " in said
    assert ours.head.state == "released"


def test_fails_when_the_weights_have_changed_since(
    whole: Run, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.safetensors"
    assert main(["export", f"--run-uri={whole.uri}", f"--out={path}"]) == 0
    ours = Run(dataset=dataset, uri=str(tmp_path / "ours"), scratch=tmp_path)
    ours.options = [f"--init-from={path}"]
    tiny.HOOKS["first"] = lambda step: signal.raise_signal(signal.SIGUSR1)
    assert ours.attempt() == 75
    tiny.HOOKS.clear()
    tensors = {name: tensor + 1 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"stage": "second"})
    ours.options = []
    assert ours.attempt() == 1
    assert "are not those that this run started with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--extend-to=5epochs"], "--extend-to needs --init-from"),
        (
            ["--init-from={whole}", "--extend-to=3epochs"],
            "has already trained stage 'second' for 12 steps, 3 whole epochs; give more",
        ),
        (["--init-from={whole}", "--extend-to=forever"], "write 8epochs or 4000steps"),
        (["--init-from={whole}", "--extend-to=5epochs", CONSTANT], "with the overrides (none)"),
        (["--init-from=no/such/run"], "there is no run at"),
        (["--init-from=no/such.safetensors"], "there is no file"),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(
    whole: Run, run: Run, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.options = [option.format(whole=whole.uri) for option in options]
    assert run.attempt() == 2
    assert says in capsys.readouterr().err
    assert not Path(run.uri).exists()


def test_fails_for_another_origin_under_the_same_run(
    whole: Run, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.HOOKS["first"] = lambda step: signal.raise_signal(signal.SIGUSR1)
    assert run.attempt() == 75
    run.options = [f"--init-from={whole.uri}"]
    assert run.attempt() == 2
    assert "belongs to origin None, not" in capsys.readouterr().err
