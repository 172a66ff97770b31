"""The target of a deploy, what a check finds there, and refused calls as findings."""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoRegionError

from contract.aws_errors import DENIED, checked, explain_denial, settings_checked
from stacks.guard.settings import answer_or_none
from stacks.parameters import StackParameters

State = Literal["ok", "warning", "problem"]
DATASET, NETWORK = "DatasetStack", "NetworkStack"
_POLICY = Path(__file__).parents[2] / "docs/deployer.md"
# What a bucket's owner need not allow another account.
_NEEDED_BY_NO_RUN = ("GetBucketLocation", "GetBucketEncryption")
_OF_IDENTITY_CENTER = "AWSReservedSSO_"
_OTHER = "use credentials with the policy of docs/deployer.md, or an administrator's"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """One line of the report; `fix` is the exact command that solves it."""

    state: State
    what: str
    fix: str = ""
    check: str = ""  # the check's own name, unless set


ok = partial(Diagnosis, state="ok")
warning = partial(Diagnosis, state="warning")
problem = partial(Diagnosis, state="problem")


@dataclass(frozen=True, kw_only=True)
class DeployTarget:
    """Input of all checks: clients by service, the deploy's parameters and its `-c` options."""

    client: Callable[[str], Any]
    region: str
    parameters: StackParameters
    options: str = ""
    qualifier: str = ""  # of `cdk bootstrap`, as synth takes it from the context

    @property
    def stacks(self) -> tuple[str, ...]:
        """The construct ids of the app's stacks, the training stack last."""
        p = self.parameters
        asked = {DATASET: not (p.dataset_bucket and p.run_bucket), NETWORK: not p.vpc}
        asked |= {"SweepStack": p.sweep.instances > 0, "ReviewStack": bool(p.review.repository)}
        asked |= {p.image_stack: bool(p.image_stack)}
        return (*(each for each, is_asked in asked.items() if is_asked), p.training)

    def deploy(self, stack: str = "") -> str:
        """Return the deploy command with the same `-c` options."""
        return f"npx cdk deploy {stack or self.parameters.training}{self.options}"

    @cached_property
    def deployed(self) -> dict[str, dict[str, Any]]:
        """All stacks of account and region by name, but those of which only the name is taken."""
        pages = self.client("cloudformation").get_paginator("describe_stacks").paginate()
        stacks = (each for page in pages for each in page["Stacks"])
        return {s["StackName"]: s for s in stacks if s["StackStatus"] != "REVIEW_IN_PROGRESS"}

    def stack(self, construct_id: str) -> dict[str, Any] | None:
        """Return what is deployed under a stack's name; None if nothing is."""
        return self.deployed.get(self.parameters.name_of(construct_id))

    def output(self, stack: str, name: str) -> str | None:
        """Return an output of a deployed stack; None if it does not exist."""
        outputs = (self.stack(stack) or {}).get("Outputs") or []
        return next((e["OutputValue"] for e in outputs if e["OutputKey"] == name), None)

    def quota(self, service: str, code: str) -> float:
        """Return a quota; an account whose value was never changed has only AWS's default."""
        quotas, which = self.client("service-quotas"), {"ServiceCode": service, "QuotaCode": code}
        found = answer_or_none(quotas.get_service_quota, "NoSuchResourceException", **which)
        found = found or quotas.get_aws_default_service_quota(**which)
        return float(found["Quota"]["Value"])

    def increase_quota(self, service: str, code: str, value: int) -> str:
        """Return the command that requests a larger quota."""
        return (
            f"aws service-quotas request-service-quota-increase --service-code {service} "
            f"--quota-code {code} --desired-value {value} --region {self.region}"
        )


Check = Callable[[DeployTarget], Iterator[Diagnosis]]


def connect(profile: str | None = None) -> tuple[Callable[[str], Any], str]:
    """Return a factory of clients with short timeouts, and the region.

    SettingsError for a profile that is not there or whose credentials cannot be had.
    """
    # boto3 reads only AWS_DEFAULT_REGION; the CDK CLI prefers AWS_REGION.
    region = os.environ.get("AWS_REGION")
    config = Config(connect_timeout=5, read_timeout=15, retries={"max_attempts": 2})
    with settings_checked():
        session = checked(boto3.session.Session(profile_name=profile, region_name=region))
        client = cache(partial(session.client, config=config))
        if not session.region_name:
            raise NoRegionError
        client("sts")  # finds a wrong endpoint now
    return client, session.region_name


def run(name: str, check: Check, target: DeployTarget) -> Iterator[Diagnosis]:
    """Run one check; a call that AWS refuses becomes a diagnosis too."""
    try:
        for found in check(target):
            yield replace(found, check=found.check or name)
    except ClientError as error:
        yield _refused(name, error, target)
    except BotoCoreError as error:
        fix = f"aws sts get-caller-identity --region {target.region}"
        yield problem(check=name, what=f"no response: {error}", fix=fix)


def _refused(name: str, error: ClientError, target: DeployTarget) -> Diagnosis:
    code, call = error.response.get("Error", {}).get("Code", ""), error.operation_name
    message = error.response.get("Error", {}).get("Message", "")
    if code in DENIED:
        return replace(_denied(call, message, target), check=name)
    if code == "NotImplemented":
        return warning(check=name, what=f"not checked: the AWS at this endpoint has no {call}")
    return problem(check=name, what=f"{call} failed with {code}: {message}")


def _denied(call: str, message: str, target: DeployTarget) -> Diagnosis:
    """Say which policy denies a call, and print the command that allows it, where one can."""
    sid, action, statement = _statement_about(call, message)
    who = target.client("sts").get_caller_identity()["Arn"].split(":", 5)
    kind, _, name = who[5].partition("/")
    name = name.split("/")[0] if kind == "assumed-role" else name.rpartition("/")[2]
    kind = kind.removeprefix("assumed-")
    why = explain_denial(message, action)
    if why == explain_denial("", action) and kind in ("role", "user"):  # no word of the policy
        why = explain_denial(f"because no {_simulated(target, kind, name, action)}", action)
    what = f"not checked: {why}" + f" (asked by {sid} of docs/deployer.md)" * bool(sid)
    is_of_owner = "bucket's policy" in why and call in _NEEDED_BY_NO_RUN
    if "service control" in why or "resource control" in why or is_of_owner:
        return warning(what=what, fix=_OTHER)  # nor can anybody else here check it
    if not statement or "identity-based" not in why or kind not in ("role", "user"):
        return problem(what=what, fix=_OTHER)
    text = json.dumps({"Version": "2012-10-17", "Statement": [statement]}, separators=(",", ":"))
    text = text.replace("arn:aws:", f"arn:{who[1]}:")
    with suppress(ClientError):  # the stacks' outputs may be denied too
        for each in ("Dataset", "Run"):
            given = getattr(target.parameters, f"{each.lower()}_bucket")
            bucket = given or target.output(DATASET, f"{each}BucketName")
            text = text.replace(f"{each.upper()}-BUCKET", bucket or f"{each.upper()}-BUCKET")
    fix = (
        f"aws iam put-{kind}-policy --{kind}-name {name} --policy-name training-{sid} "
        f"--policy-document '{text}'   # as an administrator"
    )
    if name.startswith(_OF_IDENTITY_CENTER):  # IAM refuses to change it
        named = name.removeprefix(_OF_IDENTITY_CENTER).rpartition("_")[0]
        fix = f"add to permission set {named}'s inline policy in IAM Identity Center: {text}"
    return problem(what=what, fix=fix)


def _statement_about(call: str, message: str) -> tuple[str, str, dict[str, Any]]:
    """Return the deployer's statement about a call: its Sid, the action and all of it."""
    wanted = next(iter(re.findall(r"perform: ([\w-]+:\w+)", message)), call)
    with suppress(OSError):  # an installed package has no docs
        (policy,) = re.findall(r"```json\n(.*?)```", _POLICY.read_text(encoding="utf-8"), re.DOTALL)
        for each in json.loads(policy)["Statement"]:
            for action in [each["Action"]] if isinstance(each["Action"], str) else each["Action"]:
                if wanted in (action, action.partition(":")[2]):
                    return each["Sid"], action, each
    return "", wanted, {}


def _simulated(target: DeployTarget, kind: str, name: str, action: str) -> str:
    """Return the kind of policy that denies an action by IAM's policy simulator."""
    iam = target.client("iam")
    try:
        found = iam.get_role(RoleName=name) if kind == "role" else iam.get_user(UserName=name)
        arn = next(iter(found.values()))["Arn"]
        asked = {"PolicySourceArn": arn, "ActionNames": [action]}
        (result,) = iam.simulate_principal_policy(**asked)["EvaluationResults"]
    except ClientError:
        return "policy"  # the simulator is denied as well
    if not result.get("OrganizationsDecisionDetail", {}).get("AllowedByOrganizations", True):
        return "service control policy"
    boundary = result.get("PermissionsBoundaryDecisionDetail", {})
    if not boundary.get("AllowedByPermissionsBoundary", True):
        return "permissions boundary"
    allowed = result["EvalDecision"] == "allowed"
    return "resource-based policy" if allowed else "identity-based policy"
