"""The registry: a workload's name -> its import path. The only place that names a workload."""

import importlib
from typing import TYPE_CHECKING, Any

from contract.program import WORKLOAD as PROGRAM
from training.errors import UserError, name_known

if TYPE_CHECKING:
    from training.workload import Workload

WORKLOADS: dict[str, str] = {
    "detection": "training.workloads.detection.workload:DETECTION",
    "growth": "training.workloads.growth.workload:GROWTH",
    "imagenet": "training.workloads.imagenet.workload:IMAGENET",
    "trajectory": "training.workloads.trajectory.workload:TRAJECTORY",
}

# Known without torch, so that a typing mistake is answered at once.
RECIPES: dict[str, tuple[str, ...]] = {
    "detection": ("coco_12", "full", "laptop"),
    "growth": ("full", "laptop", "literal"),
    "imagenet": ("epochs_16", "epochs_40", "epochs_88", "full", "laptop"),
    "trajectory": ("full", "laptop", "magvit_full", "magvit_laptop"),
}


def check_recipe(workload: str | None, recipe: str | None) -> None:
    """UserError for an unknown workload, or an unknown recipe of a known one."""
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
            "subclass training.workload.Workload"
        )
    return workload


def module_of(name: str) -> str:
    """The module that defines the workload `name`."""
    return _path(name).partition(":")[0]


def _path(name: str) -> str:
    path = WORKLOADS.get(name, name)
    if not path.partition(":")[2]:
        raise UserError(
            f"unknown workload {name!r}; {name_known(name, sorted(WORKLOADS))}, "
            "or give your own as package.module:NAME"
        )
    return path
