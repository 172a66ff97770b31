"""How much a reader must keep in mind: lines, names, one-importer modules, parameters, flags.

It reads a checkout's tracked Python files as text, so that an older commit can be measured by the
same rules: `python -m benchmarks walks --tree FOLDER`.
"""

import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# An option of the trainer: the number of files that name it shows what adding an option costs.
OPTION = "nan_skips"
_DEFINES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def sources(tree: Path) -> dict[str, ast.Module]:
    """Parse every tracked Python file outside tests/."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.splitlines() if (tree / name).is_file()]
    return {
        name: ast.parse((tree / name).read_text())
        for name in names
        if not name.startswith("tests/")
    }


def doubled_classes(files: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Return public class names that several modules (except examples) define, with the modules."""
    found = defaultdict(list)
    for name, module in files.items():
        if name.startswith("examples/"):
            continue  # independent scripts
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def measure(tree: Path) -> list[dict[str, Any]]:
    """Return one row per figure."""
    files = sources(tree)
    training = {name: module for name, module in files.items() if name.startswith("training/")}
    rooms = Counter[str]()
    for name in files:
        rooms[name.partition("/")[0]] += _num_lines(tree / name)
    tests = sum(_num_lines(path) for path in (tree / "tests").rglob("*.py"))
    importers = _importers(files)
    alone = [name for name in training if len(importers[_module_of(name)]) == 1]
    return [
        *({"what": f"lines in {room}", "number": lines} for room, lines in sorted(rooms.items())),
        {"what": "lines of source", "number": sum(rooms.values())},
        {"what": "lines of tests", "number": tests},
        {"what": "public names in training", "number": sum(map(_num_public, training.values()))},
        {"what": "modules with one importer in training", "number": len(alone)},
        {"what": "doubled class names", "number": len(doubled_classes(files))},
        {"what": "stack parameters", "number": _num_parameters(files)},
        *_command_line(tree),
        {"what": f"files that name {OPTION}", "number": _num_naming(tree)},
    ]


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def _module_of(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _num_public(module: ast.Module) -> int:
    """Count a module's functions, classes and variables without a leading underscore."""
    names = [node.name for node in module.body if isinstance(node, _DEFINES)]
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return sum(not name.startswith("_") for name in names)


def _importers(files: Mapping[str, ast.Module]) -> Mapping[str, set[str]]:
    """Return, by module, the files outside tests/ that import it or a name from it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, module in files.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                for each in node.names:
                    found[each.name].add(name)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found[node.module].add(name)
                for each in node.names:
                    found[f"{node.module}.{each.name}"].add(name)
    return found


def _command_line(tree: Path) -> list[dict[str, Any]]:
    """Count commands and flags, if the tree has the list of them."""
    path = tree / "tests" / "command_line.txt"
    if not path.exists():
        return []
    words = [line.split() for line in path.read_text().splitlines()]
    flags = [each for each in words if each[-1].startswith("--")]
    return [
        {"what": "commands with flags", "number": len({tuple(each[:-1]) for each in flags})},
        {"what": "flags, each name once", "number": len({each[-1] for each in flags})},
    ]


def _num_parameters(files: Mapping[str, ast.Module]) -> int:
    """Count the annotated fields of the class of stack parameters."""
    for module in files.values():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == "ParameterFields":
                return sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return 0


def _num_naming(tree: Path) -> int:
    listed = subprocess.run(
        ["git", "grep", "-l", OPTION, "--", ".", ":!tests"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    return len(listed.stdout.splitlines())
