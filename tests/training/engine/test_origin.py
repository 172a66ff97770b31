"""Runs that start from others: from weights, and from the final state of an extended run."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training import hooks, tiny
from tests.training.runs import Run
from training.cli.main import main
from training.durable.record.head import Head
from training.durable.record.run import OpenRun
from training.durable.save.tensors.resume import CheckpointContent
from training.durable.save.tensors.weights import Extension, Weights
from training.durable.store.folder import FolderStore

CONSTANT = "--override=schedule=constant"
NewRun = Callable[[str], Run]


@pytest.fixture(scope="module")
def steady(finished: Callable[..., Run]) -> Run:
    """Three epochs with a constant learning rate."""
    return finished(CONSTANT)


def test_an_extended_run_equals_one_that_was_longer_from_the_beginning(
    steady: Run, dataset: Path, tmp_path: Path
) -> None:
    """Bit for bit, where the learning rate does not depend on the length; interrupted once."""
    ours = Run(dataset=dataset, uri=str(tmp_path / "ours"), scratch=tmp_path)
    ours.options = [CONSTANT, f"--init-from={steady.uri}", "--extend-to=5epochs"]
    tiny.HOOKS["second"] = lambda step: hooks.notice() if step == 14 else None
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


def kill_in_copy() -> None:
    put_file = FolderStore.put_file

    def killing(self: FolderStore, key: str, path: Path) -> None:
        put_file(self, key, path)
        os.kill(os.getpid(), signal.SIGKILL)

    FolderStore.put_file = killing  # type: ignore[method-assign]  # in a forked process


def test_an_extension_that_was_killed_in_its_copy_is_repeated_and_nothing_else_begins_there(
    steady: Run, whole: Run, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    right = [CONSTANT, f"--init-from={steady.uri}", "--extend-to=4epochs"]
    run.options, run.at_start = right, kill_in_copy
    assert run.attempt_in_fork() == -signal.SIGKILL
    for wrong in ([CONSTANT], [f"--init-from={whole.uri}"]):
        run.options, before = wrong, run.store.sizes("")
        assert run.attempt() == 2
        said = capsys.readouterr().err
        assert "has checkpoints but no config.json" in said
        assert "repeat the command with --extend-to" in said
        assert run.store.sizes("") == before
    run.options = right
    assert run.attempt() == 0
    assert run.json("receipt.json")["steps"] == 28


def test_a_second_machine_that_extends_too_never_replaces_what_the_first_resumes_from(
    steady: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first, if the second is killed in its copy, has no valid checkpoint any more."""
    store = FolderStore(tmp_path / "ours")
    Extension(OpenRun.of_workload(steady.uri)).begin(store, "ours", "i-1")
    head = Head.read(store)
    assert head is not None
    copied = list[str]()
    put_file = FolderStore.put_file

    def put_and_read(self: FolderStore, key: str, path: Path) -> None:
        put_file(self, key, path)
        copied.append(key)
        for entry in head.checkpoints:
            CheckpointContent.read(store, entry)

    monkeypatch.setattr(FolderStore, "put_file", put_and_read)
    Extension(OpenRun.of_workload(steady.uri)).begin(store, "ours", "i-2")
    assert copied


def test_fails_to_extend_where_another_run_is_being_extended(
    steady: Run, whole: Run, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    Extension(OpenRun.of_workload(whole.uri)).begin(run.store, "run", "i-1")
    run.options = [CONSTANT, f"--init-from={steady.uri}", "--extend-to=4epochs"]
    assert run.attempt() == 2
    assert f"does not start from the end of {steady.uri}" in capsys.readouterr().err
    run.options = [f"--init-from={whole.uri}", "--extend-to=4epochs"]
    assert run.attempt() == 0


def test_what_another_extension_has_copied_is_deleted(
    steady: Run, whole: Run, dataset: Path, tmp_path: Path
) -> None:
    store = FolderStore(tmp_path / "ours")
    other = whole.head.checkpoints[-1].name
    store.put(f"checkpoints/{other}/state.json", b"{}")
    Extension(OpenRun.of_workload(steady.uri)).begin(store, "ours", "i-1")
    head = Head.read(store)
    assert head is not None
    assert store.folders("checkpoints/") == {entry.name for entry in head.checkpoints}


def test_a_run_begins_with_the_weights_of_another(whole: Run, run: Run) -> None:
    run.options = [f"--init-from={whole.uri}", "--override=learning_rate=0"]
    assert run.attempt() == 0
    theirs, mine = Weights.read(whole.uri).tensors, Weights.read(run.uri).tensors
    # Without learning only the statistics of BatchNorm move.
    for name, tensor in theirs.items():
        assert torch.equal(tensor, mine[name]) or "running" in name or "tracked" in name, name
    origin = run.json("config.json")["origin"]
    assert (origin["uri"], origin["stage"]) == (whole.uri, "second")


def test_weights_of_a_file_that_does_not_say_its_stage_go_into_the_first(
    run: Run, tmp_path: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.safetensors"
    save_file(dict(Weights.read(whole.uri, "24").tensors), path)
    run.options = [f"--init-from={path}"]
    assert run.attempt() == 2
    said = capsys.readouterr().err
    assert "do not fit the model of stage 'first': 0.weight is 8x6 there and 4x6 here; " in said
    assert run.head.state == "released"


def test_fails_when_the_weights_have_changed_since(
    whole: Run, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.safetensors"
    assert main(["export", f"--run-uri={whole.uri}", f"--out={path}"]) == 0
    run.options = [f"--init-from={path}"]
    tiny.HOOKS["first"] = lambda step: hooks.notice()
    assert run.attempt() == 75
    tiny.HOOKS.clear()
    tensors = {name: tensor + 1 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"stage": "second"})
    run.options = []
    assert run.attempt() == 1
    assert "are not those that this run started with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--extend-to=5epochs"], "--extend-to needs --init-from"),
        (
            ["--init-from={whole}", "--extend-to=3epochs"],
            "has already trained stage 'second' for 12 steps, 3 whole epochs; pass more",
        ),
        (["--init-from={whole}", "--extend-to=forever"], "write 8epochs or 4000steps"),
        (["--init-from={whole}", "--extend-to=5epochs", CONSTANT], "with the overrides (none)"),
        (["--init-from=no/such/run"], "no run found at"),
        (["--init-from=no/such.safetensors"], "does not exist"),
        (["--init-from={file}"], "is not a state dict and has none under 'state_dict_ema', "),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(
    whole: Run,
    run: Run,
    options: list[str],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "checkpoint.pth"
    torch.save({"epoch": 3, "net": {"weight": torch.zeros(2)}}, file)
    run.options = [option.format(whole=whole.uri, file=file) for option in options]
    assert run.attempt() == 2
    assert says in capsys.readouterr().err
    assert not Path(run.uri).exists()


def test_fails_for_other_weights_than_the_run_began_with(
    whole: Run, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would train on from the first ones, and the command would seem to have been obeyed."""
    run.options = [f"--init-from={whole.uri}"]
    tiny.HOOKS["first"] = lambda step: hooks.notice()
    assert run.attempt() == 75
    run.options = ["--init-from=other.safetensors"]
    assert run.attempt() == 2
    assert f"starts from {whole.uri}, not from" in capsys.readouterr().err
    tiny.HOOKS.clear()
    run.options = [f"--init-from={whole.uri}/"]
    assert run.attempt() == 0


def test_fails_for_another_origin_under_the_same_run(
    whole: Run, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.HOOKS["first"] = lambda step: hooks.notice()
    assert run.attempt() == 75
    run.options = [f"--init-from={whole.uri}"]
    assert run.attempt() == 2
    assert "belongs to origin None, not" in capsys.readouterr().err
