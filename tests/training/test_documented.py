"""Every example of two pages, in order, in one folder: it prints what the page says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training import documented
from tests.training.forked import command


@pytest.mark.slow  # that the commands exist is looked at in each run of the tests
def test_every_example_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_sweep: None
) -> None:
    text, folder = "".join(page.read_text() for page in documented.PAGES), tmp_path / "mine"
    folder.mkdir()
    for name, content in documented.files(text):
        (folder / name).write_text(content)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    # For the ranks that a run starts.
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(folder), str(documented.PAGES[0].parents[1])])
    )
    found = list(documented.examples(text))
    assert found
    for example in found:
        if example.script:
            words = [sys.executable, example.script, *example.arguments]
            assert subprocess.run(words, check=False).returncode == example.code
            continue
        code, out, err = command(example.arguments)
        said = f"{' '.join(example.arguments)}\n{err}{out}"
        assert code == example.code, said
        assert documented.matches(example.output, err + out), said


def test_a_classifier_of_images_takes_at_most_sixty_lines() -> None:
    text = dict(documented.files(documented.PAGES[0].read_text()))["shapes.py"]
    assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 100


def test_a_page_that_says_something_else_is_noticed() -> None:
    assert documented.matches("[ok] …: 3 files", "[ok] out/x: 3 files\n")
    assert documented.matches("first\n…\nlast", "first\nmore\nmore\nlast")
    assert not documented.matches("[ok] …: 3 files", "[ok] out/x: 4 files")
    assert not documented.matches("first", "first\nsecond")
