"""Whether a deploy and its run would get through: bootstrap, stacks, dataset, e-mail."""

from __future__ import annotations

import json
from collections.abc import Iterator

from botocore.exceptions import ClientError

from contract.keys import MANIFEST
from stacks.doctor.account import STACKS, Account, Finding
from stacks.parameters.checks import VOLUME_PER_DATASET
from stacks.parameters.context import CDK_JSON

# What assemblies of aws-cdk-lib 2.275 ask for (requiresBootstrapStackVersion in the manifest).
_BOOTSTRAP_VERSION = 6
_QUALIFIER = "@aws-cdk/core:bootstrapQualifier"
_DEFAULT_QUALIFIER = "hnb659fds"


def is_bootstrapped(account: Account) -> Iterator[Finding]:
    """`cdk bootstrap` was run in this account and region."""
    context = json.loads(CDK_JSON.read_text(encoding="utf-8"))["context"]
    parameter = f"/cdk-bootstrap/{context.get(_QUALIFIER, _DEFAULT_QUALIFIER)}/version"
    number = account.client("sts").get_caller_identity()["Account"]
    mend = f"npx cdk bootstrap aws://{number}/{account.region}"
    try:
        version = int(account.client("ssm").get_parameter(Name=parameter)["Parameter"]["Value"])
    except ClientError as error:
        if error.response["Error"]["Code"] != "ParameterNotFound":
            raise
        what = f"{account.region} is not bootstrapped: no {parameter}"
        yield Finding(check="bootstrap", state="problem", what=what, mend=mend)
        return
    what = f"version {version}; {_BOOTSTRAP_VERSION} or newer is needed"
    if version < _BOOTSTRAP_VERSION:
        yield Finding(check="bootstrap", state="problem", what=what, mend=mend)
    else:
        yield Finding(check="bootstrap", state="ok", what=what)


def stacks_can_be_deployed(account: Account) -> Iterator[Finding]:
    """Neither stack stands in a state that a deploy cannot leave."""
    for name in STACKS:
        status = (account.stack(name) or {}).get("StackStatus", "")
        check = f"stack {name}"
        if not status:
            yield Finding(check=check, state="ok", what="not deployed yet")
        elif status in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"):
            mend = f"aws cloudformation delete-stack --stack-name {name} --region {account.region}"
            yield Finding(check=check, state="problem", what=f"{status}: its first deploy failed "
                          "and it can only be deleted", mend=mend)  # fmt: skip
        elif status == "UPDATE_ROLLBACK_FAILED":
            mend = (
                f"aws cloudformation continue-update-rollback --stack-name {name} "
                f"--region {account.region}"
            )
            yield Finding(check=check, state="problem", what=status, mend=mend)
        elif status.endswith("IN_PROGRESS"):
            mend = (
                f"aws cloudformation wait stack-update-complete --stack-name {name} "
                f"--region {account.region}"
            )
            yield Finding(check=check, state="warning", what=f"{status}: wait for it", mend=mend)
        else:
            yield Finding(check=check, state="ok", what=status)


def dataset_is_there(account: Account) -> Iterator[Finding]:
    """The manifest is in the bucket, in this region, and the volume holds what it lists."""
    p = account.parameters
    bucket = p.dataset_bucket or account.output("DatasetStack", "DatasetBucketName")
    if not bucket:
        what = "no DatasetStack yet; the instance would wait for its manifest"
        yield Finding(check="dataset", state="problem", what=what,
                      mend=account.deploy("DatasetStack"))  # fmt: skip
        return
    s3, key = account.client("s3"), f"{p.dataset}/{MANIFEST}"
    uri = f"s3://{bucket}/{p.dataset}"
    try:
        # us-east-1 answers with nothing.
        place = s3.get_bucket_location(Bucket=bucket).get("LocationConstraint") or "us-east-1"
        manifest = json.loads(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        needed = sum(int(file["bytes"]) for file in manifest["files"]) / 2**30
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("NoSuchKey", "NoSuchBucket"):
            raise
        yield Finding(
            check="dataset",
            state="problem",
            what=f"{uri}/{MANIFEST} is not there; the instance waits "
            f"{p.dataset_wait_seconds} s for it, then the fleet goes to zero",
            mend=f"python -m training data upload DIR --dataset-uri {uri}",
        )
        return
    except (ValueError, KeyError, TypeError) as error:
        yield Finding(
            check="dataset",
            state="problem",
            what=f"{uri}/{MANIFEST} is no manifest ({type(error).__name__}: {error})",
            mend=f"python -m training data upload DIR --dataset-uri {uri}",
        )
        return
    what = f"{len(manifest['files'])} files, {needed:.1f} GiB at {uri}"
    if place != account.region:
        yield Finding(
            check="dataset",
            state="warning",
            what=f"{what}; the bucket is in {place}: every boot pays for transfer between regions",
            mend=f"AWS_REGION={place} {account.deploy()}",
        )
    if needed * VOLUME_PER_DATASET > p.data_volume_gib:
        least = int(needed * VOLUME_PER_DATASET) + 1
        yield Finding(
            check="dataset",
            state="problem",
            what=f"{what}; data_volume_gib is {p.data_volume_gib}",
            mend=f"{account.deploy()} -c data_volume_gib={least}",
        )
    else:
        yield Finding(check="dataset", state="ok", what=f"{what}, on {p.data_volume_gib} GiB")


def somebody_is_told(account: Account) -> Iterator[Finding]:
    """The alarms' e-mail address is confirmed."""
    p = account.parameters
    topic = account.output("TrainingStack", "TopicArn")
    if topic is None:
        if p.alarm_email:
            what = f"{p.alarm_email} gets a mail to confirm once TrainingStack is deployed"
            yield Finding(check="alarm e-mail", state="ok", what=what)
        else:
            what = "nobody is told when a run fails: alarm_email is empty"
            yield Finding(check="alarm e-mail", state="warning", what=what,
                          mend=f"{account.deploy()} -c alarm_email=YOU@EXAMPLE.COM")  # fmt: skip
        return
    subscriptions = account.client("sns").list_subscriptions_by_topic(TopicArn=topic)
    states = {
        each["Endpoint"]: each["SubscriptionArn"]
        for each in subscriptions["Subscriptions"]
        if not each["Endpoint"].startswith("arn:")
    }
    pending = [endpoint for endpoint, arn in states.items() if not arn.startswith("arn:")]
    for endpoint in pending:
        yield Finding(
            check="alarm e-mail",
            state="problem",
            what=f"{endpoint} has not confirmed: look for a mail of AWS Notifications",
            mend=f"aws sns subscribe --topic-arn {topic} --protocol email "
            f"--notification-endpoint {endpoint} --region {account.region}",
        )
    confirmed = sorted(states.keys() - set(pending))
    if confirmed:
        yield Finding(check="alarm e-mail", state="ok", what=f"{', '.join(confirmed)} confirmed")
    elif not pending:
        yield Finding(
            check="alarm e-mail",
            state="warning",
            what="nobody is subscribed to the topic",
            mend=f"{account.deploy()} -c alarm_email=YOU@EXAMPLE.COM",
        )
