"""The seed's SageMaker job: COCO files in channels are checked, imported and trained on."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from contract.errors import UserError
from tests.training.workloads.detection.watched import WORKLOAD, make_sparse_dataset
from training.cli import sagemaker
from training.cli.main import main
from training.cli.sagemaker import _Command, _read_job
from training.workloads.detection.detection_dataset import _annotations_file

_CHANNEL = {"TrainingInputMode": "File", "S3DistributionType": "FullyReplicated"}
ANNOTATIONS = "_annotations.coco.json"


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sparse_dataset(tmp_path_factory.mktemp("plans") / "data")


@pytest.fixture
def root(plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What SageMaker leaves below /opt/ml: two channels, each a folder in COCO's format."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    config = tmp_path / "ml/input/config"
    config.mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    given = {
        "hyperparameters": {
            "workload": WORKLOAD.partition("=")[2],
            "recipe": "quick",
            "run-uri": str(tmp_path / "bucket/run-1"),
            "num-processes": "1",
            "epochs": "1",
            "drop_epoch": "1",
        },
        "inputdataconfig": {"train": _CHANNEL, "validation": _CHANNEL},
    }
    for name, content in given.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    for split in ("train", "validation"):
        channel = tmp_path / "ml/input/data" / split
        shutil.copytree(plans / split, channel)
        shutil.copy(plans / _annotations_file(split), channel / ANNOTATIONS)
    return tmp_path / "ml"


class _InThisProcess(_Command):
    """The same command line without the seconds of another interpreter's imports."""

    def run(self) -> int:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = main([*self._command][3:])
        self._listen(io.BytesIO(said.getvalue().encode()))
        return code


@pytest.mark.slow
def test_files_in_channels_become_a_dataset_and_a_model(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sagemaker, "_Command", _InThisProcess)
    assert main(["sagemaker", f"--ml-root={root}"]) == 0
    said = capsys.readouterr().out
    for fact in ("dataset made:", "torch ", "dataset ", "detect uses: attention ", "recipe"):
        assert f"[ok] {fact}" in said or (fact == "recipe" and ", recipe quick: " in said)
    assert (root / "model/model.safetensors").stat().st_size > 40_000_000
    receipt = json.loads((root / "model/receipt.json").read_text())
    (stage,) = receipt["stages"].values()
    assert "AP50" in str(stage)
    # The next container of the same job finds the dataset made, and the run finished.
    assert main(["sagemaker", f"--ml-root={root}"]) == 0


def test_faulty_files_are_the_failure_reason_and_nothing_is_trained(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sagemaker, "_Command", _InThisProcess)
    path = root / "input/data/train" / ANNOTATIONS
    content = json.loads(path.read_text())
    content["annotations"][0]["category_id"] = 99
    path.write_text(json.dumps(content))
    assert main(["sagemaker", f"--ml-root={root}"]) == 2
    reason = (root / "output/failure").read_text()
    assert reason.startswith("the dataset cannot be trained on: train: annotation 1 is of category")
    assert not (root.parent / "bucket").exists()


def test_channels_that_are_no_splits_are_no_files_to_import(root: Path) -> None:
    job = _read_job(root, {})
    assert job.importing is not None and job.importing[:2] == ("data", "import")
    path = root / "input/config/inputdataconfig.json"
    path.write_text(json.dumps({"training": _CHANNEL}))
    assert _read_job(root, {}).importing is None
    path.write_text(json.dumps({"train": _CHANNEL, "other": _CHANNEL}))
    with pytest.raises(UserError, match="those with files of your own 'train' and 'validation'"):
        _read_job(root, {})
    path.write_text(json.dumps({"train": _CHANNEL, "validation": {"TrainingInputMode": "Pipe"}}))
    with pytest.raises(UserError, match="'validation' is in Pipe mode"):
        _read_job(root, {})
