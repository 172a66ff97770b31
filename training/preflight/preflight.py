"""What is settled before an attempt begins: where the run begins from, and what its memory holds.

The answers stand in the run (config.json, adaptation.json) from its first attempt on.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from training.capabilities import HasDataInMemory
from training.config import resolve_config
from training.engine.origin import Origin, with_origin
from training.engine.parallel import is_sharded
from training.errors import UserError
from training.preflight.admission import ResourceRequest
from training.preflight.extend import resolve_origin
from training.preflight.ladder import TrialRequest, adapted, explain, resolve_adaptation
from training.preflight.limits import is_out_of_memory, limit_memory
from training.preflight.workload_checks import problems
from training.store.dataset import MANIFEST
from training.store.open import open_store
from training.store.protocol import Store
from training.workload import Train, Workload
from training.workloads import load_workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The workload as this run trains it."""

    workload: Workload[Any]
    config: Any
    origin: Origin | None
    need: ResourceRequest

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Whoever runs out of memory in here is told what to do."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise explain(error, self.workload, self.config) from error


def settle(
    options: argparse.Namespace,
    store: Store,
    run_id: str,
    overrides: Mapping[str, str],
    num_ranks: int = 1,
) -> Settled:
    """Settle it; memory is tried only where it is limited, by a GPU or by --memory-limit-mib.

    A trial is one process with the whole model, so none is made for one that ranks share.
    """
    workload = load_workload(options.workload)
    wrong = problems(workload)
    if wrong:
        raise UserError(f"workload {options.workload!r} cannot be trained: {wrong[0]}")
    config = resolve_config(workload, options.recipe, overrides)
    _refuse_wrong_settings(workload, config)
    origin = resolve_origin(
        store,
        init_from=options.init_from,
        extend_to=options.extend_to,
        workload=(options.workload, workload),
        recipe=options.recipe,
        overrides=overrides,
        identity=(run_id, options.writer),
    )
    is_limited = torch.cuda.is_available() or options.memory_limit_mib is not None
    asked = TrialRequest(
        workload=options.workload,
        recipe=options.recipe,
        overrides=overrides,
        memory_limit_mib=options.memory_limit_mib,
    )
    rungs = resolve_adaptation(
        store,
        asked,
        workload,
        config,
        may_adapt=is_limited and not options.no_adapt and not _shards(workload, config, num_ranks),
    )
    if options.memory_limit_mib is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        limit_memory(options.memory_limit_mib, device)
    if origin is not None:
        workload = with_origin(workload, origin)
    workload = adapted(workload, rungs)
    need = resource_request(
        store.uri, workload, config, options.dataset_uri, options.memory_limit_mib
    )
    need = replace(need, num_processes=options.num_processes or max(1, torch.cuda.device_count()))
    return Settled(workload=workload, config=config, origin=origin, need=need)


def _shards(workload: Workload[Any], config: Any, num_ranks: int) -> bool:
    """Whether a stage is sharded; that nothing is tried then is said."""
    for stage in workload.stages(config):
        if isinstance(stage, Train) and is_sharded(stage.settings, num_ranks):
            print(
                f"[memory] stage {stage.name!r} is sharded over {num_ranks} ranks: whether memory "
                "suffices is not tried at the start",
                flush=True,
            )
            return True
    return False


def _refuse_wrong_settings(workload: Workload[Any], config: Any) -> None:
    """Settings are checked when they are made."""
    try:
        for stage in workload.stages(config):
            if isinstance(stage, Train):
                assert stage.settings
    except ValueError as error:
        raise UserError(f"the config of workload {workload.name!r} cannot be: {error}") from error


def resource_request(
    run: str, workload: Workload[Any], config: Any, dataset_uri: str, gpu_limit: int | None
) -> ResourceRequest:
    """What a run takes of its machine."""
    data = 0
    if isinstance(workload, HasDataInMemory):
        found = open_store(dataset_uri).get(MANIFEST)
        files = json.loads(found.data)["files"] if found else []
        data = workload.data_bytes_in_memory(config, sum(file["bytes"] for file in files))
    stages = [stage for stage in workload.stages(config) if isinstance(stage, Train)]
    return ResourceRequest(
        run=run,
        data_mib=-(-data // 2**20),
        loader_workers=max(stage.settings.loader_workers for stage in stages),
        threads=config.num_threads,
        gpu_mib=gpu_limit,
    )


def gpu_mib() -> list[int]:
    """Memory of each GPU of this machine."""
    num = torch.cuda.device_count()
    return [torch.cuda.get_device_properties(k).total_memory // 2**20 for k in range(num)]
