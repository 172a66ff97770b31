"""Checks that a deploy and its run can succeed: bootstrap, stacks, dataset, e-mail."""

import json
from collections.abc import Iterator

from botocore.exceptions import ClientError

from contract.keys import MANIFEST
from stacks.doctor.account import STACKS, Account, Finding
from stacks.parameters.checks import VOLUME_PER_DATASET
from stacks.parameters.context import CDK_JSON

# Required by assemblies of aws-cdk-lib 2.275 (requiresBootstrapStackVersion in the manifest).
_BOOTSTRAP_VERSION = 6
_QUALIFIER = "@aws-cdk/core:bootstrapQualifier"
_DEFAULT_QUALIFIER = "hnb659fds"


def is_bootstrapped(account: Account) -> Iterator[Finding]:
    """Check that `cdk bootstrap` was run in this account and region."""
    context = json.loads(CDK_JSON.read_text(encoding="utf-8"))["context"]
    parameter = f"/cdk-bootstrap/{context.get(_QUALIFIER, _DEFAULT_QUALIFIER)}/version"
    number = account.client("sts").get_caller_identity()["Account"]
    fix = f"npx cdk bootstrap aws://{number}/{account.region}"
    try:
        version = int(account.client("ssm").get_parameter(Name=parameter)["Parameter"]["Value"])
    except ClientError as error:
        if error.response["Error"]["Code"] != "ParameterNotFound":
            raise
        what = f"{account.region} is not bootstrapped: no {parameter}"
        yield Finding(check="bootstrap", state="problem", what=what, fix=fix)
        return
    what = f"version {version}; {_BOOTSTRAP_VERSION} or newer is needed"
    if version < _BOOTSTRAP_VERSION:
        yield Finding(check="bootstrap", state="problem", what=what, fix=fix)
    else:
        yield Finding(check="bootstrap", state="ok", what=what)


def stacks_can_be_deployed(account: Account) -> Iterator[Finding]:
    """Check that no stack is in a state that blocks a deploy."""
    for name in STACKS:
        status = (account.stack(name) or {}).get("StackStatus", "")
        check = f"stack {name}"
        if not status:
            yield Finding(check=check, state="ok", what="not deployed yet")
        elif status in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"):
            fix = f"aws cloudformation delete-stack --stack-name {name} --region {account.region}"
            yield Finding(check=check, state="problem", what=f"{status}: its first deploy failed "
                          "and it can only be deleted", fix=fix)  # fmt: skip
        elif status == "UPDATE_ROLLBACK_FAILED":
            fix = (
                f"aws cloudformation continue-update-rollback --stack-name {name} "
                f"--region {account.region}"
            )
            yield Finding(check=check, state="problem", what=status, fix=fix)
        elif status.endswith("IN_PROGRESS"):
            fix = (
                f"aws cloudformation wait stack-update-complete --stack-name {name} "
                f"--region {account.region}"
            )
            yield Finding(check=check, state="warning", what=f"{status}: wait for it", fix=fix)
        else:
            yield Finding(check=check, state="ok", what=status)


def dataset_is_uploaded(account: Account) -> Iterator[Finding]:
    """Check that the manifest is in the bucket, in this region, and its files fit the volume."""
    p = account.parameters
    bucket = p.dataset_bucket or account.output("DatasetStack", "DatasetBucketName")
    if not bucket:
        what = "DatasetStack is not deployed; the instance would wait for the manifest"
        yield Finding(check="dataset", state="problem", what=what,
                      fix=account.deploy("DatasetStack"))  # fmt: skip
        return
    s3, key = account.client("s3"), f"{p.dataset}/{MANIFEST}"
    uri = f"s3://{bucket}/{p.dataset}"
    try:
        # For us-east-1 the response has no location.
        place = s3.get_bucket_location(Bucket=bucket).get("LocationConstraint") or "us-east-1"
        manifest = json.loads(s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        needed = sum(int(file["bytes"]) for file in manifest["files"]) / 2**30
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("NoSuchKey", "NoSuchBucket"):
            raise
        yield Finding(
            check="dataset",
            state="problem",
            what=f"{uri}/{MANIFEST} does not exist; the instance waits "
            f"{p.dataset_wait_seconds} s for it, then the fleet goes to zero",
            fix=f"python -m training data upload DIR --dataset-uri {uri}",
        )
        return
    except (ValueError, KeyError, TypeError) as error:
        yield Finding(
            check="dataset",
            state="problem",
            what=f"{uri}/{MANIFEST} is not a manifest ({type(error).__name__}: {error})",
            fix=f"python -m training data upload DIR --dataset-uri {uri}",
        )
        return
    what = f"{len(manifest['files'])} files, {needed:.1f} GiB at {uri}"
    if place != account.region:
        yield Finding(
            check="dataset",
            state="warning",
            what=f"{what}; the bucket is in {place}, so every boot pays for cross-region transfer",
            fix=f"AWS_REGION={place} {account.deploy()}",
        )
    if needed * VOLUME_PER_DATASET > p.data_gib:
        least = int(needed * VOLUME_PER_DATASET) + 1
        yield Finding(
            check="dataset",
            state="problem",
            what=f"{what}; {p.data_on} has {p.data_gib} GiB",
            fix=f"{account.deploy()} -c data_on=ebs -c data_volume.gib={least}",
        )
    else:
        there = f"{what}, on {p.data_gib} GiB of {p.data_on}"
        yield Finding(check="dataset", state="ok", what=there)


def alarm_email_is_confirmed(account: Account) -> Iterator[Finding]:
    """Check that someone gets the alarms: a confirmed e-mail address."""
    p = account.parameters
    topic = account.output("TrainingStack", "TopicArn")
    if topic is None:
        if p.alarm.email:
            what = f"{p.alarm.email} gets a confirmation e-mail once TrainingStack is deployed"
            yield Finding(check="alarm e-mail", state="ok", what=what)
        else:
            what = "alarm.email is empty: nobody is notified when a run fails"
            yield Finding(check="alarm e-mail", state="warning", what=what,
                          fix=f"{account.deploy()} -c alarm.email=YOU@EXAMPLE.COM")  # fmt: skip
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
            what=f"{endpoint} has not confirmed: look for an e-mail from AWS Notifications",
            fix=f"aws sns subscribe --topic-arn {topic} --protocol email "
            f"--notification-endpoint {endpoint} --region {account.region}",
        )
    confirmed = sorted(states.keys() - set(pending))
    if confirmed:
        yield Finding(check="alarm e-mail", state="ok", what=f"{', '.join(confirmed)} confirmed")
    elif not pending:
        yield Finding(
            check="alarm e-mail",
            state="warning",
            what="the topic has no subscriber",
            fix=f"{account.deploy()} -c alarm.email=YOU@EXAMPLE.COM",
        )
