"""Machines on one run in a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.durable.save.scene import Machine, NewMachine
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "run")


@pytest.fixture
def new_machine(store: Store, tmp_path: Path) -> Iterator[NewMachine]:
    """Makes a machine of this name that has taken the lease and restored."""
    machines: list[Machine] = []

    def make(name: str, on: Store = store, **options: Any) -> Machine:
        machines.append(Machine(on, tmp_path / name, **options))
        return machines[-1]

    yield make
    for machine in machines:
        machine.vanish()
