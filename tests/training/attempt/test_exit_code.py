"""How a command ends that was stopped by hand."""

import signal

import pytest

from training.attempt.exit_code import exit_code_of


def test_a_command_that_is_stopped_by_hand_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def wait() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert exit_code_of(wait) == 130
    said = capsys.readouterr().err
    assert said == "error: stopped by Ctrl-C before it finished; run it again\n"
