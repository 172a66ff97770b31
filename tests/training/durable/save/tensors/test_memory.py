"""How much memory is free is read from the system and from the unit's own limit."""

import ctypes
import gc
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.training.forked import in_fork
from training.durable.save.tensors import memory
from training.durable.save.tensors.memory import allocate, available_bytes, view_of
from training.durable.save.tensors.state import HostCopy, LiveState
from training.preflight.admission import limit_memory

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
    monkeypatch.setattr("training.durable.save.tensors.memory._MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr("training.durable.save.tensors.memory._OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr("training.durable.save.tensors.memory._CGROUP", tmp_path / "cgroup")
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


def test_a_block_that_the_limit_refuses_is_a_lack_of_memory_like_any_other() -> None:
    def refused() -> str:
        limit_memory(50, CPU)
        with pytest.raises(MemoryError) as error:
            allocate(GIB, CPU)
        return str(error.value)

    assert in_fork(refused) == f"{GIB} bytes of host memory: Cannot allocate memory"


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = ([int(end, 16) for end in line.split()[0].split("-")] for line in lines)
    return any(first <= address < last for first, last in ranges)


def test_a_forked_child_has_nothing_of_a_block() -> None:
    block = allocate(5_000_000, CPU)
    address = block.data_ptr()
    assert is_mapped(address)
    assert not in_fork(lambda: is_mapped(address)), "a loader worker would copy it"
    block.fill_(1)


def test_a_forked_child_that_frees_a_block_keeps_its_own_memory_there() -> None:
    blocks = [allocate(8192, CPU)]
    address = blocks[0].data_ptr()

    def free() -> bytes:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        # Private and anonymous, readable and writable, where the parent has its block.
        place = libc.mmap(ctypes.c_void_p(address), 8192, 3, 0x22, -1, 0)
        assert place == address
        ctypes.memset(address, 7, 8192)
        blocks.clear()
        gc.collect()
        return ctypes.string_at(address, 8192)

    assert in_fork(free) == bytes([7]) * 8192


class Runtime:
    """Stands in for CUDA's runtime, which cannot be called without a GPU."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered.append(address)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "out of memory"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made this thread's own, and those where a kernel was launched."""
    found: list[torch.device] = []

    def use(device: torch.device) -> object:
        found.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(torch, "ones", lambda size, device: found.append(device))
    return found


def test_memory_is_locked_and_unlocked_for_the_device_that_was_named(
    devices: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime(error=0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    second = torch.device("cuda", 1)
    block = allocate(5000, second)
    assert runtime.registered == [block.data_ptr()]
    del block
    assert runtime.registered == []
    assert devices == [second, second], "a new thread would open a context on GPU 0"


def test_memory_that_cannot_be_locked_is_pageable_and_leaves_no_error_behind(
    devices: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = Runtime(error=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    second = torch.device("cuda", 1)
    with caplog.at_level(logging.WARNING, "training"):
        block = allocate(5_000_000, second)
    assert "5 MB of host memory could not be page-locked (out of memory)" in caplog.text
    assert devices == [second, second], "the launch of a kernel that reports the error"
    block.fill_(3)
    del block


@pytest.mark.gpu
def test_the_error_of_memory_that_cannot_be_locked_does_not_reach_the_next_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = torch.device("cuda", 0)
    block = allocate(8192, device)
    with caplog.at_level(logging.WARNING, "training"):
        assert memory.page_lock(block.data_ptr(), 8192, device) is None, "it is locked already"
    assert "could not be page-locked" in caplog.text
    assert torch.ones(1, device=device).item() == 1.0


@pytest.mark.gpu
def test_a_forked_child_copies_no_page_locked_memory() -> None:
    block = allocate(256 * 2**20, torch.device("cuda", 0)).fill_(1)
    assert block.is_pinned()
    private = in_fork(lambda: Path("/proc/self/smaps_rollup").read_text())
    dirty = next(int(x.split()[1]) for x in private.splitlines() if x.startswith("Private_Dirty"))
    assert dirty < 128 * 1024, "KiB; the kernel copies page-locked memory at a fork"


ON_THE_SECOND_GPU = """
import threading, torch
from training.durable.save.tensors.memory import allocate
torch.cuda.set_device(1)
torch.zeros(1, device="cuda:1")
thread = threading.Thread(target=lambda: allocate(5_000_000, torch.device("cuda", 1)))
thread.start(); thread.join()
assert torch._C._cuda_hasPrimaryContext(1) and not torch._C._cuda_hasPrimaryContext(0)
"""


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_a_thread_of_the_second_rank_opens_no_context_on_gpu_0() -> None:
    subprocess.run([sys.executable, "-c", ON_THE_SECOND_GPU], check=True, timeout=300)


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


@pytest.mark.gpu
def test_a_copy_has_all_of_the_step_before_it_and_nothing_of_the_step_after() -> None:
    device = torch.device("cuda", 0)
    weights, busy = torch.zeros(2**24, device=device), torch.randn(4096, 4096, device=device)
    live = LiveState(tensors={"model": {"w": weights}}, state={})
    copy = HostCopy(live)
    for step in range(5):
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        weights.add_(1.0)
        copy.fill(live)
        weights.add_(100.0).sub_(100.0)
        assert copy.tensors["model"]["w"].unique().tolist() == [step + 1.0]
