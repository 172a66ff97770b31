"""A program's processes: started together, and none outlives the attempt."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contract.errors import UserError
from tests.training.durable.program.programs import ROOT, is_running, started
from tests.training.runs import wait_for
from training.durable.program.process import ProgramProcess, resolve_command


def end_of(process: ProgramProcess) -> int:
    code = process.wait(60)
    code = process.left_code if code is None else code
    assert code is not None
    return code


def test_what_a_program_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    # In a session of its own, its parent gone: a process group would not find it.
    script = "(setsid sleep 4711 &); until [ -e ends ]; do sleep 0.05; done"
    with started("bash", "-c", script, folder=tmp_path) as process:
        wait_for(lambda: is_running("4711"))
        (tmp_path / "ends").touch()
        assert end_of(process) == 0
    assert process.exit_code == 0
    assert not is_running("4711")


def test_a_keeper_that_is_killed_before_it_reads_a_signal_is_an_end() -> None:
    with started("bash", "-c", "sleep 4714") as process:
        os.kill(process._keeper.pid, signal.SIGSTOP)
        process.signal(signal.SIGTERM)
        process._keeper.kill()
        assert end_of(process) == -signal.SIGKILL


def test_closing_ends_every_process_at_once() -> None:
    with started("bash", "-c", "trap '' TERM; (setsid sleep 4712 &); sleep 4712") as process:
        assert process.wait(0.2) is None
    assert process.exit_code == -signal.SIGKILL
    assert not is_running("4712")


def test_a_killed_parent_leaves_no_process() -> None:
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from training.durable.program.process import ProgramProcess\n"
        "words = ['bash', '-c', '(setsid sleep 4713 &); sleep 4713']\n"
        "p = ProgramProcess(words, folder=Path('.'), variables=dict(os.environ), output=1)\n"
        "print('started', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    # The pipe ends when the last process that holds it has.
    assert parent.stdout.read() == b""
    parent.wait()
    parent.stdout.close()
    assert not is_running("4713")


def test_a_killed_keeper_takes_the_program_along() -> None:
    with started("sleep", "4714") as process:
        parent = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGKILL)
        assert end_of(process) == -signal.SIGKILL
        wait_for(lambda: not is_running("4714"))


def test_a_signal_goes_to_the_first_process_alone() -> None:
    # As from docker stop: torchrun and its like pass it on as they see fit.
    script = "sleep 0.4 & trap 'wait; exit 5' USR1; while :; do sleep 0.02; done"
    with started("bash", "-c", script) as process:
        wait_for(lambda: bool(process.takers(signal.SIGUSR1)))
        process.signal(signal.SIGUSR1)
        assert end_of(process) == 5


def test_a_signal_is_sent_when_that_returns() -> None:
    with started("sleep", "4715") as process:
        os.kill(process.pid, signal.SIGSTOP)
        facts = Path(f"/proc/{process.pid}/status")
        # A signal that comes before it has stopped ends it.
        wait_for(lambda: "State:\tT" in facts.read_text())
        process.signal(signal.SIGUSR1)
        status = facts.read_text()
        pending = int(status.partition("ShdPnd:")[2].split()[0], 16)
    assert pending >> (signal.SIGUSR1 - 1) & 1


def test_it_is_known_whether_a_program_handles_a_signal() -> None:
    with started("bash", "-c", "trap '' TERM; echo; sleep 60") as process:
        wait_for(lambda: bool(process.takers(signal.SIGTERM)))
        assert process.takers(signal.SIGUSR2) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\x00\x01 no program", "begin the file with #!"), (b"#!/no/such/python\n", "No such file")],
)
def test_fails_to_start_what_no_kernel_or_interpreter_runs(
    tmp_path: Path, content: bytes, words: str
) -> None:
    script = tmp_path / "train"
    script.write_bytes(content)
    script.chmod(0o755)
    with pytest.raises(UserError, match=words), started(str(script)):
        pass


@pytest.mark.parametrize("command", ["python -m tool new.py", "bash -c new.sh", "env new.py"])
def test_a_script_is_looked_for_only_where_it_is_certain_which_word_it_is(
    tmp_path: Path, command: str
) -> None:
    resolve_command(command.split(), tmp_path, os.environ["PATH"])


def test_an_end_that_follows_another_word_is_known_after_closing() -> None:
    """Its first process ended between the last look and the end of a notice's time."""
    with started("bash", "-c", "(setsid sleep 4715 &); sleep 0.2; exit 3") as process:
        time.sleep(1)
    assert process.exit_code == 3
    assert not is_running("4715")
