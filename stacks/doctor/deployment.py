"""Checks that a deploy and its run can succeed: bootstrap, stacks, dataset, e-mail, key."""

import json
from collections.abc import Iterator

from botocore.exceptions import ClientError

from contract.description import describe
from contract.keys import HEAD, MANIFEST
from contract.stack_names import SHARED_QUEUE, description_of, other_prefixes, refuse_foreign
from stacks.data_key import SERVICE_LINKED_ROLES
from stacks.doctor.account import DATASET, DeployTarget, Diagnosis, ok, problem, warning
from stacks.guard.settings import answer_or_none
from stacks.parameters.checks import VOLUME_PER_DATASET

# Required by assemblies of aws-cdk-lib 2.275 (requiresBootstrapStackVersion in the manifest).
_BOOTSTRAP_VERSION = 6
_DEFAULT_QUALIFIER = "hnb659fds"
# The most samples that it suggests drawing; 900 clips of trajectory take 11 s of CPU.
_DRAWN_SAMPLES = 20_000
_SOMEBODY = "YOU@EXAMPLE.COM"
_UNPROTECT = "update-termination-protection --no-enable-termination-protection"
# What to wait for, by how a status begins; else for its creation, also if that is rolled back.
_WAITS = (("UPDATE_ROLLBACK", "rollback"), ("UPDATE", "update"), ("DELETE", "delete"))
_GRANTED = (
    "Encrypt Decrypt ReEncryptFrom ReEncryptTo GenerateDataKey GenerateDataKeyWithoutPlaintext "
    "DescribeKey CreateGrant"
)


def is_bootstrapped(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that `cdk bootstrap` was run in this account and region."""
    number = target.client("sts").get_caller_identity()["Account"]
    fix = f"npx cdk bootstrap aws://{number}/{target.region}"
    qualifier = target.qualifier or _DEFAULT_QUALIFIER
    toolkit, key = _toolkit(target, qualifier)
    if toolkit != "CDKToolkit":
        fix += f" --qualifier {qualifier} --toolkit-stack-name {toolkit}"
    parameter = f"/cdk-bootstrap/{qualifier}/version"
    found = answer_or_none(target.client("ssm").get_parameter, "ParameterNotFound", Name=parameter)
    if found is None:
        what = f"{target.region} is not bootstrapped: no {parameter}"
        if qualifier != _DEFAULT_QUALIFIER and "CDKToolkit" in target.deployed:
            what += f"; CDKToolkit is there: is the qualifier {qualifier} meant?"
        yield problem(what=what, fix=fix)
        return
    version = int(found["Parameter"]["Value"])
    what = f"version {version}; {_BOOTSTRAP_VERSION} or newer is needed"
    if version < _BOOTSTRAP_VERSION:
        yield problem(what=what, fix=fix)
    elif key in ("", "AWS_MANAGED_KEY"):  # a key that `cdk bootstrap` makes admits the account
        yield ok(what=what)
    else:
        what = (
            f"the code bundle is encrypted with {key}: machines boot only if its policy lets the "
        )
        what += f"account's roles kms:Decrypt by kms:ViaService s3.{target.region}.amazonaws.com"
        fix = f"aws kms get-key-policy --key-id {key} --policy-name default "
        yield warning(what=what, fix=f"{fix}--region {target.region}")


def _toolkit(target: DeployTarget, qualifier: str) -> tuple[str, str]:
    """Return name and key of the stack that `cdk bootstrap` made for a qualifier, or would make."""
    for name, stack in target.deployed.items():
        parameters = stack.get("Parameters") or []
        given = {each["ParameterKey"]: each["ParameterValue"] for each in parameters}
        if given.get("Qualifier") == qualifier and "FileAssetsBucketKmsKeyId" in given:
            return name, given["FileAssetsBucketKmsKeyId"]
    # In the default's stack, another qualifier's resources would take the place of its own.
    return "CDKToolkit" + f"-{qualifier}" * (qualifier != _DEFAULT_QUALIFIER), ""


def stacks_can_be_deployed(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that the stacks are ours, and none in a state that blocks a deploy."""
    others = list(stacks_are_ours(target))
    yield from others
    for name in map(target.parameters.name_of, target.stacks):
        if any(each.check == f"stack {name}" for each in others):
            continue
        found = target.deployed.get(name, {})
        which = f"--stack-name {name} --region {target.region}"
        status = found.get("StackStatus", "")
        call = why = ""
        if status in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "DELETE_FAILED"):
            failed = "deletion" if status == "DELETE_FAILED" else "first deploy"
            call, why = "delete-stack", f": its {failed} failed, and it can only be deleted"
            # The CLI protects a stack before its first deploy.
            if found.get("EnableTerminationProtection"):
                call = f"{_UNPROTECT} {which} && aws cloudformation {call}"
        elif status == "UPDATE_ROLLBACK_FAILED":
            call = "continue-update-rollback"
        elif status.endswith("IN_PROGRESS"):
            named = next((verb for first, verb in _WAITS if status.startswith(first)), "create")
            call, why = f"wait stack-{named}-complete", ": wait for it"
        if not call:
            yield ok(what=status or "not deployed yet", check=f"stack {name}")
            continue
        diagnosis = warning if call.startswith("wait") else problem
        fix = f"aws cloudformation {call} {which}"
        yield diagnosis(what=status + why, fix=fix, check=f"stack {name}")


def stacks_are_ours(target: DeployTarget) -> Iterator[Diagnosis]:
    """Find stacks of others under the names of ours, and ours that a deploy would build again."""
    found = {name: stack.get("Description") for name, stack in target.deployed.items()}
    # Once some stack has our prefix, others are another team's.
    is_new = not any(map(target.stack, target.stacks))
    for each in target.stacks:
        name, ours = target.parameters.name_of(each), description_of(each)
        if why := refuse_foreign(name, found.get(name, ours), ours):
            fix = f"{target.deploy()} -c prefix=NAME-"
            yield problem(what=why, fix=fix, check=f"stack {name}")
        for prefix in other_prefixes(name, each, found) if is_new else ():
            what = f"not deployed; {prefix}{each} is, and a deploy would build a second, empty one"
            fix = f"{target.deploy()} -c prefix={prefix}   # to update that one"
            yield warning(what=what, fix=fix, check=f"stack {name}")


def no_other_run_ends(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that the deploy does not end a different run that is unfinished."""
    uri, p = target.output(target.parameters.training, "RunUri"), target.parameters
    if uri is None or uri.endswith(f"/{p.run_id}"):
        return
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    get, missing = target.client("s3").get_object, ("NoSuchKey", "NoSuchBucket")
    answer = answer_or_none(get, *missing, Bucket=bucket, Key=f"{prefix}/{HEAD}")
    state = json.loads(answer["Body"].read())["state"] if answer else "not begun"
    name, own = prefix.rpartition("/")[2], target.output(p.training, "DeployCommand")
    if state in ("finished", "failed"):
        yield ok(what=f"{name}, which is deployed, is {state}; the deploy starts {p.run_id}")
    else:
        yield warning(
            what=f"the deploy starts {p.run_id} and ends {name}, which is {state}: its machine "
            "saves and shuts down, and the run resumes when it is deployed again",
            fix=(own or f"{target.deploy()} -c run_id={name}") + "   # to leave it alone or go on",
        )


def buckets_can_be_used(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check the buckets that are given: DatasetStack's own are right."""
    for which in ("run", "dataset"):
        if bucket := getattr(target.parameters, f"{which}_bucket"):
            yield _can_be_used(target, which, bucket)


def _can_be_used(target: DeployTarget, which: str, bucket: str) -> Diagnosis:
    """Check that a bucket exists, is in this region, and that machines may write what it gets."""
    s3, name = target.client("s3"), "ServerSideEncryptionConfiguration"
    found = answer_or_none(s3.get_bucket_location, "NoSuchBucket", Bucket=bucket)
    if found is None:
        fix = f"{target.deploy(DATASET)} -c {which}_bucket=   # makes one"
        return problem(what=f"s3://{bucket} does not exist", fix=fix)
    # For us-east-1 the response has no location, and "EU" is the old name of Ireland's.
    place = (found.get("LocationConstraint") or "us-east-1").replace("EU", "eu-west-1")
    what = f"s3://{bucket} is in {place}"
    if place != target.region:
        what += ", so every boot pays for cross-region transfer"
        return warning(what=what, fix=f"AWS_REGION={place} {target.deploy()}")
    if which == "dataset":  # its files may have other keys than new ones get
        return ok(what=what)
    found = answer_or_none(s3.get_bucket_encryption, f"{name}NotFoundError", Bucket=bucket)
    (rule,) = found[name]["Rules"] if found else [{}]
    key = rule.get("ApplyServerSideEncryptionByDefault", {}).get("KMSMasterKeyID", "")
    return _sealed(target, which, what, key) or ok(what=what)


def _sealed(target: DeployTarget, which: str, what: str, key: str) -> Diagnosis | None:
    """Find that a bucket's key is neither the parameters' nor AWS's, which admits machines, too."""
    own = target.parameters.kms
    found = target.client("kms").describe_key(KeyId=key)["KeyMetadata"] if key else {}
    arn = found.get("Arn", own)
    if arn == own or found["KeyManager"] != "CUSTOMER":
        return None
    fix = f"{target.deploy()} -c kms={arn}"
    if own:  # A stack uses one key: with another, it could not read what it has written.
        fix = f"{target.deploy(DATASET)} -c {which}_bucket=   # has your key: copy the data there"
    return problem(what=f"{what}, encrypted with {arn}, which no machine may use", fix=fix)


def dataset_is_uploaded(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that the manifest is in the bucket, and that its files fit the volume."""
    p = target.parameters
    bucket = p.dataset_bucket or target.output(DATASET, "DatasetBucketName")
    if not bucket:
        what = f"{DATASET} is not deployed; the instance would wait for the manifest"
        yield problem(what=what, fix=target.deploy(DATASET))
        return
    s3, key = target.client("s3"), f"{p.dataset}/{MANIFEST}"
    uri = f"s3://{bucket}/{p.dataset}"
    try:
        found = s3.get_object(Bucket=bucket, Key=key)
        manifest = json.loads(found["Body"].read())
        needed = sum(int(file["bytes"]) for file in manifest["files"]) / 2**30
    except (ClientError, ValueError, KeyError, TypeError) as error:
        wrong = f"is not a manifest ({type(error).__name__}: {error})"
        if isinstance(error, ClientError):
            if error.response["Error"]["Code"] not in ("NoSuchKey", "NoSuchBucket"):
                raise
            wrong = (
                f"does not exist; the instance waits {p.dataset_wait_seconds} s for it, then the "
                "fleet goes to zero"
            )
        yield problem(what=f"{uri}/{MANIFEST} {wrong}", fix=_fill(target, uri))
        return
    what = f"{len(manifest['files'])} files, {needed:.1f} GiB at {uri}"
    # DatasetStack's own bucket has the parameters' key.
    key = found.get("SSEKMSKeyId", "") if p.dataset_bucket else ""
    if f":{target.region}:" in key and (sealed := _sealed(target, "dataset", what, key)):
        yield sealed
    elif needed * VOLUME_PER_DATASET > p.data_gib:
        least = int(needed * VOLUME_PER_DATASET) + 1
        yield problem(
            what=f"{what}; {p.data_on} has {p.data_gib} GiB",
            fix=f"{target.deploy()} -c data_on=ebs -c data_volume.gib={least}",
        )
    else:
        yield ok(what=f"{what}, on {p.data_gib} GiB of {p.data_on}")


def _fill(target: DeployTarget, uri: str) -> str:
    """Return the command that fills the bucket: drawn data if that takes minutes, else your own."""
    p, does = target.parameters, "upload DIR"
    if not p.program and not p.source:
        known = describe(p.workload, p.recipe, p.overrides)
        if known.makes_data and 0 < known.num_samples <= _DRAWN_SAMPLES:
            does = f"make --workload {p.workload} --count {known.num_samples} --out data"
    return f"python -m training data {does} --dataset-uri {uri}"


def alarm_email_is_confirmed(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that someone gets the alarms: a confirmed e-mail address."""
    p = target.parameters
    topic = target.output(p.training, "TopicArn")
    if topic is None:
        if p.alarm.email:
            what = f"{p.alarm.email} gets a confirmation e-mail once {p.stack_name} is deployed"
            yield ok(what=what)
        else:
            what = "alarm.email is empty: nobody is notified when a run fails"
            yield warning(what=what, fix=f"{target.deploy()} -c alarm.email={_SOMEBODY}")
        return
    subscribe = (
        f"aws sns subscribe --region {target.region} --topic-arn {topic} --protocol email "
        "--notification-endpoint"
    )
    subscriptions = target.client("sns").list_subscriptions_by_topic(TopicArn=topic)
    states = {
        each["Endpoint"]: each["SubscriptionArn"]
        for each in subscriptions["Subscriptions"]
        if not each["Endpoint"].startswith("arn:")
    }
    pending = [endpoint for endpoint, arn in states.items() if not arn.startswith("arn:")]
    for endpoint in pending:
        what = f"{endpoint} has not confirmed: look for an e-mail from AWS Notifications (where a "
        what += "mail scanner follows links, which would end the subscription, confirm by aws sns "
        what += f"confirm-subscription --region {target.region} --topic-arn {topic} --token <the "
        what += "link's Token> --authenticate-on-unsubscribe true)"
        yield problem(what=what, fix=f"{subscribe} {endpoint}")
    confirmed = sorted(states.keys() - set(pending))
    if confirmed:
        yield ok(what=f"{', '.join(confirmed)} confirmed")
    elif not pending:
        # SNS deletes what nobody confirms in 48 hours; a deploy would not subscribe it again.
        fix = f"{subscribe} {p.alarm.email or _SOMEBODY}"
        yield warning(what="the topic has no subscriber", fix=fix)


def sweeps_go_on(target: DeployTarget) -> Iterator[Diagnosis]:
    """Warn if the deploy replaces the sweeps' queue, whose jobs Batch then ends."""
    queue = target.output("SweepStack", "SweepQueue")
    if "SweepStack" not in target.stacks or queue is None:
        return
    has, wants = SHARED_QUEUE in queue, bool(target.parameters.sweep.shares)
    if has != wants:
        yield warning(
            what=f"sweep.shares {'make' if wants else 'were part of'} another queue, as none gains "
            f"or loses shares: the deploy deletes {queue.rpartition('/')[2]}, and Batch ends its "
            "jobs",
            fix="runs stop SWEEP   # before the deploy; after it: runs resume SWEEP",
        )


def key_can_be_used(target: DeployTarget) -> Iterator[Diagnosis]:
    """Check that the key lets Spot create volumes and alarms publish.

    Without `kms`, volumes use the account's default EBS key, which may be one of its own.
    """
    arn, topic_too = target.parameters.kms, True
    if not arn:
        arn, topic_too = target.client("ec2").get_ebs_default_kms_key_id()["KmsKeyId"], False
    if not arn.startswith("arn:") or arn.endswith(":alias/aws/ebs"):
        return
    if arn.split(":")[3] != target.region:
        what = f"{arn} is not in {target.region}"
        yield problem(what=what, fix=target.deploy() + " -c kms=")
        return
    kms = target.client("kms")
    found = answer_or_none(kms.describe_key, "NotFoundException", KeyId=arn) or {}
    key = found.get("KeyMetadata", {})
    if key.get("KeyManager") == "AWS":
        return
    # Grants are listed by a key, not by an alias.
    arn, state = key.get("Arn", arn) if ":alias/" in arn else arn, key.get("KeyState", "missing")
    if state != "Enabled":
        enable = f"aws kms enable-key --key-id {arn} --region {target.region}"
        cancel = enable.replace("enable-key", "cancel-key-deletion")
        ways = {"PendingDeletion": f"{cancel} && {enable}", "Disabled": enable}
        fix = ways.get(state, f"aws kms list-keys --region {target.region}   # then -c kms=ARN")
        yield problem(what=f"{arn} is {state}", fix=fix)
        return
    yield from _admits_services(target, arn, topic_too=topic_too)


def _admits_services(target: DeployTarget, arn: str, *, topic_too: bool) -> Iterator[Diagnosis]:
    kms, number = target.client("kms"), target.client("sts").get_caller_identity()["Account"]
    _, partition, _, _, owner, _ = arn.split(":", 5)
    # KMS shows nobody the policy of another account's key, to which roles here need grants anyway.
    is_own = owner == number
    text = kms.get_key_policy(KeyId=arn, PolicyName="default")["Policy"] if is_own else ""
    pages = kms.get_paginator("list_grants").paginate(KeyId=arn)
    grantees = " ".join(each["GranteePrincipal"] for page in pages for each in page["Grants"])
    is_fine = True
    for role in SERVICE_LINKED_ROLES[target.parameters.fleet]:
        grantee = f"arn:{partition}:iam::{number}:role/aws-service-role/{role}"
        if role not in text and grantee not in grantees:
            is_fine = False
            yield problem(
                what=f"neither policy nor grants name {role.rpartition('/')[2]}: instances would "
                "terminate at launch with Client.InternalError",
                fix=f"aws kms create-grant --key-id {arn} --operations {_GRANTED} "
                f"--grantee-principal {grantee} --region {target.region}",
            )
    if topic_too and "cloudwatch.amazonaws.com" not in text:
        is_fine = False
        whether = "its policy does not allow" if is_own else f"only {owner} sees whether it allows"
        yield (problem if is_own else warning)(
            what=f"{whether} cloudwatch.amazonaws.com and events.amazonaws.com kms:Decrypt "
            "and kms:GenerateDataKey*: alarms would be lost without an error",
            fix=f"aws kms put-key-policy --key-id {arn} --policy-name default --policy "
            f"file://policy.json   # as {owner}: the current policy plus these two",
        )
    if is_fine:
        yield ok(what=f"Spot{' and alarms' * topic_too} may use {arn}")
