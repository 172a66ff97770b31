"""Attempts are forked from the command's process: what it must leave to forks, or to others."""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from training.errors import UserError
from training.store.local_dataset import open_dataset, write_manifest
from training.workload import Workload

_DATASET_SEED = 0


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
            f"workload {workload!r} called CUDA when it was imported; its attempts are forked from "
            "the same process, where CUDA starts only once: leave the GPU to the stages, which "
            "find it in Inputs.device"
        )


def made_dataset(given: str | None, workload: Workload[Any], count: int, folder: Path) -> Path:
    """The folder that is given, or a new one, filled by the workload's own generator."""
    if given is not None:
        open_dataset(Path(given))
        return Path(given)
    folder.mkdir()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # threads and pools that a generator starts end with the child
        code = 1
        try:
            meta = workload.make_dataset(folder, count, _DATASET_SEED, lambda done, total: None)
            write_manifest(folder, workload.name, meta)
            code = 0
        except UserError as error:
            os.write(writer, str(error).encode())
        except BaseException:  # the child must end here, whatever the generator raises
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise UserError(said or f"workload {workload.name!r} cannot make its dataset; see above")
    return folder
