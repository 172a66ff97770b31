"""Settings and credentials that cannot work: every command says so in one sentence, exit code 2."""

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import boto3
import pytest

from operate.command import main as operate
from review.assembly import CannotReview, deployed
from sizing.__main__ import main as sizing
from stacks.doctor.__main__ import main as doctor
from stacks.guard.settings import quick_client
from stacks.sagemaker.__main__ import sagemaker_command
from training.cli.main import main as training
from training.durable.store import dataset

CONFIG = """
[profile failing]
credential_process = false
[profile nowhere]
credential_process = /nowhere/program
[profile garbage]
credential_process = echo hello
[profile expired]
credential_process = cat {expired}
[profile chained]
role_arn = arn:aws:iam::123456789012:role/train
source_profile = missing
[profile half]
aws_access_key_id = x
[profile ended]
sso_session = corp
sso_account_id = 123456789012
sso_role_name = train
[sso-session corp]
sso_start_url = https://corp.awsapps.com/start
sso_region = us-east-1
[profile signed-out]
sso_start_url = https://corp.awsapps.com/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = train
"""
KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
# The variables of each fault, and words of its sentence: what is wrong, and what to do.
FAULTS: dict[str, tuple[dict[str, str], str, str]] = {
    "no such profile": ({"AWS_PROFILE": "mistyped"}, "mistyped", "~/.aws has those"),
    "process fails": ({"AWS_PROFILE": "failing"}, "custom-process", "get-caller-identity"),
    "process is missing": ({"AWS_PROFILE": "nowhere"}, "/nowhere/program", "get-caller-identity"),
    "process prints no JSON": ({"AWS_PROFILE": "garbage"}, "cannot be used", "get-caller-identity"),
    "process gives old keys": ({"AWS_PROFILE": "expired"}, "still expired", "get-caller-identity"),
    "no source profile": ({"AWS_PROFILE": "chained"}, '"missing"', "~/.aws/config"),
    "half a key": ({"AWS_PROFILE": "half"}, "Partial credentials", "~/.aws/config"),
    "SSO login ended": ({"AWS_PROFILE": "ended"}, "corp", "without .venv: aws sso login"),
    "SSO signed out": ({"AWS_PROFILE": "signed-out"}, "SSO Token", "CLI 2, in a"),
    "no credentials": ({}, "credentials", "aws configure sso"),
    "no such region": (
        {**KEYS, "AWS_REGION": "us east 1", "AWS_DEFAULT_REGION": "us east 1"},
        "us east 1",
        "AWS_",
    ),
    "no endpoint": ({**KEYS, "AWS_ENDPOINT_URL": "localhost:9"}, "localhost:9", "get-caller"),
}
TO, RUN = ("--dataset-uri", "s3://bucket/data"), ("--run-uri", "s3://bucket/runs/a")
VERBS = ("list", "status", "logs", "stop", "resume", "cost", "download", "open", "shell")
SMALL = ("--workload", "trajectory", "--recipe", "laptop")
COMMANDS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "data upload": (training, ("data", "upload", "FOLDER", *TO)),
    "data sync": (training, ("data", "sync", *TO, "--out", "OUT")),
    "data make": (
        training,
        ("data", "make", "--workload", "trajectory", "--count", "55", "--out", "OUT", *TO),
    ),
    "data import": (
        training,
        ("data", "import", "s3://bucket/x", "--workload", "imagenet", "--out", "OUT"),
    ),
    "data import to S3": (
        training, ("data", "import", "FOLDER", "--workload", "imagenet", *TO)
    ),
    "run": (training, ("run", *SMALL, *RUN, *TO)),
    "fail": (training, ("fail", *RUN, "--reason", "x", "--writer", "me")),
    "reopen": (training, ("reopen", *RUN)),
    "report": (training, ("report", *RUN)),
    "tensorboard": (training, ("tensorboard", *RUN, "--out", "OUT")),
    "export": (training, ("export", *RUN, "--out", "OUT")),
    "evaluate": (training, ("evaluate", *RUN, *TO)),
    "predict": (training, ("predict", *RUN, *TO, "--out", "OUT")),
    "sweep": (
        training,
        ("sweep", *SMALL, *TO, "--runs-uri", "s3://bucket/runs", "--vary", "seed=1,2"),
    ),
    **{
        f"runs {verb}{' of a URI' * bool(uri)}": (operate, (verb, *uri))
        for verb in VERBS
        for uri in ((), ("s3://bucket/runs/a",))[verb not in ("list", "status") :]
    },
    "sizing": (sizing, ("catalogue", "--refresh", "g5.xlarge")),
    "doctor": (doctor, ()),
    "doctor before a deploy": (doctor, ("--before", "deploy")),
    "sagemaker": (
        sagemaker_command,
        (
            "submit", *SMALL, *RUN, *TO, "--image", "1.dkr.ecr.us-east-1.amazonaws.com/x:y",
            "--role", "arn:aws:iam::123456789012:role/x", "--instance-type", "ml.g5.xlarge",
        ),
    ),
}  # fmt: skip

UNATTENDED = {"data sync", "run", "fail", "sweep"}


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the variables of a fault, and nothing else of AWS."""
    old = {"Version": 1, "AccessKeyId": "x", "SecretAccessKey": "y", "SessionToken": "z"}
    (tmp_path / "old.json").write_text(json.dumps({**old, "Expiration": "2020-01-01T00:00:00Z"}))
    (tmp_path / "config").write_text(CONFIG.format(expired=tmp_path / "old.json"))
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # 55 clips are drawn before processes start
    quick_client.cache_clear()
    dataset._store.cache_clear()
    yield lambda variables: [monkeypatch.setenv(*each) for each in variables.items()]
    quick_client.cache_clear()
    dataset._store.cache_clear()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that can be uploaded, of no workload."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "validation"):
        (folder / split).mkdir()
        (folder / split / "a.txt").write_text(split)
    return folder


@pytest.mark.parametrize(
    ("command", "fault"),
    # Prices are asked for a region that is an option.
    [pair for pair in product(COMMANDS, FAULTS) if pair != ("sizing", "no such region")],
)
def test_fails_in_one_sentence_with_code_2(
    command: str,
    fault: str,
    faulty: Callable[[dict[str, str]], None],
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables, what, advice = FAULTS[fault]
    faulty(variables)
    main, words = COMMANDS[command]
    places = {"FOLDER": str(images), "OUT": str(tmp_path / "out")}
    code = main([places.get(word, word) for word in words])
    said = capsys.readouterr().err
    if fault == "no credentials" and command in UNATTENDED:
        assert code == 74, said  # a machine's metadata may be down for a moment
        what = advice = "no AWS credentials found; configure a role or a profile"
    else:
        assert code == 2, said
    sentence = said.splitlines()[-1]
    assert what in sentence and advice in sentence, said


@pytest.mark.parametrize("command", ["runs list", "doctor", "sagemaker"])
def test_fails_without_a_region_in_one_sentence(
    command: str,
    faulty: Callable[[dict[str, str]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    faulty(KEYS)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    main, words = COMMANDS[command]
    assert main(list(words)) == 2
    assert "specify a region: export AWS_REGION=" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("fault", ["no such profile", "process is missing", "SSO login ended"])
def test_fails_to_review_what_is_deployed_in_one_sentence(
    fault: str, faulty: Callable[[dict[str, str]], None]
) -> None:
    variables, what, advice = FAULTS[fault]
    faulty(variables)
    with pytest.raises(CannotReview, match="the deployed stacks cannot be read: ") as refused:
        deployed(["TrainingStack"])
    assert what in str(refused.value) and advice in str(refused.value)
