"""For every run of `check`: its process has a GPU, as far as it can see, and must not touch it."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _a_gpu_that_this_process_must_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempts, which are forked, see what there really is."""
    owner, counted = os.getpid(), torch.cuda._device_count_nvml

    def count() -> int:
        return 1 if os.getpid() == owner else counted()

    monkeypatch.setattr(torch.cuda, "_device_count_nvml", count)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    # Tests before these may have called CUDA in pytest's process, and torch does not forget it.
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    for name in ("_cuda_init", "_cuda_getDeviceCount"):
        call = getattr(torch._C, name, None)
        if call is None:  # a torch without CUDA
            continue

        def called(*arguments: int, name: str = name, call: object = call) -> object:
            assert os.getpid() != owner, f"{name} was called by the process that forks"
            assert callable(call)
            return call(*arguments)

        monkeypatch.setattr(torch._C, name, called)
