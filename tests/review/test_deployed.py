"""`python -m review --deployed` against the embedded AWS: what is deployed is the base."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from rehearsal.aws import EmbeddedAws
from review.__main__ import REPOSITORY, main
from review.assembly import CannotReview, deployed


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = main(["--deployed", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_what_is_deployed_is_the_base(aws: EmbeddedAws, capsys: pytest.CaptureFixture[str]) -> None:
    # Nothing is deployed: both stacks are new.
    code, answer = facts(capsys)
    assert code == 0
    assert "DatasetStack is new" in str(answer["notes"])
    for command in (["bootstrap"], ["deploy", "TrainingStack", "--require-approval", "never"]):
        subprocess.run(
            ["npx", "--no-install", "cdk", *command],
            cwd=REPOSITORY, check=True, capture_output=True,
        )  # fmt: skip
    code, answer = facts(capsys)
    assert (code, answer["changes"]) == (0, [])
    code, answer = facts(capsys, "-c", "size=g5.4xlarge")
    assert code == 0
    assert sorted(each["type"] for each in answer["changes"]) == [  # type: ignore[attr-defined]
        "AWS::EC2::LaunchTemplate",
        "AWS::EC2::SpotFleet",
    ]


def test_fails_without_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(CannotReview, match="cannot be read: Unable to locate credentials"):
        deployed(["TrainingStack"])
