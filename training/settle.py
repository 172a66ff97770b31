"""What is settled before an attempt begins: where the run begins from, and what its memory holds.

The answers stand in the run (config.json, adaptation.json) from its first attempt on.
"""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from training.config import resolve_config
from training.extend import settle_origin
from training.ladder import Asked, adapted, explain, settle_adaptation
from training.limits import is_out_of_memory, limit_memory
from training.origin import Origin, beginning_from
from training.store import Store
from training.workload import Workload
from training.workloads import load_workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The workload as this run trains it."""

    workload: Workload[Any]
    config: Any
    origin: Origin | None

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
    options: argparse.Namespace, store: Store, run_id: str, overrides: Mapping[str, str]
) -> Settled:
    """Settle it; memory is tried only where it is limited, by a GPU or by --memory-limit-mib."""
    workload = load_workload(options.workload)
    config = resolve_config(workload, options.recipe, overrides)
    origin = settle_origin(
        store,
        init_from=options.init_from,
        extend_to=options.extend_to,
        workload=(options.workload, workload),
        recipe=options.recipe,
        overrides=overrides,
        identity=(run_id, options.writer),
    )
    is_limited = torch.cuda.is_available() or options.memory_limit_mib is not None
    asked = Asked(
        workload=options.workload,
        recipe=options.recipe,
        overrides=overrides,
        memory_limit_mib=options.memory_limit_mib,
    )
    rungs = settle_adaptation(
        store, asked, workload, config, may_adapt=is_limited and not options.no_adapt
    )
    if options.memory_limit_mib is not None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        limit_memory(options.memory_limit_mib, device)
    if origin is not None:
        workload = beginning_from(workload, origin)
    return Settled(workload=adapted(workload, rungs), config=config, origin=origin)
