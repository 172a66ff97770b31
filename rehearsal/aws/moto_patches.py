"""Patches of moto 5.2.5, installed while the embedded AWS runs.

Each says why it is needed; tests/rehearsal/aws/test_moto_patches.py fails as soon as moto no longer
needs it.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.exceptions import DependencyViolationError
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
from moto.s3.models import FakeBucket, FakeKey

from rehearsal.aws.spot_fleet import CAPACITY, FleetNotFound, TemplateFleet
from sizing import catalogue
from sizing.catalogue.prices import UnknownPriceError


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One replaced attribute of one of moto's classes."""

    owner: type
    name: str
    replacement: Any
    why: str
    original: Any


def _request_spot_fleet(self: Any) -> ActionResult:
    self.error_on_dryrun()
    config = self._get_param("SpotFleetRequestConfig", {})
    if not config.get("LaunchTemplateConfigs"):
        return _ORIGINAL_REQUEST(self)
    fleet = TemplateFleet(self.ec2_backend, dict(config))
    self.ec2_backend.spot_fleet_requests[fleet.id] = fleet
    fleet.reach_target()
    return ActionResult({"SpotFleetRequestId": fleet.id})


def _modify_spot_fleet_request(self: Any) -> ActionResult:
    fleet = _find(self.ec2_backend, self._get_param("SpotFleetRequestId"))
    if not isinstance(fleet, TemplateFleet):
        return _ORIGINAL_MODIFY(self)
    names = (
        "TargetCapacity", "OnDemandTargetCapacity", "LaunchTemplateConfigs",
        "ExcessCapacityTerminationPolicy",
    )  # fmt: skip
    given = {name: self._get_param(name) for name in names}
    fleet.modify({name: value for name, value in given.items() if value is not None})
    return ActionResult({"Return": True})


def _cancel_spot_fleet_requests(
    self: Any, spot_fleet_request_ids: list[str], terminate_instances: bool
) -> list[Any]:
    fleets = [_find(self, fleet_id) for fleet_id in spot_fleet_request_ids]
    for fleet in fleets:
        if isinstance(fleet, TemplateFleet):
            fleet.cancel(terminate=terminate_instances)
        else:
            _ORIGINAL_CANCEL(self, [fleet.id], terminate_instances)
    return fleets


def _describe_spot_fleet_requests(self: Any, spot_fleet_request_ids: list[str]) -> list[Any]:
    if spot_fleet_request_ids:
        return [_find(self, fleet_id) for fleet_id in spot_fleet_request_ids]
    return list(self.spot_fleet_requests.values())


def _describe_spot_price_history(self: Any) -> ActionResult:
    found = _ORIGINAL_PRICES(self)
    history: Any = found.result
    for each in history["SpotPriceHistory"]:
        with suppress(UnknownPriceError):  # a size that the catalogue does not have
            each["SpotPrice"] = str(catalogue.spot_price(each["InstanceType"]).usd_per_hour)
    return found


def _create_version(self: Any, data: dict[str, Any], description: str) -> Any:
    if isinstance(data.get("UserData"), str):
        data = data | {"UserData": parse_user_data(data["UserData"])}
    return _ORIGINAL_CREATE_VERSION(self, data, description)


def _modify_vpc_endpoint(self: Any, vpc_id: str, **changes: Any) -> None:
    _ORIGINAL_MODIFY_ENDPOINT(self, vpc_id, **changes)
    endpoint = self.vpc_end_points[vpc_id]
    prefixes = endpoint.destination_prefix_list_id
    if prefixes is None:
        return
    for table in changes.get("add_route_tables") or []:
        self.create_route(table, None, gateway_id=vpc_id, destination_prefix_list_id=prefixes)
    for table in changes.get("remove_route_tables") or []:
        self.delete_route(table, prefixes)


def _init_aws_policies(self: Any) -> list[Any]:
    policies: list[Any] = _ORIGINAL_POLICIES(self) if self.partition == "aws" else []
    return policies


def _terminate(self: Any) -> Any:
    previous = _ORIGINAL_TERMINATE(self)
    if self.id in CAPACITY[0].powered:
        self._state.name, self._state.code = "shutting-down", 32
    return previous


def _delete_security_group(self: Any, name: str | None = None, group_id: str | None = None) -> None:
    for instance in self.all_instances():
        groups = [group.id for nic in instance.nics.values() for group in nic.group_set]
        groups += [group.id for group in instance.security_groups]
        if instance.state != "terminated" and group_id in groups:
            raise DependencyViolationError(f"resource {group_id} has a dependent object")
    _ORIGINAL_DELETE_GROUP(self, name, group_id)


def _read_value(key: Any) -> bytes:
    for read, kept in _LARGE_VALUES:
        if read is key:
            return kept
    content: bytes = _ORIGINAL_VALUE.fget(key)
    if len(content) >= _LARGE_BYTES:
        _LARGE_VALUES[:] = [*_LARGE_VALUES[-1:], (key, content)]
    return content


def _write_value(key: Any, content: bytes) -> None:
    _LARGE_VALUES[:] = [each for each in _LARGE_VALUES if each[0] is not key]
    _ORIGINAL_VALUE.fset(key, content)


def _find(backend: Any, fleet_id: str) -> Any:
    fleet = backend.get_spot_fleet_request(fleet_id)
    if fleet is None:
        raise FleetNotFound(fleet_id)
    return fleet


def _permitted(bucket: Any, action: str, resource: str) -> PermissionResult:
    return PermissionResult.PERMITTED


def _may_be_logged_to(target_bucket: Any, target_prefix: str | None) -> bool:
    return True


_ORIGINAL_REQUEST = SpotFleets.request_spot_fleet
_ORIGINAL_MODIFY = SpotFleets.modify_spot_fleet_request
_ORIGINAL_CANCEL = SpotRequestBackend.cancel_spot_fleet_requests
_ORIGINAL_PRICES = SpotInstances.describe_spot_price_history
_ORIGINAL_CREATE_VERSION = LaunchTemplate.create_version
_ORIGINAL_MODIFY_ENDPOINT = VPCBackend.modify_vpc_endpoint
_ORIGINAL_POLICIES = IAMBackend._init_aws_policies
_ORIGINAL_TERMINATE = Instance.terminate
_ORIGINAL_DELETE_GROUP = SecurityGroupBackend.delete_security_group
_ORIGINAL_VALUE: Any = FakeKey.value
_LARGE_BYTES = 1_000_000
# The last two that were read, each by its key.
_LARGE_VALUES: list[tuple[FakeKey, bytes]] = []

PATCHES = (
    Patch(
        owner=SpotFleets,
        name="request_spot_fleet",
        replacement=_request_spot_fleet,
        original=_ORIGINAL_REQUEST,
        why="for LaunchTemplateConfigs moto takes the template's latest version, not the one "
        "requested, and loses its instance profile, security groups, volumes and MetadataOptions; "
        "it takes a dry run for a request",
    ),
    Patch(
        owner=SpotFleets,
        name="modify_spot_fleet_request",
        replacement=_modify_spot_fleet_request,
        original=_ORIGINAL_MODIFY,
        why="moto supports only TargetCapacity (and requires it): no OnDemandTargetCapacity, no "
        "LaunchTemplateConfigs; an unknown fleet id is a KeyError",
    ),
    Patch(
        owner=SpotRequestBackend,
        name="cancel_spot_fleet_requests",
        replacement=_cancel_spot_fleet_requests,
        original=_ORIGINAL_CANCEL,
        why="moto forgets a cancelled fleet at once (EC2 shows it for two days)",
    ),
    Patch(
        owner=SpotRequestBackend,
        name="describe_spot_fleet_requests",
        replacement=_describe_spot_fleet_requests,
        original=SpotRequestBackend.describe_spot_fleet_requests,
        why="moto returns an empty list for a fleet id that does not exist",
    ),
    Patch(
        owner=Instance,
        name="terminate",
        replacement=_terminate,
        original=_ORIGINAL_TERMINATE,
        why="moto's instances are terminated at once; on EC2 their systems shut down first",
    ),
    Patch(
        owner=SecurityGroupBackend,
        name="delete_security_group",
        replacement=_delete_security_group,
        original=_ORIGINAL_DELETE_GROUP,
        why="moto deletes a group that an instance is in; EC2 refuses until it is terminated",
    ),
    Patch(
        owner=SpotInstances,
        name="describe_spot_price_history",
        replacement=_describe_spot_price_history,
        original=_ORIGINAL_PRICES,
        why="moto's Spot price is 0.00001 dollars, whatever the size",
    ),
    Patch(
        owner=FakeBucket,
        name="get_permission",
        replacement=_permitted,
        original=FakeBucket.get_permission,
        why="moto denies everything to everybody once a bucket policy has a Deny with a condition "
        "(TLS only): it treats an unmet condition as a denial; rehearsal/aws/iam decides before it",
    ),
    Patch(
        owner=FakeBucket,
        name="_log_permissions_enabled_policy",
        replacement=staticmethod(_may_be_logged_to),
        original=vars(FakeBucket)["_log_permissions_enabled_policy"],
        why="moto requires the target's bucket policy when logging is enabled; S3 reads it when "
        "it delivers, and CDK's policy names the source buckets, so it is created after them",
    ),
    Patch(
        owner=LaunchTemplate,
        name="create_version",
        replacement=_create_version,
        original=_ORIGINAL_CREATE_VERSION,
        why="moto keeps the user data of a second template version as plain text, and an instance "
        "that starts from it ends in an AssertionError",
    ),
    Patch(
        owner=VPCBackend,
        name="modify_vpc_endpoint",
        replacement=_modify_vpc_endpoint,
        original=_ORIGINAL_MODIFY_ENDPOINT,
        why="moto adds no routes to route tables that a gateway endpoint gets later, and then "
        "cannot delete the endpoint because they are missing",
    ),
    Patch(
        owner=IAMBackend,
        name="_init_aws_policies",
        replacement=_init_aws_policies,
        original=_ORIGINAL_POLICIES,
        why="moto looks for the first request's key in all six partitions, and reads AWS's 1,500 "
        "managed policies for each: 1.5 seconds of each start",
    ),
    Patch(
        owner=FakeKey,
        name="value",
        replacement=property(_read_value, _write_value),
        original=_ORIGINAL_VALUE,
        why="moto reads all of an object from a file for each range that is asked for: 15 GB to "
        "sync 354 MB, while nobody else is served, and a busy machine's Guard times out",
    ),
)


def install() -> None:
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.replacement)


def uninstall() -> None:
    _LARGE_VALUES.clear()
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.original)
