"""What a run on a GPU teaches later plans, from the key that the trainer writes there."""

import json
from pathlib import Path

import pytest
import torch

from sizing.plan.finished_run import calibration, read_run
from tests.sizing.sample_plan import plan
from training.numerics import numerics_key


# As CUDA names them.
@pytest.mark.parametrize(
    ("size", "gpu"),
    [
        ("g4dn.xlarge", "Tesla T4"),
        ("g5.xlarge", "NVIDIA A10G"),
        ("g6e.xlarge", "NVIDIA L40S"),
        ("p3.2xlarge", "Tesla V100-SXM2-16GB"),
        ("p4de.24xlarge", "NVIDIA A100-SXM4-80GB"),
        ("p5.48xlarge", "NVIDIA H100 80GB HBM3"),
        ("g7e.2xlarge", "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    ],
)
def test_a_run_calibrates_the_gpu_that_its_numerics_key_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, gpu: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    key = numerics_key(torch.device("cuda", 0), world=None, deterministic=True, stages={})
    step = {
        "kind": "step",
        "stage": "head",
        "step": 1,
        "generation": 1,
        "num_samples": 64,
        "samples_per_second": 640.0,
        "data_wait": 0.0,
    }
    receipt = {
        "run_id": "run-1",
        "workload": "trajectory",
        "recipe": "full",
        "seconds": 3600.0,
        "numerics_key": key,
    }
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "0001-a-00001.jsonl").write_text(json.dumps(step))
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    run = read_run(tmp_path)
    assert run.device == gpu
    assert calibration(run, plan(tmp_path, size=size)).constants
