"""How a command ends that was stopped by hand, or on a full disk."""

import shutil
import signal
from pathlib import Path

import pytest

from training.attempt.exit_code import exit_code_of
from training.errors import EXIT_MACHINE


def test_a_command_that_is_stopped_by_hand_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def wait() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert exit_code_of(wait) == 130
    said = capsys.readouterr().err
    assert said == "error: stopped by Ctrl-C before it finished; run it again\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a full disk at hand")
def test_a_full_disk_is_the_machine_s_fault_wherever_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "scratch").symlink_to("/dev/full")

    def copy() -> int:
        (tmp_path / "train.py").write_text("x")
        shutil.copyfile(tmp_path / "train.py", tmp_path / "scratch")
        return 0

    def write() -> int:
        (tmp_path / "scratch").write_text("x")
        return 0

    assert exit_code_of(copy) == exit_code_of(write) == EXIT_MACHINE
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"error: the disk is full: {tmp_path / 'scratch'} cannot be written; free some of it, or "
        "use a larger one",
        "error: the disk is full: a file cannot be written; free some of it, or use a larger one",
    ]
