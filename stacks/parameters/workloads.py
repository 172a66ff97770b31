"""The names of workloads and recipes, read from training's source: stacks never imports it.

Without it, an unknown name would only fail on the first instance, after the deploy.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
