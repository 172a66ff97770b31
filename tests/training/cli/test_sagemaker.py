"""A workload as the container of a SageMaker training job, below a root of the test's own."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UserError
from contract.metrics import METRIC_DEFINITIONS
from tests.training.runs import ROOT, WORKLOAD, Run
from training.cli import sagemaker
from training.cli.main import main
from training.cli.sagemaker import _Command, _read_job
from training.durable import Head, open_store

_CHANNEL = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}


def _given(root: Path, **hyperparameters: str) -> Path:
    """Below this root, what SageMaker leaves there for a container."""
    files: dict[str, Mapping[str, Any]] = {
        "hyperparameters": {name.replace("__", "-"): v for name, v in hyperparameters.items()},
        "resourceconfig": {"current_host": "algo-1", "hosts": ["algo-1"]},
        "inputdataconfig": {"training": _CHANNEL},
    }
    for name, content in files.items():
        path = root / "input" / "config" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return root


def _tiny(root: Path, dataset: Path, **more: str) -> Path:
    """A job of the tiny workload, its hyperparameters as SageMaker's SDK encodes them."""
    _given(
        root,
        workload=json.dumps(WORKLOAD),
        recipe='"quick"',
        run__uri=json.dumps(str(root.parent / "bucket" / "runs" / "run-1")),
        checkpoint__interval="3steps",
        num__processes="1",
        step_seconds="0.05",
        sagemaker_program='"train.py"',
        **more,
    )
    channel = root / "input" / "data" / "training"
    channel.parent.mkdir(parents=True)
    channel.symlink_to(dataset)
    return root


def _container(root: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "training", "sagemaker", f"--ml-root={root}", "train"]
    tmp = root / "tmp"
    tmp.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(tmp), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=2
    )


def test_an_interrupted_job_goes_on_in_its_next_container(
    dataset: Path, whole: Run, tmp_path: Path
) -> None:
    root = _tiny(tmp_path / "ml", dataset)
    with _container(root) as first:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("first: "):
                first.send_signal(signal.SIGTERM)
            if "waits for its end" in line:
                committed = Head.read(open_store(str(tmp_path / "bucket/runs/run-1")))
                assert committed is not None and committed.state == "released"
                last = f"its last commit is of step {committed.checkpoints[-1].step}"
                assert line == f"[sagemaker] {last}; this container waits for its end\n"
                assert first.poll() is None, "an exit code would end the job"
                first.kill()
    with _container(root) as second:
        output = second.communicate(timeout=300)[0]
    assert second.returncode == 0, output
    assert "[resume] from" in output
    names = sorted(path.name for path in (root / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "receipt.json", "report.html"]
    receipt = json.loads((root / "model" / "receipt.json").read_text())
    assert receipt["weights_sha256"] == whole.head.weights_sha256
    assert not (root / "output" / "failure").exists()
    config = json.loads((root / "model" / "config.json").read_text())
    assert config["overrides"] == {"step_seconds": "0.05"}
    # What SageMaker is told to look for in the log is what the trainer prints.
    for name, regex in METRIC_DEFINITIONS.items():
        values = [match[1] for line in output.splitlines() if (match := re.search(regex, line))]
        assert values and all(map(_is_number, values)), name


def _is_number(text: str) -> bool:
    return isinstance(float(text), float)


def test_a_mistake_is_the_failure_reason_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = _given(tmp_path, workload="tiny", run__uri="s3://bucket/runs/run-1")
    assert main(["sagemaker", f"--ml-root={root}"]) == 2
    reason = (root / "output" / "failure").read_text()
    assert reason.startswith("the job has no hyperparameter recipe; submit it with")
    assert f"error: {reason}" in capsys.readouterr().err


def _job(root: Path, workload: str = "w", **hyperparameters: str) -> list[str]:
    _given(root, workload=workload, recipe="r", run__uri="s3://b/r", **hyperparameters)
    return list(_read_job(root, {}).arguments)


def test_hyperparameters_are_options_of_run_and_fields_of_the_recipe(tmp_path: Path) -> None:
    arguments = _job(tmp_path, keep="2", learning_rate="0.1", name='"a b"', _tuning_objective="x")
    assert arguments == [
        "run",
        "--workload=w",
        "--recipe=r",
        "--run-uri=s3://b/r",
        "--keep=2",
        f"--dataset-uri={tmp_path / 'input' / 'data' / 'training'}",
        "--notice-budget-seconds=120",
        "--override=learning_rate=0.1",
        "--override=name=a b",
        f"--writer=sagemaker/algo-1-{sagemaker._boot()}",
        f"--scratch={tempfile.gettempdir()}/training",
    ]
    of_scripts = _job(tmp_path, batch__size="2", lr_backbone="1e-5", hidden_dim="256")
    assert [word for word in of_scripts if word.startswith("--override")] == [
        "--override=global_batch=2",
        "--override=backbone_learning_rate=1e-5",
        "--override=width=256",
    ]
    own = _job(tmp_path, workload="mine:MINE", batch__size="2", lr="0.1")
    assert [word for word in own if word.startswith("--override")] == [
        "--override=batch_size=2",
        "--override=lr=0.1",
    ]
    assert "--dataset-uri=s3://b/data" in _job(tmp_path, dataset__uri="s3://b/data")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "resourceconfig",
            '{"hosts": ["algo-1", "algo-2"], "network_interface_name": "eth77"}',
            "are to meet over the interface 'eth77', but this one has lo",
        ),
        ("inputdataconfig", '{"a": {}, "b": {}}', "channels are a, b: name the one"),
        ("inputdataconfig", "{}", "channels are none"),
        ("inputdataconfig", '{"a": {"TrainingInputMode": "Pipe"}}', "Pipe mode, which has no"),
        ("hyperparameters", "[1]", "is not a JSON object"),
        ("hyperparameters", "{", "is not JSON"),
    ],
)
def test_fails_for_a_job_that_cannot_be_trained(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    _job(tmp_path)
    (tmp_path / "input" / "config" / f"{name}.json").write_text(content)
    with pytest.raises(UserError, match=words):
        _read_job(tmp_path, {})


def _on_two_hosts(root: Path, own: str) -> None:
    """What SageMaker leaves for one of two containers."""
    resources = {"current_host": own, "hosts": ["algo-1", "algo-2"], "network_interface_name": "lo"}
    (root / "input" / "config" / "resourceconfig.json").write_text(json.dumps(resources))


def test_several_hosts_train_together_and_the_first_leaves_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _job(tmp_path)
    _on_two_hosts(tmp_path, "algo-1")
    assert _read_job(tmp_path, {}).leads
    _on_two_hosts(tmp_path, "algo-2")
    job = _read_job(tmp_path, {})
    assert job.arguments[-3:] == (
        f"--writer=sagemaker/algo-2-{sagemaker._boot()}",
        f"--scratch={tempfile.gettempdir()}/training",
        "--hosts=algo-2@algo-1,algo-2",
    )
    assert job.variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    monkeypatch.setattr(_Command, "run", lambda self: 0)
    assert main(["sagemaker", f"--ml-root={tmp_path}"]) == 0
    assert list((tmp_path / "model").iterdir()) == []


def test_a_container_waits_with_the_others_where_another_host_was_told_to_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tries = str(tmp_path / "tries")
    saved = f"f = open({tries!r}, 'a'); f.write('x'); exit(75 if f.tell() < 5 else 0)"
    pauses = list[float]()
    trainer = _trainer(saved)
    trainer._sleep = pauses.append
    assert trainer.run() == 0
    assert (tmp_path / "tries").read_text() == "xxxxx" and pauses == [3.0] * 4
    assert capfd.readouterr().out.count("another host is ending; waiting for all of them") == 4


def _trainer(program: str) -> _Command:
    return _Command([sys.executable, "-c", program], sleep=lambda seconds: None)


def test_a_crash_is_tried_three_times_and_a_mistake_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    count = f"open({str(tmp_path / 'tries')!r}, 'a').write('x')"
    crashing = _trainer(f"{count}; import sys; sys.exit('error: out of luck')")
    assert crashing.run() == 1 and crashing.reason(1) == "out of luck (exit code 1)"
    assert (tmp_path / "tries").read_text() == "xxx"
    mistaken = _trainer(f"{count}; raise SystemExit(2)")
    assert mistaken.run() == 2 and mistaken.reason(2) == "the command ended with exit code 2"
    assert (tmp_path / "tries").read_text() == "xxxx"
    assert _trainer(f"{count}; raise SystemExit(74)").run() == 74
    assert (tmp_path / "tries").read_text() == "xxxxxxx", "a store that failed may answer again"
    assert "out of luck (exit code 1); trying again" in capfd.readouterr().out
    lost = _trainer(
        "import sys; sys.exit('[failed] host b is lost\\n' + 40 * '  File x, line 1\\n')"
    )
    assert lost.run() == 1 and lost.reason(1) == "host b is lost (exit code 1)"
    killed = _trainer("import os; os.kill(os.getpid(), 9)")
    assert killed.run() == -9 and killed.reason(-9) == "the command ended with signal SIGKILL"


def test_three_crashes_of_days_do_not_end_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sagemaker, "_WITHIN_SECONDS", 0.0)
    tries = str(tmp_path / "tries")
    assert _trainer(f"f = open({tries!r}, 'a'); f.write('x'); exit(f.tell() < 5)").run() == 0
    assert (tmp_path / "tries").read_text() == "xxxxx"


def _ended_with(code: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a container whose trainer ends so."""
    monkeypatch.setattr(_Command, "run", lambda self: code)
    _given(root, workload="w", recipe="r", run__uri=str(root / "run-1"))
    return main(["sagemaker", f"--ml-root={root}"])


def test_a_run_that_has_failed_says_why_to_every_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["fail", f"--run-uri={tmp_path / 'run-1'}", "--reason=the loss is nan"]) == 0
    assert _ended_with(1, tmp_path, monkeypatch) == 1
    reason = (tmp_path / "output" / "failure").read_text()
    assert reason.startswith("the loss is nan; take it back with: python -m training reopen")


def test_a_finished_run_needs_its_model_and_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _ended_with(0, tmp_path, monkeypatch) == 2
    reason = (tmp_path / "output" / "failure").read_text()
    assert "is finished, but its final/model.safetensors is gone; train again" in reason
    final = tmp_path / "run-1" / "final"
    final.mkdir(parents=True)
    (final / "model.safetensors").write_bytes(b"weights")
    assert _ended_with(0, tmp_path, monkeypatch) == 0
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]


def test_a_process_that_outlives_the_trainer_does_not_keep_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sagemaker, "_LAST_WORDS_SECONDS", 0.1)
    alive = tmp_path / "alive"
    alive.touch()
    stay = f"import os, time\nwhile os.path.exists({str(alive)!r}): time.sleep(0.05)"
    started = f"subprocess.Popen([sys.executable, '-c', {stay!r}])"
    assert _trainer(f"import os, subprocess, sys; {started}; os._exit(2)").run() == 2
    alive.unlink()


def test_a_notice_to_a_trainer_that_has_not_begun_reaches_it() -> None:
    trainer = _trainer("import time; time.sleep(60)")
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    began = time.monotonic()
    assert trainer.run() == -signal.SIGTERM
    assert trainer.terminated_at is not None and time.monotonic() - began < 60


def test_what_a_killed_import_left_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _job(tmp_path)
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset/part").touch()
    job = replace(_read_job(tmp_path, {}), dataset=tmp_path / "dataset", importing=("data",))
    monkeypatch.setattr(_Command, "run", lambda _: 0)
    assert sagemaker._import(job)[1] == 0
    assert not job.dataset.exists()


def test_a_container_that_nobody_ends_is_neither_completed_nor_silent(tmp_path: Path) -> None:
    _job(tmp_path)
    job = _read_job(tmp_path, {})
    assert sagemaker._await_the_end(job, time.monotonic() - 1000, "it has ended") == 143
    reason = (tmp_path / "output" / "failure").read_text()
    assert reason.startswith("interrupted, it has ended: submit the same")
