"""How a command ends that was stopped by hand, or on a full disk."""

import errno
import signal
from pathlib import Path

import pytest

from contract.errors import Exit
from training.durable.errors import exit_code_of


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
    assert exit_code_of(lambda: (tmp_path / "scratch").write_text("x")) == Exit.MACHINE
    said = capsys.readouterr().err
    assert said == "error: the disk is full; free some space, or use a larger disk\n"

    def copy() -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "train.py", None, "ml/train.py")

    assert exit_code_of(copy) == Exit.MACHINE
    assert "the disk is full: cannot write ml/train.py; free" in capsys.readouterr().err
