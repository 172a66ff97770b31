"""Every example of docs/your-program.md, in order, in one folder: it prints what the page says."""

import os
import sys
from pathlib import Path

import pytest

from tests.training import documented
from tests.training.forked import command

PAGE = Path(__file__).parents[2] / "docs" / "your-program.md"


def test_every_example_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text()
    for name, content in documented.files(text):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    # For the processes that a sweep starts.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(PAGE.parents[1])]))
    found = documented.read(PAGE)
    assert found
    for example in found:
        code, out, err = command(example.arguments)
        said = f"{' '.join(example.arguments)}\n{err}{out}"
        assert code == example.code, said
        assert documented.matches(example.output, err + out), said


def test_a_page_that_says_something_else_is_noticed() -> None:
    assert documented.matches("[ok] …: 3 files", "[ok] out/x: 3 files\n")
    assert documented.matches("first\n…\nlast", "first\nmore\nmore\nlast")
    assert not documented.matches("[ok] …: 3 files", "[ok] out/x: 4 files")
    assert not documented.matches("first", "first\nsecond")
