"""The target of a deploy, what a check finds there, and refused calls as findings."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from stacks.parameters import StackParameters

State = Literal["ok", "warning", "problem"]
DATASET, NETWORK = "DatasetStack", "NetworkStack"
_NO_ACCESS = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")


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
    _stacks: dict[str, dict[str, Any] | None] = field(default_factory=dict)

    @property
    def stacks(self) -> tuple[str, ...]:
        """The names of the stacks that a deploy creates."""
        network = () if self.parameters.vpc else (NETWORK,)
        image = (self.parameters.image_stack,) if self.parameters.image_stack else ()
        return (DATASET, *network, *image, self.parameters.stack_name)

    def deploy(self, stack: str = "") -> str:
        """Return the deploy command with the same `-c` options."""
        return f"npx cdk deploy {stack or self.parameters.stack_name}{self.options}"

    def stack(self, name: str) -> dict[str, Any] | None:
        """Return a deployed stack's description; None if it is not deployed."""
        if name not in self._stacks:
            self._stacks[name] = None
            try:
                answer = self.client("cloudformation").describe_stacks(StackName=name)
                self._stacks[name] = answer["Stacks"][0]
            except ClientError as error:
                if "does not exist" not in str(error):
                    raise
        return self._stacks[name]

    def output(self, stack: str, name: str) -> str | None:
        """Return an output of a deployed stack; None if it does not exist."""
        outputs = (self.stack(stack) or {}).get("Outputs") or []
        return next(
            (str(each["OutputValue"]) for each in outputs if each["OutputKey"] == name), None
        )


Check = Callable[[DeployTarget], Iterator[Diagnosis]]


def quota(target: DeployTarget, service: str, code: str) -> float:
    """Return a quota; an account whose value was never changed has only AWS's default."""
    quotas, which = target.client("service-quotas"), {"ServiceCode": service, "QuotaCode": code}
    try:
        return float(quotas.get_service_quota(**which)["Quota"]["Value"])
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchResourceException":
            raise
        return float(quotas.get_aws_default_service_quota(**which)["Quota"]["Value"])


def connect(profile: str | None = None) -> tuple[Callable[[str], Any], str]:
    """Return a factory of clients with short timeouts, and the region."""
    # boto3 reads only AWS_DEFAULT_REGION; the CDK CLI prefers AWS_REGION.
    region = os.environ.get("AWS_REGION")
    session = boto3.session.Session(profile_name=profile, region_name=region)
    config = Config(connect_timeout=5, read_timeout=15, retries={"max_attempts": 2})
    clients: dict[str, Any] = {}

    def client(service: str) -> Any:
        if service not in clients:
            clients[service] = session.client(service, config=config)
        return clients[service]

    return client, session.region_name or ""


def run(name: str, check: Check, target: DeployTarget) -> Iterator[Diagnosis]:
    """Run one check; a call that AWS refuses becomes a diagnosis too."""
    try:
        for found in check(target):
            yield replace(found, check=found.check or name)
    except ClientError as error:
        yield _refused(name, error)
    except BotoCoreError as error:
        fix = f"aws sts get-caller-identity --region {target.region}"
        yield problem(check=name, what=f"no response: {error}", fix=fix)


def _refused(name: str, error: ClientError) -> Diagnosis:
    code = error.response.get("Error", {}).get("Code", "")
    call = error.operation_name
    if code in _NO_ACCESS:
        return problem(
            check=name,
            what=f"not checked: these credentials may not call {call}",
            fix="use credentials with the policy of docs/deployer.md, or an administrator's",
        )
    if code == "NotImplemented":
        return warning(check=name, what=f"not checked: the AWS at this endpoint has no {call}")
    message = error.response.get("Error", {}).get("Message", "")
    return problem(check=name, what=f"{call} failed with {code}: {message}")
