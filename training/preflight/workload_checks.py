"""Static checks of a workload: one sentence for each problem found without running it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from training.engine.stage_checks import unlike
from training.settings import field_places
from training.workload import Prepare, Rung, Settings, Train, Workload

_CONFIG_FIELDS = {"seed": int, "num_threads": int, "deterministic": bool}


def problems(workload: Any) -> list[str]:
    """Problems as sentences; empty if there are none."""
    if lacks := list(unlike(workload, Workload, "the workload")):
        return lacks
    if not isinstance(workload.recipes, Mapping) or not workload.recipes:
        return [
            "recipes must be a mapping with at least one recipe -> function that makes a config"
        ]
    found = []
    if not isinstance(workload.placement_fields, frozenset):
        found.append("placement_fields must be a frozenset of names of config fields")
    for recipe, make in workload.recipes.items():
        # The next recipe mostly has the same problems.
        found = found or [f"recipe {recipe!r}: {text}" for text in _recipe(workload, make)]
    return found


def _recipe(workload: Any, make: Callable[[], Any]) -> Iterator[str]:
    config = make()
    wrong = list(_config(config))
    yield from wrong
    if wrong:
        return
    unknown = set(workload.placement_fields) - field_places(config).keys()
    if unknown:
        yield f"placement_fields names {', '.join(sorted(unknown))}, which the config lacks"
    if make() != config:
        yield "two calls return different configs; a recipe must be a constant"
    stages = workload.stages(config)
    yield from _stages(stages)
    if [stage.name for stage in workload.stages(config)] != [stage.name for stage in stages]:
        yield "two calls of stages(config) return different stages; it must be a function of config"
    for rung in workload.rungs(config):
        if not isinstance(rung, Rung):
            yield f"rungs(config) returns a {type(rung).__name__}; return training.workload.Rung"
        elif type(rung.apply(config)) is not type(config):
            yield f"rung {rung.name!r} must return a {type(config).__name__}"


def _config(config: Any) -> Iterator[str]:
    if not dataclasses.is_dataclass(config):
        yield f"the config is a {type(config).__name__}; make it a frozen dataclass"
        return
    if not getattr(type(config), "__dataclass_params__").frozen:  # noqa: B009
        yield "the config's dataclass is not frozen; write @dataclass(frozen=True)"
    for name, kind in _CONFIG_FIELDS.items():
        if type(getattr(config, name, None)) is not kind:
            yield f"the config has no field {name}: {kind.__name__}"


def _stages(stages: Sequence[Any]) -> Iterator[str]:
    names = [getattr(stage, "name", None) for stage in stages]
    if len(set(names)) != len(names):
        yield f"the stages are named {names}; names must differ"
    for stage in stages:
        kind = Prepare if hasattr(stage, "make") else Train
        yield from unlike(stage, kind, f"stage {getattr(stage, 'name', stage)!r}")
        settings = getattr(stage, "settings", None)
        if kind is Train and settings is not None and not isinstance(settings, Settings):
            yield f"stage {stage.name!r}: settings is a {type(settings).__name__}; return Settings"
    if not any(isinstance(stage, Train) for stage in stages):
        yield "no stage trains; at least one must subclass training.workload.Train"


def describe(workload: Any, recipe: str) -> str:
    """One line with the recipes and the stages of one, for the start of the report."""
    stages = workload.stages(workload.recipes[recipe]())
    kinds = ", ".join(f"{'train' if isinstance(s, Train) else 'prepare'} {s.name}" for s in stages)
    return f"recipes {', '.join(sorted(workload.recipes))}; stages of {recipe}: {kinds}"
