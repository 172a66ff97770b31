"""Signals wake a thread, deadlines come from the notice, and little time is not wasted."""

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
from tests.training.runs import Run, wait_for
from training.interruption.notice import Interruption
from training.store.folder import FolderStore
from training.store.protocol import Upload


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
    assert listening.notice.deadline - listening.notice.received == 120
    assert listening.notice.seconds_left <= 120


def test_a_rebalance_recommendation_is_taken_once(listening: Interruption) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    wait_for(listening.take_rebalance)
    assert not listening.take_rebalance()
    assert not listening.is_pending


def test_the_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    interruption = Interruption(budget_seconds=1)
    interruption.listen()
    assert signal.getsignal(signal.SIGTERM) != before
    interruption.close()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("content", "seconds"),
    [
        (None, 120),
        ("not json", 120),
        ('{"action": "terminate"}', 120),
        ("in 60 s", 60),
        ("in 600 s", 120),
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
    interruption.tell("notice")
    assert interruption.notice is not None
    if interruption.notice.is_dated and seconds < 120:
        # Whole seconds are written; however long this test took to come here, the date stays.
        assert interruption.notice.deadline == pytest.approx(began + seconds - 0.5, abs=0.6)
    else:
        assert interruption.notice.deadline - interruption.notice.received == seconds


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
