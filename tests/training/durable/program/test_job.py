"""An attempt of a program from its command to its receipt, and how it ends in every other way."""

import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UserError
from tests.training.durable.program.programs import COMMITS, ENDLESS, ProgramRun, is_running, kill
from tests.training.runs import wait_for
from training.cli.main import main
from training.durable.attempt.supervisor import Watchdog
from training.durable.program import failure
from training.durable.program.container import Container
from training.durable.program.job import _fingerprint
from training.durable.program.watch import ProgramWatch
from training.durable.save.snapshots.mirror import Mirror
from training.durable.store.folder import open_store
from training.durable.store.local_dataset import LocalDataset
from training.program import commit


def test_a_program_runs_to_its_end_and_leaves_its_files(run_anywhere: ProgramRun) -> None:
    run = run_anywhere
    assert run.attempt() == 0
    receipt = run.json("receipt.json")
    assert (receipt["state"], receipt["workload"], receipt["exit_code"]) == (
        "finished",
        "program",
        0,
    )
    assert (receipt["steps"], receipt["snapshots"], receipt["interruptions"]) == (8, 1, [])
    assert json.loads(run.store.get("final/model/model.json").data) == {"step": 8}  # type: ignore[union-attr]
    assert list(receipt["final_files"]) == ["model/model.json"]
    assert receipt["checkpoint_files"] == {}, "it left a model to compare"
    assert run.head.weights_sha256 == receipt["weights_sha256"]
    assert run.log(1).splitlines()[:2] == ["begins after 0", "step=1 loss=1.0"]
    parts = (
        *('<h2>Metrics</h2>\n<div class="chart">', "<th>MB sent</th>", "step=8 loss=0.125</pre>"),
        *("finished: 8 steps and 1 snapshot in 1 attempt.</p>", "<td>0 steps were computed twice"),
        "<tr><td>loss</td><td>0.125</td></tr><tr><td>final files</td><td>model/model.json</td>",
    )
    page = run.page
    assert [part for part in parts if part not in page] == []
    assert "None yet" not in page
    assert "<td>is</td><td>no certificate: what an interruption costs it was not tried" in page


def test_a_run_made_longer_begins_with_the_newest_snapshot_of_another(
    run: ProgramRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt() == 0
    capfd.readouterr()
    assert run.attempt("--hyperparameter=steps=12") == 2
    assert f"with --init-from {run.uri} that one begins with" in capfd.readouterr().err
    config = run.store.get("config.json")
    longer = ProgramRun(folder=run.folder, uri=f"{run.uri}-longer", options=run.options)
    more = ("--hyperparameter=steps=12", f"--init-from={run.uri}", f"--ml-root={run.folder}/more")
    assert longer.attempt(*more) == 0
    assert longer.log(1).splitlines()[:2] == ["begins after 8", "step=9 loss=0.1111111111111111"]
    newest = run.head.checkpoints[-1]
    origin = {"uri": run.uri, "checkpoint": newest.name, "step": newest.step}
    assert longer.json("receipt.json")["origin"] == longer.json("config.json")["origin"] == origin
    assert run.store.get("config.json") == config, "as it was written"
    # From here on it has snapshots of its own: the other run is needed no more.
    shutil.rmtree(run.uri)
    assert longer.attempt(*more) == 0


def test_the_page_of_a_program_that_reports_nothing_says_what_it_left(run: ProgramRun) -> None:
    run.write("""
        import os
        from pathlib import Path
        Path(os.environ["SM_MODEL_DIR"], "model.bin").write_bytes(b"x")
    """)
    assert run.attempt() == 0
    page = run.page
    assert "finished: 0 snapshots in 1 attempt.</p>" in page
    assert re.search(r"<td>what did it cost</td><td>\d+ s of machines", page)
    assert "<td>final files</td><td>model/model.bin</td></tr><tr><td>exit code</td><td>0" in page
    assert "None yet" not in page


def test_the_fingerprint_of_a_folder_has_what_its_links_lead_to(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"kept{number}").mkdir()
        (tmp_path / f"kept{number}/a.csv").write_text("a" * number)
        (tmp_path / f"data{number}").mkdir()
        (tmp_path / f"data{number}/b.csv").write_text("b")
        (tmp_path / f"data{number}/train").symlink_to(tmp_path / f"kept{number}")
    stores = (open_store(str(tmp_path / "run1")), open_store(str(tmp_path / "run2")))
    one, two = (_fingerprint(tmp_path / f"data{n}", s) for n, s in enumerate(stores, start=1))
    assert one != two


def test_names_that_are_no_text_are_kept_in_words_and_a_link_to_nothing_is_no_data(
    run: ProgramRun,
) -> None:
    run.write("""
        import os
        with open(os.fsencode(os.environ["SM_MODEL_DIR"]) + b"/caf\\xe9", "w") as file:
            file.write("x")
    """)
    data = run.folder / "data"
    data.mkdir()
    (data / "gone").symlink_to(data / "nothing")
    Path(os.fsdecode(os.fsencode(data) + b"/caf\xe9")).write_text("1")
    assert run.attempt(f"--dataset-uri={data}") == 0
    assert list(run.json("receipt.json")["final_files"]) == ["model/caf\\xe9"]
    assert run.store.get("final/model/caf\\xe9") is not None
    assert run.store.get("report.html") is not None


@pytest.mark.parametrize("is_covered", [True, False])
def test_a_program_may_write_beside_its_data_and_changes_none_of_it(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch, is_covered: bool
) -> None:
    """Where there is no view of the data, what it adds to the folder makes no difference."""
    run.write(
        """
        import os
        data = os.environ["SM_CHANNEL_TRAINING"]
        for name in ("labels.cache", "cache-1.arrow", "a.jpg"):
            with open(data + "/" + name, "a") as file:
                file.write("more" * (name != "a.jpg" or IS_COVERED))
        print(sorted(os.listdir(data)), open(data + "/a.jpg").read())
    """.replace("IS_COVERED", str(is_covered))
    )
    if not is_covered:
        monkeypatch.setattr(Container, "view", lambda *_: ())
    data = run.folder / "da:ta, 1"
    data.mkdir()
    (data / "a.jpg").write_text("a")
    before = {path.name for path in data.iterdir()}
    added = set() if is_covered else {"labels.cache", "cache-1.arrow"}
    assert run.attempt(f"--dataset-uri={data}") == 0
    assert {path.name for path in data.iterdir()} == before | added
    assert (data / "a.jpg").read_text() == "a"
    said = "['a.jpg', 'cache-1.arrow', 'labels.cache'] a" + "more" * is_covered
    assert run.log(1).strip() == said
    fingerprint = run.json("config.json")["dataset"]
    assert _fingerprint(data, run.store) == fingerprint
    (data / "a.jpg").write_text("another")
    with pytest.raises(UserError, match=r"lacks 'a\.jpg 1'"):
        _fingerprint(data, run.store)


def test_a_program_sees_the_files_of_its_data_alone(run: ProgramRun, tmp_path: Path) -> None:
    """A sync keeps files beside them, one of which differs on each machine.

    Where each folder or file of the root is a class, they would be further classes.
    """
    source, data = tmp_path / "mine", tmp_path / "synced"
    (source / "cats").mkdir(parents=True)
    (source / "cats/1.jpg").write_text("cat")
    (source / "manifest.txt").write_text("mine")
    uri = str(tmp_path / "stored")
    assert main(["data", "upload", str(source), f"--dataset-uri={uri}"]) == 0
    assert main(["data", "sync", f"--dataset-uri={uri}", f"--out={data}"]) == 0
    run.write("import os; print(sorted(os.listdir(os.environ['SM_CHANNEL_TRAINING'])))")
    before = sorted(path.name for path in data.iterdir())
    assert {"manifest.json", ".verified.jsonl", ".sync.lock"} < set(before)
    assert run.attempt(f"--dataset-uri={data}") == 0
    assert run.log(1).strip() == "['cats', 'manifest.txt']"
    assert sorted(path.name for path in data.iterdir()) == before
    # Made here, where it was never synced: the same classes.
    LocalDataset.complete(source, "program", {})
    assert run.attempt(f"--dataset-uri={source}", f"--run-uri={run.uri}-2") == 0
    run.uri += "-2"
    assert run.log(1).strip() == "['cats', 'manifest.txt']"


def test_a_folder_that_holds_the_run_itself_is_not_covered(tmp_path: Path) -> None:
    """Else what is written to the checkpoint folder would not be found there."""
    assert not Container(root=tmp_path / "ml").view(tmp_path)


def test_a_program_that_left_nothing_where_it_is_kept_is_named(
    run: ProgramRun, capfd: pytest.CaptureFixture[str]
) -> None:
    run.write("open('model.pt', 'w').write('x')")
    assert run.attempt() == 0
    assert "left nothing in SM_MODEL_DIR, SM_OUTPUT_DATA_DIR or" in "".join(capfd.readouterr())


def test_what_has_finished_is_not_run_again(
    run: ProgramRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt() == 0
    capfd.readouterr()
    assert run.attempt("--notice-signal=SIGUSR1") == 0
    assert "is finished already" in capfd.readouterr().out
    assert run.head.generation == 1


def test_a_killed_supervisor_leaves_no_program_and_the_next_attempt_resumes(
    run: ProgramRun,
) -> None:
    run.options += ["--hyperparameter=steps=100047", "--hyperparameter=pause=0.1", COMMITS]
    process = run.spawn()
    run.wait_for_snapshots(2)
    assert is_running("100047")
    kill(process)
    wait_for(lambda: not is_running("100047"))
    # Another machine, with an empty disk.
    second = run.spawn(f"--ml-root={run.folder / 'other'}")
    wait_for(lambda: "begins" in run.log(2))
    kill(second)
    begun = int(run.log(2).splitlines()[0].removeprefix("begins after "))
    assert begun >= 4
    assert len(run.events("resumed")) == 1


def test_another_program_is_refused_under_the_same_run(
    run: ProgramRun, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run.attempt("--hyperparameter=steps=3") == 0
    assert run.attempt("--hyperparameter=steps=4") == 2
    assert "config field hyperparameters" in capfd.readouterr().err
    run.write("print('other')")
    assert run.attempt("--hyperparameter=steps=3") == 2
    assert "config field source_sha256" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("source", "code", "reason"),
    [
        ("raise ValueError('it is negative')", 1, "exit code 1: ValueError: it is negative"),
        (
            "import os, sys\n"
            "with open(os.environ['SM_OUTPUT_DIR'] + '/failure', 'w') as stream:\n"
            "    stream.write('no data in channel training\\n' + 'x' * 5000)\n"
            "sys.exit(3)",
            3,
            "exit code 3: no data in channel training xxx",
        ),
        ("import os; os.kill(os.getpid(), 9)", -9, "signal 9 (the kernel does this when memory"),
    ],
)
def test_a_failing_program_says_why(
    run: ProgramRun, source: str, code: int, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run.write(source)
    assert run.attempt() == 1
    said = capfd.readouterr().err
    assert said.startswith(f"error: the program ended with {reason}")
    assert len(said.splitlines()) == 1 and len(said) < 1200
    (event,) = run.events("program-failed")
    assert said == f"error: {event['message']}\n"
    assert (event["exit_code"], event["status"]) == (code, "failed")
    assert run.head.state == "released"


def test_a_program_that_fails_at_a_step_again_and_again_fails_the_run_whatever_it_commits(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "MOST_FAILURES", 3)
    run.write("""
import os, pathlib, sys, time
starts = pathlib.Path(os.environ["SM_CHECKPOINT_DIR"], "starts")
number = int(starts.read_text()) + 1 if starts.exists() else 1
starts.write_text(str(number))
commit = pathlib.Path(os.environ["TRAINING_COMMIT_FILE"])
commit.touch()
while commit.exists():
    time.sleep(0.01)
print(f"step={7 if number < 3 else 8} loss=1.0")
sys.exit("it is negative")
""")
    assert [run.attempt() for _ in range(4)] == [1] * 4
    assert run.head.state == "released"
    assert run.attempt() == 1
    assert run.head.state == "failed"
    assert "it failed 3 times in a row, never after step 8" in run.head.reason
    assert [event["times"] for event in run.events("program-failed")] == [1, 2, 1, 2, 3]
    assert main(["reopen", f"--run-uri={run.uri}"]) == 0
    assert [run.attempt(), run.head.state] == [1, "released"]


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("program=no-such-command train.py", "'no-such-command' is not found on this machine"),
        ("program=./train.py", "is not executable; run chmod +x"),
        ("program=./other.sh", "'./other.sh' is not in the source folder"),
        ("program=python -u trian.py", "the script 'trian.py' is not in the source folder"),
        ("program=torchrun --nproc-per-node=2 trian.py", "the script 'trian.py' is not in the"),
        ("program=bash /no/such/run.sh", "the script '/no/such/run.sh' is not in the source"),
        ("program=python train.py $SM_CHANNEL_TRIAN", "$SM_CHANNEL_TRIAN, which is not part"),
        ("program=python train.py && echo", "write: bash -eo pipefail -c"),
        ("working-folder=scripts", "the working folder 'scripts' is not in the source folder"),
        ("interpreter=python9", "the interpreter 'python9' is not found"),
        ("workload=trajectory", "--workload is for workloads"),
        ("override=steps=1", "--override is for workloads"),
        ("hyperparameter=steps", "--hyperparameter 'steps' cannot be read; write name=value"),
        ("env=A=1 --env=A=2", "--env 'A' is given twice"),
        ("dataset-uri=/no/such/folder", "the dataset folder /no/such/folder does not exist"),
        ("source=/no/such/folder", "the source folder /no/such/folder does not exist"),
    ],
)
def test_fails_for_a_wrong_option(
    run: ProgramRun, option: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = option.split() if option.startswith("env") else [option]
    assert run.attempt("--" + words[0], *words[1:]) == 2
    assert sentence in capfd.readouterr().err
    assert run.store.get("head.json") is None


def test_fails_without_anything_to_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"--run-uri={tmp_path / 'runs' / 'run-1'}"]) == 2
    assert "--program and --source for a program of your own" in capfd.readouterr().err


def test_a_program_file_says_all_of_it(run: ProgramRun, tmp_path: Path) -> None:
    run.options = []
    path = tmp_path / "program.json"
    path.write_text(json.dumps({"command": "python train.py", "hyperparameters": {"steps": 2}}))
    arguments = [word for word in run.arguments() if not word.startswith(("--program", "--quiet"))]
    assert main([*arguments, f"--program-file={path}"]) == 0
    assert run.json("config.json")["config"]["hyperparameters"] == {"steps": "2"}


def test_the_channels_are_the_folders_of_the_dataset(run: ProgramRun, tmp_path: Path) -> None:
    for name in ("train", "validation"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "a.txt").write_text(name)
    run.write("""
        import os
        print(os.environ["SM_CHANNELS"])
        for name in ("TRAIN", "VALIDATION"):
            print(open(os.environ["SM_CHANNEL_" + name] + "/a.txt").read())
    """)
    words = (f"--dataset-uri={tmp_path / 'data'}", "--channel=train", "--channel=validation")
    assert run.attempt(*words) == 0
    assert run.log(1).split() == ['["train","validation"]', "train", "validation"]
    assert run.attempt(*words[:2], "--channel=test") == 2


def test_the_program_sees_nothing_of_the_service_that_runs_it(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RUN_ID", "NOTIFY_SOCKET", "JOURNAL_STREAM"):
        monkeypatch.setenv(name, "/ours")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    run.write("""
        import json, os, sys
        import training.durable.program
        print(json.dumps({"variables": dict(os.environ), "input": sys.stdin.read(),
                          "folder": os.getcwd()}))
    """)
    assert run.attempt("--env=GREETING=hello world") == 0
    said = json.loads(run.log(1))
    assert not {"RUN_ID", "NOTIFY_SOCKET", "JOURNAL_STREAM"} & said["variables"].keys()
    assert said["variables"]["AWS_REGION"] == "eu-west-1"
    assert said["variables"]["GREETING"] == "hello world"
    assert said["input"] == ""
    assert said["folder"] == os.path.realpath(run.root / "code")


def test_a_file_that_the_program_removes_while_its_time_is_read_ends_nothing(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write("""
        import os, time
        from pathlib import Path
        folder = Path(os.environ["SM_CHECKPOINT_DIR"])
        (folder / "going.pt").write_text("x")
        (folder / "state.pt").write_text("x")
        time.sleep(1)
    """)
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        if path.name == "going.pt":
            path.unlink(missing_ok=True)
        return real(path)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert run.attempt() == 0


def test_what_a_program_leaves_may_take_longer_to_send_than_the_watchdog_waits(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs: list[str] = []
    monkeypatch.setattr("training.durable.attempt.supervisor._LastResort.fail", hangs.append)
    real = ProgramWatch._upload_final

    def slow(self: ProgramWatch) -> tuple[dict[str, str], int]:
        time.sleep(4)
        return real(self)

    monkeypatch.setattr(ProgramWatch, "_upload_final", slow)
    assert run.attempt("--watchdog-seconds=3") == 0
    assert not hangs


@pytest.mark.parametrize("folder", ["checkpoints", "input", "model", "output", "code"])
def test_fails_where_another_program_uses_the_root(
    run: ProgramRun, folder: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (run.root / folder).mkdir(parents=True)
    (run.root / folder / "mine.pt").write_text("x")
    assert run.attempt() == 2
    assert "has files of something else" in capfd.readouterr().err
    assert (run.root / folder / "mine.pt").exists()


def test_a_suspended_writer_that_wakes_up_ends_its_program_and_writes_nothing(
    run: ProgramRun,
) -> None:
    run.options += [*ENDLESS, COMMITS]
    first = run.spawn()
    run.wait_for_snapshots(1)
    run.suspend(first.pid)
    second = run.spawn(f"--ml-root={run.folder / 'other'}")
    wait_for(lambda: run.head.generation == 2)
    run.wait_for_snapshots(run.head.checkpoints[-1].step + 1)
    first.send_signal(signal.SIGCONT)
    said = first.communicate(timeout=60)[0]
    assert (first.returncode, "was taken over by another writer" in said) == (76, True)
    assert {entry.name.split("-")[1] for entry in run.head.checkpoints[-1:]} == {"g0002"}
    kill(second)


def test_a_failed_run_is_taken_back_from_a_chosen_snapshot(run: ProgramRun) -> None:
    run.options += ["--keep=100", COMMITS, "--hyperparameter=steps=6"]
    wrong = "python train.py --model-dir /no/such/folder"
    assert run.attempt(command=wrong) == 1
    assert main(["fail", f"--run-uri={run.uri}", "--reason=enough"]) == 0
    assert run.attempt(command=wrong) == 1
    assert [entry.step for entry in run.head.checkpoints] == [1, 2, 3]
    assert main(["reopen", f"--run-uri={run.uri}", "--from-checkpoint=1"]) == 0
    assert run.attempt(command=wrong) == 1
    begun = [run.log(generation).splitlines()[0] for generation in (1, 2)]
    assert begun == ["begins after 0", "begins after 2"]


def test_what_only_the_program_can_read_is_refused_with_a_way_out(
    run: ProgramRun, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run.attempt() == 0
    assert main(["evaluate", f"--run-uri={run.uri}", f"--dataset-uri={tmp_path}"]) == 2
    assert main(["check", "program"]) == 2
    said = capfd.readouterr().err
    assert said.count(f"is in {run.uri}/final/model/") == 1
    assert "'program' is not a workload" in said


def test_a_last_snapshot_that_takes_long_is_no_hang(
    run: ProgramRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats, final = threading.Event(), Mirror.final

    def slow(self: Mirror, **options: Any) -> bool:
        beats.clear()
        assert beats.wait(20), "the watchdog would have ended it"
        return final(self, **options)

    monkeypatch.setattr(Mirror, "final", slow)
    monkeypatch.setattr(Watchdog, "beat", lambda self: beats.set())
    assert run.attempt() == 0


def test_of_several_ranks_only_the_first_asks_for_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINING_COMMIT_FILE", str(tmp_path / "missing" / "commit"))
    monkeypatch.setenv("RANK", "1")
    commit()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(FileNotFoundError):
        commit()


def test_a_snapshot_is_exported_into_a_new_folder(
    run: ProgramRun, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run.options += ["--keep=100", COMMITS]
    assert run.attempt() == 0
    oldest = run.head.checkpoints[0]
    out = tmp_path / "snapshot"
    export = ["export", f"--run-uri={run.uri}", f"--out={out}"]
    assert main([*export, f"--checkpoint={oldest.step}"]) == 0
    assert f"of {oldest.name}" in capfd.readouterr().out
    steps = {path.read_text() for path in out.rglob("*") if path.is_file()}
    assert len(steps) == 1, "both files of the pair are of one step"
    assert main(export) == 2
    assert "is not empty; use a new folder" in capfd.readouterr().err
    assert main([*export[:-1], f"--out={tmp_path / 'newest'}", "--checkpoint=99"]) == 2
    assert "use one of: newest" in capfd.readouterr().err
    assert main([*export[:-1], f"--out={run.source / 'train.py/below'}"]) == 2
    assert "below: Not a directory; use another path" in capfd.readouterr().err
