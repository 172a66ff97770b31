"""Two ranks on gloo: one lineage, one writer, and the same training as one process alone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from subprocess import PIPE

import psutil
import pytest

from contract.errors import UserError
from tests.training.hooks import (
    HUNG_SECONDS,
    a_kill_of_either_rank_loses_no_bit,
    at_rank,
    both_ranks_stop_at_a_notice,
    notice,
)
from tests.training.runs import ROOT, Run, assert_equal, free_port, wait_for
from training.durable.attempt.ranks import RankProcess
from training.durable.attempt.supervisor import Supervisor
from training.durable.attempt.world import RankEnvironment
from training.durable.errors import AttemptEndedError
from training.durable.record.lease import LeaseLostError

NewRun = Callable[[str], Run]


def test_fails_for_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    place = RankEnvironment()
    assert place.ranks(4) == 4, "on the CPU as many as are asked for"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert place.ranks(None) == 2
    with pytest.raises(UserError, match="4 ranks need a GPU each, and this machine has 2; pass "):
        place.ranks(4)


def test_two_ranks_train_on_the_batches_of_one(pair: Run, whole: Run) -> None:
    assert_equal(pair, whole)
    assert "world" not in pair.json("receipt.json")["numerics_key"]
    assert len(pair.lines("step")) == len(whole.lines("step")), "rank 0 alone writes"
    assert [line["shard"] for line in pair.lines("prepare")] == [0, 1, 2]
    counts = [line["metrics"].keys() for line in pair.lines("evaluation")]
    assert counts == [line["metrics"].keys() for line in whole.lines("evaluation")]


@pytest.mark.parametrize(
    ("rank", "place"), [(0, ("first", 0)), (1, ("first-evaluation", 5)), (1, ("second", 5))]
)
def test_a_notice_to_either_rank_stops_both_at_the_same_step(
    run: Run, pair: Run, rank: int, place: tuple[str, int]
) -> None:
    both_ranks_stop_at_a_notice(run, pair, rank, place)


def test_a_kill_of_either_rank_ends_the_attempt_and_loses_no_bit(run: Run, pair: Run) -> None:
    a_kill_of_either_rank_loses_no_bit(run, pair)


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGUSR1, 75), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)],
)
def test_a_process_starts_the_other_ranks_itself_and_they_end_with_it(
    run: Run, pair: Run, sent: signal.Signals, code: int
) -> None:
    run.options = ["--override=step_seconds=0.1"]
    command = [sys.executable, "-m", "training", *run.arguments("--num-processes=2")]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_for(lambda: run.store.get("head.json") is not None and bool(run.head.checkpoints))
        others = psutil.Process(process.pid).children(recursive=True)
        assert len(others) == 1
        process.send_signal(sent)
        process.wait(120)
    assert process.returncode == code
    _, alive = psutil.wait_procs(others, timeout=20)
    assert alive == [], "a rank does not outlive rank 0"
    run.options = []
    assert run.attempt_with_ranks(2, "--override=step_seconds=0.1") == [0, 0]
    assert_equal(run, pair)


def test_a_rank_that_watches_rank_0_ends_without_a_word() -> None:
    """Several times: the end of the interpreter and the thread that reads race each other."""
    lines = ["import time", "from training.durable.attempt.supervisor import Supervisor"]
    program = "; ".join([*lines, "Supervisor.end_with_rank_0()", "time.sleep(0.1)"])
    command = [sys.executable, "-c", program]
    for _ in range(5):
        with subprocess.Popen(command, cwd=ROOT, stdin=PIPE, stderr=PIPE, text=True) as rank:
            assert rank.stderr is not None
            said, code = rank.stderr.read(), rank.wait(HUNG_SECONDS)
        assert (code, said) == (0, "")


@pytest.mark.slow
def test_all_ranks_of_a_finished_run_end_without_a_word(run: Run) -> None:
    command = [sys.executable, "-m", "training", *run.arguments("--num-processes=2")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert run.head.state == "finished"


def test_a_lost_rank_is_named_where_a_collective_breaks_first(run: Run) -> None:
    """The training thread may hear of it before the thread that waits for the process."""
    supervisor = Supervisor(budget_seconds=20)
    supervisor.last_resort.stand_down()

    def ends(variables: Mapping[str, str]) -> RankProcess:
        command = [sys.executable, "-c", "raise SystemExit(3)"]
        return subprocess.Popen(command, env={**variables}, stdin=subprocess.PIPE)

    said = "rank 1 exited with 3; the next attempt resumes from the last commit"
    with (
        pytest.raises(AttemptEndedError, match=said),
        RankEnvironment().meeting(
            supervisor, 2, run.scratch, {}, arguments=[], start=ends
        ) as place,
    ):
        assert place.world_size == 2
        raise RuntimeError("Connection closed by peer")


def test_fails_for_a_number_of_ranks_that_cannot_share_out_a_step(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt_with_ranks(3) == [2, 2, 2]
    assert "only 1, 2, 4 or 8 sum gradients in one order" in capfd.readouterr().err
    assert run.attempt_with_ranks(4) == [2] * 4
    said = capfd.readouterr().err
    assert "a step of 8 samples has 2 micro-batches of 4, so some would have nothing" in said
    assert "use fewer --num-processes, or a micro_batch of at most 2" in said


def test_three_ranks_on_a_ring_resume_exactly_and_their_number_is_in_the_key(
    run: Run, finished: Callable[..., Run]
) -> None:
    run.options = ["--override=reduction=ring", "--override=micro_batch=2"]
    whole = finished(*run.options, ranks=3)
    at_rank(1, ("first", 6), notice)
    assert run.attempt_with_ranks(3) == [75] * 3
    assert run.attempt_with_ranks(3) == [0] * 3
    assert_equal(run, whole)
    assert run.json("receipt.json")["numerics_key"]["world"] == 3


def test_ranks_whose_lease_was_taken_over_end_alike(run: Run) -> None:
    run.options = ["--override=step_seconds=0.1"]
    first = run.fork_ranks(2)
    wait_for(lambda: bool(run.lines("step")))
    assert first[0].pid is not None
    run.suspend(first[0].pid)
    assert run.attempt_with_ranks(2) == [0, 0]
    os.kill(first[0].pid, signal.SIGCONT)
    for process in first:
        process.join(HUNG_SECONDS)
    assert [process.exitcode for process in first] == [76, 76]


def test_a_rank_hears_of_a_lost_lease_that_rank_0_alone_has_found(run: Run) -> None:
    def find_out() -> None:
        raise LeaseLostError("taken over")

    at_rank(0, ("first", 5), find_out)
    assert run.attempt_with_ranks(2) == [76, 76]


def torchrun(run: Run) -> subprocess.Popen[str]:
    ranks = ["--standalone", "--nproc-per-node=2", "-m", "training", *run.arguments()]
    command = [sys.executable, "-m", "torch.distributed.run", *ranks]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_ranks_with_the_variables_of_torchrun_stop_at_a_sigterm_and_go_on(
    run: Run, pair: Run
) -> None:
    port = free_port()

    def as_torchrun_starts_it() -> None:
        del os.environ["TRAINING_RENDEZVOUS"]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    run.options, run.at_start = ["--override=step_seconds=0.1"], as_torchrun_starts_it
    first = run.fork_ranks(2)
    wait_for(lambda: bool(run.lines("step")))
    for process in first:
        process.terminate()
    for process in first:
        process.join(HUNG_SECONDS)
    assert [process.exitcode for process in first] == [75, 75]
    run.at_start = None
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, pair)
    assert len(run.lines("step")) == 24, "no step was repeated"


@pytest.mark.slow  # what it tells its ranks stands above
def test_ranks_that_torchrun_started_stop_at_a_sigterm_and_go_on(run: Run, pair: Run) -> None:
    run.options = ["--override=step_seconds=0.1"]
    first = torchrun(run)
    while not run.lines("step"):
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    _, said = first.communicate(timeout=120)
    assert first.returncode != 0, "torchrun does not hand on the exit code 75"
    assert run.head.state == "released", said
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, pair)
    assert len(run.lines("step")) == 24, "no step was repeated"


# Rank 1 says who it is; then it hangs in C and keeps the interpreter's lock.
RANK_1 = """
import ctypes, os
from training.durable.attempt.supervisor import Supervisor
Supervisor.end_with_rank_0()
print(os.getpid(), flush=True)
ctypes.PyDLL(None).sleep(600)
"""
RANK_0 = """
import subprocess, sys
command = [sys.executable, "-c", sys.argv[1]]
others = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(2)]
others[0].wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel kills a child for us")
def test_a_rank_that_runs_no_python_ends_with_rank_0_even_if_it_is_stopped() -> None:
    command = [sys.executable, "-c", RANK_0, RANK_1]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        others = [psutil.Process(int(rank_0.stdout.readline())) for _ in range(2)]
        others[1].send_signal(signal.SIGSTOP)
        wait_for(lambda: others[1].status() == psutil.STATUS_STOPPED)
        rank_0.kill()
        _, alive = psutil.wait_procs(others, timeout=20)
        for process in alive:
            process.kill()
        assert alive == []
