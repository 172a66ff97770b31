"""`python -m training describe`: what a workload is made of, as one line of JSON.

It is how cdk synth and a rehearsal see workloads, which they do not import.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.description import WorkloadDescription
from training.cli.measure import measured
from training.cli.run import import_from
from training.errors import EXIT_FINISHED, UserError


def add_describe(parser: argparse.ArgumentParser) -> None:
    """Add the options of `describe`."""
    add = parser.add_argument
    add("workload", metavar="NAME", help="a known name, or your own as package.module:NAME")
    add("--recipe", help="default: the first")
    add("--override", action="append", default=[], metavar="NAME=VALUE", help="as for `run`")
    add("--source", type=Path, metavar="FOLDER", help="the folder of your own's module")
    add("--manifest", type=Path, metavar="FILE", help="of the dataset: refuse what does not fit it")
    add("--measure", action="store_true", help="with its footprints, as `measure` counts them")
    parser.set_defaults(act=_describe)


def _describe(options: argparse.Namespace) -> int:
    import_from(options.source)
    from training.config import fitted, parse_overrides, resolve_config
    from training.engine.job import checked_stages
    from training.engine.stage_checks import problems
    from training.preflight.preflight import refuse_dataset
    from training.registry import load_workload
    from training.workload import Workload, implements

    workload = load_workload(options.workload)
    if found := problems(workload):
        raise UserError(f"workload {options.workload!r}: {found[0]}")
    recipe = options.recipe or next(iter(workload.recipes))
    overrides = parse_overrides(options.override)
    config = resolve_config(workload, recipe, overrides)
    samples = workload.nominal_samples.get(recipe, {})
    meta = _meta(options.manifest) if options.manifest is not None else {}
    overrides = {**fitted(workload, config, overrides, meta), **overrides}
    config = resolve_config(workload, recipe, overrides)
    stages = checked_stages(workload, config)
    refuse_dataset(meta, stages)
    rows, why = _footprints(options.workload, recipe, overrides) if options.measure else ([], "")
    described = WorkloadDescription(
        recipe=recipe,
        stages={stage.name: _length(stage, samples.get("train")) for stage in stages},
        num_samples=sum(samples.values()),
        makes_data=implements(workload, Workload.make_dataset),
        footprints=rows,
        why_unmeasured=why,
    )
    print(described.to_json())
    return EXIT_FINISHED


def _meta(manifest: Path) -> Mapping[str, Any]:
    meta: Mapping[str, Any] = json.loads(manifest.read_text(encoding="utf-8")).get("meta") or {}
    return meta


def _length(stage: Any, num_samples: int | None) -> int | None:
    """A stage's shards, or its steps over that many samples; None if it takes others to tell."""
    from training.workload import Train

    if not isinstance(stage, Train):
        return int(stage.num_shards)
    if num_samples is None:
        return stage.settings.steps
    return stage.settings.num_steps(num_samples)


def _footprints(
    workload: str, recipe: str, overrides: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """The footprints of all stages; without them, why it cannot be measured."""
    try:
        return list(measured(workload, recipe, overrides)), ""
    except UserError as error:
        return [], str(error)
    except RuntimeError as error:  # torch's own: what it cannot do on fake tensors
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return [], f"its step on fake tensors failed: {said}"
