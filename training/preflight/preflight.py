"""Everything that is checked before an attempt starts: workload, origin, memory, machine.

The answers stand in the run (config.json, adaptation.json) from its first attempt on.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from contract.keys import MANIFEST
from training.config import resolve_config
from training.engine.job import ResolvedWorkload, RunOptions, checked_stages
from training.engine.loader import num_workers
from training.engine.numerics import device_of
from training.engine.origin import with_origin
from training.engine.parallel import is_sharded
from training.errors import UserError
from training.preflight.admission import ResourceRequest
from training.preflight.extend import resolve_origin
from training.preflight.ladder import TrialRequest, adapted, explain, resolve_adaptation
from training.preflight.limits import is_out_of_memory, limit_memory
from training.preflight.workload_checks import problems
from training.registry import load_workload
from training.store.local_dataset import parse_manifest
from training.store.open import open_store
from training.workload import Prepare, Train, Workload, implements

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """A job that has passed every check, and what it takes of its machine."""

    job: ResolvedWorkload
    request: ResourceRequest

    @contextmanager
    def explaining_out_of_memory(self) -> Iterator[None]:
        """Turn an out-of-memory error into a sentence that says what to do."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise explain(error, self.job.workload, self.job.config) from error


def preflight(options: RunOptions) -> Preflight:
    """Check a run; UserError says what is wrong.

    Memory is tried only where it is limited, by a GPU or by --memory-limit-mib. A trial is one
    process with the whole model, so there is none for a model that the ranks share.
    """
    workload = load_workload(options.workload)
    wrong = problems(workload)
    if wrong:
        raise UserError(f"workload {options.workload!r} cannot be trained: {wrong[0]}")
    config = resolve_config(workload, options.recipe, options.overrides)
    checked_stages(workload, config)
    origin = resolve_origin(options, workload, config)
    limit = options.memory_limit_mib
    is_limited = torch.cuda.is_available() or limit is not None
    num_ranks = options.environment.ranks(options.num_processes)
    may_adapt = is_limited and not options.no_adapt
    trial = TrialRequest(
        workload=options.workload,
        recipe=options.recipe,
        overrides=options.overrides,
        memory_limit_mib=limit,
    )
    rungs = resolve_adaptation(
        options.store,
        trial,
        workload,
        config,
        may_adapt=may_adapt and not _has_sharded_stage(workload, config, num_ranks),
    )
    if limit is not None:
        limit_memory(limit, device_of(options.environment.local_rank))
    if origin is not None:
        workload = with_origin(workload, origin)
    workload = adapted(workload, rungs)
    job = ResolvedWorkload(
        workload=workload, config=config, stages=checked_stages(workload, config), origin=origin
    )
    _refuse_in_backward(job.stages, num_ranks)
    num_processes = options.num_processes or max(1, torch.cuda.device_count())
    request = resource_request(
        options.store.uri, workload, config, options.dataset_uri, limit, num_processes
    )
    return Preflight(job=job, request=request)


def _refuse_in_backward(stages: Sequence[Prepare | Train], num_ranks: int) -> None:
    """Refuse an optimizer in backward on several ranks, which sum their gradients first.

    Now, and not when the stage begins, after others have been trained.
    """
    for stage in stages:
        if num_ranks > 1 and isinstance(stage, Train) and stage.settings.optimizer_in_backward:
            raise UserError(
                f"stage {stage.name!r} has optimizer_in_backward: {num_ranks} processes would each "
                "update with gradients of their own; give --num-processes 1, or overrides with "
                "which its settings have optimizer_in_backward=False"
            )


def _has_sharded_stage(workload: Workload[Any], config: Any, num_ranks: int) -> bool:
    """Whether a stage is sharded; logs that memory is then not tried."""
    for stage in workload.stages(config):
        if isinstance(stage, Train) and is_sharded(stage.settings, num_ranks):
            _log.info(
                "[memory] stage %r is sharded over %d ranks: whether memory suffices is not tried "
                "at the start",
                stage.name,
                num_ranks,
            )
            return True
    return False


def resource_request(
    run: str,
    workload: Workload[Any],
    config: Any,
    dataset_uri: str,
    gpu_limit: int | None,
    num_processes: int = 1,
) -> ResourceRequest:
    """What a run takes of its machine."""
    data = 0
    if implements(workload, Workload.data_bytes_in_memory):
        found = open_store(dataset_uri).get(MANIFEST)
        files = parse_manifest(found.data, dataset_uri)["files"] if found else []
        data = workload.data_bytes_in_memory(config, sum(file["bytes"] for file in files))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers = [
        num_workers(
            stage.settings.loader_workers,
            device=device,
            num_threads=config.num_threads,
            num_ranks=num_processes,
        )
        for stage in workload.stages(config)
        if isinstance(stage, Train)
    ]
    return ResourceRequest(
        run=run,
        data_mib=-(-data // 2**20),
        loader_workers=max(workers),
        threads=config.num_threads,
        gpu_mib=gpu_limit,
        num_processes=num_processes,
    )


def gpu_mib() -> list[int]:
    """Memory of each GPU of this machine, in MiB."""
    num = torch.cuda.device_count()
    return [torch.cuda.get_device_properties(k).total_memory // 2**20 for k in range(num)]
