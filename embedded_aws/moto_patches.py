"""Patches of moto 5.2.5, installed while the embedded AWS runs.

Each states its reason in its docstring; tests/embedded_aws/test_moto_patches.py fails as soon as
moto no longer needs it.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult
from moto.ec2.exceptions import DependencyViolationError, EC2ClientError
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import Instance
from moto.ec2.models.launch_templates import LaunchTemplate
from moto.ec2.models.security_groups import SecurityGroupBackend
from moto.ec2.models.spot_requests import SpotRequestBackend
from moto.ec2.models.vpcs import VPCBackend
from moto.ec2.responses.spot_fleets import SpotFleets
from moto.ec2.responses.spot_instances import SpotInstances
from moto.ec2.utils import parse_user_data
from moto.iam.access_control import PermissionResult
from moto.iam.models import IAMBackend
from moto.s3.exceptions import MissingKey, PreconditionFailed
from moto.s3.models import FakeBucket, FakeKey
from moto.s3.responses import S3Response
from moto.ssm.models import SimpleSystemManagerBackend

from embedded_aws import auto_scaling
from embedded_aws.cloudformation.resources.fleets import MODIFIABLE
from embedded_aws.fleet import CAPACITY
from embedded_aws.spot_fleet import TemplateFleet


class Patch(NamedTuple):
    """One replaced attribute of one of moto's classes; the replacement's docstring says why."""

    owner: type
    name: str
    replacement: Any
    original: Any


PATCHES: list[Patch] = []


def _method_of(owner: type) -> Callable[[Callable[..., Any]], None]:
    """Replace the method of the function's name; its first argument is moto's own method."""

    def keep(function: Callable[..., Any]) -> None:
        original = vars(owner)[function.__name__]

        @functools.wraps(function)
        def method(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        replacement = staticmethod(method) if isinstance(original, staticmethod) else method
        PATCHES.append(Patch(owner, function.__name__, replacement, original))

    return keep


@_method_of(SpotFleets)
def request_spot_fleet(moto: Any, self: Any) -> ActionResult:
    """Moto ignores the requested version in LaunchTemplateConfigs and takes the latest one.

    It also drops the template's instance profile, security groups, volumes and MetadataOptions,
    and carries out dry runs.
    """
    self.error_on_dryrun()
    config = self._get_param("SpotFleetRequestConfig", {})
    if not config.get("LaunchTemplateConfigs"):
        found: ActionResult = moto(self)
        return found
    fleet = TemplateFleet(self.ec2_backend, dict(config))
    self.ec2_backend.spot_fleet_requests[fleet.id] = fleet
    fleet.reach_target()
    return ActionResult({"SpotFleetRequestId": fleet.id})


@_method_of(SpotFleets)
def modify_spot_fleet_request(moto: Any, self: Any) -> Any:
    """Moto requires TargetCapacity and supports nothing else.

    It lacks OnDemandTargetCapacity and LaunchTemplateConfigs; an unknown fleet id is a KeyError.
    """
    fleet = _find(self.ec2_backend, self._get_param("SpotFleetRequestId"))
    if not isinstance(fleet, TemplateFleet):
        return moto(self)
    given = {name: self._get_param(name) for name in MODIFIABLE}
    fleet.modify({name: value for name, value in given.items() if value is not None})
    return ActionResult({"Return": True})


@_method_of(SpotRequestBackend)
def cancel_spot_fleet_requests(
    moto: Any, self: Any, spot_fleet_request_ids: list[str], terminate_instances: bool
) -> list[Any]:
    """Moto forgets a cancelled fleet at once; EC2 shows it for two days."""
    fleets = [_find(self, fleet_id) for fleet_id in spot_fleet_request_ids]
    for fleet in fleets:
        if isinstance(fleet, TemplateFleet):
            fleet.cancel(terminate=terminate_instances)
        else:
            moto(self, [fleet.id], terminate_instances)
    return fleets


@_method_of(SpotRequestBackend)
def describe_spot_fleet_requests(_: Any, self: Any, spot_fleet_request_ids: list[str]) -> list[Any]:
    """Moto returns an empty list for a fleet id that does not exist."""
    if spot_fleet_request_ids:
        return [_find(self, fleet_id) for fleet_id in spot_fleet_request_ids]
    return list(self.spot_fleet_requests.values())


def _find(backend: Any, fleet_id: str) -> Any:
    fleet = backend.get_spot_fleet_request(fleet_id)
    if fleet is None:
        message = f"The spot fleet request ID '{fleet_id}' does not exist"
        raise EC2ClientError("InvalidSpotFleetRequestId.NotFound", message)
    return fleet


@_method_of(Instance)
def terminate(moto: Any, self: Any) -> Any:
    """Moto's instances are terminated at once; on EC2 their systems shut down first."""
    previous = moto(self)
    if self.id in CAPACITY[0].powered:
        self._state.name, self._state.code = "shutting-down", 32
    return previous


@_method_of(SecurityGroupBackend)
def delete_security_group(
    moto: Any, self: Any, name: str | None = None, group_id: str | None = None
) -> None:
    """Moto deletes a group that an instance is in; EC2 refuses until it is terminated."""
    for instance in self.all_instances():
        groups = [group.id for nic in instance.nics.values() for group in nic.group_set]
        groups += [group.id for group in instance.security_groups]
        if instance.state != "terminated" and group_id in groups:
            raise DependencyViolationError(f"resource {group_id} has a dependent object")
    moto(self, name, group_id)


@_method_of(SpotInstances)
def describe_spot_price_history(moto: Any, self: Any) -> Any:
    """Moto's Spot price is 0.00001 dollars, whatever the size."""
    found = moto(self)
    if (spot_usd := CAPACITY[0].spot_usd) is not None:
        for each in found.result["SpotPriceHistory"]:
            with suppress(ValueError):
                each["SpotPrice"] = str(spot_usd(each["InstanceType"]))
    return found


@_method_of(SimpleSystemManagerBackend)
def put_parameter(moto: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Moto's Parameter Store sends no events."""
    made = moto(self, *given, **named)
    detail = {
        "operation": "Create" if made.version == 1 else "Update",
        "name": made.name,
        "type": made.parameter_type,
        "description": made.description or "",
    }
    arn = f"arn:aws:ssm:{self.region_name}:{self.account_id}:parameter/{made.name.lstrip('/')}"
    CAPACITY[0].events.append(("aws.ssm", "Parameter Store Change", detail, [arn]))
    return made


@_method_of(FakeBucket)
def get_permission(_: Any, bucket: Any, action: str, resource: str) -> PermissionResult:
    """Moto denies everything once a bucket policy has a Deny with a condition (TLS only).

    It treats an unmet condition as a denial; embedded_aws/iam decides before it.
    """
    return PermissionResult.PERMITTED


@_method_of(FakeBucket)
def _log_permissions_enabled_policy(_: Any, target_bucket: Any, target_prefix: str | None) -> bool:
    """Moto requires the target's bucket policy when logging is enabled, S3 only on delivery.

    CDK's policy names the source buckets, so it is created after them.
    """
    return True


@_method_of(LaunchTemplate)
def create_version(moto: Any, self: Any, data: dict[str, Any], description: str) -> Any:
    """Moto keeps the user data of a second template version as plain text.

    Starting an instance from that version then raises an AssertionError.
    """
    if isinstance(data.get("UserData"), str):
        data = data | {"UserData": parse_user_data(data["UserData"])}
    return moto(self, data, description)


@_method_of(VPCBackend)
def modify_vpc_endpoint(moto: Any, self: Any, vpc_id: str, **changes: Any) -> None:
    """Moto adds no routes to route tables that a gateway endpoint gains later.

    It then cannot delete the endpoint, because the routes are missing.
    """
    moto(self, vpc_id, **changes)
    endpoint = self.vpc_end_points[vpc_id]
    prefixes = endpoint.destination_prefix_list_id
    if prefixes is None:
        return
    for table in changes.get("add_route_tables") or []:
        self.create_route(table, None, gateway_id=vpc_id, destination_prefix_list_id=prefixes)
    for table in changes.get("remove_route_tables") or []:
        self.delete_route(table, prefixes)


@_method_of(VPCBackend)
def create_vpc_endpoint(moto: Any, self: Any, vpc_id: str, *named: Any, **more: Any) -> Any:
    """Moto gives private names without the VPC's DNS, and no default security group."""
    if (more.get("endpoint_type") or "").lower() == "interface":
        vpc = self.get_vpc(vpc_id)
        has_dns = (vpc.enable_dns_support, vpc.enable_dns_hostnames)
        if more["private_dns_enabled"] and {str(each).lower() for each in has_dns} != {"true"}:
            needs = "both enableDnsSupport and enableDnsHostnames VPC attributes set to true"
            why = f"Enabling private DNS requires {needs} for {vpc_id}"
            raise EC2ClientError("InvalidParameter", why)
        default = [self.get_default_security_group(vpc_id).id]
        more["security_group_ids"] = more["security_group_ids"] or default
    return moto(self, vpc_id, *named, **more)


@_method_of(IAMBackend)
def _init_aws_policies(moto: Any, self: Any) -> list[Any]:
    """Moto looks for the first request's key in all six partitions.

    It reads AWS's 1,500 managed policies for each: 1.5 seconds of each start.
    """
    policies: list[Any] = moto(self) if self.partition == "aws" else []
    return policies


def _refuse_unmatched(backend: Any, bucket: str, key: str, etag: str) -> None:
    found = backend.get_object(bucket, key)
    if found is None:
        raise MissingKey
    if etag not in ("*", found.etag, found.etag.strip('"')):
        raise PreconditionFailed("If-Match")


@_method_of(S3Response)
def _key_response_post(
    moto: Any, self: Any, request: Any, body: bytes, bucket: str, query: Any, key: str
) -> Any:
    """Moto completes an upload whatever its If-Match says."""
    if "uploadId" in query and (etag := request.headers.get("If-Match")):
        _refuse_unmatched(self.backend, bucket, key, etag)
    return moto(self, request, body, bucket, query, key)


@_method_of(S3Response)
def _bucket_response_delete_keys(moto: Any, self: Any, bucket: str, *arguments: Any) -> Any:
    """Moto deletes several objects whatever ETag the request gives each."""
    tree, refused = ElementTree.fromstring(self.body), ""
    for each in tree.findall("{*}Object"):
        key, etag = each.findtext("{*}Key", ""), each.findtext("{*}ETag")
        try:
            if etag:
                _refuse_unmatched(self.backend, bucket, key, etag)
        except (MissingKey, PreconditionFailed) as error:
            tree.remove(each)
            why = f"<Code>{error.code}</Code><Message>{escape(error.message)}</Message>"
            refused += f"<Error><Key>{escape(key)}</Key>{why}</Error>"
    if not refused:
        return moto(self, bucket, *arguments)
    answer: Any = (200, {}, "<DeleteResult></DeleteResult>")
    if tree.find("{*}Object") is not None:
        self.body = ElementTree.tostring(tree, default_namespace=tree.tag[1:].partition("}")[0])
        answer = moto(self, bucket, *arguments)
    status, headers, text = answer
    return status, headers, text.replace("</DeleteResult>", f"{refused}</DeleteResult>")


_VALUE: Any = FakeKey.value
_LARGE_BYTES = 1_000_000
# The two large values read last, with their keys.
_LARGE_VALUES: list[tuple[FakeKey, bytes]] = []


def _read_value(key: Any) -> bytes:
    """Moto reads the entire object from a file for each requested range.

    Syncing 354 MB reads 15 GB and blocks other requests; on a busy machine the Guard times out.
    """
    for read, kept in _LARGE_VALUES:
        if read is key:
            return kept
    content: bytes = _VALUE.fget(key)
    if len(content) >= _LARGE_BYTES:
        _LARGE_VALUES[:] = [*_LARGE_VALUES[-1:], (key, content)]
    return content


def _write_value(key: Any, content: bytes) -> None:
    _LARGE_VALUES[:] = [each for each in _LARGE_VALUES if each[0] is not key]
    _VALUE.fset(key, content)


PATCHES.append(Patch(FakeKey, "value", property(_read_value, _write_value), _VALUE))


def _itself(key: Any, _: Any) -> Any:
    """Moto copies the bucket's content for each list of versions, and keeps every copy for ever."""
    return key


PATCHES.append(Patch(FakeKey, "__deepcopy__", _itself, None))


def _auto_scaling(operation: str) -> Callable[[Any], ActionResult]:
    def answered(self: Any) -> ActionResult:
        """Moto's groups launch nothing on Spot, replace nothing, and know no activities."""
        backend = ec2_backends[self.current_account][self.region]
        return ActionResult(auto_scaling.answer(backend, operation, self._get_params()))

    return answered


for _operation, _moto in vars(AutoScalingResponse).items():
    if inspect.isfunction(_moto) and not _operation.startswith("_") and _operation != "call_action":
        PATCHES.append(Patch(AutoScalingResponse, _operation, _auto_scaling(_operation), _moto))


def install() -> None:
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.replacement)


def uninstall() -> None:
    _LARGE_VALUES.clear()
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.original)
