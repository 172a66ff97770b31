"""A language model of seconds that grows twice: dense, then experts, then twice as wide.

Each stage starts from the one before, its AdamW from that one's state. The hooks of the tiny
workload are called at each stage's steps. Shapes: B batch, T tokens, N = B x T, W width.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tests.training import tiny
from training.workload import (
    Batch,
    Inputs,
    Loss,
    Partial,
    Prepare,
    Progress,
    Samples,
    Settings,
    Start,
    Train,
    Workload,
)

VOCABULARY, NUM_TOKENS, NUM_EXPERTS, STEPS = 16, 6, 4, 6
SETTINGS = Settings(steps=STEPS, global_batch=8, micro_batch=4)
# The optimizer's state that stages have read, which must not stay in memory.
READ: list[weakref.ref[Tensor]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    seed: int = 3
    num_threads: int = 1
    deterministic: bool = True
    settings: Settings = SETTINGS


class Dense(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Experts(nn.Module):
    """Each token goes to two experts, whose weights sum to one; some experts may get none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS)
        self.experts = nn.ModuleList(Dense(width) for _ in range(NUM_EXPERTS))

    def forward(self, x_NW: Tensor) -> Tensor:
        weights_N2, chosen_N2 = self.router(x_NW).softmax(-1).topk(2)
        weights_N2 = weights_N2 / weights_N2.sum(-1, keepdim=True)
        out_NW = torch.zeros_like(x_NW)
        for number, expert in enumerate(self.experts):
            tokens, place = (chosen_N2 == number).nonzero(as_tuple=True)
            if len(tokens):
                y = expert(x_NW[tokens]) * weights_N2[tokens, place, None]
                out_NW = out_NW.index_add(0, tokens, y)
        return out_NW


class Model(nn.Module):
    """The embedding is the output layer too."""

    def __init__(self, width: int, *, has_experts: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.block = Experts(width) if has_experts else Dense(width)
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_NW = self.embedding(ids_BT).flatten(0, 1)
        return cast(Tensor, self.head(self.last_norm(x_NW + self.block(self.norm(x_NW)))))


def upcycled(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The names of a dense model's, for one whose experts are copies of its block."""
    found = {name: t for name, t in tensors.items() if not name.startswith("block.")}
    for name in tensors.keys() - found.keys():
        for number in range(NUM_EXPERTS):
            own = name.replace("block.", f"block.experts.{number}.")
            found[own] = tensors[name]
    return found


def widened(name: str, tensor: Tensor) -> tuple[Tensor, float]:
    """A tensor of a model of twice the width with the same outputs, but for the factor.

    Everything is computed twice; what reads what is there twice has half the weights.
    """
    if name == "block.router.bias":
        return tensor, 1.0
    is_row = tensor.ndim == 1 or "embedding" in name or "head" in name or "router" in name
    twice = torch.cat([tensor, tensor], dim=-1)
    if not is_row:
        twice = torch.cat([twice, twice])
    halves = tensor.ndim == 2 and name not in ("embedding.weight", "head.weight")
    return twice, 0.5 if halves or name.startswith("last_norm") else 1.0


def widened_model(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t * by for name in tensors for t, by in [widened(name, tensors[name])]}


def widened_moments(name: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adam's moments: gradients of what is there twice are half as large."""
    is_once = name.startswith(("block.router", "last_norm"))
    factor = 1.0 if is_once else 0.5
    first, second = (widened(name, state[key])[0] for key in ("exp_avg", "exp_avg_sq"))
    return {"step": state["step"], "exp_avg": factor * first, "exp_avg_sq": factor**2 * second}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences(Samples):
    tokens: Tensor  # (N, T + 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Tensor:
        return self.tokens[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class Grow(Train):
    config: Config
    name: str
    width: int
    has_experts: bool
    grow: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    grow_state: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None

    @property
    def settings(self) -> Settings:
        return self.config.settings

    def model(self, i: Inputs) -> nn.Module:
        return Model(self.width, has_experts=self.has_experts)

    def start(self, m: nn.Module, i: Inputs) -> Start:
        if self.grow is None or self.grow_state is None:
            return Start()
        assert i.prior is not None
        # What the smaller model does not have, the router, stays as it is.
        m.load_state_dict(self.grow(i.prior.model), strict=False)
        state = i.prior.optimizer()
        READ.extend(weakref.ref(own["exp_avg"]) for own in state.values())
        return Start(optimizer=self.grow_state(state))

    def optimizer(self, m: nn.Module) -> Optimizer:
        return AdamW(m.parameters(), lr=0.01)

    def samples(self, i: Inputs, split: str) -> Sequences:
        tokens = load_file(i.dataset.folder / "tokens.safetensors")["tokens"]
        return Sequences(tokens=tokens[8:] if split == "train" else tokens[:8])

    def weight(self, b: Batch) -> float:
        return float(b[:, 1:].numel())

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        tiny.HOOKS.get(self.name, lambda number: None)(step)
        total = F.cross_entropy(m(b[:, :-1]), b[:, 1:].flatten(), reduction="sum")
        return Loss(total=total)

    def evaluate(self, m: nn.Module, b: Batch) -> Partial:
        total = F.cross_entropy(m(b[:, :-1]), b[:, 1:].flatten(), reduction="sum")
        return Partial(sums={"nll": (total.item(), self.weight(b))})


class Growth(Workload[Config]):
    name = "growth"
    recipes: Mapping[str, Callable[[], Config]] = {"tiny": Config}

    def stages(self, c: Config) -> Sequence[Prepare | Train]:
        return (
            Grow(config=c, name="dense", width=8, has_experts=False),
            Grow(
                config=c,
                name="experts",
                width=8,
                has_experts=True,
                grow=upcycled,
                grow_state=upcycled,
            ),
            Grow(
                config=c,
                name="wide",
                width=16,
                has_experts=True,
                grow=widened_model,
                grow_state=lambda old: {n: widened_moments(n, own) for n, own in old.items()},
            ),
        )

    def make_dataset(
        self, out: Path, count: int, seed: int, progress: Progress
    ) -> Mapping[str, Any]:
        rng = torch.Generator().manual_seed(seed)
        first = torch.randint(VOCABULARY, (count, 1), generator=rng)
        tokens = (first * 5 + torch.arange(NUM_TOKENS + 1) * 3) % VOCABULARY
        save_file({"tokens": tokens}, out / "tokens.safetensors")
        progress(count, count)
        return {"count": count}


GROWTH = Growth()
