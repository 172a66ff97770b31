"""One boot step: how often it is tried, what is said, and which exit status it ends with."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from contract.errors import EXIT_CONFIG
from userdata.run_step import main


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    monkeypatch.setenv("STEP_RETRY_SECONDS", "0")
    (tmp_path / "run/training").mkdir(parents=True)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, root: Path, script: str) -> tuple[int, list[Any]]:
    monkeypatch.setattr("sys.argv", ["run_step", "disk", "bash", "-c", script])
    status = main()
    spool = sorted((root / "var/lib/training/events").iterdir())
    return status, [json.loads(path.read_text()) for path in spool]


def test_a_step_that_fails_once_leaves_an_event_of_it_and_succeeds(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"[[ -e {root}/tried ]] && echo mounted || {{ : >{root}/tried; echo 503; exit 5; }}"
    status, (first, last) = run(monkeypatch, root, script)
    assert status == 0
    assert (first["status"], first["message"]) == ("info", "attempt 1 of 3 failed: 503")
    assert (last["name"], last["status"], last["message"]) == ("boot-disk", "ok", "mounted")
    out = capsys.readouterr().out
    assert "[retry] disk: attempt 1 of 3 failed: 503; again in 0 s" in out
    assert "[ok] disk: mounted" in out
    assert not (root / "run/training/boot-failure").exists()


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_step_that_always_fails_is_the_machines_fault_whatever_its_status(
    root: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    got, events = run(monkeypatch, root, f"echo no disk; exit {status}")
    assert got == 1
    assert [event["status"] for event in events] == ["info", "info", "failed"]
    assert (root / "run/training/boot-failure").read_text() == "disk: no disk\n"


def test_what_no_machine_could_do_better_is_not_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, events = run(monkeypatch, root, f"echo no dataset; exit {EXIT_CONFIG}")
    assert status == EXIT_CONFIG
    assert [event["status"] for event in events] == ["failed"]


def test_a_step_that_hangs_is_given_up_even_if_a_child_of_it_cannot_be_killed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEP_LIMIT_SECONDS", "0.3")
    # As where a driver hangs: the child keeps the pipe, and a second attempt would hang too.
    script = f"echo asking the GPU; sleep 60 & echo $! >{root}/child; wait"
    status, (event,) = run(monkeypatch, root, script)
    os.kill(int((root / "child").read_text()), signal.SIGKILL)
    assert status == 1
    assert event["status"] == "failed"
    assert event["message"] == "asking the GPU / it did not end within 0.3 s"
    assert (root / "run/training/boot-failure").read_text() == f"disk: {event['message']}\n"
