"""`python -m training` in a fork of this process, which has imported torch already."""

import os
import subprocess
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch  # noqa: F401 (here, and so not in each fork)


def run_in_fork(
    words: Sequence[str], *, cwd: Path = Path(), **_: bool
) -> subprocess.CompletedProcess[str]:
    """For `subprocess.run` with captured output."""
    from tests.training.forked import command

    assert list(words[1:3]) == ["-m", "training"]
    try:
        done = command(words[3:], lambda: os.chdir(cwd))
    except Exception as error:
        said = "".join(traceback.format_exception(error))
        return subprocess.CompletedProcess(words, 1, "", said)
    return subprocess.CompletedProcess(words, *done)
