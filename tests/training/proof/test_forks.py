"""Attempts are forked only from a process that has not called CUDA."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.training.forked import in_fork
from training.proof.experiment import refuse_started_cuda

ROOT = Path(__file__).parents[3]
# A process of its own: the tests before this one may have asked for GPUs in pytest's.
PROGRAM = """
import torch
from training.durable.errors import UserError
from training.proof.experiment import refuse_started_cuda

torch.cuda.device_count = lambda: 1
refuse_started_cuda("mine:MINE")
torch._C._cuda_getDeviceCount()  # what a plain torch.cuda.is_available() does
try:
    refuse_started_cuda("mine:MINE")
except UserError as error:
    print(error)
"""


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch knows no CUDA")
def test_fails_for_a_workload_that_has_called_cuda() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("workload 'mine:MINE' called CUDA when it was imported")


def test_without_a_gpu_nothing_is_refused() -> None:
    assert torch.cuda.device_count() or in_fork(lambda: refuse_started_cuda("mine:MINE")) is None
