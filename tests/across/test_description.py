"""A workload is described by another process, which sees what travels of its folder."""

import os
import subprocess
from pathlib import Path

import pytest

from contract.description import _refusal, describe
from contract.errors import UserError
from tests.training import documented


def test_a_workload_of_one_s_own_is_described_and_what_it_prints_does_no_harm(
    tmp_path: Path,
) -> None:
    source = documented.own_workload(tmp_path / "mine", 'print("imported")')
    described = describe("moons:MOONS", "small", ("epochs=2",), source=source)
    assert described.stages == {"classify": 30} and described.makes_data


def test_fails_for_a_module_that_git_ignores(tmp_path: Path) -> None:
    source = documented.own_workload(tmp_path / "mine")
    (source / "other.py").touch()
    (source / ".gitignore").write_text("moons.py\n")
    own = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", "init", "--quiet"], cwd=source, env=own, check=True)
    with pytest.raises(UserError, match="module 'moons' was not found"):
        describe("moons:MOONS", "small", source=source)


def test_an_error_of_its_code_is_one_sentence() -> None:
    mine = Path("mine")
    missing = _refusal("a:A", "ModuleNotFoundError: No module named 'timm'", mine)
    assert missing.endswith(
        "named 'timm'; add it to mine, or to its requirements.txt and also install it here"
    )
    assert _refusal("a:A", "NameError: name 'x' is not defined", mine) == (
        "workload 'a:A' cannot be imported: NameError: name 'x' is not defined; correct it"
    )
    assert _refusal("a:A", "error: it has no stage", mine) == "it has no stage"
