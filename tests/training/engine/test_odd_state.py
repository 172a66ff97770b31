"""State of unusual kinds resumes bit for bit, or is refused at the first step, with a way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from tests.training import hooks, tiny
from tests.training.runs import DOUBLE, SHARDED, Run, assert_equal
from training.durable.save.tensors.weights import Weights
from training.workload import Inputs, Start

MODEL = tiny.TinyTrain.model


class Odd(nn.Module):
    """Scales by what it keeps, in ways that a plain tensor of the model is not kept."""

    def __init__(self, extra: Any = "numbers") -> None:
        super().__init__()
        self.register_buffer("repeated", torch.tensor([1.5]).expand(6))
        self.register_buffer("unset", torch.full((3,), float("nan")))
        self.register_buffer("phases", torch.tensor([complex(0, float("nan"))]))  # unset, too
        self.calls, self.extra = 0, extra

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x * self.repeated * (1 + self.calls / 100)

    def get_extra_state(self) -> Any:
        if self.extra == "numbers":
            return {"calls": [self.calls]}
        return torch.tensor([self.calls]) if self.extra == "tensor" else self.extra

    def set_extra_state(self, state: Any) -> None:
        (self.calls,) = state["calls"] if self.extra == "numbers" else state.tolist()


class Mute(Odd):
    set_extra_state = nn.Module.set_extra_state


class Late(nn.Module):
    """Makes a buffer when it is first used."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(len(x)))
        return x


class Precise(nn.Module):
    """Keeps a type that safetensors has no name for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.phase.real.float()


class Closed(LBFGS):
    """Takes the gradients as they are."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure or (lambda: torch.zeros(())))


def begin_with(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]) -> None:
    """Let the tiny model begin with this module, or with this layer instead of its own."""

    def model(stage: tiny.TinyTrain, i: Inputs) -> nn.Module:
        first, *others = MODEL(stage, i)  # type: ignore[misc]
        made = make()
        layer = nn.LazyLinear(stage.width) if isinstance(made, nn.LazyLinear) else first
        return nn.Sequential(nn.Identity() if layer is not first else made, layer, *others)

    monkeypatch.setattr(tiny.TinyTrain, "model", model)
    monkeypatch.setattr(tiny.TinyTrain, "start", lambda *_: Start())


def optimize_with(monkeypatch: pytest.MonkeyPatch, kind: type[Optimizer]) -> None:
    make = lambda self, m: kind(m.parameters(), lr=0.01, max_iter=1)  # type: ignore[call-arg]  # noqa: E731
    monkeypatch.setattr(tiny.TinyTrain, "optimizer", make)


@pytest.mark.parametrize(
    "make",
    [Odd, lambda: Odd("tensor"), lambda: nn.LazyLinear(1), None],
    ids=["extra state", "a tensor of it", "lazy", "closure"],
)
def test_it_resumes_bit_for_bit(
    run: Run,
    new_run: Callable[[str], Run],
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module] | None,
) -> None:
    if make is None:
        optimize_with(monkeypatch, Closed)
    else:
        begin_with(monkeypatch, make)
    hooks.interrupt_at("first", 4)
    whole = new_run(f"{run.uri}-whole")
    run.options = whole.options = ["--override=epochs=2"]
    assert [run.attempt(), run.attempt(), whole.attempt()] == [75, 0, 0]
    assert_equal(run, whole)
    if make is Odd:
        model = nn.Sequential(Odd(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout())
        model.append(nn.Linear(8, 2))
        Weights.read(run.uri).load_into(model, "second")
        assert model[0].calls == 16  # two micro-batches a step


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Late, "not what a new model can load (0.cache is unknown); let model() register all"),
        (Precise, "0.phase is a torch.strided Tensor of torch.complex128, which no checkpoint"),
        (Mute, "0._extra_state is a dict: let get_extra_state return a tensor or text"),
        (lambda: Odd({1: "x"}), "0._extra_state is a dict: let get_extra_state"),
        (
            lambda: Odd({"x": torch.ones(1)}),
            "and lists and dicts of them by name, and let set_extra_state take it",
        ),
        (None, "LBFGS.step needs a closure that computes the loss again"),
    ],
)
def test_fails_after_the_first_step_if_it_could_not_resume(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    make: Callable[[], nn.Module] | None,
    says: str,
) -> None:
    steps: list[int] = []
    tiny.HOOKS["first"] = steps.append
    if make is None:
        optimize_with(monkeypatch, LBFGS)
    else:
        begin_with(monkeypatch, make)
    assert run.attempt() == 2
    assert says in capfd.readouterr().err
    assert max(steps, default=0) == 0


@pytest.mark.slow  # one process does so, too
def test_ranks_that_share_the_model_resume_with_it(
    run: Run, new_run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_with(monkeypatch, Odd)
    whole = new_run(f"{run.uri}-whole")
    run.options = whole.options = [*DOUBLE, SHARDED, "--override=epochs=1"]
    tiny.HOOKS["first"] = lambda step: hooks.notice() if step == 2 else None
    assert run.attempt_with_ranks(2)[0] == 75
    tiny.HOOKS.clear()
    assert [one.attempt_with_ranks(2)[0] for one in (run, whole)] == [0, 0]
    assert_equal(run, whole)
