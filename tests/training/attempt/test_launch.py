"""No rank outlives rank 0, whatever state it is in."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.training.runs import ROOT, wait_for

# Rank 1 says that it is ready; then it hangs in C and keeps the interpreter's lock.
RANK_1 = """
import ctypes
from training.attempt.ranks import end_with_rank_0
end_with_rank_0()
print("ready", flush=True)
ctypes.PyDLL(None).sleep(600)
"""
RANK_0 = """
import subprocess, sys
rank_1 = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(rank_1.pid, flush=True)
rank_1.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel kills a child for us")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_that_runs_no_python_ends_with_rank_0(is_stopped: bool) -> None:
    command = [sys.executable, "-c", RANK_0, RANK_1]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        lines = {rank_0.stdout.readline().strip(), rank_0.stdout.readline().strip()}
        (pid,) = lines - {"ready"}
        rank_1 = psutil.Process(int(pid))
        if is_stopped:
            rank_1.send_signal(signal.SIGSTOP)
            wait_for(lambda: rank_1.status() == psutil.STATUS_STOPPED)
        rank_0.kill()
        _, alive = psutil.wait_procs([rank_1], timeout=20)
        for process in alive:
            process.kill()
        assert alive == []
