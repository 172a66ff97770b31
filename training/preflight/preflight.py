"""The checks before an attempt starts: workload, origin, memory, machine.

Their results are in the run (config.json, adaptation.json) from its first attempt on.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from contract.errors import UserError
from contract.grammar import parse_span
from contract.keys import CHECKPOINTS, CONFIG
from training.durable import Extension, Head, OpenRun, RunConfig, Store, StoredDataset, open_store
from training.engine.job import (
    Origin,
    ResolvedWorkload,
    RunOptions,
    checked_stages,
    origin_from_weights,
    usable_ranks,
    with_origin,
)
from training.engine.loader import num_workers
from training.engine.parallel import is_sharded
from training.engine.stage_checks import problems
from training.numerics import device_of
from training.preflight.admission import ResourceRequest, is_out_of_memory, limit_memory
from training.preflight.ladder import TrialRequest, adapted, explain, resolve_adaptation
from training.registry import dataset_refusals, fitted, load_workload
from training.workload import Prepare, Train, Workload, implements

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Preflight:
    """A job that has passed every check, and what it needs from its machine."""

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


def preflight(options: RunOptions) -> _Preflight:
    """Check a run; UserError says what is wrong.

    Memory is tried only where it is limited, by a GPU or by --memory-limit-mib. A trial is one
    process with the whole model, so there is none for a model that the ranks share.
    """
    workload = load_workload(options.workload)
    wrong = problems(workload)
    if wrong:
        raise UserError(f"workload {options.workload!r} cannot be trained: {wrong[0]}")
    record = RunConfig.read(options.store)
    meta = _meta(options.dataset_uri) if record is None else None
    overrides_of_data = _fitted(workload, options, meta) if record is None else record.fitted
    overrides = {**overrides_of_data, **options.overrides}
    config = ResolvedWorkload.of(workload, options.recipe, overrides).config
    origin = _resolve_origin(options, record, workload, config)
    limit = options.memory_limit_mib
    is_limited = torch.cuda.is_available() or limit is not None
    num_ranks = options.environment.ranks(options.num_processes)
    may_adapt = is_limited and not options.no_adapt
    trial = TrialRequest(
        workload=options.workload,
        recipe=options.recipe,
        overrides=overrides,
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
        workload=workload,
        config=config,
        stages=checked_stages(workload, config),
        origin=origin,
        fitted=overrides_of_data,
    )
    num_here = usable_ranks(job.stages, options) // options.environment.num_hosts
    if meta is not None:
        refuse_dataset(meta, job.stages)
    if options.environment.world_size > 1:  # this machine may have only a part of it
        num_here = options.num_processes or max(1, torch.cuda.device_count())
    request = resource_request(
        options.store.uri, workload, config, options.dataset_uri, limit, num_here
    )
    return _Preflight(job=job, request=request)


def _meta(dataset_uri: str) -> Mapping[str, Any] | None:
    """Return the `meta` of the dataset that a run begins with.

    None without a manifest, as when a sync has just begun: then stages refuse as they start.
    """
    manifest = StoredDataset(open_store(dataset_uri)).manifest
    return manifest["meta"] if manifest else None


def _fitted(
    workload: Workload[Any], options: RunOptions, meta: Mapping[str, Any] | None
) -> Mapping[str, str]:
    """Return the overrides that the dataset decides for a run that begins, and log them."""
    found = fitted(workload, options.recipe, options.overrides, meta) if meta is not None else {}
    if found:
        named = " ".join(f"{name}={text}" for name, text in found.items())
        _log.info(f"[data] {named}: decided by the dataset; --override changes it")
    return found


def refuse_dataset(meta: Mapping[str, Any], stages: Sequence[Prepare | Train]) -> None:
    """Raise UserError with everything that keeps the stages from training on a dataset."""
    if wrong := dataset_refusals(stages, meta):
        raise UserError("; also: ".join(wrong))


def _has_sharded_stage(workload: Workload[Any], config: Any, num_ranks: int) -> bool:
    """Whether a stage is sharded; if so, log that memory is not tested."""
    for stage in workload.stages(config):
        if isinstance(stage, Train) and is_sharded(stage.settings, num_ranks):
            _log.info(
                "[memory] stage %r is sharded over %d ranks: its memory is not tested at the start",
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
    """Return what a run needs from its machine."""
    data = 0
    if implements(workload, Workload.data_bytes_in_memory):
        manifest = StoredDataset(open_store(dataset_uri)).manifest
        files = manifest["files"] if manifest else []
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


def _resolve_origin(
    options: RunOptions, record: RunConfig | None, workload: Workload[Any], config: Any
) -> Origin | None:
    """Return what the run starts from: what its config.json says, else what the options say."""
    store, asked = options.store, options.init_from and _place(options.init_from)
    if record is not None and record.origin:
        origin = Origin(**record.origin)
        if asked and asked != _place(origin.uri):
            raise UserError(
                f"the run folder {store.uri} starts from {origin.uri}, not from {asked}; use "
                "another run URI, or the same --init-from"
            )
        return origin
    if record is not None and not asked:
        return None
    if not options.extend_to and record is None:
        _refuse_unfinished_copy(store)
    if not asked:
        if options.extend_to:
            raise UserError("--extend-to needs --init-from with the URI of the run to extend")
        return None
    if not options.extend_to:
        return origin_from_weights(asked, workload, config)
    old = OpenRun.of_workload(asked)
    theirs = (old.record.workload, old.record.recipe, dict(old.record.overrides))
    if theirs != (options.workload, options.recipe, dict(options.overrides)):
        raise UserError(
            f"{old.store.uri} is a run of {theirs[0]}, recipe {theirs[1]}, with the overrides "
            f"{theirs[2] or '(none)'}; extend it with exactly these"
        )
    extension = Extension(old)
    origin = _extended(extension, options.extend_to)
    extension.begin(store, options.run_id, options.writer)
    return origin


def _place(uri: str) -> str:
    """Return the URI in a form that is the same wherever the next attempt starts."""
    return (uri if "://" in uri else str(Path(uri).absolute())).rstrip("/")


def _refuse_unfinished_copy(store: Store) -> None:
    """Refuse to begin a run among copies: its config.json would block the right command."""
    head = Head.read(store)
    is_begun = head is not None and head.generation > 0
    if not is_begun and store.folders(CHECKPOINTS):
        raise UserError(
            f"{store.uri} has checkpoints but no {CONFIG}: repeat the command with --extend-to "
            f"if it was interrupted; otherwise restore the last version of {CONFIG}, or use "
            "another run URI"
        )


def _extended(old: Extension, text: str) -> Origin:
    """The origin that `--extend-to` asks for: `8epochs` or `4000steps` of the last Train stage."""
    run, end = old.run, old.end
    span = parse_span(text)
    if span is None:
        raise UserError(f"--extend-to {text!r} cannot be read; write 8epochs or 4000steps")
    steps: int = old.state["position"]["stage_step"]
    if span.value <= (end.epoch if span.unit == "epochs" else steps):
        raise UserError(
            f"--extend-to {text}: the run {run.store.uri} has already trained stage {end.stage!r} "
            f"for {steps} steps, {end.epoch} whole epochs; pass more"
        )
    assert run.head.weights_sha256 is not None
    return Origin(
        uri=run.store.uri,
        weights_sha256=run.head.weights_sha256,
        stage=end.stage,
        **{span.unit: span.value},
        dataset=run.record.dataset,
    )
