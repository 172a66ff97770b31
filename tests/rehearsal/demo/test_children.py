"""Programs that the rehearsal starts leave nothing behind."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from rehearsal.demo.children import ChildFailed, Children

GRANDCHILD = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
)


def children(folder: Path, said: list[str]) -> Children:
    return Children(say=said.append, environment={}, folder=folder)


def test_each_line_is_relayed_with_the_name_of_its_program(tmp_path: Path) -> None:
    said: list[str] = []
    with children(tmp_path, said) as programs:
        programs.start("hello", [sys.executable, "-c", "print('one'); print('two')"]).expect()
    assert said == ["hello: one", "hello: two"]


def test_fails_with_the_last_lines_of_the_program(tmp_path: Path) -> None:
    with children(tmp_path, []) as programs:
        child = programs.start("bad", [sys.executable, "-c", "print('why'); exit(3)"])
        with pytest.raises(ChildFailed, match=r"bad failed with exit status 3:\n    why"):
            child.expect()


def test_leaving_the_context_ends_grandchildren_too(tmp_path: Path) -> None:
    with children(tmp_path, []) as programs:
        child = programs.start("parent", [sys.executable, "-c", GRANDCHILD])
        process = psutil.Process(child.process.pid)
        deadline = time.monotonic() + 120
        while not process.children() and time.monotonic() < deadline:
            time.sleep(0.02)
        grandchild = process.children()[0]
    psutil.wait_procs([grandchild], timeout=120)
    assert not grandchild.is_running()
