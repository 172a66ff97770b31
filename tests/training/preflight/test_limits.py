"""Out of memory is recognised in every form that torch gives it; a limit is this rank's GPU's."""

from types import SimpleNamespace

import pytest
import torch

from contract.grammar import parse_interval
from tests.training.runs import WORKLOAD, Run
from training.durable.attempt.world import RankEnvironment
from training.engine.job import RunOptions
from training.preflight.admission import is_out_of_memory, limit_memory
from training.preflight.preflight import preflight

# torch 2.8 and later have an error of its own for what a device reports.
DEVICE_ERROR = getattr(torch, "AcceleratorError", RuntimeError)
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        DEVICE_ERROR(f"CUDA error: out of memory{HINT}"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDn`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError(
            "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        DEVICE_ERROR(f"CUDA error: device-side assert triggered{HINT}"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        ValueError("shapes differ"),
    ],
)
def test_another_error_is_not_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(("free_mib", "is_full"), [(20, True), (4000, False), (None, False)])
def test_a_library_that_could_not_start_ran_out_of_memory_if_the_gpu_is_full(
    free_mib: int | None, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mem_get_info() -> tuple[int, int]:
        if free_mib is None:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return free_mib * 2**20, 16 * 2**30

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    created = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(created)) == is_full


def test_the_limit_of_a_rank_is_set_on_its_own_gpu(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[float, int]] = []
    # torch's own functions, down to what only works with a GPU.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.memory._lazy_init", lambda: None)
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=2**30)
    )
    monkeypatch.setattr(
        "torch._C._cuda_setMemoryFraction",
        lambda share, device: limits.append((share, device)),
        raising=False,
    )
    options = RunOptions(
        workload=WORKLOAD,
        recipe="quick",
        overrides={},
        dataset_uri=str(run.dataset),
        store=run.store,
        run_id="run-1",
        interval=parse_interval("3steps"),
        lease_ttl_seconds=1,
        memory_limit_mib=256,
        no_adapt=True,
        writer="i-1",
        scratch=run.scratch,
        environment=RankEnvironment(rank=1, world_size=2, local_rank=1),
    )
    preflight(options)
    assert limits == [(0.25, 1)]


@pytest.mark.gpu
def test_what_exceeds_the_limit_of_a_gpu_is_out_of_memory() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.get_per_process_memory_fraction(device)
    limit_memory(512, device)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**30, dtype=torch.uint8, device=device)
        assert is_out_of_memory(caught.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
