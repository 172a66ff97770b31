"""The CreateTrainingJob request: what botocore's model and the documentation say of it."""

import json
import re
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError, ReadTimeoutError
from botocore.validate import ParamValidator
from moto import mock_aws

from contract.trainer_options import SAGEMAKER_OPTIONS
from sizing import catalogue
from stacks.bundle import FOLDERS
from stacks.sagemaker.__main__ import sagemaker_command as main
from stacks.sagemaker.prices import ON_DEMAND_USD_PER_HOUR
from stacks.sagemaker.request import JobSettings, job_name, training_job
from training.cli.sagemaker import _read_job

ROOT = Path(__file__).parents[3]
_ACCOUNT = "123456789012"
_GIVEN = {
    "--workload": "trajectory",
    "--recipe": "laptop",
    "--run-uri": "s3://bucket/runs/run-1",
    "--dataset-uri": "s3://bucket/trajectory",
    "--image": f"{_ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/training:1",
    "--role": f"arn:aws:iam::{_ACCOUNT}:role/Training",
    "--instance-type": "ml.g5.2xlarge",
}


def _arguments(**other: str) -> list[str]:
    given = _GIVEN | {f"--{name.replace('_', '-')}": value for name, value in other.items()}
    return ["submit", *(word for pair in given.items() for word in pair)]


def _never(name: str) -> Any:
    raise AssertionError("a dry run calls nothing")


def _request(capsys: pytest.CaptureFixture[str], *more: str, **other: str) -> dict[str, Any]:
    assert main([*_arguments(**other), "--dry-run", *more], client=_never) == 0
    request: dict[str, Any] = json.loads(capsys.readouterr().out)
    return request


def test_a_dry_run_prints_a_request_that_botocore_accepts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = _request(capsys, "--spot", "--hyperparameter", "epochs=3", max_hours="2")
    model = botocore.session.get_session().get_service_model("sagemaker")
    report = ParamValidator().validate(
        request, model.operation_model("CreateTrainingJob").input_shape
    )
    assert not report.has_errors(), report.generate_report()
    assert request["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 7200,
        "MaxWaitTimeInSeconds": 14400,
    }
    assert request["EnableManagedSpotTraining"] is True
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 30}
    assert request["HyperParameters"]["epochs"] == "3"
    assert "CheckpointConfig" not in request and "VolumeSizeInGB" not in request["ResourceConfig"]
    on_demand = _request(capsys, instance_type="ml.c5.xlarge", volume_gib="50")
    assert on_demand["ResourceConfig"]["VolumeSizeInGB"] == 50
    assert "MaxWaitTimeInSeconds" not in on_demand["StoppingCondition"]


def test_what_is_submitted_is_what_the_container_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    request = _request(capsys, "--hyperparameter", "checkpoint-interval=auto")
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text(json.dumps(request["HyperParameters"]))
    job = _read_job(tmp_path, {"TRAINING_JOB_NAME": request["TrainingJobName"]})
    assert job.arguments[:6] == (
        "run",
        "--workload=trajectory",
        "--recipe=laptop",
        "--run-uri=s3://bucket/runs/run-1",
        "--dataset-uri=s3://bucket/trajectory",
        "--checkpoint-interval=auto",
    )
    assert set(request["HyperParameters"]) <= set(SAGEMAKER_OPTIONS)


def test_usual_names_stand_for_fields_but_in_a_workload_of_one_s_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for workload, field in (("trajectory", "learning_rate"), ("mine:MINE", "lr")):
        request = _request(capsys, workload=workload, hyperparameter="lr=0.1")
        assert request["HyperParameters"][field] == "0.1"


def test_several_instances_train_as_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    request = _request(capsys, "--spot", instances="4")
    assert request["ResourceConfig"]["InstanceCount"] == 4
    assert request["EnableManagedSpotTraining"] is True
    assert "num-processes" not in request["HyperParameters"]
    known = {"instance_type": "ml.g5.12xlarge", "max_hours": "10"}
    assert main([*_arguments(**known, instances="2"), "--dry-run"], client=_never) == 0
    assert "at most $141.80 for 10 h on 2 instances" in capsys.readouterr().err
    by_hand = "num-processes=1"
    request = _request(
        capsys, instance_type="ml.g5.12xlarge", instances="8", hyperparameter=by_hand
    )
    assert request["ResourceConfig"]["InstanceCount"] == 8
    _request(capsys, instances="3", hyperparameter="reduction=ring")


def test_submit_creates_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("sagemaker", region_name="us-east-1")
        assert main(_arguments(job_name="job-1"), client=lambda name: client) == 0
        job = client.describe_training_job(TrainingJobName="job-1")
        printed = capsys.readouterr()
    assert f"[ok] {job['TrainingJobArn']} trains s3://bucket/runs/run-1" in printed.out
    assert job["HyperParameters"]["workload"] == "trajectory"


def test_fails_in_one_sentence_where_aws_cannot_be_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nowhere = boto3.client(
        "sagemaker",
        region_name="us-east-1",
        endpoint_url="http://127.0.0.1:9",
        config=Config(retries={"max_attempts": 0}, signature_version=UNSIGNED),
    )
    assert main(_arguments(), client=lambda name: nowhere) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sagemaker: the job was not created: Could not connect")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"workload": "tractory"}, "unknown workload 'tractory'; known are"),
        ({"recipe": "tiny"}, "has no recipe 'tiny'; known are"),
        ({"instance_type": "ml.g5.3xlarge"}, "does not know; of that family it knows ml.g5.xlarge"),
        ({"instance_type": "g5.2xlarge"}, "it knows ml.g5.xlarge"),
        ({"role": "Training"}, "RoleArn is 'Training', which does not match arn"),
        ({"run_uri": "runs/run-1"}, "--run-uri is 'runs/run-1'; a job reaches only S3"),
        ({"dataset_uri": "data"}, "--dataset-uri is 'data'; a job reaches only S3"),
        ({"max_hours": "700"}, "--max-hours is 700, but a job runs for at most 672"),
        ({"max_wait_hours": "3"}, "--max-wait-hours is for managed Spot only; add --spot"),
        ({"job_name": "run_1"}, "TrainingJobName is 'run_1', which does not match"),
        ({"hyperparameter": "epochs"}, "--hyperparameter is 'epochs'; write NAME=VALUE"),
        ({"hyperparameter": f"usd-per-hour={'x' * 2501}"}, "2501, and at most 2500 is allowed"),
        ({"hyperparameter": "workload=growth"}, "is an option of its own: use --workload"),
        ({"hyperparameter": "run-uri=s3://a/b"}, "is an option of its own: use --run-uri"),
        ({"metric": "a=("}, "--metric a is the invalid regular expression '('"),
        ({"metric": "a=x"}, "--metric a is 'x': put the number in parentheses"),
        ({"metric": f"a={'x' * 501}"}, "501, and at most 500 is allowed"),
        ({"subnet": "subnet-1"}, "the length of VpcConfig.SecurityGroupIds is 0, and at least 1"),
        (
            {"instances": "3"},
            "--instances 3 with 1 processes each are 3 ranks, and only",
        ),
        ({"instance_type": "ml.g5.12xlarge", "instances": "4"}, "with 4 processes each are 16"),
    ],
)
def test_fails_for_what_sagemaker_would_refuse(
    other: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_arguments(**other), "--dry-run"], client=_never) == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.startswith("sagemaker: ") and printed.out == ""


def test_fails_for_a_volume_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(_arguments(volume_gib="0"))
    assert "argument --volume-gib: 0 is not positive" in capsys.readouterr().err


def test_fails_for_a_wait_that_is_shorter_than_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*_arguments(max_hours="4", max_wait_hours="3"), "--spot", "--dry-run"]) == 2
    assert "--max-wait-hours is 3, but it includes the run itself" in capsys.readouterr().err


def test_every_reason_is_named_at_once() -> None:
    settings = JobSettings(
        job_name="a b",
        image="i",
        role="r",
        instance_type="ml.none",
        run_uri="x",
        dataset_uri="s3://b/d",
        hyperparameters={},
        max_hours=1,
    )
    with pytest.raises(ValueError, match="at least 20 is needed") as refused:
        training_job(settings)
    assert len(str(refused.value).split("; ")) >= 4


def test_a_job_s_name_fits_whatever_the_run_is_called() -> None:
    name = job_name("s3://bucket/runs/a_very.long-" + 80 * "x", "20261122-120000")
    assert re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name) and name.endswith("-120000")
    assert job_name("s3://bucket/runs/run-1/", "1").startswith("run-1-")


def test_a_price_that_is_unknown_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    for instance_type in ("ml.g5.2xlarge", "ml.g5.4xlarge", "ml.m4.xlarge"):
        main([*_arguments(instance_type=instance_type, max_hours="10"), "--dry-run"])
    known, other, foreign = capsys.readouterr().err.splitlines()
    assert "about $1.515 an hour" in known and "at most $15.15 for 10 h" in known
    assert "the price of ml.g5.4xlarge is not known here (EC2's g5.4xlarge $1.624" in other
    sizes = catalogue.instances()
    ratios = [
        usd / (sizes[name.removeprefix("ml.")].on_demand_usd_per_hour or 0.0)
        for name, usd in ON_DEMAND_USD_PER_HOUR.items()
    ]
    assert f"cost {min(ratios):.2f} to {max(ratios):.2f} times EC2's" in other
    assert "no price of EC2's m4.xlarge" in foreign


def test_files_of_one_s_own_are_channels_that_the_entry_point_imports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = {n: v for n, v in _GIVEN.items() if n != "--dataset-uri"} | {"--workload": "detection"}
    words = ["submit", *(word for pair in given.items() for word in pair), "--dry-run"]
    channels = [f"--channel={name}=s3://bucket/plans/{name}" for name in ("train", "validation")]
    assert main([*words, *channels], client=_never) == 0
    request = json.loads(capsys.readouterr().out)
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()
    for name, content in {
        "hyperparameters": request["HyperParameters"],
        "inputdataconfig": {each["ChannelName"]: {} for each in request["InputDataConfig"]},
    }.items():
        path = tmp_path / "input/config" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    assert _read_job(tmp_path, {}).importing is not None
    for wrong in ([], [channels[0]], [*channels, "--dataset-uri=s3://bucket/x"]):
        assert main([*words, *wrong], client=_never) == 2
    assert "use either --dataset-uri, or --channel train=" in capsys.readouterr().err


def test_the_image_has_what_the_bundle_has_and_starts_the_trainer_itself() -> None:
    """Read only: nothing here can build an image."""
    text = (ROOT / "stacks" / "sagemaker" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (\S+) \S+$", text, re.MULTILINE)
    pins = ["userdata/requirements.txt", "userdata/requirements-detection"]
    assert copied == [*pins, "contract", "training"]
    assert {name.partition("/")[0] for name in copied} == set(FOLDERS)
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / "stacks" / "sagemaker" / "Dockerfile.dockerignore").read_text().split()
    assert [line[1:] for line in ignored if line.startswith("!")] == [
        "contract",
        "training",
        *pins,
    ]
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert json.loads(entry) == ["python", "-m", "training", "sagemaker"]


def test_a_job_s_hyperparameters_are_checked_before_it_is_paid_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of seed document 003, by its own names."""
    seed = {"epochs": 50, "batch_size": 2, "lr": 1e-4, "lr_backbone": 1e-5, "num_classes": 2}
    seed |= {"hidden_dim": 256, "num_queries": 300}
    given = [word for n, v in seed.items() for word in ("--hyperparameter", f"{n}={v}")]
    job = {"workload": "detection", "recipe": "full"}
    sent = _request(capsys, *given, "--hyperparameter", "keep=2", **job)["HyperParameters"]
    assert (sent["global_batch"], sent["width"], sent["keep"]) == ("2", "256", "2")
    for wrong, sentence in (
        ("widht=256", "has no field 'widht'; did you mean 'width'?"),
        ("batch-size=0", "global_batch is 0"),
        ("checkpoint-interval=often", "the checkpoint interval 'often' cannot be read"),
        ("keep=0", "the checkpoints to keep, '0', cannot be read"),
        ("nan-skips=-1", "'-1' is not a whole number, 0 or more"),
    ):
        command = [*_arguments(**job), "--hyperparameter", wrong]
        assert main(command, client=_never) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "is_unknown"),
    [
        (ReadTimeoutError(endpoint_url="https://sagemaker"), True),
        (ClientError({"Error": {"Code": "ResourceInUse"}}, "CreateTrainingJob"), True),
        (ClientError({"Error": {"Code": "ResourceLimitExceeded"}}, "CreateTrainingJob"), False),
    ],
)
def test_a_job_whose_answer_is_lost_is_not_called_missing(
    error: Exception, is_unknown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lost:
        def create_training_job(self, **_: Any) -> None:
            raise error

    assert main(_arguments(), client=lambda name: Lost()) == 1
    said = capsys.readouterr().err
    assert ("was not created" in said) != is_unknown
    assert (
        "before you submit again, see `aws sagemaker describe-training-job" in said
    ) == is_unknown
