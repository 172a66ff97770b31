"""`export`, `evaluate`, `predict`: a run's weights give what the run itself reported."""

import json
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load

from contract.errors import UserError
from tests.training.runs import WORKLOAD, Run
from tests.training.tiny import Tiny, TinyTrain, tiny_config
from training.cli.main import main
from training.cli.weights import _companions
from training.durable.save.tensors.weights import Weights, weights_sha256
from training.workload import Inputs, Start


@pytest.fixture
def arguments(whole: Run) -> list[str]:
    return [f"--run-uri={whole.uri}", f"--dataset-uri={whole.dataset}"]


def test_an_exported_file_says_what_it_is(whole: Run, tmp_path: Path) -> None:
    out = tmp_path / "to" / "model.safetensors"
    assert main(["export", f"--run-uri={whole.uri}", f"--out={out}"]) == 0
    with safe_open(out, framework="pt") as file:
        about = file.metadata()
    assert weights_sha256(load_file(out)) == whole.head.weights_sha256 == about["weights_sha256"]
    assert Weights.read(str(out)).sha256 == whole.head.weights_sha256
    assert json.loads(about["config"])["epochs"] == 3
    assert json.loads(about["metrics"]) == whole.json("receipt.json")["stages"]["second"]
    assert (about["workload"], about["recipe"], about["stage"]) == (WORKLOAD, "quick", "second")


@pytest.mark.parametrize("which", ["newest", "24", "00000024"])
def test_a_finished_run_s_newest_checkpoint_has_its_weights(
    whole: Run, tmp_path: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.safetensors"
    command = ["export", f"--run-uri={whole.uri}", f"--out={out}", "--checkpoint", which, "--json"]
    if which == "00000024":  # the periodic one and the stage's end are both of step 24
        assert main(command) == 2
        assert "has 2 checkpoints '00000024'; use one of: newest, " in capsys.readouterr().err
        return
    assert main(command) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["weights_sha256"] == whole.head.weights_sha256
    assert (about["stage"], about["step"]) == ("second", "24")


def test_evaluate_gives_what_the_run_reported(
    whole: Run, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert "[warning]" not in captured.err
    assert json.loads(captured.out) == {
        "stage": "second",
        "split": "validation",
        "metrics": whole.json("receipt.json")["stages"]["second"],
    }


def test_fails_to_take_along_what_is_of_another_dataset(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"meta": {"classes": ["cat"]}}')
    stage = SimpleNamespace(
        name="head", refusals=lambda _: ["2 classes are wanted"], companions=lambda *_: {}
    )
    with pytest.raises(UserError, match="is not what stage 'head' was trained on: 2 classes"):
        _companions(stage, str(tmp_path))  # type: ignore[arg-type]


class Noisy(nn.Module):
    """Adds what it draws when it is made, and does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise", torch.randn(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise


def test_what_a_model_draws_and_does_not_save_is_drawn_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, exported = TinyTrain.model, []

    def model(stage: TinyTrain, i: Inputs) -> nn.Module:
        return nn.Sequential(Noisy(), *made(stage, i))  # type: ignore[misc]

    def export(model: nn.Module, out: Path) -> None:
        exported.append(model[0].noise)  # type: ignore[index]

    monkeypatch.setattr(TinyTrain, "model", model)
    monkeypatch.setattr(TinyTrain, "start", lambda *_: Start())
    monkeypatch.setattr(TinyTrain, "formats", lambda stage: {"own": export})
    assert run.attempt() == 0
    arguments = [f"--run-uri={run.uri}", f"--dataset-uri={run.dataset}"]
    capsys.readouterr()
    assert main(["evaluate", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found == run.json("receipt.json")["stages"]["second"]
    for number in range(2):
        out = tmp_path / f"{number}"
        assert main(["export", arguments[0], "--format=own", f"--out={out}"]) == 0
    assert torch.equal(*exported)


def test_a_run_has_its_own_config_whatever_its_recipe_says_today(
    whole: Run,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another seed would derive other data, and without its norm the weights do not fit."""
    edited = {"quick": lambda: tiny_config(seed=8, batch_norm=False, best_metric="accuracy")}
    monkeypatch.setattr(Tiny, "recipes", edited)
    assert main(["evaluate", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["metrics"]
    assert found == whole.json("receipt.json")["stages"]["second"]
    assert main(["export", arguments[0], "--format=dcp", f"--out={tmp_path / 'dcp'}"]) == 0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"find_unused_parameters": False, "source_sha256": "0", "loader_workers": "auto"}, ""),
        ({"speed": 3}, "has no field 'speed'; "),
        ({"schedule": {"factor": 0.1, "epochs": [2], "steps": []}}, "schedule=\"{'factor': 0.1"),
        ({"best_metric": "none"}, "no text gives best_metric the recorded value"),
        ({"micro_batch": 5}, "global_batch 8 is not a multiple of micro_batch 5"),
    ],
)
def test_a_run_of_another_code_warns_and_fails_for_a_config_that_the_code_cannot_have(
    whole: Run, run: Run, fields: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole.uri, run.uri)
    record = whole.json("config.json")
    record["config"] |= fields
    record["numerics_key"]["code"], record["bundle_uri"] = "another", "s3://runs/run-1/code"
    Path(run.uri, "config.json").write_text(json.dumps(record))
    export = ["export", f"--run-uri={run.uri}", "--format=dcp", f"--out={run.uri}-dcp"]
    data = "--dataset-uri=" + ("no/such" if says else str(run.dataset))  # it is not read
    for command in (export, ["evaluate", export[1], data, "--json"]):
        assert main(command) == (2 if says else 0)
        captured = capsys.readouterr()
        other = "results may differ: the run began with another code, s3://runs/run-1/code\n"
        assert f"[warning] {other}" in captured.err
        assert says in captured.err
        assert ("error: use the code that run-1 began with: " in captured.err) == bool(says)
    assert says or json.loads(captured.out)["stage"] == "second"


def test_evaluate_makes_derived_data_anew_for_another_dataset(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    make = ["data", "make", f"--workload={WORKLOAD}", f"--out={other}", "--count=50", "--seed=8"]
    assert main(make) == 0
    before = whole.store.sizes("")
    capsys.readouterr()
    assert main(["evaluate", f"--run-uri={whole.uri}", f"--dataset-uri={other}", "--json"]) == 0
    captured = capsys.readouterr()
    accuracy = json.loads(captured.out)["metrics"]["accuracy"]
    assert 0 < accuracy != whole.json("receipt.json")["validation_accuracy"]
    assert whole.store.sizes("") == before, "nothing was written into the run"
    assert f"[warning] {other} is not the dataset that the run was trained on" in captured.err


def test_predictions_are_one_for_each_sample_and_agree_with_the_metrics(
    whole: Run, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", *arguments]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["index"] for row in rows] == list(range(12))
    accuracy = sum(row["right"] for row in rows) / len(rows)
    assert accuracy == whole.json("receipt.json")["validation_accuracy"]
    out = tmp_path / "predictions.jsonl"
    assert main(["predict", *arguments, f"--out={out}"]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows


@pytest.mark.parametrize("least", [0, 6, 99])
def test_predictions_with_a_format_of_their_own_are_one_list(
    arguments: list[str], least: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each sample adds as many results as it has, also none."""
    of_samples: list[list[dict[str, int]]] = []

    def result_list(stage: TinyTrain, prediction: dict[str, Any]) -> list[dict[str, int]]:
        number = len(of_samples)
        of_samples.append([{"id": number, "n": n} for n in range(number % 3) if number >= least])
        return of_samples[-1]

    monkeypatch.setattr(TinyTrain, "result_list", result_list, raising=False)
    out = tmp_path / "results.json"
    assert main(["predict", *arguments, f"--out={out}"]) == 0
    assert len(of_samples) == 12
    assert json.loads(out.read_text()) == [result for results in of_samples for result in results]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "--stage=third"], "has no Train stage 'third'; pass one of first, second"),
        (["evaluate", "--stage=first"], "do not fit the model of stage 'first': 0.weight is 8x6"),
        (["evaluate", "--checkpoint=99"], "has no checkpoint '99'; use one of: newest, "),
        (["evaluate", "--run-uri=no/such/run"], "no run found at"),
        (["evaluate", "--dataset-uri=no/such"], "no/such does not exist"),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(
    whole: Run, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = arguments
    given = [f"--run-uri={whole.uri}", f"--dataset-uri={whole.dataset}", *options]
    assert main([command, *given]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error
    assert error.splitlines()[-1].startswith("error: ")


def test_fails_for_a_run_that_has_not_finished(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.options = ["--override=nan_at_step=5"]
    assert run.attempt() == 1
    assert main(["export", f"--run-uri={run.uri}", f"--out={tmp_path / 'x'}"]) == 2
    assert "is failed; only a finished run has final weights, so name" in capsys.readouterr().err
    out = tmp_path / "x.safetensors"
    assert main(["export", f"--run-uri={run.uri}", f"--out={out}", "--checkpoint=3"]) == 0
    with safe_open(out, framework="pt") as file:
        assert file.metadata()["checkpoint"] == run.head.checkpoints[0].name


def test_fails_for_a_file_that_holds_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"not at all")
    with pytest.raises(UserError, match="is not a safetensors file"):
        Weights.read(str(path))
    with pytest.raises(UserError, match="does not exist"):
        Weights.read(str(tmp_path / "y.safetensors"))
    save_file({}, path)
    with pytest.raises(UserError, match="is a file, without checkpoints"):
        Weights.read(str(path), "newest")


def test_what_a_model_needs_besides_its_weights_goes_along(
    whole: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def companions(self: TinyTrain, meta: Any, read: Any) -> dict[str, bytes]:
        return {"about.json": read("manifest.json")}

    monkeypatch.setattr(TinyTrain, "companions", companions)
    for out, more in (("w.safetensors", ()), ("dcp", ("--format=dcp",))):
        command = ["export", f"--run-uri={whole.uri}", f"--out={tmp_path / out}", *more]
        assert main([*command, f"--dataset-uri={whole.dataset}"]) == 0
    for name in ("w.safetensors.about.json", "dcp/about.json"):
        manifest = Path(whole.dataset, "manifest.json")
        assert (tmp_path / name).read_bytes() == manifest.read_bytes()
    command[2] = f"--out={tmp_path / 'other'}"
    assert main([*command, f"--dataset-uri={tmp_path}"]) == 2
    assert "has no manifest.json" in capsys.readouterr().err and not (tmp_path / "other").exists()


def test_a_model_leaves_in_the_form_of_another_library(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed.checkpoint's, which every stage has; others are the workload's."""
    out = tmp_path / "to" / "dcp"
    command = ["export", f"--run-uri={whole.uri}", f"--out={out}"]
    assert main([*command, "--format=timm"]) == 2
    assert "stage 'second' has no format 'timm'; " in capsys.readouterr().err and not out.exists()
    assert main([*command, "--format=dcp"]) == 0
    weights = Weights.read(whole.uri).tensors
    found = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one process is meant
        load({"model": found}, checkpoint_id=out, no_dist=True)
    assert weights_sha256(found) == whole.head.weights_sha256
    assert main([*command, "--format=dcp"]) == 2, "nothing is overwritten"
