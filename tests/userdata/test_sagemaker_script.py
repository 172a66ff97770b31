"""A script in the style of SageMaker's examples, unchanged, at a machine's real /opt/ml."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.userdata.rig import REPOSITORY

SCRIPT = Path(__file__).with_name("sagemaker_script.py")
# A mount namespace of its own, with another /opt: the host's stays as it is.
NAMESPACE = ["unshare", "--mount", "--propagation", "private", "bash", "-c"]
INSIDE = 'mount --bind "$1" /opt && shift && exec "$@"'


def make_data(folder: Path) -> None:
    """Points left and right of a line, in two channels."""
    rng = random.Random(0)
    for channel, count in (("train", 2048), ("test", 256)):
        points = [[rng.uniform(-1, 1), rng.uniform(-1, 1)] for _ in range(count)]
        labels = [int(x > y) for x, y in points]
        (folder / channel).mkdir(parents=True)
        text = json.dumps({"x": points, "label": labels})
        (folder / channel / "points.json").write_text(text)


@pytest.mark.slow  # in each run of the tests: tests/training/cli/test_sagemaker.py
@pytest.mark.machine
def test_a_script_of_sagemakers_style_runs_unchanged_and_survives_a_kill(tmp_path: Path) -> None:
    source, opt, run = (tmp_path / name for name in ("source", "opt", "run"))
    for folder in (source, opt / "ml"):
        folder.mkdir(parents=True)
    shutil.copy(SCRIPT, source / "train.py")
    make_data(tmp_path / "data")
    command = [sys.executable, "-m", "training", "run", "--program", "python train.py"]
    command += ["--source", str(source), "--dataset-uri", str(tmp_path / "data")]
    command += ["--channel", "train", "--channel", "test", "--hyperparameter", "epochs=200"]
    command += ["--run-uri", str(run), "--quiet-seconds", "0.2", "--lease-ttl-seconds", "2"]
    inside = [*NAMESPACE, INSIDE, "-", str(opt), *command]
    first = subprocess.Popen(inside, cwd=REPOSITORY)
    head = run / "head.json"
    while not (head.exists() and json.loads(head.read_text())["checkpoints"]):
        assert first.poll() is None
        time.sleep(0.05)
    # A machine that is lost writes nothing any more: the keeper ends the program in a moment.
    processes = psutil.Process(first.pid).children(recursive=True)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not psutil.wait_procs(processes, timeout=60)[1]
    # Another machine has an empty disk.
    shutil.rmtree(opt / "ml")
    (opt / "ml").mkdir()
    second = subprocess.run(inside, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "Loaded checkpoint of epoch" in second.stdout + second.stderr
    assert (run / "final/model/model.pth").exists()
