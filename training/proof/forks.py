"""Whether attempts can be forked from this process: not once it has started CUDA."""

import os

import torch

from training.errors import UserError


def refuse_started_cuda(workload: str) -> None:
    """Refuse to fork attempts that could not use the GPU, because this process has called CUDA."""
    if not torch.cuda.device_count():
        return
    pid = os.fork()
    if pid == 0:
        # torch keeps no other account of a call that did not start all of CUDA.
        os._exit(int(torch.cuda._is_in_bad_fork()))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise UserError(
            f"workload {workload!r} called CUDA when it was imported or made its dataset; its "
            "attempts are forked from the same process, where CUDA starts only once: leave the "
            "GPU to the stages, which find it in Inputs.device"
        )
