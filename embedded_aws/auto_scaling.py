"""Auto Scaling groups with a mixed instances policy, in place of moto's.

moto launches nothing on Spot, replaces nothing, and knows neither capacity nor activities. A group
replaces a machine that EC2 no longer runs (its EC2 health check) and ends one without a notice.
Not emulated: rebalancing between zones, protection, warm pools, hooks, policies and refreshes.
"""

import json
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from moto.autoscaling.exceptions import AutoscalingClientError
from moto.core.exceptions import ServiceException

from embedded_aws.capacity import ON_DEMAND, SPOT, Pool
from embedded_aws.fleet import (
    CAPACITY,
    LOCK,
    SECONDS_AFTER_FAILURE,
    FleetInstance,
    InstanceFleet,
    PoolOffer,
)

GROUP_TAG = "aws:autoscaling:groupName"
# The API's defaults of what a request, also one of an update, leaves out.
_DISTRIBUTION = {
    "OnDemandAllocationStrategy": "prioritized",
    "OnDemandBaseCapacity": 0,
    "OnDemandPercentageAboveBaseCapacity": 100,
    "SpotAllocationStrategy": "lowest-price",
}
_DEFAULTS = {
    "DefaultCooldown": 300,
    "HealthCheckType": "EC2",
    "HealthCheckGracePeriod": 0,
    "CapacityRebalance": False,
    "TerminationPolicies": ["Default"],
    "LoadBalancerNames": [],
    "EnabledMetrics": [],
    "SuspendedProcesses": [],
    "Tags": [],
}
_UNHEALTHY = "in response to an EC2 health check indicating it has been terminated or stopped."
_SHRINKS = "in response to a difference between desired and actual capacity."
_REBALANCES = "in response to an EC2 instance rebalance recommendation."
_NO_CAPACITY = (
    "Could not launch {0} Instances. InsufficientInstanceCapacity - There is no {0} capacity "
    "available that matches your request. Launching EC2 instance failed."
)
# After so long without a success, AWS suspends a group's launches by itself ("administrative
# suspension"); its words for that are not documented.
_PATIENCE_SECONDS = 24 * 3600.0
_LAUNCHING, _TIME = "Launching a new EC2", "%Y-%m-%dT%H:%M:%SZ"
_STARTED = "started in response to a difference between desired and actual capacity."
_BECAME_UNHEALTHY = (
    "Instance became unhealthy while waiting for instance to be in InService state. Termination "
    "Reason: "
)


class AutoScalingGroup(InstanceFleet):
    """A group; `settings` has its properties by the API's names."""

    service_roles = ("autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling",)

    def __init__(self, backend: Any, request: Mapping[str, Any]) -> None:
        self.settings: dict[str, Any] = dict(_DEFAULTS)
        self.ec2_backend = backend
        self.change({"DesiredCapacity": request["MinSize"], **request})
        super().__init__(backend)
        self.name: str = request["AutoScalingGroupName"]
        here = f"{backend.region_name}:{backend.account_id}"
        group = f"autoScalingGroup:{uuid.uuid4()}:autoScalingGroupName/{self.name}"
        self.arn = f"arn:aws:autoscaling:{here}:{group}"
        self.created = datetime.now(UTC)
        self.is_deleted = False
        self.activities: list[dict[str, Any]] = []
        self._leaving: dict[str, dict[str, Any]] = {}  # activities, by instance
        self._quiet_until = 0.0
        self._failing_since = math.inf

    @property
    def tags(self) -> dict[str, str]:
        return {each["Key"]: each.get("Value", "") for each in self.settings["Tags"]}

    @property
    def suspended(self) -> set[str]:
        return {each["ProcessName"] for each in self.settings["SuspendedProcesses"]}

    @property
    def desired(self) -> int:
        return int(self.settings["DesiredCapacity"])

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change settings as UpdateAutoScalingGroup does, or raise a ValidationError."""
        wanted = {**self.settings, **changes}
        if policy := changes.get("MixedInstancesPolicy"):
            wanted["MixedInstancesPolicy"] = {
                **self.settings.get("MixedInstancesPolicy", {}),
                **policy,
                "InstancesDistribution": {
                    **_DISTRIBUTION,
                    **policy.get("InstancesDistribution", {}),
                },
            }
        least, most = int(wanted["MinSize"]), int(wanted["MaxSize"])
        if "DesiredCapacity" not in changes:
            wanted["DesiredCapacity"] = min(max(wanted["DesiredCapacity"], least), most)
        if not least <= int(wanted["DesiredCapacity"]) <= most:
            raise _invalid(
                f"Desired capacity:{wanted['DesiredCapacity']} must be between the specified min "
                f"size:{least} and max size:{most}"
            )
        self._check_template(wanted)
        self.settings = wanted

    def _check_template(self, wanted: Mapping[str, Any]) -> None:
        template = wanted.get("MixedInstancesPolicy", {}).get("LaunchTemplate")
        if template is None:
            raise NotImplementedError("the embedded AWS has groups with a launch template only")
        specification = dict(template["LaunchTemplateSpecification"])
        try:
            found = self.ec2_backend._get_template_from_args(specification)
        except (IndexError, ServiceException) as error:
            raise _invalid(
                "You must use a valid fully-formed launch template. The specified launch template "
                f"does not exist: {specification}"
            ) from error
        if found.data.get("InstanceMarketOptions"):
            raise _invalid(
                "You cannot use a launch template that is set to request Spot Instances "
                "(InstanceMarketOptions) when you configure an Auto Scaling group with a mixed "
                "instances policy."
            )

    def reach_target(self) -> None:
        """Take note of what EC2 ended, end what is too much, and launch what is missing."""
        with LOCK:
            self.reclaim()
            self.end_due()
            if "Terminate" not in self.suspended or self.is_deleted:
                self._scale_in()
            self._check_health()
            for market, count in self._wanted().items():
                staying = [each for each in self._running(market) if not self._at_risk(each)]
                self.launch(market, count - len(staying))
            if self.is_deleted and not self.spot_requests:
                self.capacity.fleets = [each for each in self.capacity.fleets if each is not self]

    def _wanted(self) -> dict[str, int]:
        shares = self.settings["MixedInstancesPolicy"]["InstancesDistribution"]
        base = min(int(shares["OnDemandBaseCapacity"]), self.desired)
        percentage = int(shares["OnDemandPercentageAboveBaseCapacity"])
        on_demand = base + math.ceil((self.desired - base) * percentage / 100)
        return {ON_DEMAND: on_demand, SPOT: self.desired - on_demand}

    def _running(self, *markets: str) -> list[FleetInstance]:
        """Return the machines in service of these markets, oldest first."""
        members = self.spot_requests
        return [each for each in members if each.is_running and each.pool.market in markets]

    def _at_risk(self, member: FleetInstance) -> bool:
        """Whether capacity rebalancing replaces it before EC2 takes it back."""
        given = self.capacity.at_risk | self.capacity.endings.keys()
        return bool(self.settings["CapacityRebalance"]) and member.instance.id in given

    def _check_health(self) -> None:
        for member in [each for each in self.spot_requests if not each.is_running]:
            if member.instance.id not in self._leaving:
                self._leave(member, _UNHEALTHY)
            if member.instance.state in ("stopping", "stopped"):
                self.ec2_backend.terminate_instances([member.instance.id])
            if member.instance.state == "terminated":
                self.spot_requests.remove(member)
                self._finish(self._leaving.pop(member.instance.id))

    def _scale_in(self) -> None:
        """End machines beyond the capacity; those whose place others are to take end after them."""
        running = self._running(ON_DEMAND, SPOT)
        surplus = [each for each in running if self._at_risk(each)]
        for market, count in self._wanted().items():
            steady = [each for each in self._running(market) if each not in surplus]
            surplus += steady[: max(len(steady) - count, 0)]
        for member in surplus[: max(len(running) - self.desired, 0)]:
            self._leave(member, _REBALANCES if self._at_risk(member) else _SHRINKS)
            self.end([member])

    def _leave(self, member: FleetInstance, why: str) -> None:
        why = f"taken out of service {why}"
        self._leaving[member.instance.id] = self._activity("Terminating EC2", why, member)

    def launch(self, market: str, count: int) -> None:
        now, before = self.capacity.clock(), list(self.spot_requests)
        if count <= 0 or now < self.failed_until or "Launch" in self.suspended:
            return
        super().launch(market, count)
        launched = [each for each in self.spot_requests if each not in before]
        for member in launched:
            unhealthy = "" if member.is_running else member.instance.state_reason.message
            activity = self._activity(_LAUNCHING, _STARTED, member)
            self._finish(activity, unhealthy and _BECAME_UNHEALTHY + unhealthy)
        self.spot_requests = [*before, *(each for each in launched if each.is_running)]
        self._failing_since = math.inf if launched else min(self._failing_since, now)
        if now - self._failing_since > _PATIENCE_SECONDS:
            self.suspend(["Launch"], "Administratively suspended")
            self._failing_since = math.inf
        # How often a group repeats an attempt, and so an event, is undocumented.
        if len(launched) < count and now >= self._quiet_until:
            self._quiet_until = now + SECONDS_AFTER_FAILURE
            why = _NO_CAPACITY.format(market.title())
            self._finish(self._activity(_LAUNCHING, _STARTED), why)

    def suspend(self, processes: Iterable[str], who: str = "") -> None:
        """Suspend processes, or resume them if nobody suspends them."""
        kept = self.settings["SuspendedProcesses"]
        kept = [each for each in kept if each["ProcessName"] not in processes]
        why = f"{who} at {datetime.now(UTC):{_TIME}}"
        new = [{"ProcessName": each, "SuspensionReason": why} for each in processes if who]
        self.settings["SuspendedProcesses"] = kept + new

    def _activity(self, what: str, why: str, member: FleetInstance | None = None) -> dict[str, Any]:
        instance_id = member.instance.id if member else ""
        place = {
            "Subnet ID": member.instance.subnet_id if member else "",
            "Availability Zone": member.pool.zone if member else "",
        }
        activity = {
            "ActivityId": str(uuid.uuid4()),
            "AutoScalingGroupName": self.name,
            "Description": f"{what} instance: {instance_id}",
            "Cause": f"At {datetime.now(UTC):{_TIME}} an instance was {why}",
            "StartTime": datetime.now(UTC),
            "StatusCode": "InProgress",
            "Progress": 50,
            "Details": json.dumps(place),
            "EC2InstanceId": instance_id,
        }
        self.activities.insert(0, activity)
        return activity

    def _finish(self, activity: dict[str, Any], failure: str = "") -> None:
        """End an activity and send its event, as in the user guide's event reference."""
        activity["EndTime"] = datetime.now(UTC)
        if failure:
            description = f"{_LAUNCHING} instance.  Status Reason: {failure}"
            activity |= {"StatusCode": "Failed", "Description": description}
        is_launch, instance_id = _LAUNCHING in activity["Description"], activity["EC2InstanceId"]
        ends = ("EC2", "AutoScalingGroup") if is_launch else ("AutoScalingGroup", "EC2")
        detail = {
            **activity,  # a success is InProgress here, as in AWS's examples
            "StatusMessage": failure,
            "Details": json.loads(activity["Details"]),
            "RequestId": activity["ActivityId"],
            "StartTime": f"{activity['StartTime']:{_TIME}}",
            "EndTime": f"{activity['EndTime']:{_TIME}}",
            **dict(zip(("Origin", "Destination"), ends, strict=True)),
        }
        kind = f"EC2 Instance {'Launch' if is_launch else 'Terminate'} "
        kind += "Unsuccessful" if failure else "Successful"
        here = f"{self.ec2_backend.region_name}:{self.ec2_backend.account_id}"
        instances = [f"arn:aws:ec2:{here}:instance/{instance_id}"] if instance_id else []
        self.capacity.events.append(("aws.autoscaling", kind, detail, [self.arn, *instances]))
        activity |= {"Progress": 100, "StatusMessage": failure}
        activity["StatusCode"] = "Failed" if failure else "Successful"

    def choose(self, market: str) -> PoolOffer | None:
        shares = self.settings["MixedInstancesPolicy"]["InstancesDistribution"]
        if market == ON_DEMAND and shares["OnDemandAllocationStrategy"] == "prioritized":
            return next(iter(self.free(market)), None)
        return super().choose(market)

    def offers(self, market: str) -> Iterator[PoolOffer]:
        chosen = self.settings["MixedInstancesPolicy"]["LaunchTemplate"]
        template = dict(chosen["LaunchTemplateSpecification"])
        version = self.ec2_backend._get_template_from_args(template)
        for given in chosen.get("Overrides") or [{}]:
            size = given.get("InstanceType") or version.instance_type
            for subnet in filter(None, self.settings["VPCZoneIdentifier"].split(",")):
                pool = Pool(market=market, size=size, zone=self.zone_of(subnet))
                override = {"InstanceType": size, "SubnetId": subnet}
                yield PoolOffer(template=template, override=override, pool=pool)

    def request(self, offer: PoolOffer) -> FleetInstance:
        tags = {
            each["Key"]: each.get("Value", "")
            for each in self.settings["Tags"]
            if each.get("PropagateAtLaunch")
        }
        price = self.settings["MixedInstancesPolicy"]["InstancesDistribution"].get("SpotMaxPrice")
        tags[GROUP_TAG] = self.name
        return FleetInstance(offer, backend=self.ec2_backend, tags=tags, price=price or "")

    def described(self) -> dict[str, Any]:
        """Return the group as DescribeAutoScalingGroups does."""
        role = f"aws-service-role/{self.service_roles[0]}"
        subnets = filter(None, self.settings["VPCZoneIdentifier"].split(","))
        more = {"ResourceId": self.name, "ResourceType": "auto-scaling-group"}
        return {
            **self.settings,
            "AutoScalingGroupARN": self.arn,
            "AvailabilityZones": sorted({self.zone_of(each) for each in subnets}),
            "CreatedTime": self.created,
            "Instances": [self._described(each) for each in self.spot_requests],
            "ServiceLinkedRoleARN": f"arn:aws:iam::{self.ec2_backend.account_id}:role/{role}",
            "Tags": [{**each, **more} for each in self.settings["Tags"]],
            **({"Status": "Delete in progress"} if self.is_deleted else {}),
        }

    def _described(self, member: FleetInstance) -> dict[str, Any]:
        instance = member.instance
        state = {"pending": "Pending", "running": "InService"}.get(instance.state, "Terminating")
        return {
            "InstanceId": instance.id,
            "InstanceType": instance.instance_type,
            "AvailabilityZone": member.pool.zone,
            "LifecycleState": state,
            "HealthStatus": "Healthy" if member.is_running else "Unhealthy",
            "LaunchTemplate": member.launch_template,
            "ProtectedFromScaleIn": False,
        }


def _invalid(why: str) -> AutoscalingClientError:
    return AutoscalingClientError("ValidationError", why)


def group_of(backend: Any, name: str) -> AutoScalingGroup | None:
    """Return the group with this name, if there is one."""
    return next((each for each in groups_of(backend) if each.name == name), None)


def groups_of(backend: Any) -> list[AutoScalingGroup]:
    """Return the account's groups in a region."""
    found = [each for each in CAPACITY[0].fleets if isinstance(each, AutoScalingGroup)]
    return [each for each in found if each.ec2_backend is backend]


Request = Mapping[str, Any]
Operation = Callable[[Any, Request], Mapping[str, Any] | None]


def answer(backend: Any, operation: str, request: Request) -> Mapping[str, Any] | None:
    """Carry out an operation of the service; time has passed since the last one."""
    if operation not in OPERATIONS:
        raise NotImplementedError(f"the embedded AWS has no {operation} of Auto Scaling")
    for group in groups_of(backend):
        group.reach_target()
    return OPERATIONS[operation](backend, request)


def _named(backend: Any, name: str) -> AutoScalingGroup:
    group = group_of(backend, name)
    if group is None:
        raise _invalid(f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found")
    return group


def _create(backend: Any, request: Request) -> None:
    name = request["AutoScalingGroupName"]
    if group_of(backend, name) is not None:
        why = "AutoScalingGroup by this name already exists - A group with the name "
        raise AutoscalingClientError("AlreadyExists", f"{why}{name} already exists")
    AutoScalingGroup(backend, request).reach_target()


def _update(backend: Any, request: Request) -> None:
    group = _named(backend, request["AutoScalingGroupName"])
    if group.is_deleted:
        why = f"AutoScalingGroup '{group.name}' is pending delete"
        raise AutoscalingClientError("ScalingActivityInProgress", why)
    group.change(request)
    group.reach_target()


def _delete(backend: Any, request: Request) -> None:
    group = _named(backend, request["AutoScalingGroupName"])
    if not request.get("ForceDelete") and group.spot_requests:
        code, what = "ScalingActivityInProgress", "scaling activities in progress for that group."
        if any(each.is_running for each in group.spot_requests):
            code = "ResourceInUse"
            what = "instances or pending Spot instance request(s) still in the group."
        why = f"You cannot delete an AutoScalingGroup while there are {what}"
        raise AutoscalingClientError(code, why)
    group.change({"MinSize": 0, "MaxSize": 0, "DesiredCapacity": 0})
    group.is_deleted = True
    group.reach_target()


def _detach(backend: Any, request: Request) -> None:
    """Let instances go on without the group, which then no longer tags them."""
    group, ids = _named(backend, request["AutoScalingGroupName"]), request["InstanceIds"]
    if request["ShouldDecrementDesiredCapacity"]:
        group.change({"DesiredCapacity": group.desired - len(ids)})
    group.spot_requests = [each for each in group.spot_requests if each.instance.id not in ids]
    backend.delete_tags(ids, {GROUP_TAG: None})
    group.reach_target()


def _describe(backend: Any, request: Request) -> Mapping[str, Any]:
    names, groups = request.get("AutoScalingGroupNames") or [], groups_of(backend)
    for each in request.get("Filters") or []:
        key = each["Name"].removeprefix("tag:")
        groups = [group for group in groups if group.tags.get(key) in each["Values"]]
    wanted = [each for each in groups if not names or each.name in names]
    return {"AutoScalingGroups": [each.described() for each in wanted]}


def _describe_activities(backend: Any, request: Request) -> Mapping[str, Any]:
    wanted = request.get("AutoScalingGroupName")
    groups = [each for each in groups_of(backend) if wanted in (None, each.name)]
    return {"Activities": [each for group in groups for each in group.activities]}


def _retag(backend: Any, request: Request, *, sets: bool) -> None:
    for tag in request["Tags"]:
        settings = _named(backend, tag["ResourceId"]).settings
        others = [each for each in settings["Tags"] if each["Key"] != tag["Key"]]
        settings["Tags"] = [*others, *([tag] if sets else [])]


def _suspend(backend: Any, request: Request, *, who: str) -> None:
    group = _named(backend, request["AutoScalingGroupName"])
    group.suspend(request.get("ScalingProcesses") or ["Launch", "Terminate"], who)
    group.reach_target()


def _measure(backend: Any, request: Request) -> None:
    of = {"Granularity": request["Granularity"]}
    metrics = [{"Metric": each, **of} for each in request.get("Metrics") or []]
    _named(backend, request["AutoScalingGroupName"]).settings["EnabledMetrics"] = metrics


OPERATIONS: Mapping[str, Operation] = {
    "create_auto_scaling_group": _create,
    "update_auto_scaling_group": _update,
    "set_desired_capacity": _update,
    "delete_auto_scaling_group": _delete,
    "detach_instances": _detach,
    "describe_auto_scaling_groups": _describe,
    "describe_scaling_activities": _describe_activities,
    "create_or_update_tags": partial(_retag, sets=True),
    "delete_tags": partial(_retag, sets=False),
    "enable_metrics_collection": _measure,
    "suspend_processes": partial(_suspend, who="User suspended"),
    "resume_processes": partial(_suspend, who=""),
}
