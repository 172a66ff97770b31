"""`python -m training measure | describe | count`: needs of stages, a workload, any model's step.

Writes sizing/footprints.json, which `sizing` reads: {"format", "torch", "command", "footprints"}.
docs/sizing.md explains each key of a footprint; a stage has one for each micro-batch counted.
`describe` is how cdk synth and a rehearsal see workloads, which they do not import; `count` is
started by `python -m sizing model`, which prices what it counts.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from contract.description import WorkloadDescription
from contract.errors import Exit, UserError
from contract.readable import table
from training.cli.run import add_override, checked_file, import_from, positive_int
from training.settings import changed

_DEFAULT_OUT = Path("sizing/footprints.json")
_COMMAND = "python -m training measure"
# Around the recipe's micro-batch, so that sizing can interpolate and predict others.
_FACTORS = (0.5, 1, 2, 4)
# Figures that determine a step's time, besides the bytes that it keeps.
_WORK = (
    *("kernels", "flops_per_sample"),
    *("convolution_share", "grouped_share", "channels_last_share"),
)
# Figures that a test checks for the recipe, and that no plan needs at other micro-batches.
_OF_RECIPE = ("moved_bytes", "optimizer_kernels", "optimizer_moved_bytes")


def add_measure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `measure`."""
    add = parser.add_argument
    add("--workload", help="default: every known workload")
    add("--recipe", help="default: every recipe of the workload")
    add_override(parser, "measure a changed recipe: printed, and written only to another --out")
    add("--out", type=Path, default=_DEFAULT_OUT, help="the file to write (default: %(default)s)")
    add("--check", action="store_true", help="write nothing; exit 1 if the file differs")
    add("--json", action="store_true", help="print the footprints as JSON")
    parser.set_defaults(act=_measure)


def _measured(
    workload_name: str,
    recipe: str,
    overrides: Mapping[str, str],
    factors: Sequence[float] = _FACTORS,
) -> Iterator[dict[str, Any]]:
    """Yield the footprints of all stages of a recipe, each of which takes seconds.

    They are counted at `factors` times the recipe's micro-batch.
    """
    from training.registry import load_workload, resolve_config
    from training.workload import Prepare

    workload = load_workload(workload_name)
    config = resolve_config(workload, recipe, overrides)
    if recipe not in workload.nominal_samples:
        raise UserError(
            f"workload {workload_name!r} cannot be measured: its `nominal_samples` lack recipe "
            f"{recipe!r}; add how many samples it is made for (training/workload.py)"
        )
    samples = workload.nominal_samples[recipe]
    about = {"workload": workload_name, "recipe": recipe}
    for stage in workload.stages(config):
        if isinstance(stage, Prepare):
            yield from _prepare(stage, samples, about)
        else:
            at_size = partial(_at_size, workload, config, stage)
            yield from train_footprints(stage, config, samples, about, factors, at_size)


def _at_size(workload: Any, config: Any, stage: Any, size: int) -> Any | None:
    """Return the stage as with `--override micro_batch=size`; None if it cannot be trained so.

    One that steps in backward cannot while it accumulates, as its gradients then stay.
    """
    settings = stage.settings
    if not settings.optimizer_in_backward or size >= settings.global_batch:
        return stage
    try:
        stages = workload.stages(changed(config, micro_batch=size))
        found = next(each for each in stages if each.name == stage.name)
        return found if found.settings.micro_batch == size else None
    except (KeyError, ValueError):  # no such field, or refused by the settings
        return None


def _prepare(
    stage: Any, samples: Mapping[str, int], about: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    from training.preflight.footprint import measure_probe
    from training.workload import Prepare, implements

    name: str = stage.name
    if not implements(stage, Prepare.probe):
        return
    probe = stage.probe()
    yield {
        **about,
        "stage": name,
        "kind": "prepare",
        "micro_batch": probe.size,
        "recipe_micro_batch": probe.size,
        "samples_per_epoch": sum(samples.values()),
        "epochs": 1,
        **measure_probe(name, probe),
    }


def train_footprints(
    stage: Any,
    config: Any,
    samples: Mapping[str, int],
    about: Mapping[str, Any],
    factors: Sequence[float] = _FACTORS,
    at_size: Callable[[int], Any | None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a Train stage's footprints, around its own micro-batch.

    `at_size` returns the stage with another micro-batch, if that changes more than the batch.
    """
    from training.preflight.footprint import measure_evaluation, measure_step

    settings, train = stage.settings, samples["train"]
    per_epoch = settings.steps_per_epoch(train)
    evaluation = 0
    if samples["validation"]:
        evaluation = measure_evaluation(stage, config, settings.eval_batch)
    # Not 1 if the recipe has more: batch norm cannot train on one sample.
    least = min(2, settings.micro_batch)
    for size in sorted({max(least, int(f * settings.micro_batch)) for f in factors}):
        sized = at_size(size) if at_size else stage
        if sized is None:
            continue
        found = asdict(measure_step(sized, config, size))
        if size != settings.micro_batch:
            found = {name: value for name, value in found.items() if name not in _OF_RECIPE}
        yield {
            **about,
            "stage": stage.name,
            "kind": "train",
            "micro_batch": size,
            "recipe_micro_batch": settings.micro_batch,
            "global_batch": settings.global_batch,
            "precision": settings.precision,
            "samples_per_epoch": train,
            "epochs": settings.epochs or settings.num_steps(train) / per_epoch,
            "steps_per_epoch": per_epoch,
            "evaluations": settings.num_evaluations(train),
            "validation_samples": samples["validation"],
            "eval_batch": settings.eval_batch,
            "evaluation_peak_bytes": evaluation,
            **_first_files(stage),
            **_phases(stage),
            **found,
            **_usual(sized, config, size),
        }


def _first_files(stage: Any) -> dict[str, int]:
    from training.workload import Train, implements

    return {"first_files": stage.first_files()} if implements(stage, Train.first_files) else {}


def _phases(stage: Any) -> dict[str, Any]:
    """Return the epochs by work per sample, if that changes, as shares of what is counted."""
    from training.workload import Train, implements

    num_epochs: int | None = stage.settings.epochs
    if not implements(stage, Train.work) or not num_epochs:
        return {}
    works = [stage.work(epoch) for epoch in range(num_epochs)]
    phases = [
        {"name": name, "epochs": len(list(epochs)), "work": round(work, 6)}
        for (name, work), epochs in groupby(works)
    ]
    return {"phases": phases, "evaluation_work": round(stage.work(-1)[1], 6)}


def _usual(stage: Any, config: Any, size: int) -> dict[str, int | float]:
    """Return the average work and memory of a stage whose batches have several shapes."""
    from training.preflight.footprint import measure_step

    usual = stage.usual(size)
    if _shapes(usual) == _shapes(stage.example(size)):
        return {}
    found = asdict(measure_step(stage, config, size, usual))
    memory = {f"usual_{name}": found[name] for name in ("peak_bytes", "kept_bytes")}
    return {**{name: found[name] for name in _WORK}, **memory}


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    return [tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def _measure(options: argparse.Namespace) -> int:
    from training.registry import parse_overrides

    overrides = parse_overrides(options.override)
    if options.recipe and not options.workload:
        raise UserError("--recipe needs --workload; name the workload that has the recipe")
    if overrides and not (options.workload and options.recipe):
        raise UserError("--override needs --workload and --recipe; name the recipe that it changes")
    is_written = not options.check and not (overrides and options.out == _DEFAULT_OUT)
    (_check_out if is_written else _read)(options.out)
    footprints = []
    for workload, recipe in _recipes(options):
        began = time.monotonic()
        rows = list(_measured(workload, recipe, overrides))
        footprints += rows
        if not options.json:
            print(f"[measured] {workload} {recipe} in {time.monotonic() - began:.1f} s", flush=True)
    if options.json:
        print(json.dumps(footprints, indent=1))
    else:
        print("\n".join(table([_columns(row) for row in footprints])))
        print("* the recipe's own; what is not counted: training/preflight/footprint.py")
    if options.check:
        differing = _difference(options.out, footprints)
        print(f"[failed] {differing}" if differing else f"[ok] {options.out} is up to date")
        return Exit.FAILED if differing else Exit.FINISHED
    if not is_written:
        return Exit.FINISHED
    _write_footprints(options.out, footprints)
    if not options.json:
        print(f"[ok] {options.out}: {len(footprints)} footprints")
    return Exit.FINISHED


def _recipes(options: argparse.Namespace) -> list[tuple[str, str]]:
    from training.registry import WORKLOADS, load_workload

    names = [options.workload] if options.workload else sorted(WORKLOADS)
    if options.recipe:
        return [(options.workload, options.recipe)]
    return [(name, recipe) for name in names for recipe in load_workload(name).recipes]


def _check_out(path: Path) -> None:
    """Check, before anything is measured, that footprints can be written to a file."""
    if not path.parent.is_dir():
        raise UserError(
            f"the folder {path.parent} does not exist; create it, or pass another --out"
        )
    checked_file(path)
    _read(path)


def _read(path: Path) -> Mapping[str, Any]:
    """Read the file, which may not exist; UserError if it holds something else."""
    if not path.exists():
        return {"footprints": []}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = found["torch"], [_key(row) for row in found["footprints"]]
        return found
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is not a file of footprints ({error!r}); pass another --out"
        ) from error


def _write_footprints(
    path: Path, footprints: Sequence[Mapping[str, Any]], *, command: str = _COMMAND
) -> None:
    """Write the file; recipes that were not measured this time keep their footprints in it."""
    import torch

    version = torch.__version__.partition("+")[0]
    now = {(row["workload"], row["recipe"]) for row in footprints}
    before = _read(path)
    kept = [r for r in before["footprints"] if (r["workload"], r["recipe"]) not in now]
    if kept and before["torch"] != version:
        raise UserError(
            f"{path} was measured with torch {before['torch']}, but this is {version}; "
            f"measure everything: {command}"
        )
    rows = sorted([*kept, *footprints], key=lambda row: (row["workload"], row["recipe"]))
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = json.dumps({"format": 2, "torch": version, "command": command}, indent=1)
    path.write_text(f'{head.rstrip()[:-2]},\n "footprints": [\n{lines}\n ]\n}}\n')


def _difference(path: Path, footprints: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first difference from the file, with the command that fixes it, if any."""
    if not path.exists():
        return f"{path} does not exist; write it with: {_COMMAND}"
    there = {_key(row): row for row in _read(path)["footprints"]}
    for row in footprints:
        known = there.get(_key(row), {})
        for name in row.keys() | known.keys():
            if row.get(name) != known.get(name):
                return (
                    f"{path}: {' '.join(map(str, _key(row)))}: {name} is {known.get(name)} but "
                    f"measured as {row.get(name)}; measure again: {_COMMAND}"
                )
    return None


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("workload", "recipe", "stage", "kind", "micro_batch"))


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a footprint that people read."""
    mark = "*" if row["micro_batch"] == row["recipe_micro_batch"] else ""
    return {
        **{name: row[name] for name in ("workload", "recipe", "stage")},
        "batch": f"{row['micro_batch']}{mark}",
        "parameters": row["parameters"],
        "peak MiB": round(row["peak_bytes"] / 2**20, 1),
        "activations": round(row.get("peak_activation_bytes", 0) / 2**20, 1),
        "checkpoint MB": round(row.get("checkpoint_bytes", 0) / 1e6, 2),
        "GFLOP/sample": round(row["flops_per_sample"] / 1e9, 3),
    }


def add_describe(parser: argparse.ArgumentParser) -> None:
    """Add the options of `describe`."""
    add = parser.add_argument
    add("workload", metavar="NAME", help="a known name, or your own as package.module:NAME")
    add("--recipe", help="default: the first")
    add_override(parser, "as for `run`")
    add("--source", type=Path, metavar="FOLDER", help="the folder of your own module")
    add("--manifest", type=Path, metavar="FILE", help="the dataset's: refuse what does not fit it")
    add("--measure", action="store_true", help="include its footprints, as `measure` counts them")
    add("--also", type=Path, metavar="FILE", help="JSON lists of more overrides, all to be checked")
    parser.set_defaults(act=_describe)


def _describe(options: argparse.Namespace) -> int:
    import_from(options.source)
    from training.engine.job import ResolvedWorkload
    from training.engine.stage_checks import problems
    from training.preflight.preflight import refuse_dataset
    from training.registry import fitted, imports_data, load_workload, parse_overrides
    from training.workload import Workload, implements

    workload = load_workload(options.workload)
    if found := problems(workload):
        raise UserError(f"workload {options.workload!r}: {found[0]}")
    recipe = options.recipe or next(iter(workload.recipes))
    overrides = parse_overrides(options.override)
    samples = workload.nominal_samples.get(recipe, {})
    meta = _meta(options.manifest) if options.manifest is not None else {}
    overrides = {**fitted(workload, recipe, overrides, meta), **overrides}
    stages = ResolvedWorkload.of(workload, recipe, overrides).stages
    refuse_dataset(meta, stages)
    for others in json.loads(options.also.read_text(encoding="utf-8")) if options.also else ():
        ResolvedWorkload.of(workload, recipe, parse_overrides(others))
    rows, why = _footprints(options.workload, recipe, overrides) if options.measure else ([], "")
    described = WorkloadDescription(
        recipe=recipe,
        stages={stage.name: _length(stage, samples.get("train")) for stage in stages},
        num_samples=sum(samples.values()),
        makes_data=implements(workload, Workload.make_dataset),
        imports_data=imports_data(workload),
        footprints=rows,
        why_unmeasured=why,
    )
    print(described.to_json())
    return Exit.FINISHED


def _meta(manifest: Path) -> Mapping[str, Any]:
    try:
        meta: Mapping[str, Any] = json.loads(manifest.read_text(encoding="utf-8")).get("meta") or {}
    except OSError as error:
        raise UserError(f"--manifest {manifest} cannot be read: {error.strerror}") from None
    except (ValueError, AttributeError):
        raise UserError(f"--manifest {manifest} is not a dataset's manifest.json") from None
    return meta


def _length(stage: Any, num_samples: int | None) -> int | None:
    """Return a stage's shards, or its steps over that many samples; None if that is not enough."""
    from training.workload import Train

    if not isinstance(stage, Train):
        return int(stage.num_shards)
    if num_samples is None:
        return stage.settings.steps
    return stage.settings.num_steps(num_samples)


def _footprints(
    workload: str, recipe: str, overrides: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """Return the footprints of all stages, or else why they cannot be measured."""
    try:
        return list(_measured(workload, recipe, overrides)), ""
    except UserError as error:
        return [], str(error)
    except RuntimeError as error:  # torch's own: what it cannot do on fake tensors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return [], f"its step on fake tensors failed: {reason}"


def add_count(parser: argparse.ArgumentParser) -> None:
    """Add the options of `count`."""
    add = parser.add_argument
    add(
        "target",
        metavar="MODEL",
        help="package.module:function, which returns (model, batch) or (model, batch, loss); or a "
        "config.json that the transformers library builds, or its name on the Hugging Face Hub",
    )
    add("--batch", type=int, default=8, help="samples of a step, all GPUs together")
    add("--micro-batch", type=positive_int, help="samples at once on a GPU (default: all)")
    add("--samples", type=positive_int, help="samples of an epoch (default: those of 1,000 steps)")
    add("--epochs", type=int, default=1)
    add("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    add("--pure", action="store_true", help="parameters and state in bfloat16, too")
    add("--optimizer", choices=("adamw", "sgd", "adamw-8bit"), default="adamw")
    add(
        "--lora",
        type=positive_int,
        metavar="RANK",
        help="train only adapters; the rest is frozen, in --precision",
    )
    add("--four-bit", action="store_true", help="with --lora: frozen matrices in 4 bits (QLoRA)")
    add("--tokens", type=positive_int, help="tokens per sample, for transformers (default: 512)")
    add("--attention", choices=("sdpa", "eager"), help="for transformers (default: fused)")
    add("--recompute", action="store_true", help="for transformers: recompute blocks in backward")
    add("--recipe", default="full", help="name of these settings in the file of --out")
    add("--out", type=Path, help="write the footprints to this file")
    parser.set_defaults(act=_count)


def _count(options: argparse.Namespace) -> int:
    _check(options)
    from training.preflight.standalone import ModelStage
    from training.workload import Settings, Train

    if options.out:
        _check_out(options.out)
    micro_batch = options.micro_batch or options.batch
    try:
        settings = Settings(
            epochs=options.epochs,
            global_batch=options.batch,
            micro_batch=micro_batch,
            eval_batch=micro_batch,
            # Without autocast, what is already in bfloat16 is computed in it.
            precision="float32" if options.pure else options.precision,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    samples = {"train": options.samples or 1000 * options.batch, "validation": 0}
    about = {"workload": options.target, "recipe": options.recipe}
    make, counting = _maker(options)
    with counting:
        stage = ModelStage(options.target, make, settings, options.optimizer)
        # Counting calls only those methods of a stage that this one has.
        rows = list(train_footprints(cast(Train, stage), SimpleNamespace(seed=0), samples, about))
    rows = [{**row, "stage": "model", "loss": stage.loss_is} for row in rows]
    for row in rows:
        row["precision"] = options.precision
        if options.lora:  # adapters and their state are what is saved
            row["checkpoint_bytes"] = row["gradient_bytes"] + row["optimizer_bytes"]
    if options.out:
        _write_footprints(options.out, rows, command="python -m training count")
    print(json.dumps(rows, indent=1))
    return Exit.FINISHED


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before torch is imported."""
    if ":" in options.target and (options.tokens or options.recompute):
        raise UserError("--tokens and --recompute are for transformers: the function decides here")
    if options.pure and options.precision != "bfloat16":
        raise UserError(f"--pure is bfloat16, not {options.precision}")
    if options.four_bit and not options.lora:
        raise UserError("--four-bit freezes the model: add --lora RANK")
    if options.lora and options.pure:
        raise UserError("--lora already freezes the model in that precision: leave out --pure")


def _maker(
    options: argparse.Namespace,
) -> tuple[Callable[[int], tuple[Any, ...]], AbstractContextManager[None]]:
    """Return a function that makes model and batch for a batch size, and a context to count in."""
    import torch

    from training.preflight.standalone import (
        HuggingFace,
        adapted,
        balanced_experts,
        in_bfloat16,
        load_function,
    )

    # torch would print a traceback before our one sentence.
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    counting: AbstractContextManager[None] = nullcontext()
    make: Callable[[int], tuple[Any, ...]]
    if ":" in options.target:
        make = load_function(options.target)
    else:
        make = HuggingFace(
            options.target,
            tokens=options.tokens,
            attention=options.attention,
            recomputes=options.recompute,
        )
        counting = balanced_experts()
    if options.lora:
        dtype = getattr(torch, options.precision)
        make = adapted(make, rank=options.lora, dtype=dtype, four_bit=options.four_bit)
    return (in_bfloat16(make) if options.pure else make), counting
