"""Attempts are forked only from a process that has not called CUDA."""

import pytest
import torch

from tests.training.forked import in_fork
from training.errors import UserError
from training.proof.forks import refuse_started_cuda


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch knows no CUDA")
def test_fails_for_a_workload_that_has_called_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        with pytest.raises(UserError) as caught:
            # What a plain torch.cuda.is_available() does.
            torch._C._cuda_getDeviceCount()
            refuse_started_cuda("mine:MINE")
        return str(caught.value)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert in_fork(lambda: refuse_started_cuda("mine:MINE")) is None
    assert in_fork(refused).startswith("workload 'mine:MINE' called CUDA when it was imported")


def test_without_a_gpu_nothing_is_refused() -> None:
    assert torch.cuda.device_count() or in_fork(lambda: refuse_started_cuda("mine:MINE")) is None
