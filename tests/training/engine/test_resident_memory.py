"""Between its steps a stage holds its own state, and neither a snapshot nor another stage's."""

import ctypes
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.training import tiny
from tests.training.hooks import notice
from tests.training.runs import Run
from tests.training.tiny import TinyConfig, TinyTrain
from training.engine.job import TrainProxy, WorkloadProxy
from training.workload import Inputs, Prepare, Train

OPTIONS = [
    "--workload=tests.training.engine.test_resident_memory:HEAVY",
    "--override=epochs=1",
    "--override=micro_batch=8",
    "--checkpoint-interval=1000steps",
    # Long enough that no copy of the state is staged before an evaluation.
    "--notice-budget-seconds=10000",
]
STAGES = ("first", "second", "third")


def memory(name: str) -> int:
    """Bytes of this process's memory, by a name of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def resting_memory() -> int:
    """Bytes that stay once other threads have let go of what they had, and the allocator too.

    Only a block above 32 MB that needs new memory is given back when it is freed: what other tests
    left free in this process's heap may be used for it, and is kept.
    """
    found = []
    for _ in range(10):
        found.append(memory("RssAnon"))
        time.sleep(0.05)
        ctypes.CDLL(None).malloc_trim(0)
    return min(found)


class Measured(NamedTuple):
    """Bytes of a process."""

    peak_above: int  # at its first step, how much more it had held before
    held: dict[str, int]  # by stage, in the evaluation at its end


def measure(run: Run, log: Path, notice_in: str | None = None) -> Measured:
    """Run an attempt in a process of its own; the notice comes in the second step of a stage."""

    def note(text: str) -> None:
        with log.open("a") as lines:
            lines.write(f"{text}\n")

    def step(stage: str, number: int) -> None:
        if not log.exists():
            note(str(memory("VmHWM") - memory("VmRSS")))
        if (stage, number) == (notice_in, 1):
            notice()

    for name in STAGES:
        tiny.HOOKS[name] = partial(step, name)
        tiny.HOOKS[f"{name}-evaluation"] = lambda size, name=name: note(
            f"{name} {resting_memory()}"
        )
    assert run.attempt_in_fork() == (75 if notice_in else 0)
    first, *lines = log.read_text().splitlines()
    held = {name: int(size) for name, size in (line.split() for line in lines)}
    return Measured(peak_above=int(first), held=held)


@pytest.mark.slow  # it measures what other work on the machine disturbs
def test_a_stage_holds_its_own_state_alone_whether_it_began_or_resumed(
    run: Run, tmp_path: Path
) -> None:
    run.options = OPTIONS
    begun = measure(run, tmp_path / "begun", notice_in="second")
    resumed = measure(run, tmp_path / "resumed")
    held = {**begun.held, **resumed.held}
    print({stage: f"{size / 1e6:.0f} MB" for stage, size in held.items()})
    assert tuple(held) == STAGES
    assert max(held.values()) - min(held.values()) < 0.1 * STATE_BYTES
    # To resume: the snapshot, the end of the stage before, and parameters to copy into: a third
    # of the state each of the latter.
    assert resumed.peak_above < 0.8 * STATE_BYTES


# Blocks above 32 MB that needed new memory are given back at once when they are freed.
NUM_FLOATS = 10_000_000
STATE_BYTES = 3 * 4 * NUM_FLOATS


class Ballast(nn.Module):
    """Parameters that change no result; the loss has their norm, and so they have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_FLOATS))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Laden(TrainProxy):
    def model(self, i: Inputs) -> nn.Module:
        return nn.Sequential(*super().model(i), Ballast())  # type: ignore[misc]


class Heavy(WorkloadProxy):
    def stages(self, c: TinyConfig) -> Sequence[Prepare | Train]:
        *before, second = self._inner.stages(c)
        third = TinyTrain(config=c, name="third", width=8)
        trained: list[Any] = [*before, second, third]
        return [Laden(stage) if isinstance(stage, Train) else stage for stage in trained]


HEAVY = Heavy(tiny.TINY)
