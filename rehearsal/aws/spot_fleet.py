"""A Spot fleet with launch templates, which moto supports only in part.

Every instance starts from the template version in the fleet's configuration, in the first override.
"""

import threading
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import Instance
from moto.ec2.models.spot_requests import SpotInstanceRequest
from moto.ec2.utils import convert_tag_spec, random_spot_fleet_request_id, random_spot_request_id

FLEET_TAG = "aws:ec2spot:fleet-request-id"
# Two clients that ask for the same target at once must not start two instances.
_LOCK = threading.RLock()


class FleetNotFound(EC2ClientError):
    """The error for a fleet id that EC2 does not know."""

    def __init__(self, fleet_id: str) -> None:
        super().__init__(
            "InvalidSpotFleetRequestId.NotFound",
            f"The spot fleet request ID '{fleet_id}' does not exist",
        )


class FleetNotModifiable(EC2ClientError):
    """The error for a change that the fleet does not accept."""

    def __init__(self, why: str) -> None:
        super().__init__("InvalidParameterValue", why)


class FleetInstance(SpotInstanceRequest):
    """One Spot (or on-demand) instance of a fleet, from a launch template and an override."""

    def __init__(self, fleet: "TemplateFleet", *, lifecycle: str | None) -> None:
        backend = fleet.ec2_backend
        config = fleet.config["LaunchTemplateConfigs"][0]
        self.launch_template = dict(config["LaunchTemplateSpecification"])
        version = backend._get_template_from_args(self.launch_template)
        self.override = (config.get("Overrides") or [{}])[0]
        self.template_data = version.data
        self.lifecycle = lifecycle
        super().__init__(
            ec2_backend=backend,
            spot_request_id=random_spot_request_id(),
            price=self.override.get("SpotPrice") or fleet.config.get("SpotPrice") or "",
            image_id=version.image_id,
            spot_instance_type="one-time",
            valid_from=None,
            valid_until=None,
            launch_group=None,
            availability_zone_group=None,
            key_name=version.data.get("KeyName"),
            security_groups=version.data.get("SecurityGroupIds", []),
            user_data=version.user_data,
            instance_type=self.override.get("InstanceType") or version.instance_type,
            placement=self.override.get("AvailabilityZone"),
            kernel_id=None,
            ramdisk_id=None,
            monitoring_enabled=bool(version.data.get("Monitoring", {}).get("Enabled")),
            subnet_id=self.override.get("SubnetId"),
            tags={},
            spot_fleet_id=fleet.id,
            instance_interruption_behaviour=fleet.config.get("InstanceInterruptionBehavior"),
        )

    @property
    def is_running(self) -> bool:
        return self.instance.state in ("pending", "running")

    def launch_instance(self) -> Instance:
        """Launch as EC2 does: everything from the template version, then the override."""
        tags = convert_tag_spec(self.template_data.get("TagSpecifications", []))
        instance_tags = {**tags.get("instance", {}), FLEET_TAG: self.spot_fleet_id}
        reservation = self.ec2_backend.run_instances(
            image_id="",
            count=1,
            user_data=None,
            security_group_names=[],
            launch_template=self.launch_template,
            instance_type=self.launch_specification.instance_type,
            is_instance_type_default=False,
            region_name=self.ec2_backend.region_name,
            placement=self.launch_specification.availability_zone,
            subnet_id=self.launch_specification.subnet_id,
            metadata_options=self.template_data.get("MetadataOptions", {}),
            spot_fleet_id=self.spot_fleet_id,
            associate_public_ip=None,  # as the subnet maps it
            tags={"instance": instance_tags, "volume": tags.get("volume", {})},
            lifecycle=self.lifecycle,
        )
        instance: Instance = reservation.instances[0]
        profile = self.template_data.get("IamInstanceProfile", {})
        if profile:
            self.ec2_backend.associate_iam_instance_profile(
                instance_id=instance.id,
                iam_instance_profile_name=profile.get("Name"),
                iam_instance_profile_arn=profile.get("Arn"),
            )
        return instance


class TemplateFleet:
    """A Spot fleet request whose instances come from launch templates.

    It replaces moto's SpotFleetRequest and has what moto's instances and responses read.
    """

    def __init__(self, backend: Any, config: dict[str, Any]) -> None:
        self.ec2_backend = backend
        self.id = random_spot_fleet_request_id()
        self.config: dict[str, Any] = {
            "Type": "maintain",
            "OnDemandTargetCapacity": 0,
            "AllocationStrategy": "lowestPrice",
        } | config
        self.state = "active"
        self.tags = convert_tag_spec(config.get("TagSpecifications", []))
        # moto's Instance.terminate would subtract the weights of these from fulfilled_capacity.
        self.launch_specs: list[Any] = []
        self.spot_requests: list[FleetInstance] = []
        self.reach_target()

    @property
    def spot_fleet_request_id(self) -> str:
        return self.id

    @property
    def spot_fleet_request_state(self) -> str:
        return self.state

    @property
    def tag_set(self) -> list[dict[str, str]]:
        tags = self.tags.get("spot-fleet-request", {})
        return [{"Key": key, "Value": value} for key, value in tags.items()]

    @property
    def target_capacity(self) -> int:
        return int(self.config["TargetCapacity"])

    @property
    def fulfilled_capacity(self) -> float:
        return float(sum(request.is_running for request in self.spot_requests))

    @property
    def spot_fleet_request_config(self) -> dict[str, Any]:
        on_demand = [item for item in self.spot_requests if item.lifecycle is None]
        return self.config | {
            "FulfilledCapacity": self.fulfilled_capacity,
            "OnDemandFulfilledCapacity": float(len(on_demand)),
        }

    def modify(self, changes: dict[str, Any]) -> None:
        """Set a new target, on-demand base or template version, then reach it."""
        if self.state != "active":
            raise FleetNotModifiable(f"The spot fleet request '{self.id}' is in state {self.state}")
        if self.config["Type"] != "maintain":
            raise FleetNotModifiable("Only spot fleet requests of type maintain can be modified")
        wanted = self.config | changes
        if int(wanted["OnDemandTargetCapacity"]) > int(wanted["TargetCapacity"]):
            raise FleetNotModifiable(
                f"OnDemandTargetCapacity {wanted['OnDemandTargetCapacity']} is above "
                f"TargetCapacity {wanted['TargetCapacity']}"
            )
        self.config = wanted
        self.reach_target()

    def reach_target(self) -> None:
        """Launch what is missing; terminate the excess, unless the fleet's policy keeps it."""
        with _LOCK:
            self.spot_requests = [item for item in self.spot_requests if item.is_running]
            on_demand = int(self.config.get("OnDemandTargetCapacity") or 0)
            self._reach(None, on_demand)
            self._reach("spot", self.target_capacity - on_demand)

    def _reach(self, lifecycle: str | None, wanted: int) -> None:
        have = [item for item in self.spot_requests if item.lifecycle == lifecycle]
        for _ in range(wanted - len(have)):
            request = FleetInstance(self, lifecycle=lifecycle)
            self.ec2_backend.spot_instance_requests[request.id] = request
            self.spot_requests.append(request)
        policy = self.config.get("ExcessCapacityTerminationPolicy", "default")
        if policy.lower() == "default" and len(have) > wanted:
            self._end(have[max(wanted, 0) :])

    def cancel(self, *, terminate: bool) -> None:
        """Stop following the target for good; the instances are terminated or stay."""
        self.state = "cancelled_terminating" if terminate else "cancelled_running"
        if terminate:
            self.config = self.config | {"TargetCapacity": 0, "OnDemandTargetCapacity": 0}
            self._end(list(self.spot_requests))

    def _end(self, requests: list[FleetInstance]) -> None:
        ids = [item.instance.id for item in requests if item.is_running]
        if ids:
            self.ec2_backend.terminate_instances(ids)
        self.spot_requests = [item for item in self.spot_requests if item not in requests]
