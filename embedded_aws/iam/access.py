"""Checks requests: gathers the relevant policies from moto's state, rules, and keeps evidence.

Policies are read at each call, so that a change takes effect at once.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from moto.awslambda.exceptions import UnknownFunctionException
from moto.awslambda_simple.models import lambda_simple_backends
from moto.ec2.models import ec2_backends
from moto.iam.exceptions import NotFoundException
from moto.iam.models import iam_backends
from moto.kms.models import kms_backends
from moto.logs.models import logs_backends
from moto.s3.models import s3_backends
from moto.sns.models import sns_backends
from moto.sts.models import AssumedRole

from embedded_aws.auto_scaling import group_of
from embedded_aws.cloudformation.records import Stack, StackResource
from embedded_aws.iam.evaluation import (
    BOUNDARY,
    IDENTITY,
    RESOURCE,
    WORDS,
    ApiCall,
    Caller,
    Keys,
    PolicyDocument,
    Ruling,
    Statement,
    evaluate,
    read_policy,
)
from embedded_aws.iam.requests import asked
from embedded_aws.iam.sessions import Sessions

# The stack of `cdk bootstrap`.
_NOT_OURS = "CDKToolkit"
# Where a policy is: its kind, its owner, and its name if the owner may have several.
Key = tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Evidence:
    """The calls so far, with their rulings; thread-safe."""

    stacks: Callable[[], Iterable[Stack]]
    policies_of: Callable[[StackResource], Iterable[tuple[Key, str]]]
    _used: dict[Statement, Counter[str]] = field(default_factory=dict)
    _denied: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    _places: dict[Key, str] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, caller: Caller, call: ApiCall, ruling: Ruling) -> None:
        """Record one call's ruling."""
        with self._lock:
            for statement in ruling.statements:
                self._used.setdefault(statement, Counter())[call.action] += 1
            if not ruling.allowed:
                who = caller.role.rpartition("/")[2] or caller.arn
                self._denied[who, call.action, call.resource, ruling.why] += 1

    def read(self, key: Key, text: str) -> PolicyDocument:
        """Return a policy's document, whose statements say where in our stacks they are."""
        if key not in self._places:
            path = next((path for path, each in self.resources() if each.physical_id == key[1]), "")
            # Drop CDK's hash from a generated name.
            more = [re.sub("[0-9A-F]{8}$", "", name) for name in key[2:]] or [key[0]]
            self._places[key] = f"{path} {more[0]}" if path else ""
        return read_policy(self._places[key], IDENTITY if key[0] == "identity" else RESOURCE, text)

    def report(self) -> dict[str, Any]:
        """Return every statement of the deployed stacks with its calls, and all denied calls."""
        deployed = [
            statement
            for _, resource in self.resources()
            for key, text in self.policies_of(resource)
            for statement in self.read(key, text).statements
        ]
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        with self._lock:
            for each in dict.fromkeys([*deployed, *self._used]):
                if "/" in each.policy and not each.policy.startswith(_NOT_OURS):
                    row = rows.setdefault((each.policy, each.name), _row(each))
                    row["calls"] = dict(Counter(row["calls"]) + self._used.get(each, Counter()))
            denied = [
                {"caller": who, "action": action, "resource": resource, "why": why, "times": n}
                for (who, action, resource, why), n in sorted(self._denied.items())
            ]
        return {"statements": [rows[key] for key in sorted(rows)], "denied": denied}

    def forget(self) -> None:
        """Forget everything, before the next drill."""
        with self._lock:
            self._used.clear()
            self._denied.clear()

    def resources(self) -> Iterator[tuple[str, StackResource]]:
        """Yield the stacks' resources with their paths in the CDK app, or their logical ids."""
        for stack in list(self.stacks()):
            for resource in list(stack.resources.values()) if stack.deleted is None else ():
                path = (resource.metadata or {}).get("aws:cdk:path", "")
                short = path.removesuffix("/Resource")
                yield short or f"{stack.name}/{resource.logical_id}", resource


def _row(statement: Statement) -> dict[str, Any]:
    return {
        "policy": statement.policy,
        "statement": re.sub("([0-9A-F]{7,8})?-[0-9A-F]{12}$", "", statement.name),
        "effect": "Allow" if statement.allows else "Deny",
        "actions": statement.actions,
        "calls": {},
    }


_OWN = ":role/aws-service-role/"  # of services, which no policy of an organization limits
_ALL = '{"Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}}'


class Denied(NamedTuple):
    """An action that is not allowed, and why."""

    caller: Caller
    call: ApiCall
    why: str


class AccessControl:
    """IAM of one account in one region."""

    def __init__(self, *, account: str, region: str, stacks: Callable[[], Iterable[Stack]]) -> None:
        self.account, self.region = account, region
        # Service control policies with what they deny, as the organization's FullAWSAccess allows.
        self.organization: list[str] = []
        self.sessions = Sessions(account=account, region=region)
        self.evidence = Evidence(stacks=stacks, policies_of=self._policies_of)
        self._iam: Any = iam_backends[account]["aws"]
        self._s3: Any = s3_backends[account]["aws"]
        self._ec2: Any = ec2_backends[account][region]

    def refuses(self, service: str, environ: Mapping[str, Any], body: bytes) -> Denied | None:
        """Return the first denied action of a request, if there is one."""
        caller = self.sessions.find(environ, body)
        for each in asked(service, environ, body, (self.region, self.account)):
            for one in (each, *self._of_key(each)):
                if (denied := self.check(caller, one)) is not None:
                    return denied
        return None

    def hides(self, environ: Mapping[str, Any], body: bytes) -> Denied | None:
        """Return the denial of ListBucket, if any; S3 then hides that an object is missing."""
        bucket = str(environ.get("PATH_INFO", "")).lstrip("/").partition("/")[0]
        one = ApiCall(action="s3:ListBucket", resource=f"arn:aws:s3:::{bucket}")
        return self.check(self.sessions.find(environ, body), one)

    def check(self, caller: Caller, one: ApiCall) -> Denied | None:
        """Rule on one action, and keep the evidence."""
        if one.action == "sts:GetCallerIdentity":  # it cannot be denied
            return None
        ruling = self._rule(caller, one)
        self.evidence.record(caller, one, ruling)
        return None if ruling.allowed else Denied(caller, one, ruling.why)

    def expect(self, service: str, source_arn: str, action: str, resource: str) -> None:
        """Raise PermissionError unless a service may do this for the account's `source_arn`."""
        caller = self.sessions.service(service, source_arn)
        denied = self.check(caller, ApiCall(action=action, resource=resource))
        if denied is not None:
            raise PermissionError(f"{caller.arn}, {action} on {resource}: denied {denied.why}")

    def assume(
        self, role_arn: str, *, service: str, source_arn: str, name: str, keys: Keys | None = None
    ) -> AssumedRole:
        """Begin a role's session for a service; raise PermissionError if the role forbids that."""
        self.expect(service, source_arn, "sts:AssumeRole", role_arn)
        return self.sessions.begin(role_arn, name, keys or {})

    def allows(self, session: AssumedRole, one: ApiCall) -> bool:
        """Whether a session may make this call."""
        return self.check(self.sessions.by_key(session.access_key_id), one) is None

    def may_encrypt_volumes(self, key: str, names: Iterable[str]) -> bool:
        """Whether the key lets these service-linked roles start instances with its volumes.

        https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-fleet-prerequisites.html
        https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
        """
        keys = {
            "kms:grantisforawsresource": "true",
            "kms:calleraccount": self.account,
            "kms:viaservice": f"ec2.{self.region}.amazonaws.com",
        }
        ways = ("CreateGrant", "GenerateDataKeyWithoutPlaintext", "Decrypt")
        wanted = [ApiCall(action=f"kms:{way}", resource=key, keys=keys) for way in ways]
        roles = map(self.sessions.service_linked, names)
        return all(self.check(role, one) is None for role in roles for one in wanted)

    def role_of_profile(self, profile: str) -> str:
        """Return the ARN of an instance profile's role, given the profile's name or ARN."""
        found = self._iam.instance_profiles.values()
        return str(next(each.roles[0].arn for each in found if profile in (each.name, each.arn)))

    def _rule(self, caller: Caller, one: ApiCall) -> Ruling:
        context = {
            "aws:securetransport": "true",  # the local connection counts as TLS 1.3
            "s3:tlsversion": "1.3",
            **dict.fromkeys(("aws:requestedregion", "ec2:region"), self.region),
            **dict.fromkeys(("aws:resourceaccount", "s3:resourceaccount"), self.account),
        }
        keys = {**context, **caller.keys, **self._resource_keys(one), **one.keys}
        roles = self._role(caller.role)
        read = self.evidence.read
        every = [read_policy("root", IDENTITY, _ALL)] if caller.kind == "Account" else []
        if caller.kind in ("Account", "User", "AssumedRole") and _OWN not in caller.arn:
            every += [read_policy("scp", "service control policy", e) for e in self.organization]
        boundaries = [each.permissions_boundary_arn for each in roles]
        resource = [read(key, text) for key, text in self._resource(one)]
        # A key always has a policy; if none is found, the key does not exist, and KMS says so.
        needs_resource = one.action.startswith("sts:AssumeRole") or (
            one.action.startswith("kms:") and bool(resource)
        )
        return evaluate(
            caller,
            replace(one, keys=keys),
            identity=[*every, *(read(key, text) for key, text in self._identity(roles))],
            boundary=[read_policy(a, BOUNDARY, self._managed(a)) for a in boundaries if a],
            resource=resource,
            needs_resource=needs_resource and one.resource != "*",
        )

    def _resource_keys(self, one: ApiCall) -> dict[str, str]:
        service, name = _service_and_name(one.resource)
        if service == "autoscaling":
            group = group_of(self._ec2, name.rpartition("/")[2])
            return _tag_keys(service, group.tags if group else {})
        if service != "ec2":
            return {}
        kind, _, identifier = name.partition("/")
        tags: dict[str, str] = {k: v or "" for k, v in self._ec2.tags.get(identifier, {}).items()}
        if kind == "spot-fleet-request":
            fleet = self._ec2.spot_fleet_requests.get(identifier)
            tags = {} if fleet is None else dict(fleet.tags.get(kind, {}))
        own: dict[str, str] = {"ec2:instanceid": identifier} if kind == "instance" else {}
        return own | _tag_keys(service, tags)

    def _role(self, arn: str) -> list[Any]:
        """Return a list with the role, empty if it is deleted."""
        with suppress(NotFoundException):
            return [self._iam.get_role(arn.rpartition("/")[2])] if arn else []
        return []

    def _identity(self, roles: Iterable[Any]) -> Iterator[tuple[Key, str]]:
        for role in roles:
            for name, text in list(role.policies.items()):
                yield ("identity", role.name, name), text
            for arn in list(role.managed_policies):
                yield ("identity", role.name, arn.rpartition("/")[2]), self._managed(arn)

    def _policies_of(self, resource: StackResource) -> Iterator[tuple[Key, str]]:
        """Yield the policies that belong to a stack's resource."""
        if resource.type == "AWS::IAM::Role":
            yield from self._identity(self._role(f"role/{resource.physical_id}"))
        if form := WORDS["with_policies"].get(resource.type):
            arn = form.format(resource.physical_id)
            yield from self._resource(ApiCall(action=f"{resource.type}:", resource=arn))

    def _managed(self, arn: str) -> str:
        versions = self._iam.managed_policies[arn].versions
        return next(str(each.document) for each in versions if each.is_default)

    def _resource(self, one: ApiCall) -> Iterator[tuple[Key, str]]:
        """Yield the resource's own policies."""
        service, name = _service_and_name(one.resource)
        here, last = (self.account, self.region), name.rpartition("/")[2]
        found: Any = None
        if service == "iam" and not one.action.startswith("iam:"):
            for found in self._role(name):
                yield ("trust", found.name), found.assume_role_policy_document
        elif service == "s3":
            found = self._s3.buckets.get(name.partition("/")[0])
            if found is not None and found.policy:
                yield ("bucket", found.name), found.policy.decode()
        elif service == "logs":
            for found in list(_of(logs_backends, here).resource_policies.values()):
                yield ("logs", found.policy_name), found.policy_document
            # moto does not keep a log group's own policy.
            for _, group in self.evidence.resources():
                own = group.properties.get("ResourcePolicyDocument")
                if own and f"log-group:{group.physical_id}:" in f"{name}:":
                    yield ("logs", group.physical_id), json.dumps(own)
        elif service == "sns" and (found := _of(sns_backends, here).topics.get(one.resource)):
            yield ("topic", found.arn), found.policy
        elif service == "kms" and (found := _of(kms_backends, here).keys.get(last)):
            yield ("key", found.id), found.policy
            yield (
                ("grants", found.id),
                json.dumps({"Statement": [*map(_granted, found.list_grants(""))]}),
            )
        elif service == "lambda":
            with suppress(UnknownFunctionException):
                function = name.partition(":")[2]
                found = _of(lambda_simple_backends, here).get_function(function).policy.statements
                yield ("permissions", function), json.dumps({"Statement": found})

    def _of_key(self, one: ApiCall) -> Iterator[ApiCall]:
        """Yield the call that S3 makes to the bucket's own KMS key in the caller's name."""
        action = WORDS["s3_key"].get(one.action)
        bucket = self._s3.buckets.get(_service_and_name(one.resource)[1].partition("/")[0])
        if action and bucket is not None and bucket.encryption:
            rule = bucket.encryption["Rule"]["ApplyServerSideEncryptionByDefault"]
            if key := rule.get("KMSMasterKeyID"):
                via = f"s3.{self.region}.amazonaws.com"
                keys = {"kms:viaservice": via, "kms:calleraccount": self.account}
                yield ApiCall(action=action, resource=key, keys=keys)


def _granted(grant: Any) -> dict[str, Any]:
    """Return a KMS grant as the policy statement that it amounts to."""
    actions = [f"kms:{name}" for name in grant.operations]
    who = {"AWS": grant.grantee_principal}
    return {"Effect": "Allow", "Principal": who, "Action": actions, "Resource": "*"}


def _tag_keys(service: str, tags: Mapping[str, str]) -> dict[str, str]:
    named = {f"resourcetag/{key.lower()}": value for key, value in tags.items()}
    return {f"{prefix}:{key}": value for prefix in ("aws", service) for key, value in named.items()}


def _service_and_name(arn: str) -> tuple[str, str]:
    parts = arn.split(":", 5)
    return (parts[2], parts[5]) if len(parts) == 6 else ("", arn)


def _of(backends: Any, here: tuple[str, str]) -> Any:
    return backends[here[0]][here[1]]
