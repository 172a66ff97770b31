"""The room's promises: the standard library alone, also on the Python that an instance brings."""

import ast
import sys
from pathlib import Path

import pytest

import contract

FILES = sorted(Path(contract.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_imports_the_standard_library_and_itself(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module, "no relative import"
            names = [node.module]
        for name in names:
            top = name.partition(".")[0]
            assert top == "contract" or top in sys.stdlib_module_names, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_older_python_reads_it(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 10))
