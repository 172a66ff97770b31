"""`.ci/compat.sh`, with an uv and interpreters that only take note of what they are asked."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
UV = """#!/usr/bin/env bash
case "$1 $*" in
    venv*) mkdir -p "${@: -1}/bin" && cp .venv/bin/python "${@: -1}/bin/" ;;
    *--requirement*) cp "${@: -1}" installed.txt ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
echo "$@" >>calls.txt
"""


def names(requirements: str) -> set[str]:
    return set(re.findall(r"^[a-z0-9][a-z0-9._-]*", requirements, re.MULTILINE))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    locks = (f"requirements{group}.txt" for group in ("", "-examples", "-formats"))
    for name in (".ci/compat.sh", *locks, "userdata/run.env.example"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "userdata" / "steps").mkdir()
    (tmp_path / "userdata" / "steps" / "interpreter.sh").touch()
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, text in (("uv", UV), ("python", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return tmp_path


def compat(checkout: Path, *arguments: str) -> list[str]:
    command = ["bash", ".ci/compat.sh", "2.12.1", *arguments]
    subprocess.run(command, cwd=checkout, check=True)
    return (checkout / "calls.txt").read_text().splitlines()


def test_another_torch_is_tested_with_all_of_the_lock_but_what_torch_pins(checkout: Path) -> None:
    calls = compat(checkout, "3.13")
    installed = names((checkout / "installed.txt").read_text())
    wanted = names((REPOSITORY / "requirements.in").read_text())
    assert wanted - installed == {"torch", "torchvision"}
    left_out = names((REPOSITORY / "requirements.txt").read_text()) - installed
    brought_by_torch = {name for name in left_out if name.startswith(("nvidia-", "cuda-"))}
    assert left_out - brought_by_torch == {"torch", "torchvision", "triton", "setuptools"}
    assert any(call.endswith("tests/training tests/userdata") for call in calls)
