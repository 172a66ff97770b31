"""Facts about workloads, which stacks never imports: without them, a mistake would only fail on the
first instance, after the deploy.

Names and recipes of the registered ones are read from training/registry.py, as text. A user's own
workload is imported by the trainer, in another process, which also measures it.
"""

import ast
import hashlib
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from contract.description import WorkloadDescription, describe
from sizing import FOOTPRINTS_FORMAT, NotMeasuredError

ROOT = Path(__file__).parents[2]
_SCRATCH = TemporaryDirectory(prefix="footprints-")
REGISTRY = ROOT / "training" / "registry.py"


def workloads() -> dict[str, str]:
    """Return the registered workloads: a workload's name -> module:NAME."""
    return _assigned(REGISTRY, "WORKLOADS")


def recipes(workload: str) -> tuple[str, ...]:
    """Return the names of a registered workload's recipes."""
    known: dict[str, tuple[str, ...]] = _assigned(REGISTRY, "RECIPES")
    return known.get(workload, ())


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


@cache
def _assigned(path: Path, name: str) -> dict[str, Any]:
    """Return the dictionary of literals that a module assigns to `name: dict[...]`."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == name:
            return dict(ast.literal_eval(node.value))
    raise AssertionError(f"{path} assigns no dictionary to {name}: dict[...]")
