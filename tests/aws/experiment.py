"""One real run on one real instance, from deploy to destroy; for test_first_day.py only."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.exceptions import ClientError

from tests.stack_names import DATASET, TRAINING

ROOT = Path(__file__).parents[2]
SIZE = "g5.xlarge"
# The Guard's cap of one hour, its ten-minute clock, and a second instance beside the first.
WORST_HOURS = 2.0
_LIVE = ("pending", "running", "stopping", "shutting-down")


class Experiment:
    """A run id of its own; everything but what all stacks share is gone after `destroy`."""

    def __init__(self, session: boto3.session.Session, folder: Path) -> None:
        self.run_id = f"first-day-{int(time.time())}"
        self._session = session
        self._folder = folder
        self._fis_templates: list[str] = []
        self._options = [
            "-c", f"size={SIZE}", "-c", f"run_id={self.run_id}", "-c", "max_hours=1",
            # Twenty minutes, so that it can be interrupted.
            "-c", "overrides=epochs=6000",
            "-c", "train.checkpoint_interval=60s", "-c", "dataset=first-day",
        ]  # fmt: skip

    def deploy(self) -> None:
        """Both stacks, a small dataset, and the run begins."""
        self._cdk("deploy", "DatasetStack", "--require-approval", "never")
        data = self._folder / "data"
        uri = f"s3://{self._bucket('DatasetBucketName')}/first-day"
        training = [sys.executable, "-m", "training", "data"]
        make = ["make", "--workload", "trajectory", "--out", str(data), "--count", "900"]
        subprocess.run([*training, *make, "--seed", "0"], cwd=ROOT, check=True)
        subprocess.run([*training, "upload", str(data), "--dataset-uri", uri], cwd=ROOT, check=True)
        stacks = ("NetworkStack", "TrainingStack")
        self._cdk("deploy", *stacks, "--exclusively", "--require-approval", "never")

    def destroy(self) -> None:
        """End the fleet first, then the stack; raise if anything is left that costs."""
        for template in self._fis_templates:
            self._session.client("fis").delete_experiment_template(id=template)
        try:
            self._session.client("ec2").modify_spot_fleet_request(
                SpotFleetRequestId=self._fleet(), TargetCapacity=0, OnDemandTargetCapacity=0
            )
        except ClientError as error:
            # There may be no fleet: a deploy that failed rolled it back.
            print(f"the fleet was not sent to zero: {error}")
        try:
            self._cdk("destroy", "TrainingStack", "--exclusively", "--force")
        finally:
            self._end_instances()

    def _end_instances(self) -> None:
        for _ in range(40):
            if not self.instances():
                return
            time.sleep(15)
        ids = [each["InstanceId"] for each in self.instances()]
        self._session.client("ec2").terminate_instances(InstanceIds=ids)
        raise AssertionError(f"instances outlived the stack and were terminated: {ids}")

    def committed_instance(self) -> str | None:
        """The running instance once the head lists a checkpoint."""
        head = self._read("head.json")
        return self.running_instance() if head and head.get("checkpoints") else None

    def running_instance(self, other_than: str = "") -> str | None:
        for each in self.instances():
            if each["State"]["Name"] == "running" and each["InstanceId"] != other_than:
                return str(each["InstanceId"])
        return None

    def interrupt(self, instance_id: str) -> None:
        """By FIS with a notice where there is a role for it, else without."""
        role = os.environ.get("AWS_TEST_FIS_ROLE")
        if not role:
            self._session.client("ec2").terminate_instances(InstanceIds=[instance_id])
            return
        wanted = json.loads((ROOT / "docs" / "fis-interruption.json").read_text())
        wanted |= {"roleArn": role, "clientToken": self.run_id}
        fis = self._session.client("fis")
        template = fis.create_experiment_template(**wanted)["experimentTemplate"]["id"]
        self._fis_templates.append(template)
        fis.start_experiment(experimentTemplateId=template, clientToken=self.run_id)

    def receipt(self) -> dict[str, Any] | None:
        return self._read("receipt.json")

    def target_capacity(self) -> int:
        (fleet,) = self._session.client("ec2").describe_spot_fleet_requests(
            SpotFleetRequestIds=[self._fleet()]
        )["SpotFleetRequestConfigs"]
        return int(fleet["SpotFleetRequestConfig"]["TargetCapacity"])

    def instances(self) -> list[dict[str, Any]]:
        """This run's instances that are billed or about to be."""
        pages = self._session.client("ec2").get_paginator("describe_instances")
        filters = [
            {"Name": "tag:Stack", "Values": [TRAINING]},
            {"Name": "tag:RunId", "Values": [self.run_id]},
            {"Name": "instance-state-name", "Values": list(_LIVE)},
        ]
        return [
            instance
            for page in pages.paginate(Filters=filters)
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        ]

    def volumes(self) -> list[str]:
        found = self._session.client("ec2").describe_volumes(
            Filters=[{"Name": "tag:RunId", "Values": [self.run_id]}]
        )["Volumes"]
        return [each["VolumeId"] for each in found]

    def _read(self, name: str) -> dict[str, Any] | None:
        s3 = self._session.client("s3")
        key = f"runs/{self.run_id}/{name}"
        try:
            body = s3.get_object(Bucket=self._bucket("RunBucketName"), Key=key)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise
        content: dict[str, Any] = json.loads(body)
        return content

    def _bucket(self, output: str) -> str:
        (stack,) = self._session.client("cloudformation").describe_stacks(StackName=DATASET)[
            "Stacks"
        ]
        return {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}[output]

    def _fleet(self) -> str:
        parameter = self._session.client("ssm").get_parameter(Name=f"/{TRAINING}/fleet-id")
        return str(parameter["Parameter"]["Value"])

    def _cdk(self, *arguments: str) -> None:
        command = ["npx", "--no-install", "cdk", *arguments, *self._options]
        subprocess.run(command, cwd=ROOT, check=True)
