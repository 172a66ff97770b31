"""Instances that EC2 keeps at a target: what Spot fleets and Auto Scaling groups share.

An instance starts from a launch template's version, in a pool that has a free machine. All fleets
of an account share its capacity, and `maintain_fleets` does what is due as time passes.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.models.spot_requests import SpotInstanceRequest
from moto.ec2.utils import convert_tag_spec, random_spot_request_id

from embedded_aws.capacity import SPOT, Capacity, Pool
from embedded_aws.limits import Limits


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOffer:
    """One override of a fleet, with its template and its pool."""

    template: dict[str, Any]
    override: Any
    pool: Pool


# Arguments of moto's class that a request of a fleet need not set.
_UNSET = ("valid_from", "valid_until", "launch_group", "availability_zone_group", "kernel_id",
          "ramdisk_id", "spot_fleet_id", "instance_interruption_behaviour")  # fmt: skip


class FleetInstance(SpotInstanceRequest):
    """One Spot (or on-demand) instance of a fleet, from a launch template and an override."""

    def __init__(
        self, offer: PoolOffer, *, backend: Any, tags: Mapping[str, str], **request: Any
    ) -> None:
        self.launch_template = offer.template
        version = backend._get_template_from_args(self.launch_template)
        self.override = offer.override
        self.pool = offer.pool
        self.fleet_tags = dict(tags)
        self.template_data = version.data
        # In EC2's API, on-demand instances have no lifecycle.
        self.lifecycle = "spot" if offer.pool.market == SPOT else None
        named: dict[str, Any] = {**dict.fromkeys(_UNSET), **request}
        super().__init__(
            ec2_backend=backend,
            spot_request_id=random_spot_request_id(),
            image_id=version.image_id,
            spot_instance_type="one-time",
            key_name=version.data.get("KeyName"),
            security_groups=version.data.get("SecurityGroupIds", []),
            user_data=version.user_data,
            instance_type=self.override.get("InstanceType") or version.instance_type,
            placement=self.override.get("AvailabilityZone"),
            monitoring_enabled=bool(version.data.get("Monitoring", {}).get("Enabled")),
            subnet_id=self.override.get("SubnetId"),
            tags={},
            **named,
        )

    @property
    def is_running(self) -> bool:
        return self.instance.state in ("pending", "running")

    def launch_instance(self) -> Instance:
        """Launch as EC2 does: from the template version, then apply the override."""
        tags = convert_tag_spec(self.template_data.get("TagSpecifications", []))
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
            tags={
                "instance": {**tags.get("instance", {}), **self.fleet_tags},
                "volume": tags.get("volume", {}),
            },
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


_LIMITS = Limits()
# How soon EC2 tries again is undocumented.
SECONDS_AFTER_FAILURE = 30.0
# Two clients that ask for the same target at once must not start two instances.
LOCK = threading.RLock()
# The capacity of the running account: like moto's state, there is one per process.
CAPACITY = [Capacity()]
# The account's iam.access.AccessControl; None while no embedded AWS runs.
ACCESS: list[Any] = [None]


class InstanceFleet:
    """Instances of one target, in pools whose capacity all fleets share."""

    # The service-linked roles that start instances and create their volumes.
    service_roles: tuple[str, ...]

    def __init__(self, backend: Any) -> None:
        self.ec2_backend = backend
        self.capacity = CAPACITY[0]
        self.failed_until = 0.0
        # moto reads a Spot fleet's under this name.
        self.spot_requests: list[FleetInstance] = []
        self.capacity.fleets.append(self)

    def reach_target(self) -> None:
        """Mark instances to take back, end those that are due, and launch missing ones."""
        raise NotImplementedError

    def offers(self, market: str) -> Iterator[PoolOffer]:
        """Yield the overrides with their pools, in the order of the configuration."""
        raise NotImplementedError

    def request(self, offer: PoolOffer) -> FleetInstance:
        """Start an instance."""
        raise NotImplementedError

    def end(self, requests: list[FleetInstance]) -> None:
        """Terminate instances."""
        ids = [item.instance.id for item in requests if item.is_running]
        if ids:
            self.ec2_backend.terminate_instances(ids)

    def choose(self, market: str) -> PoolOffer | None:
        """Return the cheapest override whose pool has a free machine; on a tie, the first."""
        return min(
            self.free(market),
            key=lambda offer: self.capacity.usd_per_hour(offer.pool),
            default=None,
        )

    def free(self, market: str) -> list[PoolOffer]:
        """Return the overrides whose pools have a free machine."""
        return [
            offer
            for offer in self.offers(market)
            if self.capacity.machines(offer.pool) > len(self._of(offer.pool))
        ]

    def may_launch(self, offer: PoolOffer) -> bool:
        """Whether EC2 lets the fleet start an instance."""
        return True

    def launch(self, market: str, count: int) -> None:
        """Start instances while there is capacity."""
        for _ in range(count):
            offer = self.choose(market)
            waits = self.capacity.clock() < self.failed_until
            if waits or offer is None or not self._is_whole(offer) or not self.may_launch(offer):
                return
            request = self.request(offer)
            self.ec2_backend.spot_instance_requests[request.id] = request
            self.spot_requests.append(request)
            if not all(
                map(self._may_encrypt, request.template_data.get("BlockDeviceMappings", []))
            ):
                self.end([request])
                code = "Client.InternalError"
                request.instance.state_reason = StateReason(f"{code}: Client error on launch", code)
                self.failed_until = self.capacity.clock() + SECONDS_AFTER_FAILURE

    def reclaim(self) -> None:
        """Mark the newest instances of a pool that has fewer machines than we use."""
        endings = self.capacity.endings
        for request in reversed(self.spot_requests):
            staying = sum(item.instance.id not in endings for item in self._of(request.pool))
            is_lost = request.is_running and staying > self.capacity.machines(request.pool)
            if is_lost and request.instance.id not in endings:
                self.capacity.reclaim(request.instance.id, request.pool)

    def end_due(self) -> None:
        """Terminate the instances whose notice is over."""
        now = self.capacity.clock()
        for request in list(self.spot_requests):
            ending = self.capacity.endings.get(request.instance.id)
            if ending is not None and now >= ending.ends_at and request.is_running:
                self.end([request])
                code = "Server.SpotInstanceTermination"
                request.instance.state_reason = StateReason(f"{code}: {ending.reason}", code)

    def zone_of(self, subnet_id: str | None) -> str:
        """Return a subnet's zone, empty without a subnet."""
        if subnet_id is None:
            return ""
        return str(self.ec2_backend.get_subnet(subnet_id).availability_zone)

    def _is_whole(self, offer: PoolOffer) -> bool:
        """Whether RunInstances takes the template's data, of which EC2 checks most only then."""
        data = self.ec2_backend._get_template_from_args(offer.template).data
        return _LIMITS.beyond("ec2:RunInstances", data) is None

    def _may_encrypt(self, device: Mapping[str, Any]) -> bool:
        access, key = ACCESS[0], device.get("Ebs", {}).get("KmsKeyId")
        return access is None or key is None or access.may_encrypt_volumes(key, self.service_roles)

    def _of(self, pool: Pool) -> list[FleetInstance]:
        """Return the running instances of a pool in all fleets."""
        return [
            item
            for fleet in CAPACITY[0].fleets
            for item in fleet.spot_requests
            if item.pool == pool and item.is_running
        ]


def maintain_fleets(backend: Any) -> None:
    """Take back, end and replace instances of every fleet as due."""
    for fleet in list(CAPACITY[0].fleets):
        if fleet.ec2_backend is backend:
            fleet.reach_target()
