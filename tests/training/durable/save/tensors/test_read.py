"""Checkpoints hold any state_dict exactly, without pickle, in memory that gives the same bits."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.training.durable.save.scene import take_lease
from tests.training.save_scene import write_state
from training.durable.attempt.resume_point import DamagedCheckpointError, newest_valid
from training.durable.errors import MachineError
from training.durable.record.head import CheckpointEntry, Retention
from training.durable.record.metrics import Events
from training.durable.save.tensors.resume import CheckpointContent
from training.durable.save.tensors.state import LiveState, _find_nan
from training.durable.save.tensors.weights import weights_sha256
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store
from training.engine.optimizer import flatten_state, unflatten_state


def save(store: Store, step: int, value: float = 1.0) -> CheckpointEntry:
    tensors = {"model": {"w": torch.full((3, 5), value)}, "optimizer": {}}
    return write_state(store, LiveState(tensors=tensors, state={"step": step}), step)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_comes_back_exactly(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    optimizer = kind(groups, lr=0.01)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    tensors: dict[str, torch.Tensor] = {}
    state = optimizer.state_dict()
    back = unflatten_state(flatten_state(state, tensors), tensors)
    assert back["param_groups"] == state["param_groups"]
    assert back["state"].keys() == state["state"].keys()
    kind(groups, lr=0.5).load_state_dict(back)


class Pair(NamedTuple):
    a: int
    b: torch.Tensor


def test_types_of_usual_optimizers_come_back() -> None:
    state = {"shape": torch.Size((2, 3)), "pair": Pair(1, torch.ones(2)), "dtype": torch.bfloat16}
    tensors: dict[str, torch.Tensor] = {}
    skeleton = json.loads(json.dumps(flatten_state(state, tensors)))
    back = unflatten_state(skeleton, tensors)
    assert back == {"shape": (2, 3), "pair": (1, tensors["/pair/1"]), "dtype": torch.bfloat16}
    older = {"Size": [{"value": 2}, {"value": 3}]}
    assert unflatten_state(older, {}) == (2, 3)


def test_fails_for_a_state_that_json_cannot_hold() -> None:
    with pytest.raises(TypeError, match="/hook: a function cannot be stored"):
        flatten_state({"hook": lambda: None}, {})


def test_what_is_read_lies_in_aligned_memory(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    tensors = {f"t{k}": torch.ones(k + 1) for k in range(9)}
    back = CheckpointContent.read(
        store, write_state(store, LiveState(tensors={"model": tensors}, state={}))
    )
    assert all(tensor.data_ptr() % 16 == 0 for tensor in back.tensors["model"].values())


def test_the_newest_that_holds_is_used_and_the_others_are_named(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    lease, events = take_lease(store, "i-1"), Events(store, "i-1")
    entries = [save(store, step) for step in (1, 2, 3, 4)]
    root = tmp_path / "store" / "checkpoints"
    (root / entries[3].name / "model.safetensors").unlink()
    state = root / entries[2].name / "state.json"
    state.write_bytes(state.read_bytes()[:-1])
    for entry in entries:
        lease.publish(entry, retention=Retention(newest=9))
    loaded, passed_over = newest_valid(store, lease, events, CheckpointContent.read)
    assert loaded is not None
    assert loaded.entry == entries[1]
    assert passed_over == (
        (entries[3].name, "model.safetensors is missing"),
        (entries[2].name, "state.json has 10 bytes instead of 11"),
    )
    for entry in entries[:2]:
        (root / entry.name / "state.json").unlink()
    with pytest.raises(MachineError, match=r"none of the 4 checkpoints .* all of them are kept"):
        newest_valid(store, lease, events, CheckpointContent.read)
    with pytest.raises(DamagedCheckpointError):
        CheckpointContent.read(store, entries[3])


def test_tied_and_strided_tensors_can_be_kept(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": shared, "b": shared, "c": shared.t(), "d": shared[:, ::2]}
    store = FolderStore(tmp_path)
    back = CheckpointContent.read(
        store, write_state(store, LiveState(tensors={"model": tensors}, state={}))
    )
    assert all(torch.equal(back.tensors["model"][name], tensors[name]) for name in tensors)
    assert back.tensors["model"]["c"].is_contiguous()


def test_a_nan_is_found_and_an_infinity_is_not() -> None:
    mask = torch.tensor([0.0, float("-inf")])
    assert _find_nan({"mask": mask, "ids": torch.tensor([1])}) is None
    assert _find_nan({"mask": mask, "w": torch.tensor([float("nan")])}) == "w"
    for bad in (complex(1, float("nan")), complex(float("nan"), 1)):
        assert _find_nan({"mask": mask, "w": torch.tensor([bad]).conj()}) == "w"


def test_the_weights_hash_sees_names_shapes_types_and_bits() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0, dtype=torch.bfloat16)}
    variants = [
        {"a": one["a"]},
        {**one, "a": one["a"].reshape(1, 2)},
        {**one, "a": one["a"].double()},
        {**one, "a": torch.tensor([1.0, 2.0000002])},
        {"c": one["a"], "b": one["b"]},
    ]
    hashes = {weights_sha256(tensors) for tensors in [one, *variants]}
    assert len(hashes) == 1 + len(variants)
    assert weights_sha256(dict(reversed(one.items()))) == weights_sha256(one)
