"""`runs` on runs in folders, its answers in less than a second, and what it says without rights."""

import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import boto3
import botocore.client
import pytest
from botocore.exceptions import ClientError

from contract.errors import UserError
from operate import control
from operate.command import main
from operate.logs import RunLog, as_line
from operate.runs import OperatedRun
from operate.status import Sight
from stacks.guard.fleet import ON_DEMAND, SPOT, SpotFleet, StackInstance
from stacks.guard.ledger import Ledger
from stacks.guard.settings import quick_client
from training.cli.main import main as training
from training.durable import OpenRun
from training.durable.record.head import Head
from training.durable.record.lease import mark_failed
from training.durable.record.metrics import Events
from training.durable.store.folder import FolderStore
from training.durable.store.protocol import StoreError

REPOSITORY = Path(__file__).parents[2]
# Begins again where it was, and never ends by itself.
ENDLESS = """
import os, pathlib, time
save = pathlib.Path(os.environ["SM_CHECKPOINT_DIR"], "step")
step = int(save.read_text()) if save.exists() else 0
print("\\x1b]0;title\\x07")
print("\\r 1%\\r99%")
while True:
    step += 1
    save.write_text(str(step))
    print(f"step={step}", flush=True)
    time.sleep(0.2)
"""


def trainer(folder: Path) -> "subprocess.Popen[bytes]":
    source = folder.parent / "program"
    source.mkdir(exist_ok=True)
    (source / "train.py").write_text(ENDLESS)
    spec = {"command": "python train.py", "quiet_seconds": 0.05}
    spec["metric_definitions"] = [["step", r"step=(\d+)"]]
    (source / "program.json").write_text(json.dumps(spec))
    words = ["run", f"--program-file={source}/program.json", f"--source={source}"]
    words += [f"--run-uri={folder.name}", f"--ml-root={folder.parent / 'ml'}"]
    return subprocess.Popen(
        [sys.executable, "-m", "training", *words],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_commit(folder: Path) -> None:
    give_up_at = time.monotonic() + 60
    while not ((head := Head.read(FolderStore(folder))) and head.checkpoints):
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that `runs stop` has interrupted."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    process = trainer(folder)
    try:
        wait_for_commit(folder)
        assert main(["stop", str(folder)]) == 0
        head = Head.read(FolderStore(folder))
        assert head is not None and head.state == "released", "it has saved before it ended"
    finally:
        process.kill()
    yield folder


# Gets to its end in the time that a stop leaves it.
ENDS = """
import json, pathlib, signal, sys
head = pathlib.Path(sys.argv[-1], "head.json")
signal.signal(signal.SIGTERM, lambda *_: None)
print("ready", flush=True)
signal.pause()
head.write_text(json.dumps({**json.loads(head.read_text()), "state": "finished"}))
"""


def test_a_run_that_finishes_while_it_is_stopped_is_not_called_stopped(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "mine"))
    command = [sys.executable, "-c", ENDS, "training", "run", "--run-uri", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert main(["stop", str(run)]) == 0
    said = capsys.readouterr().out
    assert "is finished, at step" in said and "is stopped" not in said


def test_a_program_that_never_saves_is_shown_so_until_it_does(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, told = Path(shutil.copytree(stopped, tmp_path / "mine")), []
    for name in ("no-snapshot", "committed"):
        Events(FolderStore(run), "i-1").emit(name, message='add "keep": ["outputs"]')
        assert main(["status", str(run)]) == 0
        told.append('warning        add "keep": ["outputs"]\n' in capsys.readouterr().out)
    assert told == [True, False]


def test_a_run_in_a_folder_is_stopped_shown_and_listed(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(stopped), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["state"], found["attempts"]) == ("mine", "interrupted", 1)
    assert found["committed_step"] > 0
    assert "start the same command again" in found["waits_for"]
    assert main(["list", str(stopped.parent), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["committed_step"]) == ("mine", found["committed_step"])
    assert main(["list", str(stopped.parent)]) == 0
    assert "interrupted" in capsys.readouterr().out
    assert main(["status", str(stopped)]) == 0
    assert f"committed step {found['committed_step']}\n" in capsys.readouterr().out
    for verb in ("stop", "shell"):
        assert main([verb, str(stopped)]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in printed] == [
        f"error: no process on this machine trains {stopped}",
        "error: mine has no machine now",
    ]
    assert main(["download", str(stopped)]) == 2
    assert (
        "has no weights yet; --checkpoint newest gets its last commit, if it has one"
        in capsys.readouterr().err
    )


def test_a_run_in_a_folder_is_verified(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(stopped)]) == 0
    printed = capsys.readouterr().out
    assert "kept     commits-kept: No step is lost that a commit held" in printed
    assert "in part  one-writer: One writer at a time" in printed
    assert "- not judged: it has not ended: it is released" in printed
    broken = shutil.copytree(stopped, tmp_path / "broken")
    head = Head.read(FolderStore(broken))
    assert head is not None
    shutil.rmtree(broken / "checkpoints" / head.checkpoints[-1].name)
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(broken), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert [each["rule"] for each in found if each["verdict"] == "broken"] == [
        "deleted-after-forgotten"
    ]
    assert main(["verify", str(tmp_path)]) == 2
    assert "no run found at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [("head.json", b"{"), ("config.json", b"{"), ("guard.json", b"[]"), ("guard.json", b"\xff")],
)
def test_a_run_that_cannot_be_read_hides_no_other_one(
    stopped: Path, tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in ("damaged", "whole"):
        (tmp_path / run).mkdir()
        for each in ("head.json", "config.json"):
            (tmp_path / run / each).write_bytes((stopped / each).read_bytes())
    (tmp_path / "damaged" / name).write_bytes(content)
    assert main(["list", str(tmp_path), "--json"]) == 0
    found = capsys.readouterr()
    states = {row["run"]: row["state"] for row in json.loads(found.out)}
    assert states == {"damaged": "unreadable", "whole": "interrupted"}
    assert f"[warning] {tmp_path / 'damaged' / name} is damaged or was edited (" in found.err
    assert main(["status", str(tmp_path / "damaged")]) == 2
    assert f"error: {tmp_path / 'damaged' / name} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damaged",
    [
        *("{", "[]", '"text"', "null", '{"name": "boot"}'),
        '{"time": 1, "instance_id": "i-1", "name": "boot"}',
        '{"time": "2026-01-01T00:00:00Z", "instance_id": "i-1", "name": []}',
        '{"time": "2026-01-01T00:00:00Z", "instance_id": "i-1", "name": "committed", "step": "9"}',
        '{"time": "2026-01-01T00:00:00Z", "instance_id": "i-1", "name": "take-over"}',
    ],
)
def test_a_damaged_event_is_passed_over(
    stopped: Path, tmp_path: Path, damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("head.json", "config.json"):
        (tmp_path / name).write_bytes((stopped / name).read_bytes())
    store = FolderStore(tmp_path)
    Events(store, "i-1").emit("take-over", generation=1)
    store.put("events/29991231T235959.000000Z-i-1-boot.json", damaged.encode())
    assert main(["logs", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[2:] == ["i-1", "take-over"]
    assert main(["status", str(tmp_path)]) == 0
    assert "interrupted" in capsys.readouterr().out


def test_a_failed_run_is_taken_back(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark_failed(FolderStore(stopped), "mine", "ada", "the \x1b[2Jdisk broke")
    assert main(["status", str(stopped)]) == 0
    why = r"the \x1b[2Jdisk broke"
    assert f"`runs resume {stopped}`, once repaired: {why}" in capsys.readouterr().out
    assert main(["resume", str(stopped), "--reason", "a new disk"]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(" once started again\n"), "nothing was started"
    assert f"it had failed: {why}" in printed.err
    assert "now start its command again" in printed.err
    head = Head.read(FolderStore(stopped))
    assert head is not None and head.state == "released"


def test_followed_lines_come_once_and_an_unfinished_one_when_it_ends(stopped: Path) -> None:
    """A stream that is read in pieces is the stream that is read at once."""
    whole = [entry["text"] for entry in RunLog(FolderStore(stopped)).new()]
    printed = [text for text in whole if text.startswith("step=")]
    assert printed == [f"step={number + 1}" for number in range(len(printed))]
    assert whole.index("take-over [ok]") < whole.index("step=1") < len(whole) - 1
    log = RunLog(FolderStore(stopped))
    pieces = [*log.new(is_last=False), *log.new(is_last=False), *log.new()]
    lines = [as_line(entry) for entry in RunLog(FolderStore(stopped)).new()]
    assert sorted(as_line(entry) for entry in pieces) == sorted(lines)
    title, bar = (next(line for line in lines if each in line) for each in ("title", "99%"))
    assert title.endswith(r" \x1b]0;title\x07")
    assert bar.endswith(" 99%") and " 1%" not in bar


@pytest.mark.parametrize("most", [1, 10_000])
def test_the_status_of_a_run_with_many_events_leaves_them_to_its_cost(
    stopped: Path, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request for each took minutes of a script that commits often."""
    monkeypatch.setattr("operate.status._MOST_EVENTS", most)
    assert main(["status", str(stopped), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["goodput"]
    assert (said == f"`runs cost {stopped}` reads its many steps and events") == (most == 1)


def test_it_answers_within_a_second_without_torch_from_any_folder(
    stopped: Path, tmp_path: Path
) -> None:
    """As `make setup` links it: next to the environment's Python."""
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "runs").symlink_to(REPOSITORY / "operate" / "runs")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [tmp_path / "runs", "list", "--json", stopped.parent], cwd=tmp_path, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)[0]["run"] == "mine", done.stderr
    # Of CPU: the time on an idle machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    code = "import sys, operate.command; print(sorted({'torch', 'moto'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True)
    assert done.stdout == b"[]\n", done.stderr


def test_a_status_refreshes_in_a_terminal_until_ctrl_c(stopped: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "operate", "status", str(stopped)],
        cwd=REPOSITORY,
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    text = b""
    while text.count(b"seconds since") + text.count(b"since commit") < 2:  # five seconds later
        text += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 0
    assert b"\x1b[" in text
    os.close(ours)


def denied(operation: str, service: str) -> ClientError:
    message = f"User: ada is not authorized to perform: {service}:{operation} on resource: x"
    return ClientError({"Error": {"Code": "AccessDenied", "Message": message}}, operation)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            denied("DescribeStacks", "cloudformation"),
            "error: these credentials may not call cloudformation:DescribeStacks; docs/runs.md",
        ),
        (
            ClientError({"Error": {"Code": "UnauthorizedOperation"}}, "DescribeInstances"),
            "error: these credentials may not call DescribeInstances; docs/runs.md",
        ),
        (
            ClientError({"Error": {"Code": "Throttling"}}, "DescribeStacks"),
            "error: An error occurred (Throttling) when calling the DescribeStacks operation",
        ),
    ],
)
def test_fails_in_one_sentence_that_names_the_action_that_is_missing(
    error: ClientError,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", refuse)
    quick_client.cache_clear()
    assert main(["status"]) in (2, 74)
    quick_client.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(sentence)


def test_fails_where_neither_region_nor_run_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    quick_client.cache_clear()
    assert main(["list"]) == 2
    printed = capsys.readouterr().err
    assert "specify a region: export AWS_REGION=us-east-1" in printed
    for folder in ("./nothing", "runs/nothing"):
        assert main(["status", folder]) == 2
        assert "no run found at" in capsys.readouterr().err


def test_fails_for_a_folder_of_runs_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name in ("nothing", "file"):
        assert main(["list", str(tmp_path / name)]) == 2
        assert f"{name} is not a folder; name one with runs" in capsys.readouterr().err


def test_fails_for_a_download_into_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "program"
    source.mkdir()
    (source / "train.py").write_text(
        "import os; open(os.environ['SM_MODEL_DIR'] + '/model', 'w').write('x')"
    )
    words = ["run", "--program=python train.py", f"--source={source}", f"--run-uri={tmp_path}/run"]
    assert training([*words, f"--ml-root={tmp_path / 'ml'}"]) == 0
    capsys.readouterr()
    (tmp_path / "file").touch()
    assert main(["download", f"{tmp_path}/run", "--out", f"{tmp_path}/file"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("/file: File exists; use another --out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/final").touch()
    assert main(["download", f"{tmp_path}/run", "--out", f"{tmp_path}/out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("/out: Not a directory; use another --out")


def test_fails_for_a_tail_of_fewer_than_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["logs", "./any", "--tail", "-5"])
    assert "'-5' is not a whole number, 0 or more" in capsys.readouterr().err


def test_a_machine_on_demand_is_shut_down_and_comes_back_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No notice comes to it when its fleet goes to zero."""
    calls: list[tuple[Any, ...]] = []
    machines = [
        StackInstance(
            id=f"i-{market}", run_id="run-1", fleet_id="sfr-1", size="g5.xlarge", market=market,
            launched=0.0, is_live=True,
        )
        for market in (SPOT, ON_DEMAND)
    ]  # fmt: skip

    class Run(OperatedRun):
        folder = None
        settings: Any = type("Settings", (), {"notice_seconds": 1, "on_demand_base": 1})

    run = Run(uri=str(tmp_path), stack="TrainingStack", outputs={"FleetIdOutput": "sfr-1"})
    sight = Sight(run=run, now=0.0, head=None, ledger=Ledger(), machines=machines, capacity=1)
    monkeypatch.setattr(control, "look", lambda run: sight)
    monkeypatch.setattr(StackInstance, "terminate", lambda one: calls.append((one.id,)))
    monkeypatch.setattr(SpotFleet, "set_capacity", lambda fleet, *words: calls.append(words))
    monkeypatch.setattr(SpotFleet, "read_capacity", lambda fleet: (0, 0))
    control.stop(run, "")
    control.resume(run, "")
    assert calls == [(0, 0), ("i-on-demand",), (1, 1)]


def _stack_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> OperatedRun:
    """A run of a stack whose fleet calls nothing."""

    class Run(OperatedRun):
        folder = None
        settings: Any = type("Settings", (), {"notice_seconds": 1, "on_demand_base": 1})
        states: ClassVar[list[str]] = [state]

        @property
        def head(self) -> Any:
            state, first = self.states[0], types.SimpleNamespace(step=0, program_step=None)
            is_ended = state == "failed"
            return types.SimpleNamespace(state=state, is_ended=is_ended, checkpoints=(first,))

    monkeypatch.setattr(SpotFleet, "set_capacity", lambda *_: None)
    monkeypatch.setattr(SpotFleet, "is_new", lambda _: False)
    monkeypatch.setattr(StackInstance, "terminate", lambda _: None)
    monkeypatch.setattr(control, "_POLL_SECONDS", 0.01)
    return Run(uri=str(tmp_path), stack="TrainingStack", outputs={"FleetIdOutput": "sfr-1"})


def _seen(run: OperatedRun, *, is_live: bool, is_gone: bool) -> Sight:
    machine = StackInstance(
        id="i-1", run_id="run-1", fleet_id="sfr-1", size="g5.xlarge", market=ON_DEMAND,
        launched=0.0, is_live=is_live, is_gone=is_gone,
    )  # fmt: skip
    capacity = int(is_live)
    return Sight(
        run=run, now=0.0, head=run.head, ledger=Ledger(), machines=[machine], capacity=capacity
    )


@pytest.mark.parametrize("saves", [True, False])
def test_a_stop_waits_until_a_machine_that_shuts_down_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """EC2 says at once that it ends, and its trainer saves for two minutes."""
    run, looks = _stack_run(tmp_path, monkeypatch, "running"), []

    def look(_: OperatedRun) -> Sight:
        looks.append(1)
        if len(looks) == 5 and saves:
            type(run).states[0] = "released"
        return _seen(run, is_live=len(looks) < 3, is_gone=len(looks) > 5)

    monkeypatch.setattr(control, "look", look)
    said = control.stop(run, "")["done"]
    assert len(looks) == (5 if saves else 6)
    assert said.startswith("is stopped, saved at" if saves else "is stopped, but ended before it")


@pytest.mark.parametrize(("is_live", "capacity"), [(True, 1), (True, 0), (False, 0)])
def test_the_fleet_of_a_run_that_has_ended_can_be_stopped_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_live: bool, capacity: int
) -> None:
    """One at zero may still have a machine on demand, to which no notice comes."""
    run = _stack_run(tmp_path, monkeypatch, "failed")
    seen = replace(_seen(run, is_live=is_live, is_gone=False), capacity=capacity)
    monkeypatch.setattr(control, "look", lambda _: seen)
    if is_live:
        assert control.stop(run, "")["done"].endswith("at step 0: its fleet is at zero now")
        return
    with pytest.raises(UserError, match="failed already"):
        control.stop(run, "")


def test_a_new_fleet_is_stopped_before_the_guard_requests_its_first_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = _stack_run(tmp_path, monkeypatch, "released"), list[Any]()
    monkeypatch.setattr(control, "look", lambda _: _seen(run, is_live=False, is_gone=True))
    monkeypatch.setattr(SpotFleet, "is_new", lambda _: True)
    monkeypatch.setattr(SpotFleet, "send_to_zero", lambda fleet: calls.append(fleet))
    control.stop(run, "")
    assert len(calls) == 1


def test_fails_for_a_download_of_what_is_no_result(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed attempt leaves its files there, too, and the run is started again."""
    run = Path(shutil.copytree(stopped, tmp_path / "mine"))
    (run / "final/model").mkdir(parents=True)
    (run / "final/model/model.pt").write_text("of epoch 3")
    assert main(["download", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "mine has not finished: what lies below" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_download_that_breaks_off_leaves_no_file_and_goes_on(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts arrive in any order, so that a part of a file may have its full size."""
    run, out = Path(shutil.copytree(stopped, tmp_path / "mine")), tmp_path / "out"
    (run / "final/model").mkdir(parents=True)
    for name in ("a", "b"):
        (run / f"final/model/{name}").write_text("weights")
    head = json.loads((run / "head.json").read_text())
    (run / "head.json").write_text(json.dumps(head | {"state": "finished"}))
    get_file, fetched = FolderStore.get_file, []

    def break_off(store: FolderStore, key: str, path: Path) -> None:
        fetched.append(key)
        path.write_bytes(bytes(7))
        if len(fetched) == 2:
            raise StoreError("S3 is away")
        get_file(store, key, path)

    monkeypatch.setattr(FolderStore, "get_file", break_off)
    assert main(["download", str(run), "--out", str(out)]) == 74
    assert not [path for path in out.rglob("*") if path.is_file()]
    assert main(["download", str(run), "--out", str(out)]) == 0
    assert {path.read_text() for path in (out / "final/model").iterdir()} == {"weights"}


def test_a_download_of_many_files_holds_none_of_them_open(stopped: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "mine"))
    (run / "final/model").mkdir(parents=True)
    count = len([*Path("/proc/self/fd").iterdir()]) + 20
    for number in range(count):
        (run / f"final/model/{number}").touch()
    head = json.loads((run / "head.json").read_text())
    (run / "head.json").write_text(json.dumps(head | {"state": "finished"}))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        assert main(["download", str(run), "--out", str(tmp_path / "out")]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len([*(tmp_path / "out/final/model").iterdir()]) == count
    assert not [*(tmp_path / "out").glob(".*")]


def test_a_run_that_finishes_meanwhile_is_downloaded_whole(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are stored one by one, and then its head says that it has finished."""
    run, at = Path(shutil.copytree(stopped, tmp_path / "mine")), OpenRun.at
    (run / "final/model").mkdir(parents=True)
    (run / "final/model/a").write_text("a")

    def finish(uri: str) -> OpenRun:
        (run / "final/model/b").write_text("b")
        head = json.loads((run / "head.json").read_text())
        (run / "head.json").write_text(json.dumps(head | {"state": "finished"}))
        return at(uri)

    monkeypatch.setattr("operate.runs.OperatedRun.opened", lambda run: finish(run.uri))
    assert main(["download", str(run), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/final/model/b").read_text() == "b"
    (tmp_path / "out/final/model/b").write_text("mine")
    assert main(["download", str(run), "--out", str(tmp_path / "out")]) == 2
    assert (tmp_path / "out/final/model/b").read_text() == "mine"


def test_a_stop_during_a_deploy_is_not_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deploy may replace the fleet that was stopped by one that requests a machine."""
    run = _stack_run(tmp_path, monkeypatch, "released")
    monkeypatch.setattr(control, "look", lambda _: _seen(run, is_live=False, is_gone=True))
    monkeypatch.setattr(SpotFleet, "read_capacity", lambda _: (0, 0))
    with pytest.raises(UserError, match="TrainingStack is being deleted"):
        control.resume(replace(run, status="DELETE_IN_PROGRESS"), "")
    control.stop(replace(run, status="DELETE_IN_PROGRESS"), "")
    for act in (control.stop, control.resume):
        for status in ("UPDATE_COMPLETE", "UPDATE_COMPLETE_CLEANUP_IN_PROGRESS"):
            act(replace(run, status=status), "")
        with pytest.raises(UserError, match=r"TrainingStack is being deployed .* repeat"):
            act(replace(run, status="UPDATE_IN_PROGRESS"), "")
