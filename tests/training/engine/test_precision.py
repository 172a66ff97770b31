"""float16 with its scaler, the moving average and the best metric resume bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from tests.training.hooks import interrupt_at
from tests.training.runs import Run, assert_equal
from training.engine.optimizer import MovingAverage, Scaling
from training.settings import Precision

NewRun = Callable[[str], Run]
STATEFUL = [
    "--override=precision=float16",
    "--override=ema_decay=0.9",
    "--override=best_metric=accuracy",
    "--override=micro_batch=2",
]


@pytest.fixture(scope="module")
def stateful(finished: Callable[..., Run]) -> Run:
    """The uninterrupted run with everything on: scaler, average, best, accumulation over four."""
    return finished(*STATEFUL)


def test_scaler_average_and_best_resume_bit_for_bit(run: Run, stateful: Run) -> None:
    run.options = STATEFUL
    interrupt_at("second", 11)
    assert run.attempt() == 75
    assert run.attempt() == 0
    assert_equal(run, stateful)
    skipped = [line["step"] for line in stateful.lines("step") if line.get("skipped")]
    assert skipped == [line["step"] for line in run.lineage().values() if line.get("skipped")]
    ours, theirs = run.json("receipt.json"), stateful.json("receipt.json")
    assert ours["stages"] == theirs["stages"]
    assert {e.step for e in run.head.checkpoints if e.is_best} == {
        e.step for e in stateful.head.checkpoints if e.is_best
    }


def test_a_checkpoint_holds_the_scale_and_the_average_which_is_what_is_exported(
    stateful: Run,
) -> None:
    final = load_file(Path(stateful.uri) / "final" / "model.safetensors")
    folder = Path(stateful.uri) / "checkpoints" / stateful.head.checkpoints[-1].name
    # The first scale is 65536; what this model's gradients overflowed at was skipped and halved.
    steps = [line for line in stateful.lines("step") if line["stage"] == "second"]
    num_skipped = sum(1 for line in steps if line.get("skipped"))
    scaler = json.loads((folder / "state.json").read_text())["scaler"]
    assert scaler["scale"] == 65536.0 / 2**num_skipped
    average, model = (load_file(folder / f"{part}.safetensors") for part in ("ema", "model"))
    assert torch.equal(final["0.weight"], average["0.weight"])
    assert not torch.equal(final["0.weight"], model["0.weight"])
    assert torch.equal(final["1.running_mean"], model["1.running_mean"]), "buffers are the model's"


def test_steps_whose_gradients_overflow_are_skipped_and_the_scale_is_halved() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaling = Scaling("float16", torch.device("cpu"))
    before = model.weight.detach().clone()
    scaling.backward(model(torch.ones(1, 2)).sum() * 1e38)
    skipped, norm = scaling.step(optimizer, model, clip_norm=1.0)
    assert skipped
    assert norm is not None
    assert bool(norm.isinf())
    assert torch.equal(model.weight, before)
    assert scaling.state()["scale"] == 32768.0
    optimizer.zero_grad()
    scaling.backward(model(torch.ones(1, 2)).sum())
    assert scaling.step(optimizer, model, clip_norm=None) == (False, None)
    assert torch.allclose(model.weight, before - 1.0)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_rank_resumed_at_a_step_in_which_it_has_no_micro_batch_steps_too(
    clip_norm: float | None,
) -> None:
    """As in the last step of an epoch: its gradients are the other ranks'."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaling = Scaling("float16", torch.device("cpu"))
    scaling.load({**scaling.state(), "scale": 4.0, "_growth_tracker": 7})
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((1, 2), 2.0)  # 0.5, scaled
    model.bias.grad = torch.zeros(1)
    skipped, _ = scaling.step(optimizer, model, clip_norm)
    assert not skipped
    assert torch.equal(model.weight, before - 0.5)
    assert (scaling.state()["scale"], scaling.state()["_growth_tracker"]) == (4.0, 8)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_what_the_optimizer_does_not_train_is_not_in_the_norm(precision: Precision) -> None:
    """Nobody else clears its gradients: they would add up, and float16's would stay scaled."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    optimizer = SGD(model[1].parameters(), lr=0.0)
    scaling = Scaling(precision, torch.device("cpu"))
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        scaling.backward(model(torch.ones(1, 2)).sum())
        expected = model[0](torch.ones(1, 2)).norm().item()
        _, norm = scaling.step(optimizer, model, 1e-3)
        assert norm is not None and norm.item() == pytest.approx(expected)


def test_gradients_accumulate_exactly_with_weights(
    run: Run, new_run: NewRun, tmp_path: Path
) -> None:
    """In float64, without noise, a micro-batch of 8 is four of 2, odd last batches included."""
    whole_batch = new_run(str(tmp_path / "other" / "run-1"))
    options = ["--override=double=true", "--override=batch_norm=false", "--override=dropout=0"]
    run.options = [*options, "--override=micro_batch=2"]
    whole_batch.options = [*options, "--override=micro_batch=8"]
    assert run.attempt() == whole_batch.attempt() == 0
    for ours, theirs in zip(run.losses(), whole_batch.losses(), strict=True):
        assert ours[2] == pytest.approx(theirs[2], rel=1e-9)


def test_the_average_swaps_in_and_out_and_knows_tied_parameters_by_every_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    average = MovingAverage(model, 0.5)
    assert average.tensors.keys() == model.state_dict().keys()
    with torch.no_grad():
        model[0].weight.add_(2.0)
    trained = model[0].weight.detach().clone()
    average.update()
    with average.swapped_in():
        assert torch.allclose(model[1].weight, trained - 1.0)
    assert torch.equal(model[0].weight, trained)
    assert torch.allclose(average.tensors["1.weight"], trained - 1.0)
