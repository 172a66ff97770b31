"""The example of docs/expansion.md runs as it stands there, and prints what the page says."""

import re
import runpy
from pathlib import Path

import pytest

from tests.training import documented

PAGE = Path(__file__).parents[4] / "docs" / "expansion.md"
_NUMBER = re.compile(r"\d+e[+-]\d+")


def test_the_example_prints_what_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    ((name, code),) = documented.files(text)
    (tmp_path / name).write_text(code)
    runpy.run_path(str(tmp_path / name))
    said = text.partition("It prints:\n\n```text\n")[2].partition("```")[0]
    printed = capsys.readouterr().out
    assert _NUMBER.sub("#", printed) == _NUMBER.sub("#", said)
    for found, stated in zip(_NUMBER.findall(printed), _NUMBER.findall(said), strict=True):
        if float(stated) < 1e-9:
            assert float(found) < 1e-9
        else:
            assert 0.5 < float(found) / float(stated) < 2
