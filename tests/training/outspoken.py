"""The tiny workload, its stages choosing by machine and showing what they have learned.

`CHOOSE` says what is chosen on this machine; the hooks `<stage>-show` are called with the rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tests.training.tiny import HOOKS, NUM_FEATURES, Tiny, TinyConfig, TinyTrain
from training.durable.save.tensors.weights import weights_sha256
from training.workload import Inputs, Partial, Prepare, Train

WORKLOAD = "--workload=tests.training.outspoken:OUTSPOKEN"
CHOOSE: list[Callable[[Mapping[str, str]], Mapping[str, str]]] = [lambda started_with: {}]
# Of each call of `numerics`: the stage, and what it was said to have started with.
GIVEN: list[tuple[str, dict[str, str]]] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class OutspokenTrain(TinyTrain):
    def numerics(
        self, m: nn.Module, i: Inputs, started_with: Mapping[str, str]
    ) -> Mapping[str, str]:
        assert isinstance(m, nn.Sequential)
        GIVEN.append((self.name, dict(started_with)))
        return CHOOSE[-1](started_with)

    def show(self, m: nn.Module, i: Inputs, parts: Sequence[Partial], out: Path) -> None:
        """A text of random numbers, a table with the model's answer, a note with its weights."""
        assert not m.training and not torch.is_grad_enabled() and len(parts) == 3
        drawn = torch.rand(3, NUM_FEATURES)
        answer = m(drawn.double() if self.config.double else drawn).sum()
        (out / "answers.csv").write_text(f'answer,from\n{answer},"a, b"\n')
        HOOKS.get(f"{self.name}-show", lambda rank: None)(i.rank)
        (out / "drawn.txt").write_text(f"<{drawn.sum()}>\n")
        if i.world == 1:
            (out / "weights.md").write_text(weights_sha256(m.state_dict()))


class Outspoken(Tiny):
    def stages(self, c: TinyConfig) -> Sequence[Prepare | Train]:
        doubled, *_ = Tiny.stages(self, c)
        widths = {"first": 4, "second": 8}
        return (doubled, *(OutspokenTrain(config=c, name=n, width=w) for n, w in widths.items()))


OUTSPOKEN = Outspoken()
