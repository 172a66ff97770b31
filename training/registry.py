"""The workloads by name, and their configs: a recipe, with fields overridden by name.

WORKLOADS is the only place that names a workload. Imports no torch before one is loaded.
"""

import difflib
import importlib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from contract.errors import UserError
from contract.program import WORKLOAD as PROGRAM
from training.settings import Settings, changed, field_places

if TYPE_CHECKING:
    from training.workload import Prepare, Train, Workload

WORKLOADS: dict[str, str] = {
    "detection": "training.workloads.detection.detection_workload:DETECTION",
    "growth": "training.workloads.growth.growth_workload:GROWTH",
    "imagenet": "training.workloads.imagenet.imagenet_workload:IMAGENET",
    "trajectory": "training.workloads.trajectory.trajectory_workload:TRAJECTORY",
}


# Refusals may name overrides, and then others; what follows a value is punctuation.
_TRIES = 5
_NAMED = re.compile(r"--override ([\w.]+)=(\S*[^\s,;.)])")
# Listed so that a typo is reported at once, without importing torch: stacks reads both as text.
RECIPES: dict[str, tuple[str, ...]] = {
    "detection": ("coco_12", "full", "laptop"),
    "growth": ("full", "laptop", "literal"),
    "imagenet": ("epochs_16", "epochs_40", "epochs_88", "full", "laptop"),
    "trajectory": (
        "demo",
        "full",
        "laptop",
        "magvit_b",
        "magvit_full",
        "magvit_laptop",
        "reference",
    ),
}


def name_known(given: str, known: Iterable[str]) -> str:
    """Return the end of a sentence on an unknown name: the closest match, and all known names."""
    names = list(known)
    if not names:
        return "none is known; add it"
    close = difflib.get_close_matches(given, names, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    return f"{meant}known are {', '.join(names)}"


def check_recipe(workload: str | None, recipe: str | None) -> None:
    """Raise UserError for an unknown workload, or an unknown recipe of a known one."""
    if workload and workload != PROGRAM:
        _path(workload)
    known = RECIPES.get(workload or "", ())
    if recipe and known and recipe not in known:
        raise UserError(
            f"workload {workload!r} has no recipe {recipe!r}; {name_known(recipe, known)}"
        )


def load_workload(name: str) -> "Workload[Any]":
    """Import the workload `name`: a registered name, or your own `package.module:NAME`."""
    if name == PROGRAM:
        raise UserError(
            "'program' is not a workload; run it with "
            "`python -m training run --program COMMAND --source FOLDER`"
        )
    module_name, _, attribute = _path(name).partition(":")
    if "/" in module_name or module_name.startswith(".") or module_name.endswith(".py"):
        stem = module_name.rpartition("/")[2].removesuffix(".py")
        raise UserError(
            f"workload {name!r}: module {module_name!r} is a path; write {stem}:{attribute}, and "
            "run in its folder or pass that folder as the source"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"workload {name!r}: module {error.name!r} was not found; check its name and "
            "its folder (source)"
        ) from error
    workload = getattr(module, attribute, None)
    if workload is None:
        there = [n for n in vars(module) if n.isupper()]
        raise UserError(
            f"workload {name!r}: module {module_name} has no {attribute!r}; "
            f"{name_known(attribute, there)}"
        )
    if isinstance(workload, type):
        raise UserError(
            f"workload {name!r} is a class; name an object: {attribute.upper()} = {attribute}()"
        )
    from training.workload import Workload

    if not isinstance(workload, Workload):
        raise UserError(
            f"workload {name!r} is an instance of {type(workload).__name__}; let that class "
            "subclass training.Workload"
        )
    return workload


def module_of(name: str) -> str:
    """Return the module that defines the workload `name`."""
    return _path(name).partition(":")[0]


def _path(name: str) -> str:
    path = WORKLOADS.get(name, name)
    if not path.partition(":")[2]:
        raise UserError(
            f"unknown workload {name!r}; {name_known(name, sorted(WORKLOADS))}, "
            "or name your own as package.module:NAME"
        )
    return path


def parse_overrides(pairs: Sequence[str], what: str = "the override") -> dict[str, str]:
    """Parse `name=value` pairs, each name at most once; messages call them `what`."""
    overrides: dict[str, str] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UserError(f"{what} {pair!r} cannot be read; write name=value")
        if name in overrides:
            raise UserError(f"{what} {name!r} is given twice; give it once")
        overrides[name] = value
    return overrides


def resolve_config(workload: "Workload[Any]", recipe: str, overrides: Mapping[str, str]) -> Any:
    """Return the recipe's config with overrides applied by field name."""
    if recipe not in workload.recipes:
        raise UserError(
            f"workload {workload.name!r} has no recipe {recipe!r}; "
            f"{name_known(recipe, sorted(workload.recipes))}"
        )
    config = workload.recipes[recipe]()
    config = with_overrides(config, overrides, f"the config of workload {workload.name!r}")
    _refuse_without_effect(workload, config, overrides)
    return config


def fitted(
    workload: "Workload[Any]", recipe: str, overrides: Mapping[str, str], meta: Mapping[str, Any]
) -> dict[str, str]:
    """Return the overrides that a dataset needs, except for fields that the user overrides."""
    found = workload.fitted(resolve_config(workload, recipe, overrides), meta)
    return {name: text for name, text in found.items() if name not in overrides}


def dataset_refusals(stages: "Sequence[Prepare | Train]", meta: Mapping[str, Any]) -> list[str]:
    """Return every reason why the stages cannot train on a dataset."""
    from training.workload import Train

    trained = [stage for stage in stages if isinstance(stage, Train)]
    texts = (text for s in trained for text in (*s.refusals(meta), *_too_few(s.settings, meta)))
    return list(dict.fromkeys(texts))


def refuse_foreign(
    given: str, workload: "Workload[Any]", manifest: Mapping[str, Any], where: str
) -> None:
    """Raise UserError if the workload (`given` names it) cannot read a dataset in `where`.

    One that no workload made, files as somebody laid them out, is for whoever reads files as they
    are: a workload without an import of its own.
    """
    made_for, own = manifest["workload"], workload.name
    if made_for not in (own, PROGRAM):
        raise UserError(
            f"the dataset {where} was made for workload {made_for!r}, not {own!r}; use a dataset "
            "of this workload"
        )
    if made_for == PROGRAM and imports_data(workload):
        raise UserError(
            f"the dataset {where} has files as they are, and workload {own!r} reads its own form "
            f"of them: python -m training data import {where} --workload {given} --out data"
        )


def imports_data(workload: "Workload[Any]") -> bool:
    """Whether its datasets have a form of their own; else files are copied as they are."""
    from training.workload import Workload, implements

    own = (Workload.import_dataset, Workload.import_folder, Workload.pack_dataset)
    return any(implements(workload, method) for method in own)


def how_without_import(workload: "Workload[Any]", source: Path) -> str:
    """Return the end of a refusal of files that the workload may read as they are; "" if none."""
    folder = source.parent if source.is_file() else source
    if imports_data(workload) or not source.exists() or folder == Path():
        return ""
    uri = f"s3://DATASET-BUCKET/{folder.resolve().name}"
    return (
        f"; or leave the import out if {workload.name} reads the files as they are: "
        f"python -m training run --dataset-uri {folder} takes the folder, "
        f"python -m training data upload {folder} --dataset-uri {uri}"
    )


def _too_few(settings: Settings, meta: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a stage cannot train or be evaluated on so few samples, where they are counted."""
    splits = meta.get("splits")
    counts = splits if isinstance(splits, Mapping) else {}
    train, held_out = counts.get("train"), counts.get("validation")
    if isinstance(train, int) and (why := settings.why_no_step(train)):
        yield why
    if held_out == 0 and settings.needs_validation:
        yield "split validation has no samples; add some: without splits, a class needs two files"


def workable(
    workload: "Workload[Any]", recipe: str, meta: Mapping[str, Any]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return overrides that let a recipe train on a dataset, and what is refused without and with.

    They are those that the refusals name, tried: a smaller batch for a few images, for example.
    """
    asked, refused = dict[str, str](), list[list[str]]()
    for _ in range(_TRIES):
        overrides = {**fitted(workload, recipe, asked, meta), **asked}
        try:
            stages = workload.stages(resolve_config(workload, recipe, overrides))
        except (UserError, ValueError) as error:
            refused.append([str(error)])
            break
        refused.append(dataset_refusals(stages, meta))
        named = dict[str, str]()
        for name, text in (pair for why in refused[-1] for pair in _NAMED.findall(why)):
            named.setdefault(name, text)
        if named.items() <= asked.items():
            break
        asked |= named
    return asked, refused[0], refused[-1]


def with_overrides(config: Any, overrides: Mapping[str, str], what: str) -> Any:
    """Return the dataclass with fields overridden by name; messages call it `what`."""
    places = field_places(config)
    names = {".".join(place): name for name, place in places.items()}
    values = {}
    for given, text in overrides.items():
        name = names.get(given, given)
        if name not in places:
            raise UserError(f"{what} has no field {given!r}; {name_known(given, list(places))}")
        *outer, last = places[name]
        owner = getattr(config, outer[0]) if outer else config
        values[name] = _parse_value(given, text, typing.get_type_hints(type(owner))[last])
    try:
        return changed(config, **values)
    except ValueError as error:
        raise UserError(f"invalid overrides {dict(overrides)}: {error}") from error


def _refuse_without_effect(
    workload: "Workload[Any]", config: Any, overrides: Mapping[str, str]
) -> None:
    """Refuse to override a setting that every stage sets itself, whatever the config says."""
    from training.workload import Train

    places = field_places(config)
    places |= {".".join(place): place for place in places.values()}
    nested = {name: places[name] for name in overrides if len(places[name]) > 1}
    try:
        stages = workload.stages(config) if nested else ()
        settings = [stage.settings for stage in stages if isinstance(stage, Train)]
    except ValueError:
        return  # reported when the stages are built
    for name, (outer, last) in nested.items():
        value = getattr(getattr(config, outer), last)
        if not any(getattr(each, last) == value for each in settings):
            raise UserError(
                f"the override {name}={overrides[name]} has no effect: the stages of workload "
                f"{workload.name!r} set {last} themselves; leave it out"
            )


def _parse_value(name: str, text: str, kind: Any) -> Any:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    options = typing.get_args(kind) if is_union else (kind,)
    # SageMaker's SDK writes None as null.
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    for option in options:
        if typing.get_origin(option) is Literal:
            if text in (known := {str(value): value for value in typing.get_args(option)}):
                return known[text]
        elif option is bool:
            if text.lower() in ("true", "false"):
                return text.lower() == "true"
        elif option in (int, float):
            with suppress(ValueError):
                if math.isfinite(value := option(text)):
                    return value
        elif option is str:
            return text
    readable = getattr(kind, "__name__", str(kind))
    is_fraction = int in options and "." in text
    advice = "whole numbers, and no range" if is_fraction else "another value"
    raise UserError(f"the override {name}={text!r} is not a valid {readable}; use {advice}")


def facts_of(meta: Mapping[str, Any]) -> str:
    """Format what a manifest's `meta` has counted, in one line, with the first ten classes."""
    facts, classes, splits = list[str](), meta.get("classes"), meta.get("splits")
    if isinstance(classes, list | tuple):
        more = f", {len(classes) - 10:,} more" if classes[10:] else ""
        # Names of folders need not be UTF-8.
        names = ", ".join(map(str, classes[:10])).encode(errors="backslashreplace").decode()
        facts.append(f"{len(classes):,} classes ({names}{more})")
    for name, count in splits.items() if isinstance(splits, Mapping) else ():
        if isinstance(count, Mapping):
            count = ", ".join(f"{value:,} {unit}" for unit, value in count.items())
        facts.append(f"{name} {count:,}" if isinstance(count, int) else f"{name} {count}")
    numbers = {n: v for n, v in meta.items() if isinstance(v, int | float) and n != "seed"}
    return ", ".join([*facts, *(f"{n.replace('_', ' ')} {v:,.10g}" for n, v in numbers.items())])
