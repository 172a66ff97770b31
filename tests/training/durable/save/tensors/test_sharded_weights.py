"""Checkpoints written by several ranks are read by every command, and can start other runs."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.fsdp  # noqa: F401  (half a second that each fork would need)
from safetensors import safe_open

from tests.training.runs import AVERAGED, DOUBLE, SHARDED, Run
from training.cli.main import main
from training.durable.save.tensors.weights import weights_sha256

NewRun = Callable[[str], Run]
OPTIONS = [SHARDED, *AVERAGED, *DOUBLE, "--override=schedule=constant"]


@pytest.fixture(scope="module")
def sharded(finished: Callable[..., Run]) -> Run:
    """A finished run of two ranks."""
    return finished(*OPTIONS, ranks=2)


def test_the_final_weights_are_one_whole_file(sharded: Run) -> None:
    with safe_open(f"{sharded.uri}/final/model.safetensors", framework="pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert weights_sha256(tensors) == about["weights_sha256"] == sharded.head.weights_sha256
    assert (about["stage"], about["step"]) == ("second", "24")
    assert tensors["0.weight"].shape == (8, 6)


def test_export_reads_it(sharded: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["export", f"--run-uri={sharded.uri}", f"--out={tmp_path / 'w.safetensors'}", "--json"]
    assert main([*out, "--checkpoint=newest"]) == 0
    assert json.loads(capsys.readouterr().out)["weights_sha256"] == sharded.head.weights_sha256


def test_evaluate_and_predict_read_it(
    sharded: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = [f"--run-uri={sharded.uri}", f"--dataset-uri={sharded.dataset}"]
    assert main(["evaluate", *subject, "--checkpoint=newest", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics == sharded.json("receipt.json")["stages"]["second"]
    out = tmp_path / "predictions.jsonl"
    assert main(["predict", *subject, "--checkpoint=best", f"--out={out}"]) == 0
    assert len(out.read_text().splitlines()) == 12


def test_another_run_begins_with_its_weights(
    sharded: Run, new_run: NewRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = new_run(str(tmp_path / "tuned" / "run-1"))
    run.options = OPTIONS
    assert run.attempt_with_ranks(2, f"--init-from={sharded.uri}") == [0, 0]
    assert "[second] starts with the weights of" in capfd.readouterr().out
    assert run.json("config.json")["origin"]["weights_sha256"] == sharded.head.weights_sha256


def test_an_extended_run_goes_on_where_it_finished(
    sharded: Run, new_run: NewRun, tmp_path: Path
) -> None:
    longer = new_run(str(tmp_path / "longer" / "run-1"))
    longer.options = [*OPTIONS, "--override=second_epochs=4"]
    assert longer.attempt() == 0
    whole = {step: loss for step, _, loss, _ in longer.losses()}
    for size in (1, 2):
        extended = new_run(str(tmp_path / f"extended-{size}" / "run-1"))
        extended.options = [*OPTIONS, f"--init-from={sharded.uri}", "--extend-to=4epochs"]
        assert set(extended.attempt_with_ranks(size)) == {0}
        last = {step: loss for step, _, loss, _ in extended.losses()}
        assert list(last) == [25, 26, 27, 28]
        assert last == pytest.approx({step: whole[step] for step in last}, rel=1e-9, abs=1e-9)


def test_a_file_system_that_cannot_allocate_is_written_to_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C library reads such a file, to write what is there once more."""
    allocate = os.posix_fallocate

    def emulate(file: int, offset: int, length: int) -> None:
        os.pread(file, 1, 0)
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", emulate)
    run.options = ["--override=epochs=1"]
    assert run.attempt() == 0


def test_fails_in_one_line_if_the_disk_cannot_hold_the_final_weights(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A write to the memory of a file without disk space is a SIGBUS, at each start again."""
    allocate = os.posix_fallocate

    def refuse(file: int, offset: int, length: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().name == "final.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    run.options = ["--override=epochs=1"]
    assert run.attempt() == 4
    assert "the disk is full; free some space" in capfd.readouterr().err
