"""One boot step: how often it is tried, what it prints, and which exit status it ends with."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.errors import Exit
from contract.progress import progress_record, read_progress
from userdata.run_step import main


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MACHINE_ROOT", str(tmp_path))
    monkeypatch.setenv("STEP_RETRY_SECONDS", "0")
    (tmp_path / "run/training").mkdir(parents=True)
    return tmp_path


def run(
    monkeypatch: pytest.MonkeyPatch, root: Path, script: str, step: str = "disk"
) -> tuple[int, list[Any]]:
    monkeypatch.setattr("sys.argv", ["run_step", step, "bash", "-c", script])
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
    status, events = run(monkeypatch, root, f"echo no dataset; exit {Exit.CONFIG}")
    assert status == Exit.CONFIG
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
    assert event["message"] == ("asking the GPU / it neither ended nor got anything done for 0.3 s")
    assert (root / "run/training/boot-failure").read_text() == f"disk: {event['message']}\n"


# What a build does: a package's tools come and go, objects stay; each turn takes 0.4 s.
BUILDS = """
for number in 1 2 3 4 5 6; do
    mkdir -p tools build; head -c 9000 /dev/zero >tools/ninja; sleep 0.2
    echo $number >build/$number.o; rm -r tools; sleep 0.2
done
echo installed
"""
# One extension: its only file grows, as slowly as a compiler writes it.
COMPILES = "for number in {1..24}; do echo $number >>extension.s; sleep 0.1; done; echo built"
# What a hung one may still do: print, log, write the same again, in place or by a rename.
HANGS = """
while :; do
    echo "Collecting torch"; date >>pip.log; echo again >same; echo again >.$RANDOM; mv .[0-9]* one
    sleep 0.01
done
"""


@pytest.fixture
def pip(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which pip builds on this machine, whose AWS CLI puts objects below aws/."""
    scratch = root / "data/scratch"
    scratch.mkdir(parents=True)
    (root / "bin").mkdir()
    (root / "bin/aws").write_text(
        f'#!/bin/bash\nmkdir -p {root}/aws; cp "$4" {root}/aws/"${{5##*/}}"\n'
    )
    (root / "bin/aws").chmod(0o755)
    for name, value in {
        "PATH": f"{root}/bin:{os.environ['PATH']}", "DATA_MOUNT": "/data", "INSTANCE_ID": "i-1",
        "RUN_URI": "s3://runs/runs/run-1", "AWS_REGION": "us-east-1",
        "STEP_LIMIT_SECONDS": "1", "PROGRESS_SECONDS": "0.1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield scratch
    for thread in threading.enumerate():  # a step does not wait for its last message
        if thread.name == "progress":
            thread.join()


@pytest.mark.parametrize(("build", "done"), [(BUILDS, "installed"), (COMPILES, "built")])
def test_a_build_that_gets_something_done_may_take_longer_than_the_limit_and_is_told_of(
    root: Path, pip: Path, monkeypatch: pytest.MonkeyPatch, build: str, done: str
) -> None:
    status, (event,) = run(monkeypatch, root, f"cd {pip}; {build}", "program")
    assert (status, event["message"]) == (0, done)
    assert event["seconds"] > 2
    step, done = read_progress((root / "aws/i-1.json").read_bytes())
    assert step == "program"
    assert done > 10


@pytest.mark.parametrize("before", ["", COMPILES])
def test_a_hung_pip_that_prints_for_ever_is_ended(
    root: Path, pip: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    status, (event,) = run(monkeypatch, root, f"cd {pip}; {before}\n{HANGS}", "program")
    assert status == 1
    assert event["message"].endswith("it neither ended nor got anything done for 1 s")
    assert event["seconds"] < (3 if not before else 7)


def test_what_other_steps_write_there_does_not_keep_one_that_hangs(
    root: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _ = run(monkeypatch, root, f"cd {pip}; {COMPILES}", "torch")
    assert status == 1


def test_a_sync_counts_by_itself_and_has_no_limit(
    root: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = root / "run/training/dataset-begun"
    count = f"""printf '{{"step": "dataset", "files": 2, "bytes": 9}}' >{record}; sleep 1.5"""
    status, _ = run(monkeypatch, root, f"echo torn >{record}; sleep 0.3; {count}", "dataset")
    assert status == 0
    assert (root / "aws/i-1.json").read_bytes() == progress_record("dataset", 2, 9)


@pytest.mark.parametrize("kind", ["S3 that refuses", "a full disk"])
def test_a_step_goes_on_where_its_progress_cannot_be_sent(
    root: Path, pip: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (root / "bin/aws").write_text("#!/bin/bash\nexit 1\n")
    if kind == "a full disk":
        (root / "run/training/progress-program.json").mkdir()
    assert run(monkeypatch, root, f"cd {pip}; {COMPILES}", "program")[0] == 0
