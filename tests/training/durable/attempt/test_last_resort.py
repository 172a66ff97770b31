"""A notice in the middle of long work, and a hang: ended in time, from a thread, losing a step."""

import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training import tiny
from tests.training.hooks import (
    BUDGET,
    HUNG_SECONDS,
    LONG_SECONDS,
    both_ranks_end_in_time_where_one_hangs,
    during,
)
from tests.training.runs import ROOT, Run, assert_equal
from training.durable.attempt import supervisor
from training.durable.attempt.notice import Interruption, Notice
from training.durable.attempt.supervisor import Watchdog, _LastResort, _LongWork, notify
from training.durable.store.folder import FolderStore


def busy_in_c() -> None:
    """A long call into C that gives the interpreter's lock up, as a kernel launch does."""
    while True:
        ctypes.CDLL(None).sleep(int(LONG_SECONDS))


def end_in_time(run: Run, *more: str) -> None:
    process = run.fork(f"--notice-budget-seconds={BUDGET}", *more)
    process.join(HUNG_SECONDS)
    assert process.exitcode == 75, "it waited for the long call"
    assert run.head.state == "released"
    tiny.HOOKS.clear()


def test_a_notice_in_a_long_first_step_only_releases(run: Run, whole: Run) -> None:
    during("second", 0, busy_in_c)
    end_in_time(run)
    assert run.head.checkpoints[-1].kind == "stage-end"
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_a_rank_that_is_lost_under_a_notice_does_not_lose_what_is_staged(
    run: Run, whole: Run
) -> None:
    """The end of a machine may reach the other ranks first."""
    run.options = ["--checkpoint-interval=1000steps"]
    guardians: list[_LastResort] = []
    begin = _LastResort.__init__

    def remember(self: _LastResort, interruption: Interruption) -> None:
        guardians.append(self)
        begin(self, interruption)

    def lose_a_rank() -> None:
        while guardians[0]._interruption.notice is None:
            time.sleep(0.01)
        guardians[0].fail("rank 1 ended with -15")

    during("first-evaluation", 5, lose_a_rank)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_LastResort, "__init__", remember)
        end_in_time(run)
    newest = run.head.checkpoints[-1]
    assert (newest.kind, newest.step) == ("emergency", 4)
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_training_that_goes_back_does_not_go_on_while_the_staged_copy_is_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 90690: the next generation swept away what was being saved, and then was committed."""
    has_begun, may_end, done = threading.Event(), threading.Event(), list[str]()

    def save_staged(notice: Notice) -> None:
        has_begun.set()
        assert may_end.wait(60)
        done.append("saved")

    def end() -> None:
        with suppress(SystemExit):
            resort.fail("rank 1 ended")

    monkeypatch.setattr(os, "_exit", sys.exit)  # of its thread
    interruption = Interruption(budget_seconds=BUDGET)
    resort = _LastResort(interruption)
    interruption.record("notice")
    resort.staged_copy = SimpleNamespace(  # type: ignore[assignment]
        save_staged=save_staged, must_start_by=lambda notice: notice.deadline
    )
    saving = threading.Thread(target=end)
    saving.start()
    assert has_begun.wait(60)
    going_back = threading.Thread(target=lambda: (resort.forget_staged(), done.append("went back")))
    going_back.start()
    going_back.join(0.2)
    assert done == []
    may_end.set()
    for each in (saving, going_back):
        each.join(60)
    resort.stand_down()  # a third thread watches the clock
    assert done == ["saved", "went back"]


@pytest.mark.parametrize(("state", "ends"), [("running", False), ("finished", True)])
def test_an_end_waits_for_no_rank_that_is_gone_but_for_its_own_upload(
    monkeypatch: pytest.MonkeyPatch, state: str, ends: bool
) -> None:
    exits, has_ended = list[int](), threading.Event()

    def end(code: int) -> None:
        exits.append(code)
        has_ended.set()

    monkeypatch.setattr(supervisor, "os", SimpleNamespace(_exit=end))
    monkeypatch.setattr(supervisor, "_END_SECONDS", 0.05)
    resort = _LastResort(Interruption(budget_seconds=BUDGET))
    lost = threading.Event()
    resort.lease = SimpleNamespace(head=SimpleNamespace(state=state), lost=lost)  # type: ignore[assignment]
    resort.stand_down()
    resort.fail("rank 1 ended")
    timer = threading.Timer(0.5, has_ended.set)
    timer.start()
    resort.end_without("rank 1 ended", has_ended)
    timer.join()
    assert exits == [1] * ends


def test_a_notice_in_a_long_evaluation_commits_the_staged_copy(run: Run, whole: Run) -> None:
    run.options = ["--checkpoint-interval=1000steps"]
    during("first-evaluation", 5, lambda: time.sleep(LONG_SECONDS))
    end_in_time(run)
    newest = run.head.checkpoints[-1]
    assert (newest.kind, newest.step) == ("emergency", 4)
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_a_notice_in_a_long_shard_only_releases(run: Run, whole: Run) -> None:
    during("shard", 1, lambda: time.sleep(LONG_SECONDS))
    end_in_time(run)
    assert run.head.checkpoints == ()
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_a_notice_before_anything_is_held_ends_at_once(run: Run) -> None:
    # A slow import of a workload stands in for importing torch from a cold disk.
    code = (
        "import sys, time, types\n"
        "class Slow:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch':\n"
        "            print('importing', flush=True); time.sleep(600)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from training.cli.main import main\n"
        f"sys.exit(main({run.arguments(f'--notice-budget-seconds={BUDGET}')!r}))\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(120) == 75
    assert run.store.get("head.json") is None


def test_both_ranks_end_in_time_where_one_hangs(run: Run) -> None:
    both_ranks_end_in_time_where_one_hangs(run)


@pytest.mark.slow
def test_a_notice_during_compilation_commits_the_staged_copy(run: Run, tmp_path: Path) -> None:
    """torch.compile of a tiny model takes seconds on the CPU; the notice comes in the middle.

    The replacement compiles everything again, and has the same bits.
    """
    options = ["--override=compile_mode=default", "--checkpoint-interval=1000steps"]
    run.options = options
    run.at_start = lambda: os.environ.update(
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / f"{os.getpid()}")
    )
    process = run.fork("--notice-budget-seconds=120")
    process.join(300)
    assert process.exitcode == 0
    uninterrupted = (run.losses(), run.head.weights_sha256)
    run.uri += "-2"

    def hook(step: int) -> None:
        if step == 3:  # called by Dynamo's first trace of a shape: compilation follows
            tiny.HOOKS.clear()
            os.kill(os.getpid(), signal.SIGUSR1)

    tiny.HOOKS["first"] = hook
    process = run.fork("--notice-budget-seconds=120")
    process.join(300)
    assert process.exitcode == 75
    tiny.HOOKS.clear()
    assert run.attempt_in_fork() == 0
    assert (run.losses(), run.head.weights_sha256) == uninterrupted


def test_a_hang_shows_the_stacks_and_ends_with_1_for_a_restart(
    run: Run, whole: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny.HOOKS["first"] = lambda step: time.sleep(60) if step == 5 else None
    process = run.fork("--watchdog-seconds=3")
    process.join(120)
    assert process.exitcode == 1
    said = capfd.readouterr().err
    assert "[failed] the trainer made no progress for" in said
    assert "tests/training/tiny.py" in said, "the stacks name the place"
    assert run.head.state == "released", "the next attempt need not wait for a TTL"
    tiny.HOOKS.clear()
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_a_restore_in_which_bytes_arrive_is_no_hang_however_long_it_takes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    during("second", 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    run.fork().join(120)
    tiny.HOOKS.clear()
    read, seconds = FolderStore.read_into, [0.0, *5 * [0.9]]

    def slowly(store: FolderStore, key: str, start: int, data: memoryview) -> None:
        time.sleep(seconds.pop() if seconds else 0.0)
        read(store, key, start, data)

    monkeypatch.setattr(FolderStore, "read_into", slowly)
    slow = run.fork("--watchdog-seconds=3")
    slow.join(120)
    assert slow.exitcode == 0


def test_the_watchdog_pings_while_the_trainer_comes_by_and_long_work_is_no_hang(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(120)
        watchdog = Watchdog(0.4, said.append, str(tmp_path / "notify"))
        watchdog.start()
        assert listener.recv(64) == b"WATCHDOG=1"
        with watchdog.allowing(60):
            time.sleep(1.0)
            assert said == []
        deadline = time.monotonic() + 120
        while not said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        watchdog.close()  # although nobody reads the pings any more
    assert said[0].startswith("the trainer made no progress for")


def test_nobody_listening_for_pings_is_no_error(tmp_path: Path) -> None:
    notify(str(tmp_path / "nobody"), "WATCHDOG=1")
    notify(None, "WATCHDOG=1")


def test_long_work_is_known_by_kind_and_then_by_measurement() -> None:
    work = _LongWork(40.0, Watchdog(0.0, lambda why: None))
    assert work.is_long("compilation")
    assert work.is_long("evaluation")
    assert not work.is_long("step")
    with work.doing("evaluation"):
        pass
    assert not work.is_long("evaluation"), "a quarter of the budget was not needed"


def test_it_watches_on_where_stderr_has_no_file_descriptor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched_on, looks = threading.Event(), itertools.count(1)

    def excuse() -> bool:
        if next(looks) == 3:
            watched_on.set()
        return True

    watchdog = Watchdog(0.01, when_hung=lambda why: pytest.fail(why))
    watchdog.excuse = excuse
    watchdog.start()
    assert watched_on.wait(10)
    watchdog.close()


def test_who_was_excused_has_the_whole_limit_once_what_it_waited_for_is_there() -> None:
    looks, hung = list[float](), threading.Event()

    def excuse() -> bool:
        looks.append(time.monotonic())
        return len(looks) == 1

    watchdog = Watchdog(1.0, when_hung=lambda why: hung.set())
    watchdog.excuse = excuse
    watchdog.start()
    assert hung.wait(10)
    watchdog.close()
    assert looks[1] - looks[0] >= 0.9
