"""A room's door: the names in its `__init__` that others may import, each loaded when first used.

A door costs nothing to pass: reading a run's head imports neither torch nor the trainer.

    if TYPE_CHECKING:
        from training.durable.record.head import Head
    else:
        __getattr__ = door.of(__name__)
    __all__ = ["Head"]
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def homes(source: str) -> dict[str, str]:
    """Return the module of each name that a door's source imports for type checkers."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom):
                    found |= {alias.name: str(each.module) for alias in each.names}
    return found


def of(package: str) -> Callable[[str], object]:
    """Return the package's `__getattr__`, which loads a name of its door from the name's module."""
    modules: dict[str, str] = {}

    def load(name: str) -> object:
        room = sys.modules[package]
        if not modules:
            modules.update(homes(Path(str(room.__file__)).read_text(encoding="utf-8")))
        if name not in modules:
            raise AttributeError(f"{package} has no name {name!r} in its door")
        value: object = getattr(import_module(modules[name]), name)
        setattr(room, name, value)
        return value

    return load
