"""The real run's cleaning up, shown on the embedded AWS: a failure leaves nothing running."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from embedded_aws import EmbeddedAws
from tests.stack_names import DATASET

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_real_run_that_fails_leaves_nothing_running() -> None:
    with EmbeddedAws() as aws:
        # Nobody boots the instance here, so no commit comes, and patience is short.
        environment = {**os.environ, **aws.environment(), "AWS_TEST_USD": "50"}
        environment["AWS_TEST_PATIENCE"] = "0.001"
        bootstrap = ["npx", "--no-install", "cdk", "bootstrap"]
        subprocess.run(bootstrap, cwd=ROOT, env=environment, check=True, capture_output=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "aws", "-k", "outlives", "tests/aws"],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "a commit of the first instance did not come" in done.stdout
        stacks = aws.client("cloudformation").describe_stacks()["Stacks"]
        assert sorted(each["StackName"] for each in stacks) == ["CDKToolkit", DATASET]
        states = [
            instance["State"]["Name"]
            for reservation in aws.client("ec2").describe_instances()["Reservations"]
            for instance in reservation["Instances"]
        ]
        assert states == ["terminated"]
