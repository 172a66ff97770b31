"""How much memory is free is read from the system and from the unit's own limit."""

from pathlib import Path

import pytest
import torch

from training.checkpoint.memory import allocate, available_bytes, view_of
from training.checkpoint.state import HostCopy, LiveState

CPU = torch.device("cpu")
GIB = 1024**3


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB free, in a cgroup without a limit."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {8 * GIB // 1024} kB\n")
    (tmp_path / "own").write_text("0::/system.slice/training.service\n")
    folder = tmp_path / "cgroup" / "system.slice" / "training.service"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    (folder / "memory.current").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\n")
    monkeypatch.setattr("training.checkpoint.memory._MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("training.checkpoint.memory._OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr("training.checkpoint.memory._CGROUP", tmp_path / "cgroup")
    return tmp_path


def test_without_a_limit_the_machine_s_free_memory_counts(system: Path) -> None:
    assert available_bytes() == 8 * GIB


def test_the_unit_s_limit_counts_where_it_is_nearer(system: Path) -> None:
    path = system / "cgroup" / "system.slice" / "training.service" / "memory.max"
    path.write_text(f"{4 * GIB}\n")
    assert available_bytes() == 2 * GIB, "4 GiB, 3 of them used, 1 of these given up at need"
    path.write_text(f"{100 * GIB}\n")
    assert available_bytes() == 8 * GIB


def test_a_system_that_does_not_say_is_not_guessed_at(system: Path) -> None:
    (system / "meminfo").unlink()
    assert available_bytes() is None


def test_this_system_says() -> None:
    free = available_bytes()
    assert free is None or 0 < free < 2**50


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_block_begins_at_a_page_and_can_be_written(size: int) -> None:
    block = allocate(size, CPU)
    assert len(block) == len(view_of(block)) == size
    assert block.data_ptr() % 4096 == 0
    block.fill_(7)
    assert set(view_of(block).tolist()) <= {7}


@pytest.mark.gpu
def test_a_copy_of_a_state_on_a_gpu_is_page_locked_and_exact() -> None:
    device = torch.device("cuda")
    weights = torch.randn(1000, 1000, device=device)
    capture = LiveState(
        tensors={"model": {"w": weights, "t": weights.t(), "n": torch.tensor(3)}}, state={}
    )
    image = HostCopy(capture)
    image.fill(capture)
    copies = image.tensors["model"]
    assert copies["w"].is_pinned()
    assert torch.equal(copies["w"], weights.cpu())
    assert torch.equal(copies["t"], weights.t().cpu())
    weights.zero_()
    assert copies["w"].abs().sum() > 0
