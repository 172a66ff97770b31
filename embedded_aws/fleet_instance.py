"""An instance of a Spot fleet, from a launch template and one of the fleet's overrides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moto.ec2.models.instances import Instance
from moto.ec2.models.spot_requests import SpotInstanceRequest
from moto.ec2.utils import convert_tag_spec, random_spot_request_id

from embedded_aws.capacity import SPOT, Pool

FLEET_TAG = "aws:ec2spot:fleet-request-id"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOffer:
    """One override of a fleet, with its template and its pool."""

    config: dict[str, Any]
    override: Any
    pool: Pool


class FleetInstance(SpotInstanceRequest):
    """One Spot (or on-demand) instance of a fleet, from a launch template and an override."""

    def __init__(
        self, offer: PoolOffer, *, backend: Any, fleet_id: str, config: Mapping[str, Any]
    ) -> None:
        self.launch_template = dict(offer.config["LaunchTemplateSpecification"])
        version = backend._get_template_from_args(self.launch_template)
        self.override = offer.override
        self.pool = offer.pool
        self.template_data = version.data
        # In EC2's API, on-demand instances have no lifecycle.
        self.lifecycle = "spot" if offer.pool.market == SPOT else None
        super().__init__(
            ec2_backend=backend,
            spot_request_id=random_spot_request_id(),
            price=self.override.get("SpotPrice") or config.get("SpotPrice") or "",
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
            spot_fleet_id=fleet_id,
            instance_interruption_behaviour=config.get("InstanceInterruptionBehavior"),
        )

    @property
    def is_running(self) -> bool:
        return self.instance.state in ("pending", "running")

    def launch_instance(self) -> Instance:
        """Launch as EC2 does: from the template version, then apply the override."""
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
