"""Each verb of `runs` on the embedded AWS, with the machine interrupted in between.

The fleet, the Guard, the store and the trainer are real; a machine is the trainer's process alone.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import botocore.client
import pytest

from embedded_aws import EmbeddedAws
from embedded_aws.event_bus import EventBus
from operate import control
from operate.command import main
from rehearsal.demo.fleet import Fleet
from rehearsal.machines.metadata import RehearsedInstance
from stacks.guard.settings import quick_client
from tests.embedded_aws.cdk_cli import NEVER, REPOSITORY, Cli
from tests.page_policies import action, allowed
from tests.rehearsal.demo.no_machine import NoMachine
from tests.stack_names import TRAINING
from training.durable.record.head import Head
from training.durable.store.folder import open_store
from training.durable.store.protocol import Store

# A script that knows nothing of this project: it counts, saves, and goes on from what it saved.
SCRIPT = """
import os, pathlib, time
save = pathlib.Path(os.environ["SM_CHECKPOINT_DIR"], "step")
first = int(save.read_text()) if save.exists() else 0
for step in range(first + 1, 100_000):
    print(f"step={step} loss={1 / step:.4f}", flush=True)
    save.write_text(str(step))
    time.sleep(0.25)
    if pathlib.Path(os.environ["ENOUGH"]).exists():
        break
pathlib.Path(os.environ["SM_MODEL_DIR"], "weights.txt").write_text(f"{step} steps")
"""


@dataclass
class TrainerAlone(NoMachine):
    """A machine that is the trainer's process: a notice reaches it as a signal."""

    instance: RehearsedInstance
    command: list[str]
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self.command, "--writer", self.instance.id], env=self.environment, cwd=REPOSITORY
        )

    def notice(self, seconds: float) -> None:
        assert self.process is not None
        self.process.terminate()

    def shut_down(self) -> None:
        self.notice(0.0)

    @property
    def is_off(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def kill(self) -> int:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        return 1


@dataclass
class Account:
    """The embedded account with the stacks in it, whose machines a thread starts and ends."""

    aws: EmbeddedAws
    fleet: Fleet
    uri: str
    enough: Path
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)

    def follow(self) -> None:
        while not self.over.wait(0.5):
            with self.lock:
                self.fleet.step()

    def interrupt(self) -> None:
        with self.lock:
            (life,) = self.fleet.running()
            self.fleet.interrupt(life, notice=True)

    @cached_property
    def store(self) -> Store:
        return open_store(self.uri)

    def generation(self) -> int:
        """That of the attempt that has committed something."""
        head = Head.read(self.store)
        names = [entry.name for entry in head.checkpoints] if head else []
        return int(names[-1].split("-g")[1][:4]) if names else 0


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < give_up_at, "it did not come about"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    folder = tmp_path_factory.mktemp("account")
    source = folder / "program"
    source.mkdir()
    (source / "train.py").write_text(SCRIPT)
    definitions = [["step", r"step=(\d+)"], ["loss", r"loss=([\d.]+)"]]
    spec = {"command": "python train.py", "quiet_seconds": 0.05, "metric_definitions": definitions}
    (source / "program.json").write_text(json.dumps(spec))
    with EmbeddedAws() as aws, pytest.MonkeyPatch.context() as patch:
        cli = Cli(aws, folder / "cdk.out")
        cli.run("bootstrap", f"aws://{aws.account}/{aws.region}", "--app", "", app=False)
        program = ("-c", f"program={source / 'program.json'}", "-c", "notice_budget_seconds=20")
        cli.run("deploy", "TrainingStack", *NEVER, *program, "-c", "max_usd=5", app=False)
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in aws.environment().items():
            patch.setenv(name, value)
        quick_client.cache_clear()
        patch.setattr("boto3.DEFAULT_SESSION", None)  # it would keep an earlier account's key
        (stack,) = aws.client("cloudformation").describe_stacks(StackName=TRAINING)["Stacks"]
        told = {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}
        bus = EventBus(aws=aws, code_folder=folder / "functions")
        enough = folder / "enough"

        def machine(instance: RehearsedInstance) -> Any:
            root = folder / instance.id
            command = [sys.executable, "-m", "training", "run", f"--source={source}"]
            command += [
                f"--program-file={source / 'program.json'}",
                f"--scratch={root / 'scratch'}",
            ]
            command += [f"--ml-root={root / 'ml'}", f"--run-uri={told['RunUri']}"]
            command += ["--lease-ttl-seconds=3", "--notice-budget-seconds=20"]
            return TrainerAlone(instance, command, {**os.environ, "ENOUGH": str(enough)})

        aws.capacity.notice_seconds = 20.0
        fleet = Fleet(
            aws=aws,
            bus=bus,
            id=told["FleetIdOutput"],
            boot=machine,
            say=lambda _: None,
            stack=TRAINING,
        )
        found = Account(aws=aws, fleet=fleet, uri=told["RunUri"], enough=enough)
        yield found
        found.over.set()
        with found.lock:
            fleet.close()
        bus.close()
    quick_client.cache_clear()


@pytest.fixture
def runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Callable[..., Any], set[str]]]:
    """A function that does one verb and returns its JSON, and the IAM actions that verbs called."""
    called = set[str]()
    call = botocore.client.BaseClient._make_api_call

    def record(self: Any, operation: str, *arguments: Any) -> Any:
        # Not the machines' thread, nor the Guard's.
        if threading.current_thread().name.startswith(("MainThread", "get", "event-stop")):
            called.add(action(self, operation, *arguments))
        return call(self, operation, *arguments)

    def run(*arguments: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(botocore.client.BaseClient, "_make_api_call", record)
            code = main([*arguments, "--json"])
        said = capsys.readouterr()
        assert code == 0, said.err
        return json.loads(said.out)

    return run, called


@pytest.mark.slow  # each verb has its tests, and the demo is deployed in each run of the tests
def test_a_run_is_watched_stopped_resumed_and_fetched_through_an_interruption(
    account: Account,
    runs: tuple[Callable[..., Any], set[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    do, called = runs
    monkeypatch.chdir(tmp_path)
    (row,) = do("list")
    assert (row["run"], row["state"], row["stack"]) == ("run-1", "starting", TRAINING)
    assert do("status")["state"] == "starting"
    machines = threading.Thread(target=account.follow, name="machines")
    machines.start()
    try:
        wait_until(lambda: account.generation() == 1)
        first = do("status", "run-1")
        assert (first["state"], first["market"], first["attempts"]) == ("running", "spot", 1)
        assert first["machine"] in account.fleet.lives
        assert first["usd_limit"] == 5
        account.interrupt()
        wait_until(lambda: account.generation() == 2)
        wait_until(lambda: len(account.fleet.running()) == 1)
        second = do("status", account.uri)
        assert second["step"] > first["committed_step"] > 0
        assert second["usd_spent"] > first["usd_spent"]
        _enters_the_machine(second["machine"], tmp_path, monkeypatch)

        # Steps that only the save of a stop can commit, whatever the last periodic one had.
        wait_until(lambda: do("status")["step"] > second["step"])
        done = do("stop", "--reason", "lunch")
        wait_until(lambda: not account.fleet.running())
        stopped = do("status")
        assert do("list")[0]["state"] == stopped["state"] == "stopped"
        assert stopped["committed_step"] == done["committed_step"] > second["committed_step"]
        assert re.search(r"runs resume run-1.*stopped: from \S+: lunch", stopped["waits_for"])
        assert main(["shell"]) == 2
        assert "run-1 has no machine now" in capsys.readouterr().err
        (snapshot,) = do("download", "--checkpoint", "newest")["files"]
        saved = int(Path(snapshot, "step").read_text())
        assert saved - done["committed_step"] in (0, 1), "it says so before it saves"

        assert do("resume")["committed_step"] == done["committed_step"]
        wait_until(lambda: account.generation() == 3)
        account.enough.touch()
        wait_until(lambda: account.store.get("report.html") is not None)
    finally:
        account.over.set()
        machines.join()
    _is_told_and_fetched(do, account, tmp_path, capsys)
    assert main(["resume"]) == 2
    assert main(["stop"]) == 0, "no script of its machine's has sent the fleet to zero here"
    assert called | {"s3:DeleteObject", "ec2:TerminateInstances"} == {
        # This fleet is no group.
        name
        for name in allowed("runs.md")
        if not name.startswith(("ssm", "autoscaling:"))
    }


def _enters_the_machine(machine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shell` becomes the AWS CLI of the environment, once its plugin is there."""
    became: list[tuple[str, ...]] = []
    monkeypatch.setattr(control.os, "execv", lambda _, words: became.append(words))
    monkeypatch.setenv("PATH", str(folder))
    assert main(["shell"]) == 2
    (folder / "session-manager-plugin").touch(0o755)
    assert main(["shell"]) == 0
    assert became == [(sys.executable, "-m", "awscli", "ssm", "start-session", "--target", machine)]


def _is_told_and_fetched(
    do: Callable[..., Any], account: Account, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    machines = list(account.fleet.lives)
    assert len(machines) == 3
    places = [
        next(n for n, line in enumerate(lines) if f"{one:<20} step=" in line) for one in machines
    ]
    assert places == sorted(places), "one machine after the other"
    assert [line.split()[3] for line in lines if line.split()[3:4] == ["take-over"]] == [
        "take-over"
    ] * 3
    printed = [int(step) for step in re.findall(r"step=(\d+)", "\n".join(lines))]
    assert set(printed) == set(range(1, max(printed) + 1))
    assert main(["logs", "run-1", "--tail", "2", "--follow"]) == 0, "it ends with the run"
    assert capsys.readouterr().out.splitlines() == lines[-2:]

    cost = do("cost", "run-1")
    assert [row["machine"] for row in cost["machines"]] == machines
    assert all(row["usd"] > 0 for row in cost["machines"])
    bill = sum(row["usd"] for row in cost["machines"])
    assert sum(cost["goodput"]["usd"].values()) == pytest.approx(bill, abs=1e-5)
    ended = [row["machine"] for row in cost["machines"] if not row["is_live"]]
    assert [end["machine"] for end in cost["goodput"]["ends"]] == ended
    assert do("list")[0]["state"] == "finished"
    verified = do("verify", "run-1")
    assert not any(each["broken"] for each in verified)
    # Its last machine may still be ending; of its notice a program that does not handle it has a
    # fifth of a second, in which it may write in place.
    lacking = {each["rule"] for each in verified if each["lacks"]}
    assert lacking - {"nothing-after-the-end", "notices-answered"} == {"samples-once"}
    files = [Path(name) for name in do("download", "--out", "got")["files"]]
    assert Path("got/final/model/weights.txt") in files
    files[0].write_text("mine")
    assert main(["download", "--out", "got"]) == 2
    assert f"{files[0]} already exists and is not replaced" in capsys.readouterr().err
    assert files[0].read_text() == "mine"
    found = do("open")
    assert "finished" in Path(found["report"]).read_text()
    assert re.fullmatch(
        r"https://us-east-1\.console\S+#dashboards/dashboard/\S+", found["dashboard"]
    )
