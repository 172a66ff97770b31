"""Every number of ranks trains on the same global batches, each sample once per epoch."""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from tests.training.forked import in_fork
from tests.training.tiny import TinyConfig, TinyTrain
from training.engine.batches import BatchPlan, CompiledShapes, Maker, to_device
from training.engine.job import TrainProxy
from training.engine.step_log import _sample_digest
from training.numerics import shuffled
from training.workload import Batch, Samples, Settings


class Numbers(Samples):
    """As many samples as given; only their number and order matter here."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


def plan(world_size: int, *, length: int = 30, micro_batch: int = 4, **more: Any) -> BatchPlan:
    samples = Numbers(length)
    settings = Settings(epochs=3, global_batch=8, micro_batch=micro_batch, **more)
    return BatchPlan(samples, settings, 7, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_the_ranks_share_out_exactly_the_recipe_s_global_batches(world_size: int) -> None:
    alone, shared = plan(1), plan(world_size)
    assert shared.num_steps == alone.num_steps == 12
    for step in range(shared.num_steps):
        shares = [shared.share(step, rank) for rank in range(world_size)]
        counted = [micro for share in shares for micro in share if micro.counts]
        ids = [index for micro in sorted(counted, key=lambda m: m.number) for index in micro.ids]
        assert ids == list(alone.ids(step))
        assert counted == alone.micro_batches(step), "contiguous, in order, the same"


def test_ranks_that_share_the_model_compute_equally_often() -> None:
    whole = plan(2, micro_batch=2, sharding="full")
    for step in range(12):
        shares = [whole.share(step, rank) for rank in range(2)]
        assert len(shares[0]) == len(shares[1])
        assert sum(micro.counts for share in shares for micro in share) == 4 - (step % 4 == 3)


def test_every_sample_comes_once_per_epoch_and_the_loader_s_order_is_the_loop_s() -> None:
    whole = plan(2)
    for epoch in range(3):
        steps = range(epoch * whole.steps_per_epoch, (epoch + 1) * whole.steps_per_epoch)
        assert sorted(i for step in steps for i in whole.ids(step)) == list(range(30))
    ahead = list(whole.shares(5, 1))
    assert ahead == [micro for step in range(5, 12) for micro in whole.share(step, 1)]


def test_a_dropped_remainder_is_another_one_in_every_epoch() -> None:
    whole = plan(2, drop_last=True)
    assert (whole.steps_per_epoch, whole.num_steps, whole.epoch(3)) == (3, 9, 1)
    left = []
    for epoch in range(3):
        ids = [i for step in range(3 * epoch, 3 * epoch + 3) for i in whole.ids(step)]
        assert len(set(ids)) == len(ids) == 24
        left.append(frozenset(range(30)) - set(ids))
    assert len(set(left)) == 3


def test_the_order_of_a_seed_and_epoch_never_changes() -> None:
    assert shuffled(10, 3, 7).tolist() == [7, 0, 8, 1, 3, 6, 9, 2, 4, 5]
    of_imagenet = shuffled(1_281_167, 2, 7).numpy().tobytes()
    assert hashlib.sha256(of_imagenet).hexdigest().startswith("ce2abf8c564e7a7f")


def test_an_epoch_of_imagenet_is_kept_in_64_mib() -> None:
    def act() -> tuple[int, int, int]:
        before = _peak_kib()
        settings = Settings(epochs=2, global_batch=256, micro_batch=128)
        whole = BatchPlan(Numbers(1_281_167), settings, 7, 2)  # type: ignore[arg-type]
        samples = 0
        for step, micros in zip(range(whole.steps_per_epoch), whole.shares(0, 0), strict=False):
            _sample_digest(whole.ids(step), whole.num_samples)
            samples += sum(len(micro.ids) for micro in whole.micro_batches(step))
            assert len(micros.ids) in (128, 15)
        return samples, whole.steps_per_epoch, _peak_kib() - before

    samples, steps, kib = in_fork(act)
    assert (samples, steps) == (1_281_167, 5005)
    assert kib < 64 * 1024


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Stage(TrainProxy):
    def __init__(self, compile_mode: Any) -> None:
        super().__init__(TinyTrain(config=TinyConfig(), name="first", width=2))
        self._compile_mode = compile_mode

    @property
    def settings(self) -> Settings:
        return replace(super().settings, compile_mode=self._compile_mode)


class Bucketed(Stage):
    """Pads the images it is given to a multiple of 32 before anything compiled sees them."""

    def shape_key(self, b: Batch) -> Hashable:
        return -(-b["image"].shape[-1] // 32)


def image(width: int) -> Batch:
    return {"image": torch.empty(1, width)}


def test_without_compilation_only_the_first_step_is_new() -> None:
    shapes = CompiledShapes(Stage(None))
    assert not shapes.have([image(3)])
    shapes.add([image(3)])
    assert shapes.have([image(5), image(8)])


def test_each_micro_batch_of_a_compiled_step_counts_by_itself() -> None:
    shapes = CompiledShapes(Stage("default"))
    shapes.add([image(3), image(5)])
    assert shapes.have([image(5), image(3)])
    assert shapes.have([image(5)])
    assert not shapes.have([image(3), image(8)])


def test_a_compiled_stage_may_say_what_its_code_depends_on() -> None:
    shapes = CompiledShapes(Bucketed("default"))
    shapes.add([image(40)])
    assert shapes.have([image(64)])
    assert not shapes.have([image(65)])


def test_what_is_remembered_is_bounded_and_what_was_used_last_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("training.engine.batches._MOST_KEYS", 16)
    shapes = CompiledShapes(Stage("default"))
    shapes.add([image(1), image(2)])
    for width in range(3, 40):
        shapes.add([image(width), image(1)])
    assert not shapes.have([image(2)])
    assert shapes.have([image(1), image(39)])


class _Fixed(Samples):
    """Names the generator in its signature alone."""

    def __len__(self) -> int:
        return 9

    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return index


class _Drawing(_Fixed):
    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return torch.rand((), generator=rng).item()


class _Inheriting(_Drawing):
    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return super().get(index, epoch, rng)


class _Enclosing(_Fixed):
    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return (lambda: torch.rand((), generator=rng).item())()


class _Unnamed(_Fixed):
    def get(self, *given: Any) -> Any:
        return torch.rand((), generator=given[2]).item()


class _Reading(_Fixed):
    def get(self, index: int, epoch: int, rng: torch.Generator) -> Any:
        return torch.rand((), generator=locals()["rng"]).item()


class _Wrapped(_Fixed):
    get = partialmethod(_Drawing.get)  # type: ignore[assignment, arg-type]


def test_the_generator_is_seeded_for_every_sample_that_may_draw_from_it() -> None:
    drawn = []
    for samples in (_Drawing(), _Inheriting(), _Enclosing(), _Unnamed(), _Reading(), _Wrapped()):
        maker = Maker(samples, 7)
        drawn.append(maker.items(0, [3, 4]) + maker.items(1, [4, 3]))
    assert drawn == drawn[:1] * 6
    assert len(set(drawn[0])) == 4
    assert not Maker(_Fixed(), 7)._draws


@dataclass(frozen=True)
class _Pair:
    x: Tensor
    name: str = "a"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name * 2)


def test_a_batch_keeps_its_type_where_it_is_moved() -> None:
    from transformers import BatchEncoding

    class Own:
        def to(self, device: torch.device) -> str:
            return device.type

    class Named(NamedTuple):
        x: Tensor

        def to(self, device: torch.device) -> str:
            return device.type

    x = torch.ones(3, 2)
    encoding = BatchEncoding({"x": x, "spans": [{"a": x}]})
    assert TinyTrain(config=TinyConfig(), name="a", width=2).weight(encoding) == 3
    batch = {"text": encoding, "packed": pack_sequence([x[0], x[1, :1]]), "own": [Own(), Named(x)]}
    moved = to_device({**batch, "pair": (_Pair(x), 1)}, torch.device("meta"))
    assert moved["text"].x.is_meta and moved["text"]["spans"][0]["a"].is_meta
    assert not encoding.x.is_meta
    assert (moved["packed"].data.is_meta, moved["packed"].batch_sizes.is_meta) == (True, False)
    assert moved["own"] == ["meta", "meta"]
    assert (moved["pair"][0].x.is_meta, moved["pair"][0].name) == (True, "aa")
