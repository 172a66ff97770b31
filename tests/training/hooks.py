"""Notices and long work at chosen places of the tiny workload."""

import os
import signal
import time
from collections.abc import Callable

from tests.training import tiny
from tests.training.runs import Run, assert_equal
from training.durable.attempt.notice import Interruption

# Seconds of a notice; work that outlasts it by far; and when a process that waits for it counts as
# hung: each limit is generous, so that a busy machine fails nothing.
BUDGET = 4.0
LONG_SECONDS = 600.0
HUNG_SECONDS = 120.0


# What listens in this process, newest last: the autouse fixture `_no_hooks` has it remembered.
LISTENING: list[Interruption] = []


def send(number: signal.Signals) -> None:
    """Send this process a signal and wait until the thread that it wakes has taken note of it."""
    os.kill(os.getpid(), number)
    interruption, give_up_at = LISTENING[-1], time.perf_counter() + HUNG_SECONDS
    while not _is_heard(interruption, number):
        assert time.perf_counter() < give_up_at, f"nobody took {number.name}"
        time.sleep(0.001)


def _is_heard(interruption: Interruption, number: signal.Signals) -> bool:
    if number == signal.SIGUSR2:
        return interruption._rebalance.is_set()
    if number == signal.SIGUSR1:
        return interruption.notice is not None
    return interruption.notice is not None and interruption.is_shutting_down


def notice() -> None:
    """Send this process a notice."""
    send(signal.SIGUSR1)


def interrupt_at(place: str, number: int, sent: signal.Signals = signal.SIGUSR1) -> None:
    """Send this process a signal when the workload gets there, once."""

    def hook(reached: int) -> None:
        if reached == number:
            tiny.HOOKS.pop(place, None)
            send(sent)

    tiny.HOOKS[place] = hook


def at_rank(rank: int, place: tuple[str, int], act: Callable[[], None]) -> None:
    """Act once, in one rank of those forked from here, when its workload gets there."""
    name, number = place

    def hook(reached: int) -> None:
        if reached == number and os.environ["RANK"] == str(rank):
            tiny.HOOKS.pop(name)
            act()

    tiny.HOOKS[name] = hook


def kill_at(run: Run, place: str, number: int) -> None:
    """An attempt in a process of its own, killed when the workload gets there."""

    def hook(reached: int) -> None:
        if reached == number:
            os.kill(os.getpid(), signal.SIGKILL)

    tiny.HOOKS[place] = hook
    assert run.attempt_in_fork() == -signal.SIGKILL
    tiny.HOOKS.clear()


def during(place: str, number: int, act: Callable[[], None]) -> None:
    """Send this process a notice when the workload gets there, then `act` for a long time."""

    def hook(reached: int) -> None:
        if reached == number:
            tiny.HOOKS.clear()
            notice()
            act()

    tiny.HOOKS[place] = hook


def both_ranks_stop_at_a_notice(run: Run, whole: Run, rank: int, place: tuple[str, int]) -> None:
    """A notice to one of two: both stop at the same step, and go on as if nothing had been."""
    at_rank(rank, place, notice)
    assert run.attempt_with_ranks(2) == [75, 75]
    assert run.head.state == "released"
    assert run.head.checkpoints[-1].step == run.lines("step")[-1]["step"]
    tiny.HOOKS.clear()
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, whole)
    assert len(run.lines("step")) == 24, "no step was repeated"


def a_kill_of_either_rank_loses_no_bit(run: Run, whole: Run) -> None:
    """SIGKILL to one rank and then to the other: each ends its attempt, and the run is equal."""
    for rank, step in ((1, 5), (0, 9)):
        at_rank(rank, ("first", step), lambda: os.kill(os.getpid(), signal.SIGKILL))
        codes = run.attempt_with_ranks(2)
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] not in (0, None)
    tiny.HOOKS.clear()
    assert run.attempt_with_ranks(2) == [0, 0]
    assert_equal(run, whole)


def both_ranks_end_in_time_where_one_hangs(run: Run) -> None:
    """A notice during an evaluation that hangs: both ranks exit and the staged copy is saved."""
    during("first-evaluation", 5, lambda: time.sleep(LONG_SECONDS))
    codes = run.attempt_with_ranks(
        2, f"--notice-budget-seconds={BUDGET}", "--checkpoint-interval=1000steps"
    )
    assert codes == [75, 75]
    newest = run.head.checkpoints[-1]
    assert (newest.kind, newest.step) == ("emergency", 4)
