"""How large each room is, and how wide its door.

A room is a package that others enter by its door, the names in its `__all__`. This prints a table:

python -m tests.house
"""

import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sizing import show_table

REPOSITORY = Path(__file__).parents[1]
THE_ROOT = "the root"
# The rooms within training/; every other folder is a room itself.
INNER = ("training/workloads", "training/proof", "training/durable")


def room_of(path: str) -> str:
    """Return the room of a file; a test's is that of what it tests."""
    path = path.removeprefix("tests/").replace("/test_", "/")
    inner = (room for room in INNER if path.startswith(f"{room}/"))
    return next(inner, path.partition("/")[0] if "/" in path else THE_ROOT)


def sources(tree: Path) -> dict[str, ast.Module]:
    """Parse every tracked Python file outside tests/."""
    return {
        name: ast.parse((tree / name).read_text())
        for name in _listed(tree)
        if not name.startswith("tests/")
    }


def _listed(tree: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (tree / name).is_file()]


def rooms(tree: Path, files: Mapping[str, ast.Module]) -> list[dict[str, Any]]:
    """Return the lines and the door of each room, as used and as named, then their sum."""
    code, tests = Counter[str](), Counter[str]()
    for name, module in files.items():
        code[room_of(name)] += code_lines((tree / name).read_text(), module)
    for name in _listed(tree):
        if name.startswith("tests/"):
            room = room_of(name)
            num_lines = len((tree / name).read_text().splitlines())
            tests[room if room in code else THE_ROOT] += num_lines
    used = _imported(files)
    found = [(room, num, tests[room], len(used[room])) for room, num in code.most_common()]
    found.append(("all", code.total(), tests.total(), sum(map(len, used.values()))))
    return [
        {
            "room": room,
            "code lines": num_code,
            "test lines": num_tests,
            "names others import": num_used,
            "names in __all__": _named(files.get(f"{room}/__init__.py")),
        }
        for room, num_code, num_tests, num_used in found
    ]


def code_lines(text: str, module: ast.Module) -> int:
    """Count lines without those that are blank, a comment, or part of a docstring."""
    described = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings: set[int] = set()
    for node in (module, *_statements(module)):
        if isinstance(node, described) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(text.splitlines(), 1)
    )


def _imported(files: Mapping[str, ast.Module]) -> Mapping[str, set[str]]:
    """Return, by room, each name of it that a file of another room imports."""
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files
    }
    found: dict[str, set[str]] = defaultdict(set)
    for name, module in files.items():
        for imported in imports_of(module):
            home = modules.get(imported) or modules.get(imported.rpartition(".")[0])
            if home and room_of(home) != room_of(name):
                found[room_of(home)].add(imported)
    return found


def imports_of(module: ast.Module) -> Iterator[str]:
    """Yield what a module imports: modules, and names as MODULE.NAME."""
    for node in _statements(module):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _statements(parent: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below, without looking for some in expressions, which have none."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        for node in getattr(parent, field, ()):
            yield node
            yield from _statements(node)


def _named(package: ast.Module | None) -> int | None:
    """Return the number of names in a package's `__all__`, None if it has none."""
    for node in package.body if package else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return len(ast.literal_eval(node.value))
    return None


if __name__ == "__main__":
    show_table(rooms(REPOSITORY, sources(REPOSITORY)), title="rooms")
