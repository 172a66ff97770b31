"""What is set before any work, and what the numerics key sees of what others have set."""

import random
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.forked import in_fork
from training.numerics import configure, device_of, numerics_key, seed_torch

CPU = torch.device("cpu")


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [name for name in now if before[name] != now[name]]


def key(device: torch.device) -> dict[str, Any]:
    return numerics_key(device, world=1, deterministic=True, stages={})


def test_determinism_does_not_fill_memory_that_is_written_to_anyway() -> None:
    def configured() -> tuple[bool, bool]:
        configure(num_threads=1, deterministic=True)
        fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        return torch.are_deterministic_algorithms_enabled(), fills

    assert in_fork(configured) == (True, False)


FAULTS = """
import resource
import torch
from training.numerics import configure

def step():
    made = [torch.ones(2**18) for _ in range(6)]  # 1 MiB each, as of an optimizer's step
    return sum(made)

configure(num_threads=1, deterministic=False)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
assert faults < 20_000, faults  # 275,200, if each step's memory came from the kernel
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_step_uses_the_memory_that_the_step_before_it_freed() -> None:
    subprocess.run([sys.executable, "-c", FAULTS], check=True)


# Growth's experts are the one module of ours that the compiler must leave out.
UNCOMPILED = """
import sys
import torch
from training.numerics import configure
from training.workloads.growth.config import ExpertBlock
from training.workloads.growth.experts import ExpertFeedForward

def trained(kind):
    torch.manual_seed(0)
    ffn = ExpertFeedForward(8, ExpertBlock(hidden=16), "gelu")
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter)
    optimizer = kind(ffn.parameters(), lr=0.1)
    for _ in range(3):
        ffn(torch.ones(4, 8))[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    return [p.detach().clone() for p in ffn.parameters()]

configure(num_threads=1, deterministic=True)
kinds = torch.optim.AdamW, torch.optim.SGD
without = [trained(kind) for kind in kinds]
assert "torch._dynamo" not in sys.modules
import torch._inductor.config as inductor
assert inductor.deterministic
for kind, ours in zip(kinds, without):
    assert all(map(torch.equal, trained(kind), ours))
configure(num_threads=1, deterministic=False)
assert not inductor.deterministic
"""


def test_what_is_not_compiled_needs_no_compiler_and_has_the_same_bits_with_it() -> None:
    subprocess.run([sys.executable, "-c", UNCOMPILED], check=True)


def test_a_lower_precision_of_float32_changes_the_key() -> None:
    def lowered() -> dict[str, Any]:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        return key(CPU)

    before, now = key(CPU), in_fork(lowered)
    assert changed(before, now) == ["float32"]
    assert now["float32"]["matmul"] == "bf16"


def test_the_device_has_its_index_before_anything_starts_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert device_of(1) == CPU or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(1) == torch.device("cuda", 1)


@pytest.mark.gpu
def test_tf32_changes_the_key_by_whichever_name_it_was_set() -> None:
    device = torch.device("cuda", 0)
    before = key(device)
    set_before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert changed(before, key(device)) == ["float32"]
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision("high")
        assert key(device)["float32"]["matmul"] == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = set_before


def test_all_generators_that_a_stage_may_draw_from_are_seeded() -> None:
    """A mixup that drew from numpy differed after an interruption."""

    def drawn() -> tuple[float, ...]:
        seed_torch(torch.device("cpu"), "step", 7)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    first = drawn()
    assert drawn() == first
    assert len(set(first)) == 3
