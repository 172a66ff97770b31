"""Facts about workloads, which stacks never imports: without them, a mistake would only fail on the
first instance, after the deploy.

Names and recipes of the registered ones are read from training's source. A user's own workload is
imported by the trainer, in another process, which also measures it.
"""

import ast
import hashlib
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from contract.description import WorkloadDescription, describe
from sizing import FOOTPRINTS_FORMAT, NotMeasuredError

ROOT = Path(__file__).parents[2]
_SCRATCH = TemporaryDirectory(prefix="footprints-")
REGISTRY = ROOT / "training" / "registry.py"


@cache
def workloads() -> dict[str, str]:
    """Return the registry of training/registry.py: a workload's name -> module:NAME."""
    found = _assigned(REGISTRY, "WORKLOADS")
    assert found is not None, f"{REGISTRY} assigns no dictionary to WORKLOADS"
    names: dict[str, str] = ast.literal_eval(found)
    return names


@cache
def recipes(workload: str) -> tuple[str, ...]:
    """Return the names of a registered workload's recipes, from RECIPES in its package."""
    module = workloads()[workload].partition(":")[0]
    folder = ROOT.joinpath(*module.split(".")).parent
    for path in sorted(folder.glob("*.py")):
        found = _assigned(path, "RECIPES")
        if found is not None:
            return tuple(ast.literal_eval(key) for key in found.keys if key is not None)
    raise AssertionError(f"no file of {folder} assigns a dictionary to RECIPES")


def is_own(workload: str) -> bool:
    """Whether it is a user's own workload: package.module:NAME."""
    return ":" in workload


@cache
def described(
    workload: str, recipe: str, overrides: tuple[str, ...], source: str, manifest: str
) -> WorkloadDescription:
    """Return a workload as the trainer sees it, a user's own measured; UserError if it is bad."""
    return describe(
        workload,
        recipe,
        overrides,
        source=Path(source) if source else None,
        manifest=Path(manifest) if manifest else None,
        measured=is_own(workload),
    )


def footprints_of(own: WorkloadDescription) -> Path:
    """Return a file with its footprints, kept until this process ends; else NotMeasuredError."""
    if not own.footprints:
        raise NotMeasuredError(own.why_unmeasured or "none of its stages could be measured")
    text = json.dumps({"format": FOOTPRINTS_FORMAT, "footprints": own.footprints})
    path = Path(_SCRATCH.name, hashlib.sha256(text.encode()).hexdigest())
    path.write_text(text, encoding="utf-8")
    return path


def _assigned(path: Path, name: str) -> ast.Dict | None:
    """Return the dictionary that a module assigns to `name`, directly or wrapped in a call."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value
            if isinstance(value, ast.Call) and value.args:
                value = value.args[0]
            return value if isinstance(value, ast.Dict) else None
    return None
