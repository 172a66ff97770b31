"""The checks before an attempt starts: workload, origin, memory, machine.

Their results are in the run (config.json, adaptation.json) from its first attempt on. Where memory
is limited, the workload's rungs are tried one after another. Each trial is a new process: it runs
this module as a program and makes real steps of every stage on the largest batch; JSON on standard
input, one JSON line back.
"""

import gc
import json
import logging
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from contract.errors import UserError
from contract.grammar import parse_span
from contract.keys import ADAPTATION, CHECKPOINTS, CONFIG
from training.durable import (
    AttemptEndedError,
    Extension,
    Head,
    OpenRun,
    RunConfig,
    RunFailedError,
    Store,
    StoredDataset,
    open_store,
    put_unless_changed,
    read_json_record,
)
from training.engine.job import (
    Origin,
    ResolvedWorkload,
    Restaged,
    RunOptions,
    checked_stages,
    origin_from_weights,
    usable_ranks,
    with_origin,
)
from training.engine.loader import num_workers
from training.engine.optimizer import Scaling, autocast, step_in_backward
from training.engine.parallel import is_sharded
from training.engine.reduction import sums_set_aside
from training.engine.stage_checks import problems
from training.numerics import configure, device_of
from training.preflight.admission import ResourceRequest, is_out_of_memory, limit_memory
from training.preflight.standalone import LAST_STEP, standalone_inputs
from training.registry import (
    dataset_refusals,
    fitted,
    load_workload,
    refuse_foreign,
    resolve_config,
)
from training.workload import Batch, Prepare, Rung, Train, Workload, implements

_log = logging.getLogger(__name__)

_FORMAT = 1
_TRIAL_SECONDS = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """One trial of all Train stages, with the names of the rungs applied."""

    rungs: tuple[str, ...]
    outcome: str  # fits, out of memory, refused
    message: str
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest:
    """The command-line options that a trial needs, passed to it as JSON."""

    workload: str
    recipe: str
    overrides: Mapping[str, str]
    memory_limit_mib: int | None


def resolve_adaptation(
    store: Store, request: TrialRequest, workload: Workload[Any], config: Any, *, may_adapt: bool
) -> tuple[str, ...]:
    """Return the rungs of this run: from its adaptation.json, or else from trials."""
    found = store.get(ADAPTATION)
    known = _parse(store, found.data, may_adapt=may_adapt) if found else None
    if known is None:
        if not may_adapt:
            return ()
        trials = _climb(request, workload.rungs(config))
        data = _adaptation(request, trials)
        if put_unless_changed(store, ADAPTATION, data, found.etag if found else None):
            return trials[-1].rungs
        found = store.get(ADAPTATION)
        assert found is not None
        known = _parse(store, found.data, may_adapt=False)
        assert known is not None
    if known:
        _log.info(f"[memory] this run continues with: {', '.join(known)}")
    return known


def _adaptation(request: TrialRequest, trials: Sequence[_Trial]) -> bytes:
    """The content of adaptation.json, whose rungs are those of the last trial."""
    record = {
        "format": _FORMAT,
        "rungs": trials[-1].rungs,
        "memory_limit_mib": request.memory_limit_mib,
        "trials": [asdict(trial) for trial in trials],
    }
    return json.dumps(record, indent=1).encode()


def _parse(store: Store, data: bytes, *, may_adapt: bool) -> tuple[str, ...] | None:
    """Return the rungs; None if they are damaged, unused so far, and may be measured again.

    Once there is a checkpoint, rungs other than those it was trained with would change the run.
    """
    try:
        where = f"{store.uri}/{ADAPTATION}"
        return read_json_record(where, data, _FORMAT, lambda record: tuple(record["rungs"]))
    except UserError as error:
        head = Head.read(store)
        if not may_adapt or (head is not None and head.checkpoints):
            raise
        _log.warning(f"[memory] {error}; no checkpoint was made with it: measuring again")
        return None


def adapted(workload: Workload[Any], rungs: Sequence[str]) -> Workload[Any]:
    """Return the workload with stages made from the config with these rungs applied, in order."""
    if not rungs:
        return workload
    return Restaged(workload, lambda c: workload.stages(_apply_rungs(workload, c, rungs)))


def _apply_rungs(workload: Workload[Any], config: Any, names: Sequence[str]) -> Any:
    """The config with these rungs applied, in order."""
    known = {rung.name: rung for rung in workload.rungs(config)}
    for name in names:
        if name not in known:
            raise UserError(
                f"workload {workload.name!r} has no rung {name!r}, which {ADAPTATION} names; "
                "continue with the code that the run started with"
            )
        config = known[name].apply(config)
    return config


def _climb(request: TrialRequest, rungs: Sequence[Rung]) -> list[_Trial]:
    """Try the recipe itself, then add rung after rung until it fits.

    Rungs that change what is learned are tried too, so that the refusal can say what would fit.
    """
    trials: list[_Trial] = []
    applied: tuple[str, ...] = ()
    refused: set[str] = set()  # kinds of rungs that this model does not allow
    overrides: list[str] = []
    for rung in [None, *rungs]:
        if rung and rung.name.split()[0] in refused:
            continue
        names = (*applied, rung.name) if rung else ()
        trial = _try(request, names)
        trials.append(trial)
        what = " + ".join(names) or "the recipe unchanged"
        peak = f", peak {trial.peak_bytes / 2**20:.0f} MiB" if trial.peak_bytes else ""
        _log.info(f"[memory] {what}: {trial.outcome}{peak} {trial.message}".rstrip())
        if rung and rung.override:
            overrides.append(rung.override)
        if trial.outcome == "fits":
            if overrides:
                raise _no_memory(request, rungs, f"{_offer(overrides)}, or ")
            return trials
        if trial.outcome == "refused" and rung:
            refused.add(rung.name.split()[0])
        else:
            applied = names
    raise _no_memory(request, rungs, "")


def _no_memory(request: TrialRequest, rungs: Sequence[Rung], offer: str) -> RunFailedError:
    taken = ", ".join(rung.name for rung in rungs if not rung.override)
    return RunFailedError(
        f"not enough memory for workload {request.workload!r}, recipe {request.recipe!r}, even "
        f"with {taken or 'all rungs (it has none)'}; {offer}use a size with more memory"
    )


def _offer(overrides: Sequence[str]) -> str:
    """Offer the overrides that the user may choose: each field's last value in the trial."""
    last = dict(override.split("=", 1) for override in overrides)
    words = " ".join(f"--override {name}={value}" for name, value in last.items())
    return f"it fits with {words}, which changes what is learned: start a new run with that"


def _try(request: TrialRequest, rungs: tuple[str, ...]) -> _Trial:
    command = [sys.executable, "-m", "training.preflight.preflight"]
    text = json.dumps({**asdict(request), "rungs": list(rungs)})
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        return _Trial(rungs=rungs, **json.loads(lines[-1]))
    if done.returncode == -9:
        message = "(the system killed the trial: the host's memory was full)"
        return _Trial(rungs=rungs, outcome="out of memory", message=message, peak_bytes=None)
    last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
    raise UserError(f"a trial step of the recipe failed: {last[0]}; rerun with --no-adapt")


def explain(error: BaseException, workload: Workload[Any], config: Any) -> AttemptEndedError:
    """Return the error with a remedy for running out of memory mid-run, when rungs are fixed."""
    rungs = workload.rungs(config)
    names = ", ".join(rung.name for rung in rungs if not rung.override) or "none"
    first = str(error).splitlines()[0][:160]
    return AttemptEndedError(
        f"memory ran out: {first}; a run's batches are fixed once it has started, so start a new "
        f"run: without --no-adapt it tries these rungs ({names}); or set a smaller micro-batch "
        "with --override, or use a size with more memory"
    )


# Without a GPU the limit also covers the run's thread stacks and buffers.
_HOST_MIB = 128
_NUM_STEPS = 2  # the second one has the optimizer's state


def main() -> int:
    """Run the trial and print its outcome."""
    request = json.load(sys.stdin)
    workload = load_workload(request["workload"])
    plain = resolve_config(workload, request["recipe"], request["overrides"])
    config = _apply_rungs(workload, plain, request["rungs"])
    before = _apply_rungs(workload, plain, request["rungs"][:-1])
    device = configure(num_threads=config.num_threads, deterministic=config.deterministic)
    if refusal := _refusal(workload.stages(before), workload.stages(config), before):
        return _print("refused", refusal, None)
    limit = request["memory_limit_mib"]
    if limit is not None:
        limit_memory(limit if device.type == "cuda" else max(1, limit - _HOST_MIB), device)
    for stage in workload.stages(config):
        if isinstance(stage, Train) and implements(stage, Train.example):
            try:
                _steps(stage, config, device)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                return _print("out of memory", f"in stage {stage.name!r}", None)
            gc.collect()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return _print("fits", "", peak)


def _refusal(before: Any, after: Any, config: Any) -> str:
    """Return why the last rung must not be applied; empty if it may be."""
    for old, new in zip(before, after, strict=True):
        if not isinstance(old, Train):
            continue
        try:
            if old.settings.micro_batch == new.settings.micro_batch:
                continue
        except ValueError as error:
            return f"(stage {new.name!r}: {error})"
        model = new.model(standalone_inputs(new.name, config))
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            return f"(stage {new.name!r} has BatchNorm, which computes with its micro-batch)"
    return ""


def _steps(stage: Train, config: Any, device: torch.device) -> None:
    """Make steps, and evaluate while the optimizer's state is still there."""
    settings = stage.settings
    num_micro = 2 if settings.global_batch > settings.micro_batch else 1
    example = stage.example(settings.micro_batch)
    trained = train_steps(stage, config, example, device, num_micro)
    *_, model = islice(trained, _NUM_STEPS)
    model.zero_grad(set_to_none=True)
    _evaluate(stage, model, device)


def train_steps(
    stage: Train, config: Any, example: Batch, device: torch.device, num_micro: int
) -> Iterator[nn.Module]:
    """Train on one micro-batch, and yield the model after each step of `num_micro` copies of it."""
    settings = stage.settings
    weight = stage.weight(example)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    inputs = standalone_inputs(stage.name, config)
    model = stage.model(inputs)
    # Choose the kernels that an attempt would use on this device.
    stage.numerics(model, replace(inputs, device=device), {})
    model.to(device).train()
    _average = [p.detach().clone() for p in model.parameters() if settings.ema_decay is not None]
    optimizer = stage.optimizer(model)
    if settings.optimizer_in_backward:
        step_in_backward(optimizer)
    scaling = Scaling(settings.precision, device)
    num_of_step = math.ceil(settings.global_batch / settings.micro_batch)
    while True:
        optimizer.zero_grad(set_to_none=True)
        aside: list[Tensor] = []
        for number in range(num_micro):
            if number == num_micro - 1:
                # Sums that wait to be added while the last micro-batch is computed.
                aside = sums_set_aside(model, num_of_step)
            with autocast(settings.precision, device):
                loss = stage.loss(model, batch, *LAST_STEP)
                total = loss.total / weight + (0.0 if loss.mean is None else loss.mean)
            scaling.backward(total)
        aside.clear()
        if not settings.optimizer_in_backward:
            scaling.step(optimizer, model, settings.clip_norm)
        yield model


def _evaluate(stage: Train, model: nn.Module, device: torch.device) -> None:
    example = stage.example(stage.settings.eval_batch)
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), example)
    with torch.no_grad(), autocast(stage.settings.precision, device):
        stage.loss(model.eval(), batch, *LAST_STEP)


def _print(outcome: str, message: str, peak_bytes: int | None) -> int:
    print(json.dumps({"outcome": outcome, "message": message, "peak_bytes": peak_bytes}))
    return 0


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
    if wrong := problems(workload):
        raise UserError(f"workload {options.workload!r} cannot be trained: {wrong[0]}")
    record = RunConfig.read(options.store)
    meta = _meta(options, workload) if record is None else None
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


def _meta(options: RunOptions, workload: Workload[Any]) -> Mapping[str, Any] | None:
    """Return the `meta` of the dataset that a run begins with; UserError if it is another's.

    None without a manifest, as when a sync has just begun: then stages refuse as they start.
    """
    manifest = StoredDataset(open_store(options.dataset_uri)).manifest
    if manifest is None:
        return None
    refuse_foreign(options.workload, workload, manifest, options.dataset_uri)
    meta: Mapping[str, Any] = manifest["meta"]
    return meta


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
    if (span := parse_span(text)) is None:
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


if __name__ == "__main__":
    sys.exit(main())
