"""A store in trouble costs no commit: at a notice, at SIGTERM, in mid-run; workload or program."""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
from botocore.retries.standard import ExponentialBackoff

from tests.training.durable.program.programs import ProgramRun
from tests.training.durable.save.scene import NewMachine, wait_for_snapshot
from tests.training.runs import KeptRun, Run, wait_for
from tests.training.save_scene import Scene
from tests.training.trouble import Trouble, TroubledWay
from training.cli.main import main
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import StoreError, Upload

When: TypeAlias = Literal["notice", "SIGTERM", "mid-run"]
BUDGET = 118
SAVES_WHEN_TOLD = """
    import os, signal, sys, time
    from pathlib import Path
    state = Path(os.environ["SM_CHECKPOINT_DIR"], "state")
    def save(number, frame):
        state.write_text(str(step))
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    for step in range(1, 10**6):
        time.sleep(0.1)
        if step % 20 == 1:
            state.with_suffix(".part").write_text(str(step))
            state.with_suffix(".part").replace(state)
"""


def refusing(
    monkeypatch: pytest.MonkeyPatch, times: int, when_asked: Callable[[], None] = lambda: None
) -> list[str]:
    """Let the store refuse uploads that many times; return what it refused."""
    upload, refused = FolderStore.upload, list[str]()

    def broken(self: FolderStore, key: str, *arguments: Any) -> Upload:
        if len(refused) < times:
            refused.append(key)
            when_asked()
            raise StoreError(f"{key}: 503 Slow Down")
        return upload(self, key, *arguments)

    monkeypatch.setattr(FolderStore, "upload", broken)
    return refused


def test_a_save_that_fails_at_a_notice_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path)
    refused = refusing(monkeypatch, 3)
    assert scene.emergency(3, 60)
    assert len({key.split("/")[1] for key in refused}) == 3, "each try has a name of its own"
    assert scene.committed() == [(3, 3.0)]
    assert scene.context.lease.head.state == "released"
    scene.context.metrics.close()


def test_fails_once_another_save_would_not_fit_the_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path)
    scene.set_rate(4000.0)  # about a second for each
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    refused = refusing(monkeypatch, 10**6, lambda: now.__setitem__(0, now[0] + 1.0))
    began = now[0]
    scene.store.patience.deadline = lambda: began + 30
    assert not scene.emergency(2, 30)
    assert 24 < now[0] - began < 30
    assert len(refused) > 3
    assert "not enough time; the last commit stays" in capsys.readouterr().out
    assert scene.committed() == [(1, 1.0)]
    monkeypatch.undo()
    scene.context.metrics.close()


@pytest.mark.parametrize("commits", [False, True])
def test_a_program_s_last_snapshot_is_tried_again(
    new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    machine = new_machine("a")
    machine.mirror.start()
    machine.write({"state": b"1"})
    machine.commit() if commits else None
    wait_for_snapshot(machine, 1)
    refused = refusing(monkeypatch, 3)
    machine.write({"state": b"2"})
    if commits:
        machine.commit()
    deadline = time.monotonic() + 60
    assert machine.mirror.final(exit_code=0, deadline=deadline, release=True)
    assert len(refused) == 3
    machine.mirror.close()
    successor = new_machine("b")
    assert (successor.folder / "state").read_bytes() == b"2"


def _fork(run: Run | ProgramRun, notice: Path) -> multiprocessing.process.BaseProcess:
    options = (f"--notice-budget-seconds={BUDGET}", f"--notice-file={notice}")
    words = run.arguments(*options, "--lease-ttl-seconds=30")
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(main(words)))
    process.start()
    return process


def _newest(run: KeptRun) -> int:
    """The number of the newest snapshot, or the step of the newest checkpoint."""
    found = run.store.get("head.json")
    entries = json.loads(found.data)["checkpoints"] if found else []
    return max((entry["step"] for entry in entries), default=0)


def _trouble_costs_nothing(
    run: Run | ProgramRun, way: TroubledWay, when: When, trouble: Trouble, seconds: float
) -> None:
    notice = run.scratch / "notice.json" if isinstance(run, Run) else run.folder / "notice.json"
    process = _fork(run, notice)
    wait_for(lambda: _newest(run) > 0 or not process.is_alive())
    before = _newest(run)
    assert process.pid is not None
    way.trouble_for(trouble, seconds)
    time.sleep(0.1)
    if when == "notice":
        ends = datetime.now(UTC) + timedelta(seconds=BUDGET)
        notice.write_text(json.dumps({"action": "terminate", "time": ends.isoformat()}))
        os.kill(process.pid, signal.SIGUSR1)
    if when == "SIGTERM":
        os.kill(process.pid, signal.SIGTERM)
    if when != "mid-run":
        process.join(BUDGET + 30)
        assert process.exitcode == 75
        assert run.head.state == "released"
        assert run.head.checkpoints[-1].kind == "emergency"
    else:
        time.sleep(seconds)
        since = _newest(run)
        assert process.is_alive(), "the run goes on"
        wait_for(lambda: _newest(run) > since)
        process.kill()
        process.join()
    assert _newest(run) > before


@pytest.fixture
def way(s3_endpoint: str) -> Any:
    with TroubledWay(s3_endpoint) as way:
        yield way


@pytest.fixture(params=["workload", "program"])
def troubled(
    request: pytest.FixtureRequest,
    way: TroubledWay,
    bucket_uri: str,
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run | ProgramRun:
    """A run that goes on for as long as it is let, and reaches S3 by that way."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", way.endpoint)
    if request.param == "program":
        program = ProgramRun(folder=tmp_path, uri=f"{bucket_uri}/runs/one")
        program.write(SAVES_WHEN_TOLD)
        return program
    run = Run(dataset=dataset, uri=f"{bucket_uri}/runs/one", scratch=tmp_path / "scratch")
    run.scratch.mkdir()
    run.options = ["--override=step_seconds=0.1", "--override=epochs=4000"]
    run.options += ["--checkpoint-interval=2s", "--notice-policy=stop"]
    return run


def test_three_seconds_of_trouble_at_a_shutdown_cost_no_commit(
    troubled: Run | ProgramRun, way: TroubledWay
) -> None:
    _trouble_costs_nothing(troubled, way, "SIGTERM", "500", 3)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.05], ids=["botocore-1.43", "botocore-1.44"])
@pytest.mark.parametrize("seconds", [3.0, 20.0, 60.0])
@pytest.mark.parametrize("trouble", ["500", "503", "refused", "reset"])
@pytest.mark.parametrize("when", ["notice", "SIGTERM", "mid-run"])
def test_trouble_costs_no_commit(
    troubled: Run | ProgramRun,
    way: TroubledWay,
    when: When,
    trouble: Trouble,
    seconds: float,
    scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the library's own retries wait."""
    waits = {"throttling_base_scale": 1, "non_throttling_base_scale": scale}
    monkeypatch.setattr(ExponentialBackoff, "_DEFAULT_BACKOFF_CONFIG", waits)
    _trouble_costs_nothing(troubled, way, when, trouble, seconds)
