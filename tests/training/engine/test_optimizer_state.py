"""An optimizer's state comes back as it was saved, in types of its own and bit for bit."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests.training import tiny
from tests.training.hooks import at_rank, notice
from tests.training.runs import SHARDED, Run, assert_equal
from training.engine.job import TrainProxy, WorkloadProxy
from training.engine.optimizer import create_optimizer_state, load_optimizer_state
from training.workload import Prepare, Train

NewRun = Callable[[str], Run]
WORKLOAD = [
    "--workload=tests.training.engine.test_optimizer_state:MOMENTS",
    "--override=epochs=1",
    "--override=schedule=constant",
]


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_each_tensor_keeps_its_type_and_bits(parameters: torch.dtype) -> None:
    parameter = nn.Parameter(torch.randn(3, 2, dtype=parameters))
    own = {
        "step": torch.tensor(7.0),
        "average": torch.randn(3, 2),
        "rounded": torch.randn(3, 2, dtype=torch.bfloat16),
        "codes": torch.randint(2**40, (3, 2)),
        "blocks": [{"scale": torch.randn(2, dtype=torch.float64)}, (torch.ones(1).byte(), 0.5)],
    }
    optimizer = SGD([parameter], lr=0.1)
    saved = {"state": {0: own}, "param_groups": optimizer.state_dict()["param_groups"]}
    load_optimizer_state(optimizer, saved)
    assert_same(optimizer.state_dict()["state"][0], own)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(b, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(b, dict):
        assert a.keys() == b.keys()
        for key in b:
            assert_same(a[key], b[key])
    elif isinstance(b, list | tuple):
        assert type(a) is type(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.slow  # one process does so, too
def test_moments_of_their_own_type_resume_bit_for_bit_where_ranks_share_them(
    run: Run, new_run: NewRun, tmp_path: Path
) -> None:
    whole = new_run(str(tmp_path / "whole" / "run-1"))
    run.options = whole.options = [*WORKLOAD, SHARDED]
    assert whole.attempt_with_ranks(2) == [0, 0]
    at_rank(1, ("first", 0), notice)
    assert run.attempt_with_ranks(2) == [75, 75]
    tiny.HOOKS.clear()
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, whole)


def test_momentum_of_a_channels_last_convolution_is_laid_out_as_its_gradient() -> None:
    """A checkpoint's tensors are contiguous; beside them foreach would leave its fast path."""
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    optimizer = AdamW(model.parameters())
    create_optimizer_state(optimizer, ["/state/0/exp_avg", "/state/1/exp_avg"])
    saved = optimizer.state_dict()
    before = [dict(saved["state"][0])["exp_avg"].clone().normal_(), model.weight.stride()]
    saved["state"][0]["exp_avg"] = before[0].contiguous()
    load_optimizer_state(optimizer, saved)
    loaded = optimizer.state[model.weight]["exp_avg"]
    assert torch.equal(loaded, before[0]) and loaded.stride() == before[1]
    assert optimizer.state[model.weight]["step"].ndim == 0


class Nested(AdamW):
    """Nests its state when it saves, as bitsandbytes' optimizers do."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return {**saved, "state": {n: {"nested": own} for n, own in saved["state"].items()}}

    def load_state_dict(self, state_dict: Any) -> None:
        own = {n: own["nested"] for n, own in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": own})


class Around(Optimizer):
    """Keeps its state in another optimizer, as timm's Lookahead does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner = AdamW(parameters, lr=lr)
        super().__init__(self.inner.param_groups, {})
        self.step, self.state_dict = self.inner.step, self.inner.state_dict  # type: ignore[method-assign]
        self.load_state_dict = self.inner.load_state_dict  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [Nested, Around])
def test_state_that_is_kept_elsewhere_comes_back_by_the_optimizer_s_own_load(
    kind: type[Optimizer],
) -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    first, second = (kind([parameter], lr=0.1) for parameter in (one, other))  # type: ignore[call-arg]
    for number in range(4):
        if number == 2:
            load_optimizer_state(second, deepcopy(first.state_dict()))
            other.data = one.data.clone()
        for parameter, optimizer in ((one, first), (other, second))[: 1 + number // 2]:
            parameter.grad = torch.full((3,), 1.0 + number)
            optimizer.step()
    assert torch.equal(one, other)


def test_state_is_created_for_parameters_that_the_checkpoint_names_also_if_frozen() -> None:
    """The loss may unfreeze one at a step, and a resumed run has not reached it."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = AdamW(model.requires_grad_(False).parameters())
    create_optimizer_state(optimizer, ["/state/1/exp_avg", "/param_groups/0/lr"])
    assert [optimizer.state[p].keys() > {"exp_avg"} for p in model.parameters()] == [False, True]


class HalfMomentum(Optimizer):
    """SGD whose momentum is kept and computed in bfloat16."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                momentum = state["momentum"]
                momentum.mul_(0.9).add_(parameter.grad.to(momentum.dtype))
                parameter.add_(momentum.to(parameter.dtype), alpha=-group["lr"])


class Halved(TrainProxy):
    def optimizer(self, m: nn.Module) -> Optimizer:
        return HalfMomentum(m.parameters(), lr=0.01)


class Moments(WorkloadProxy):
    def stages(self, c: Any) -> Sequence[Prepare | Train]:
        return [Halved(s) if isinstance(s, Train) else s for s in self._inner.stages(c)]


MOMENTS = Moments(tiny.TINY)
