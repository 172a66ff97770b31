"""Signals wake a thread, deadlines come from the notice, and little time is not wasted."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.training import tiny
from tests.training.hooks import notice
from tests.training.runs import Run, assert_equal, wait_for
from training.durable.attempt.notice import Interruption
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import Upload


@pytest.fixture
def listening() -> Iterator[Interruption]:
    interruption = Interruption(budget_seconds=120)
    interruption.listen()
    yield interruption
    interruption.close()


@pytest.mark.parametrize(
    ("sent", "cause"), [(signal.SIGUSR1, "notice"), (signal.SIGTERM, "shutdown")]
)
def test_a_signal_is_received_while_the_main_thread_works(
    listening: Interruption, sent: signal.Signals, cause: str
) -> None:
    os.kill(os.getpid(), sent)
    assert listening.wait(60)
    assert listening.notice is not None
    assert listening.notice.cause == cause
    # Rounded: a monotonic clock of 940 s plus 120 has fewer binary places left.
    assert listening.notice.deadline - listening.notice.received == pytest.approx(120)
    assert listening.notice.seconds_left <= 120.001


def test_a_rebalance_recommendation_is_taken_once(listening: Interruption) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_for(listening.take_rebalance)
    assert not listening.take_rebalance()
    assert listening.notice is None


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        (None, 120),
        ("not json", 120),
        ('{"action": "terminate"}', 120),
        ("in 60 s", 60),
        ("in 600 s", 120),
        # A clock that is fast, or an old file: this machine runs, so the time is wrong.
        ("in -30 s", 120),
        ("in -86400 s", 120),
    ],
)
def test_the_deadline_is_the_notice_s_time_within_the_budget(
    tmp_path: Path, content: str | None, seconds: float
) -> None:
    path = tmp_path / "notice.json"
    began, today = time.monotonic(), datetime.now(UTC)
    if content is not None and content.startswith("in "):
        when = today + timedelta(seconds=float(content.split()[1]))
        content = f'{{"time": "{when.strftime("%Y-%m-%dT%H:%M:%SZ")}"}}'
    if content is not None:
        path.write_text(content)
    interruption = Interruption(budget_seconds=120, notice_file=path)
    interruption.record("notice")
    assert interruption.notice is not None
    if interruption.notice.is_dated and seconds < 120:
        # Whole seconds are written; however long this test took to come here, the date stays.
        assert interruption.notice.deadline == pytest.approx(began + seconds - 0.5, abs=0.6)
    else:
        interruption_lasts = interruption.notice.deadline - interruption.notice.received
        assert interruption_lasts == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("named", "received", "seconds"),
    [
        (54_000 + 75, -45, 75),  # the clock is 15 hours slow
        (-54_000 + 75, -45, 75),  # or fast
        (75, 54_000, 75),  # or has been set since
        (75, -54_000, 75),
        (-60, -180, 120),  # an old file
    ],
)
def test_by_a_wrong_clock_the_time_counts_from_when_the_handler_heard(
    tmp_path: Path, named: float, received: float, seconds: float
) -> None:
    now, path = datetime.now(UTC), tmp_path / "notice.json"
    times = {"time": named, "received_at": received}
    record = {name: (now + timedelta(seconds=each)).isoformat() for name, each in times.items()}
    path.write_text(json.dumps(record))
    interruption = Interruption(budget_seconds=120, notice_file=path)
    interruption.record("notice")
    assert interruption.notice is not None
    left = interruption.notice.deadline - interruption.notice.received
    assert left == pytest.approx(seconds, abs=5)


def write_notice(path: Path, seconds: float) -> None:
    when = datetime.now(UTC) + timedelta(seconds=seconds)
    path.write_text(json.dumps({"action": "terminate", "time": when.isoformat()}))


def test_a_notice_whose_time_has_passed_is_saved_at(run: Run, tmp_path: Path, whole: Run) -> None:
    path = tmp_path / "notice.json"

    def hook(step: int) -> None:
        if step == 7:
            tiny.HOOKS.clear()
            write_notice(path, -30.0)
            notice()

    tiny.HOOKS["first"] = hook
    interval = "--checkpoint-interval=1000steps"
    assert run.attempt(f"--notice-file={path}", interval) == 75
    assert [(e.kind, e.step) for e in run.head.checkpoints] == [("emergency", 8)]
    assert run.attempt() == 0
    assert_equal(run, whole)


def test_only_a_nearer_second_notice_moves_the_deadline(tmp_path: Path) -> None:
    path, received = tmp_path / "notice.json", []
    interruption = Interruption(budget_seconds=120, notice_file=path)
    interruption.when_noticed(received.append)
    write_notice(path, 100)
    interruption.record("notice")
    found = interruption.notice
    assert found is not None
    for seconds, expected in ((110, 100), (20, 20), (60, 20)):
        write_notice(path, seconds)
        interruption.record("notice")
        assert found.deadline - found.received == pytest.approx(expected, abs=5)
    path.unlink()
    interruption.record("shutdown")
    assert found.deadline - found.received == pytest.approx(20, abs=5)
    assert interruption.notice is found
    assert received == [found], "whoever holds it sees the deadline move"


def test_of_two_notices_at_once_one_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The thread that signals wake, and the main thread that another rank has told."""
    together = threading.Barrier(2)

    def read(path: Path | None) -> tuple[float, float]:
        together.wait(60)
        return 0.0, 0.0

    monkeypatch.setattr("training.durable.attempt.notice._seconds_in", read)
    received: list[object] = []
    for _ in range(20):
        interruption = Interruption(budget_seconds=120)
        interruption.when_noticed(received.append)
        threads = [threading.Thread(target=interruption.record, args=("notice",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(received) == 20


def test_an_upload_too_slow_for_the_notice_is_given_up_and_the_lease_released(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, answers = FolderStore.upload, threading.Event()

    def slow(self: FolderStore, *arguments: Any) -> Upload:
        answers.wait(60)
        return real(self, *arguments)

    def hook(step: int) -> None:
        if step == 1:  # before anything was measured
            tiny.HOOKS.clear()
            monkeypatch.setattr(FolderStore, "upload", slow)
            notice()

    tiny.HOOKS["first"] = hook
    assert run.attempt("--notice-budget-seconds=1") == 75, "it does not wait for the upload"
    answers.set()
    assert "the upload was too slow; the last commit stays" in capsys.readouterr().out
    assert run.head.state == "released"
    assert run.head.checkpoints == ()


@pytest.mark.parametrize(
    ("cause", "is_late", "is_heard"),
    [("notice", True, True), ("shutdown", True, False), ("shutdown", False, True)],
)
def test_only_a_notice_can_have_ended_a_program_before_we_heard_of_it(
    tmp_path: Path, cause: Any, is_late: bool, is_heard: bool
) -> None:
    """Another host's end, or a stop, that comes after its own is told as a shutdown."""
    interruption = Interruption(budget_seconds=120, notice_file=tmp_path / "notice.json")
    timer = threading.Timer(0.2 * is_late, interruption.record, (cause,))
    timer.start()
    if not is_late:
        timer.join()
    assert (interruption.heard_late() is not None) == is_heard
    timer.join()
