"""Footprints: against arithmetic, against the real allocator, and against what a run commits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.profiler import ProfilerActivity, profile

from contract.errors import UserError
from tests.training.forked import in_fork
from tests.training.runs import Run
from tests.training.tiny import TinyConfig, TinyTrain
from training.durable.attempt.world import RankEnvironment, World
from training.engine.parallel import parallel
from training.preflight.footprint import measure_evaluation, measure_probe, measure_step
from training.workload import Batch, Inputs, Loss, Probe, Settings, Train
from training.workloads.trajectory.config import laptop
from training.workloads.trajectory.trajectory_workload import TRAJECTORY

IN, OUT, BATCH = 1024, 256, 64
FLOAT = 4


@dataclass
class Linear(Train):
    """One matrix, no bias, plain SGD: everything about its step can be said by hand."""

    name: str = "linear"
    global_batch: int = BATCH
    momentum: float = 0.0
    in_backward: bool = False

    @property
    def settings(self) -> Settings:
        return Settings(
            epochs=1,
            global_batch=self.global_batch,
            micro_batch=BATCH,
            optimizer_in_backward=self.in_backward,
        )

    def example(self, size: int) -> Batch:
        return torch.zeros(size, IN)

    def model(self, i: Inputs) -> nn.Module:
        return nn.Linear(IN, OUT, bias=False)

    def optimizer(self, m: nn.Module) -> Optimizer:
        return SGD(m.parameters(), lr=0.1, momentum=self.momentum, foreach=False)

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        return Loss(total=m(b).sum())


def measure(stage: Any, size: int = BATCH) -> Any:
    return in_fork(lambda: measure_step(stage, TinyConfig(), size))


def test_a_matrix_needs_what_arithmetic_says() -> None:
    matrix, batch, output = IN * OUT * FLOAT, BATCH * IN * FLOAT, BATCH * OUT * FLOAT
    found = measure(Linear())
    assert found.parameters == found.trainable_parameters == IN * OUT
    assert found.parameter_bytes == found.gradient_bytes == found.checkpoint_bytes == matrix
    assert (found.optimizer_bytes, found.buffer_bytes) == (0, 0)
    assert found.output_bytes == output
    # A sum keeps no output for backward; scalars take a block of 512 bytes each.
    assert found.peak_bytes == pytest.approx(2 * matrix + batch, abs=8 * 512)
    assert found.peak_phase == "backward"
    assert found.peak_gradient_bytes == matrix
    # Forward, and the matrix's gradient; the input needs none.
    assert found.flops_per_sample == 2 * 2 * IN * OUT


def test_a_step_moves_what_its_operations_read_and_write() -> None:
    matrix, batch, output = IN * OUT * FLOAT, BATCH * IN * FLOAT, BATCH * OUT * FLOAT
    found = measure(Linear())
    # The product, its sum, and the product of the gradient; then scalars.
    products = (batch + matrix + output) + output + (batch + output + matrix)
    assert found.moved_bytes == pytest.approx(products, abs=64)
    # Weight and gradient are read, the weight is written.
    assert (found.optimizer_kernels, found.optimizer_moved_bytes) == (1, 3 * matrix)


@dataclass
class Layers(Linear):
    """As many matrices as torch takes two launches for, and AdamW in one kernel."""

    def model(self, i: Inputs) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(40)))

    def example(self, size: int) -> Batch:
        return torch.zeros(size, 8)

    def optimizer(self, m: nn.Module) -> Optimizer:
        return AdamW(m.parameters(), fused=True)


def test_a_fused_optimizer_is_a_launch_for_every_thirty_tensors() -> None:
    found = measure(Layers())
    # Weight, gradient and both moments are read, all but the gradient written; and steps counted.
    assert found.optimizer_moved_bytes == pytest.approx(28 * found.parameters, rel=0.05)
    assert found.optimizer_kernels == 1 + 2


def test_optimizer_state_is_part_of_peak_and_checkpoint() -> None:
    matrix = IN * OUT * FLOAT
    plain, momentum = measure(Linear()), measure(Linear(momentum=0.9))
    assert momentum.optimizer_bytes == matrix
    assert momentum.checkpoint_bytes == 2 * matrix
    assert momentum.peak_bytes - plain.peak_bytes == matrix


def test_an_optimizer_in_backward_leaves_no_gradient_after_it() -> None:
    plain, ours = measure(Linear(momentum=0.9)), measure(Linear(momentum=0.9, in_backward=True))
    assert (ours.gradient_bytes, ours.peak_bytes) == (0, plain.peak_bytes)
    assert ours.optimizer_bytes == plain.optimizer_bytes == IN * OUT * FLOAT


def test_gradients_stay_while_the_next_micro_batch_is_computed() -> None:
    alone, accumulated = measure(Linear()), measure(Linear(global_batch=4 * BATCH))
    # The last gradient exists besides the one it is added to; the sum of two others waits for both.
    assert accumulated.peak_bytes - alone.peak_bytes == 2 * IN * OUT * FLOAT
    pair = measure(Linear(global_batch=2 * BATCH))
    assert pair.peak_bytes - alone.peak_bytes == IN * OUT * FLOAT


@cache
def measured(size: int) -> Any:
    """The Transformer's footprint, which takes ten seconds."""
    return in_fork(lambda: measure_step(stage_of_trajectory(), laptop(), size))


def test_only_activations_grow_with_the_micro_batch() -> None:
    small, large = measured(16), measured(64)
    assert large.peak_activation_bytes > 3.5 * small.peak_activation_bytes
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "checkpoint_bytes"):
        assert getattr(small, name) == getattr(large, name)
    assert small.flops_per_sample == large.flops_per_sample


@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_the_peak_is_what_the_allocator_sees_of_the_real_step(size: int) -> None:
    peak = allocated_peak(stage_of_trajectory(), size)
    assert measured(size).peak_bytes == pytest.approx(peak, rel=0.03)


class Copying(Linear):
    """A model that copies a layer when it is made."""

    def model(self, i: Inputs) -> nn.Module:
        layer = nn.TransformerEncoderLayer(IN, 4, 8, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    def example(self, size: int) -> Batch:
        return torch.zeros(size, 2, IN)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_model_may_copy_its_layers() -> None:
    layer = 4 * IN * IN + 2 * 8 * IN + 9 * IN + 8
    assert measure(Copying()).parameters == 2 * layer


def test_an_evaluation_keeps_no_activations_for_backward() -> None:
    stage = stage_of_trajectory()
    peak = in_fork(lambda: measure_evaluation(stage, laptop(), 64))
    assert peak < measured(64).peak_bytes


def test_the_checkpoint_s_bytes_are_what_a_run_commits(whole: Run) -> None:
    found = measure(TinyTrain(config=TinyConfig(), name="second", width=8), 4)
    # JSON and safetensors headers come on top: kilobytes, whatever the model's size.
    assert 0 < whole.json("receipt.json")["checkpoint_bytes"] - found.checkpoint_bytes < 20_000


def test_fails_for_a_stage_that_reads_the_dataset() -> None:
    class Reading(Linear):
        def model(self, i: Inputs) -> nn.Module:
            return nn.Linear(len(i.dataset.meta), OUT)

    with pytest.raises(UserError, match="'linear' cannot be measured: its model or"):
        measure(Reading())


def test_fails_for_a_stage_without_an_example() -> None:
    class Mute(Train):
        name = "mute"

    with pytest.raises(UserError, match="'mute' cannot be measured: it has no `example"):
        measure(Mute())


class Matching(Linear):
    """Chooses outputs by their values, as a matcher does."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__(name="matcher")
        self.read = read

    def loss(self, m: nn.Module, b: Batch, step: int, num_steps: int) -> Loss:
        out = m(b)
        self.read(out.detach())
        return Loss(total=out.sum())


class Surrogate(Matching):
    def surrogate(self, m: nn.Module, b: Batch) -> Loss:
        return Loss(total=m(b).sum())


# What reads data -> how the refusal names it.
READS: dict[str, Callable[[Tensor], Any]] = {
    "(numpy() in test_footprint.py, line ": lambda out: out.cpu().numpy(),
    "np.asarray(out)": lambda out: np.asarray(out),
    "(aten.bincount.default in ": lambda out: out.argmax(1).bincount(),
    "(aten._local_scalar_dense.default in ": lambda out: out.mean().item(),
    "(aten.nonzero.default in ": lambda out: out[out > 0],
}


def test_fails_for_a_step_that_reads_data() -> None:
    def refusals() -> list[str]:
        found = []
        for read in READS.values():
            with pytest.raises(UserError) as error:
                measure_step(cast(Train, Matching(read)), TinyConfig(), BATCH)
            found.append(str(error.value))
        return found

    for operation, said in zip(READS, in_fork(refusals), strict=True):
        assert said.startswith("stage 'matcher' cannot be measured: its step reads data (")
        assert operation in said
        assert "in test_footprint.py, line " in said
        assert said.endswith(
            "add `surrogate(model, batch)`, a step by shapes alone (training/workload.py)"
        )


def test_fails_for_an_optimizer_that_reads_data() -> None:
    class Factored(Linear):
        def optimizer(self, m: nn.Module) -> Optimizer:
            return Adafactor(m.parameters())

    said = "'linear' cannot be measured: its optimizer Adafactor reads data .* in torch itself"
    with pytest.raises(UserError, match=said):
        measure(Factored())


def test_a_stage_that_reads_data_is_measured_by_its_surrogate() -> None:
    stage = Surrogate(lambda out: out.cpu().numpy())
    assert measure(stage) == measure(Linear())
    found = cast(Train, stage)
    assert in_fork(lambda: measure_evaluation(found, TinyConfig(), BATCH)) > 0


def test_fails_for_a_probe_that_reads_data() -> None:
    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x[x.sum(1) > 0]

    probe = Probe(build=lambda: Reading(2, 2), batch=torch.zeros(4, 2), size=4)
    with pytest.raises(UserError, match="'features' cannot be measured: its probe reads data"):
        in_fork(lambda: measure_probe("features", probe))


def stage_of_trajectory() -> Train:
    """A Transformer, in float32 on one thread."""
    stage = TRAJECTORY.stages(laptop())[-1]
    assert isinstance(stage, Train)
    return stage


def allocated_peak(stage: Train, size: int) -> int:
    """Bytes that torch's allocator had given out at the highest moment of two real steps."""
    # acc_events: without, torch before 2.13 warns.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        batch = stage.example(size)  # type: ignore[attr-defined]
        model = stage.model(None)  # type: ignore[arg-type]
        optimizer = AdamW(stage.optimizer(model).param_groups, lr=1e-3, foreach=True)
        ranks = parallel(stage, model, World(RankEnvironment(), torch.device("cpu")))
        num_micro = math.ceil(stage.settings.global_batch / size)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=True)
            ranks.begin_step(num_micro)
            for place in range(num_micro):
                with ranks.adding(place):
                    (stage.loss(model, batch, 0, 1).total / size).backward()  # type: ignore[no-untyped-call]
            ranks.end_step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
    events = allocations(found.profiler.kineto_results.experimental_event_tree())
    now = highest = 0
    for _, size_change in sorted(events):
        now += size_change
        highest = max(highest, now)
    return highest


def allocations(events: Any) -> Iterator[tuple[int, int]]:
    for event in events:
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            yield event.start_time_ns, fields.alloc_size
        yield from allocations(event.children)
