"""A sharded state is written by all ranks, published once, and read by any number of ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.training.damage import flip
from tests.training.durable.attempt.processes import on_ranks
from tests.training.save_scene import open_context
from training.durable.attempt.resume_point import DamagedCheckpointError
from training.durable.attempt.world import AttemptContext, World
from training.durable.errors import GoBackError
from training.durable.record.head import Head, Position
from training.durable.save.tensors.checkpointer import Checkpointer
from training.durable.save.tensors.policy import CheckpointPolicy
from training.durable.save.tensors.resume import (
    CheckpointContent,
    ShardedContent,
    read_state,
    slices_of,
)
from training.durable.save.tensors.state import LiveState
from training.durable.store.folder import FolderStore

POSITION = Position(stage="a", stage_step=4, step=4)


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "rows": torch.randn(7, 3, generator=generator),  # uneven over 2 and over 3
        "columns": torch.randn(4, 5, generator=generator).bfloat16(),
        "one row": torch.randn(1, 6, generator=generator),  # some ranks have nothing
        "replicated": torch.randn(3, generator=generator),
        "plain": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
    }


PLACEMENTS: dict[int, dict[str, Any]] = {
    2: {"rows": Shard(0), "columns": Shard(1), "one row": Shard(0), "replicated": Replicate()},
    3: {"rows": Shard(1), "columns": Shard(0), "one row": Shard(1), "replicated": Shard(0)},
}


def distributed(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    placements = PLACEMENTS[world.size]
    return {
        name: distribute_tensor(tensor, mesh, [placements[name]]) if name in placements else tensor
        for name, tensor in tensors.items()
    }


def policy_of(context: AttemptContext, live: LiveState) -> CheckpointPolicy:
    checkpointer = Checkpointer(context) if context.world.leads else None
    return CheckpointPolicy(context, checkpointer, 1, lambda: live, is_sharded=True)


def newest(root: Path, world: World) -> ShardedContent:
    store = FolderStore(root / "run")
    head = Head.read(store)
    assert head is not None
    entry = head.checkpoints[-1]
    state = read_state(store, entry)
    snapshot = ShardedContent(store, entry, state, slices_of(store, entry, state))
    assert snapshot.verify(world.rank, world.size) is None
    return snapshot


def write(world: World, root: Path) -> None:
    context = open_context(FolderStore(root / "run"), root, world=world)
    tensors = distributed(whole_tensors(), world)
    capture = LiveState(tensors={"model": tensors}, state={"k": 1})
    policy_of(context, capture).save_stage_end(POSITION)
    assert (root / "run" / "head.json").exists()
    context.metrics.close()


def read_on_three(world: World, root: Path) -> None:
    empty = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
    targets = distributed(empty, world)
    snapshot = newest(root, world)
    snapshot.fill({"model": targets})
    assert snapshot.state["k"] == 1
    expected = distributed(whole_tensors(), world)
    for name, target in targets.items():
        mine = getattr(target, "_local_tensor", target)
        theirs = getattr(expected[name], "_local_tensor", expected[name])
        assert torch.equal(mine, theirs), name


def test_two_ranks_write_and_one_or_three_read(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, write)
    store = FolderStore(tmp_path / "run")
    head = Head.read(store)
    assert head is not None
    (entry,) = head.checkpoints
    assert sorted(file.name for file in entry.files) == [
        "model.rank-0000.safetensors",
        "model.rank-0001.safetensors",
        "model.whole.safetensors",  # what is not sharded
        "state.json",
    ]
    snapshot = CheckpointContent.read(store, entry)
    assert snapshot.state["k"] == 1
    for name, tensor in whole_tensors().items():
        assert snapshot.tensors["model"][name].dtype == tensor.dtype
        assert torch.equal(snapshot.tensors["model"][name], tensor), name
    on_ranks(3, tmp_path, read_on_three)

    flip(tmp_path / "run" / "checkpoints" / entry.name / "model.rank-0001.safetensors", -1)
    with pytest.raises(DamagedCheckpointError, match=r"rank-0001\.safetensors does not match"):
        CheckpointContent.read(store, entry)


def read_on_two(world: World, root: Path) -> None:
    read, read_into = [], FolderStore.read_into

    def note(store: FolderStore, key: str, start: int, data: memoryview) -> None:
        read.append(key.rpartition("/")[2])
        read_into(store, key, start, data)

    FolderStore.read_into = note  # type: ignore[method-assign]
    empty = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
    newest(root, world).fill({"model": distributed(empty, world)})
    others = f"model.rank-{1 - world.rank:04d}.safetensors"
    assert "model.whole.safetensors" in read and others not in read, read


def test_as_many_ranks_as_wrote_it_read_their_own_shares_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's had what is not sharded, such as Adam's steps, so that each rank read it."""
    monkeypatch.delitem(PLACEMENTS[2], "replicated")  # as FSDP's are: a plain tensor
    on_ranks(2, tmp_path, write)
    on_ranks(2, tmp_path, read_on_two)


def write_with_a_nan(world: World, root: Path) -> None:
    context = open_context(FolderStore(root / "run"), root, world=world)
    tensors = distributed(whole_tensors(), world)
    if world.rank == 1:
        tensors["rows"]._local_tensor[0, 0] = float("nan")  # type: ignore[attr-defined]
    policy = policy_of(context, LiveState(tensors={"model": tensors}, state={}))
    with context.consensus.noting_divergence():
        policy.save_stage_end(POSITION)
    with pytest.raises(GoBackError) as raised:
        context.consensus.go_back_if_diverged()
    if world.leads:
        assert raised.value.divergence is not None
        assert raised.value.divergence.step == POSITION.step
        assert re.match(r"rank 1: .+rows contains a NaN", raised.value.divergence.message)
    context.metrics.close()


def test_every_rank_goes_back_where_one_has_weights_that_are_no_numbers(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, write_with_a_nan)
    head = Head.read(FolderStore(tmp_path / "run"))
    assert head is not None
    assert head.checkpoints == ()
