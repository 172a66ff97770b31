"""`measure` and `count`: committed footprints are what stages need; any model is counted."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.forked import command, in_fork
from tests.training.runs import WORKLOAD
from training.cli import measure
from training.cli.main import main
from training.cli.measure import (
    _DEFAULT_OUT,
    _at_size,
    _difference,
    _key,
    _measured,
    train_footprints,
)
from training.registry import WORKLOADS
from training.settings import Settings, changed
from training.workload import Loss, Train
from training.workloads.growth.growth_workload import GROWTH

ROOT = Path(__file__).parents[3]
FILE = ROOT / _DEFAULT_OUT
MODELS = "tests.training.preflight.models_to_count"
# Less than one layer more of any of the models.
MOST_OF_ANOTHER_TORCH = 0.005


# What a device is told to do: a launch or a byte more fails as much as one less.
WORK = ("kernels", "moved_bytes", "optimizer_kernels", "optimizer_moved_bytes")


@pytest.mark.parametrize("name", ["imagenet"])
def test_the_committed_footprints_are_what_the_stages_need(name: str) -> None:
    """Laptop recipes at their own micro-batch, everything with the marker slow."""
    rows = in_fork(lambda: list(_measured(name, "laptop", {}, factors=(1,))))
    footprints = json.loads(FILE.read_text())
    if torch.__version__.partition("+")[0] != footprints["torch"]:
        there = {_key(row): row for row in footprints["footprints"]}
        for row in rows:
            # Of how many kernels an operation is made is torch's affair: 2.12 masks with four more.
            for what in row.keys() & WORK:
                known = there[_key(row)][what]
                assert row[what] == pytest.approx(known, rel=MOST_OF_ANOTHER_TORCH)
                row[what] = known
    assert _difference(FILE, rows) is None


@pytest.mark.slow
def test_all_committed_footprints_are_what_the_stages_need() -> None:
    assert command(["measure", "--check", f"--out={FILE}"]).code == 0


def test_every_recipe_is_measured_and_every_key_is_explained() -> None:
    from training.registry import load_workload

    footprints = json.loads(FILE.read_text())["footprints"]
    recipes = {(name, recipe) for name in WORKLOADS for recipe in load_workload(name).recipes}
    assert {(row["workload"], row["recipe"]) for row in footprints} == recipes
    page = (ROOT / "docs" / "sizing.md").read_text()
    keys = {key for row in footprints for key in row}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def at_one_size() -> None:
    """In a fork: of the other micro-batches a command counts the same, for seconds."""
    measure._measured = partial(_measured, factors=(1,))


def test_a_workload_of_one_s_own_is_measured_beside_the_other_recipes_of_a_file(
    tmp_path: Path,
) -> None:
    out = tmp_path / "footprints.json"
    # Rows of two torch versions are refused in one file.
    out.write_text(
        json.dumps({**json.loads(FILE.read_text()), "torch": torch.__version__.partition("+")[0]})
    )
    arguments = ["measure", f"--workload={WORKLOAD}", "--recipe=quick", f"--out={out}"]
    assert command(arguments, at_one_size).code == 0
    before = json.loads(FILE.read_text())["footprints"]
    after = json.loads(out.read_text())["footprints"]
    assert [row for row in after if row in before] == before
    rows = [row for row in after if row["workload"] == WORKLOAD]
    assert {row["stage"] for row in rows} == {"first", "second"}
    assert _difference(out, rows) is None

    said = _difference(tmp_path / "none.json", rows)
    assert (
        said and f"{tmp_path / 'none.json'} does not exist; write it with: python -m train" in said
    )
    out.write_text(out.read_text().replace('"trainable_parameters": ', '"trainable_parameters": 1'))
    other = command([*arguments, "--check"], at_one_size)
    assert other.code == 1
    assert "trainable_parameters is 1" in other.out
    assert "measure again: python -m training measure" in other.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipe=laptop"], "--recipe needs --workload"),
        (["--override=width=9"], "--override needs --workload and --recipe"),
        ([f"--workload={WORKLOAD}", "--recipe=long"], "its `nominal_samples` lack recipe 'long'"),
        (["--workload=trajectory", "--recipe=laptop", "--override=wide=9"], "no field 'wide'"),
    ],
)
def test_fails_for_a_mistake_in_one_sentence(arguments: list[str], says: str) -> None:
    done = command(["measure", *arguments])
    assert done.code == 2
    assert says in done.err


def test_a_stage_that_steps_in_backward_keeps_its_gradients_at_a_smaller_micro_batch() -> None:
    """It then accumulates; a stage that cannot be trained so has no row."""
    small = {"num_layers": 1, "new_layers": 1, "num_experts": 2}
    config = changed(GROWTH.recipes["laptop"](), lean_optimizer="grown", **small)
    grown = GROWTH.stages(config)[-1]

    def rows() -> list[dict[str, Any]]:
        at_size = partial(_at_size, GROWTH, config, grown)
        samples = GROWTH.nominal_samples["laptop"]
        return list(train_footprints(grown, config, samples, {}, (0.5, 1), at_size))

    half, whole = in_fork(rows)
    assert (half["micro_batch"], half["gradient_bytes"]) == (8, half["parameter_bytes"])
    assert (whole["micro_batch"], whole["gradient_bytes"]) == (16, 0)
    stage = _InBackward()
    assert _at_size(stage, _Sized(), stage, 8) is stage
    assert _at_size(stage, _Sized(), stage, 4) is None


def test_memory_is_that_of_the_largest_batch_and_work_that_of_the_usual_one() -> None:
    def rows() -> list[dict[str, Any]]:
        samples = {"train": 8, "validation": 0}
        return list(train_footprints(_Varied(), SimpleNamespace(seed=0), samples, {}, factors=(1,)))

    (row,) = in_fork(rows)
    # The inputs; forward, and backward of the weight alone.
    assert row["peak_bytes"] >= row["usual_peak_bytes"] + 2 * 90 * 64 * 4
    assert row["flops_per_sample"] == 2 * 2 * 10 * 64


_SETTINGS = Settings(epochs=1, global_batch=2, micro_batch=2)


@dataclass(frozen=True)
class _Varied(Train):
    """A stage whose samples are up to 100 vectors, and 10 on average."""

    name: str = "varied"
    settings: Settings = _SETTINGS

    def model(self, i: Any) -> torch.nn.Module:
        return torch.nn.Linear(64, 1)

    def optimizer(self, m: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(m.parameters(), lr=0.1)

    def loss(self, m: torch.nn.Module, b: Any, step: int, num_steps: int) -> Loss:
        return Loss(total=m(b).sum())

    def example(self, size: int) -> torch.Tensor:
        return torch.zeros(size, 100, 64)

    def usual(self, size: int) -> torch.Tensor:
        return torch.zeros(size, 10, 64)


@dataclass(frozen=True)
class _Sized:
    settings: Settings = Settings(global_batch=8, micro_batch=8)  # noqa: RUF009


@dataclass(frozen=True)
class _InBackward:
    """A workload of one stage, which is its own: it may not accumulate."""

    name: str = "only"
    micro_batch: int = 8

    def stages(self, config: _Sized) -> list["_InBackward"]:
        return [_InBackward(micro_batch=config.settings.micro_batch)]

    @property
    def settings(self) -> Settings:
        return Settings(
            steps=1,
            global_batch=8,
            micro_batch=self.micro_batch,
            eval_batch=8,
            optimizer_in_backward=True,
        )


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
def test_fails_in_one_sentence_for_sizes_that_cannot_be(
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
