"""A Spot fleet with launch templates and real capacity, which moto supports only in part.

An instance starts from the template version in the fleet's configuration, in the cheapest override
whose pool has a free machine. `maintain_fleets` does what is due as time passes.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instances import Instance, StateReason
from moto.ec2.models.spot_requests import SpotInstanceRequest
from moto.ec2.utils import convert_tag_spec, random_spot_fleet_request_id, random_spot_request_id
from moto.sts.models import AssumedRole

from embedded_aws.capacity import ON_DEMAND, SPOT, Capacity, Pool
from embedded_aws.iam.access import AccessControl
from embedded_aws.iam.evaluation import ApiCall
from embedded_aws.limits import Limits

FLEET_TAG = "aws:ec2spot:fleet-request-id"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOffer:
    """One override of a fleet, with its template and its pool."""

    config: dict[str, Any]
    override: Any
    pool: Pool


# Arguments of moto's class that no request of a fleet sets.
_UNSET = ("valid_from", "valid_until", "launch_group", "availability_zone_group", "kernel_id",
          "ramdisk_id")  # fmt: skip


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
            key_name=version.data.get("KeyName"),
            security_groups=version.data.get("SecurityGroupIds", []),
            user_data=version.user_data,
            instance_type=self.override.get("InstanceType") or version.instance_type,
            placement=self.override.get("AvailabilityZone"),
            monitoring_enabled=bool(version.data.get("Monitoring", {}).get("Enabled")),
            subnet_id=self.override.get("SubnetId"),
            tags={},
            spot_fleet_id=fleet_id,
            instance_interruption_behaviour=config.get("InstanceInterruptionBehavior"),
            **dict.fromkeys(_UNSET),
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


DECREASE = "capacity decreased"
_LIMITS = Limits()
# How soon EC2 tries again is undocumented.
_SECONDS_AFTER_FAILURE = 30.0
# Two clients that ask for the same target at once must not start two instances.
_LOCK = threading.RLock()
# The capacity of the running account: like moto's state, there is one per process.
CAPACITY = [Capacity()]
# The account's IAM; None while no embedded AWS runs.
ACCESS: list[AccessControl | None] = [None]


class TemplateFleet:
    """A Spot fleet request whose instances come from launch templates.

    It replaces moto's SpotFleetRequest and has the attributes that moto's code reads.
    """

    def __init__(self, backend: Any, config: dict[str, Any]) -> None:
        self.ec2_backend = backend
        self.id = random_spot_fleet_request_id()
        self.config: dict[str, Any] = {
            "Type": "maintain",
            "OnDemandTargetCapacity": 0,
            "AllocationStrategy": "lowestPrice",
        } | config
        self.capacity = CAPACITY[0]
        self.state = "active"
        self.tags = convert_tag_spec(config.get("TagSpecifications", []))
        # moto's Instance.terminate would subtract the weights of these from fulfilled_capacity.
        self.launch_specs: list[Any] = []
        self.session: AssumedRole | None = None
        self.failed_until = 0.0
        self.spot_requests: list[FleetInstance] = []

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
        running = [item.pool.market for item in self.spot_requests if item.is_running]
        return self.config | {
            "FulfilledCapacity": self.fulfilled_capacity,
            "OnDemandFulfilledCapacity": float(running.count(ON_DEMAND)),
        }

    @property
    def activity_status(self) -> str:
        if any(item.instance.id in self.capacity.endings for item in self.spot_requests):
            return "pending_termination"
        is_full = self.fulfilled_capacity >= self.target_capacity
        return "fulfilled" if is_full else "pending_fulfillment"

    def modify(self, changes: dict[str, Any]) -> None:
        """Set a new target, on-demand base or template version, then reach it."""
        if self.state != "active":
            raise EC2ClientError(
                "FleetNotInModifiableState",
                f"The spot fleet request '{self.id}' is in state {self.state}",
            )
        if self.config["Type"] != "maintain":
            why = "Only spot fleet requests of type maintain can be modified"
            raise EC2ClientError("InvalidParameterValue", why)
        wanted = self.config | changes
        if int(wanted["OnDemandTargetCapacity"]) > int(wanted["TargetCapacity"]):
            raise EC2ClientError(
                "InvalidParameterValue",
                f"OnDemandTargetCapacity {wanted['OnDemandTargetCapacity']} is above "
                f"TargetCapacity {wanted['TargetCapacity']}",
            )
        self.config = wanted
        self.reach_target()

    def reach_target(self) -> None:
        """Mark instances to take back, end those that are due, and launch missing ones."""
        with _LOCK:
            self.spot_requests = [item for item in self.spot_requests if item.is_running]
            on_demand = int(self.config.get("OnDemandTargetCapacity") or 0)
            wanted = {ON_DEMAND: on_demand, SPOT: self.target_capacity - on_demand}
            self._reclaim()
            policy = self.config.get("ExcessCapacityTerminationPolicy", "default")
            if self.state == "active" and policy.lower() == "default":
                # On-demand instances stay: EC2 documents a decrease only for Spot instances.
                for request in self._kept(SPOT)[max(wanted[SPOT], 0) :]:
                    if request.instance.id not in self.capacity.endings:
                        self.capacity.end(
                            request.instance.id, DECREASE, has_notice=True, is_excess=True
                        )
            self._end_due()
            if self.state == "active":
                for market in (ON_DEMAND, SPOT):
                    self._launch(market, wanted[market] - len(self._kept(market)))

    def _kept(self, market: str) -> list[FleetInstance]:
        """Return the instances that count towards the target; lost ones do until they are gone."""
        endings = self.capacity.endings
        return [
            item
            for item in self.spot_requests
            if item.pool.market == market
            and not (item.instance.id in endings and endings[item.instance.id].is_excess)
        ]

    def _reclaim(self) -> None:
        """Mark the newest instances of a pool that has fewer machines than we use."""
        endings = self.capacity.endings
        for request in reversed(self.spot_requests):
            staying = sum(item.instance.id not in endings for item in self._of(request.pool))
            is_lost = staying > self.capacity.machines(request.pool)
            if is_lost and request.instance.id not in endings:
                self.capacity.reclaim(request.instance.id, request.pool)

    def _end_due(self) -> None:
        now = self.capacity.clock()
        for request in list(self.spot_requests):
            ending = self.capacity.endings.get(request.instance.id)
            if ending is not None and now >= ending.ends_at:
                self._end([request])
                code = "Server.SpotInstanceTermination"
                request.instance.state_reason = StateReason(f"{code}: {ending.reason}", code)

    def _launch(self, market: str, count: int) -> None:
        for _ in range(count):
            offer = self._cheapest(market)
            waits = self.capacity.clock() < self.failed_until
            if waits or offer is None or not self._may_launch(offer):
                return
            request = FleetInstance(
                offer, backend=self.ec2_backend, fleet_id=self.id, config=self.config
            )
            self.ec2_backend.spot_instance_requests[request.id] = request
            self.spot_requests.append(request)
            if not all(
                map(self._may_encrypt, request.template_data.get("BlockDeviceMappings", []))
            ):
                self._end([request])
                code = "Client.InternalError"
                request.instance.state_reason = StateReason(f"{code}: Client error on launch", code)
                self.failed_until = self.capacity.clock() + _SECONDS_AFTER_FAILURE

    def _may_encrypt(self, device: Mapping[str, Any]) -> bool:
        access, key = ACCESS[0], device.get("Ebs", {}).get("KmsKeyId")
        return access is None or key is None or access.may_encrypt_volumes(key)

    def _may_launch(self, offer: PoolOffer) -> bool:
        """Whether EC2 may start instances of the template, tag them and pass them their role."""
        access = ACCESS[0]
        if access is None:
            return True
        here = f"arn:aws:ec2:{access.region}:{access.account}"
        role, source = self.config["IamFleetRole"], f"{here}:spot-fleet-request/{self.id}"
        try:
            self.session = self.session or access.assume(
                role, service="spotfleet", source_arn=source, name="SpotFleet"
            )
        except PermissionError:
            return False
        wanted = [ApiCall(action=f"ec2:{name}", resource=f"{here}:instance/*")
                  for name in ("RunInstances", "CreateTags")]  # fmt: skip
        template = dict(offer.config["LaunchTemplateSpecification"])
        data = self.ec2_backend._get_template_from_args(template).data
        # EC2 checks most of a template's data when it starts an instance, and not before.
        if _LIMITS.beyond("ec2:RunInstances", data) is not None:
            return False
        if profile := data.get("IamInstanceProfile"):
            passed = access.role_of_profile(profile.get("Arn") or profile["Name"])
            to = {"iam:passedtoservice": "ec2.amazonaws.com"}
            wanted.append(ApiCall(action="iam:PassRole", resource=passed, keys=to))
        return all(access.allows(self.session, one) for one in wanted)

    def _cheapest(self, market: str) -> PoolOffer | None:
        """Return the cheapest override whose pool has a free machine; on a tie, the first."""
        free = [
            offer
            for offer in self._offers(market)
            if self.capacity.machines(offer.pool) > len(self._of(offer.pool))
        ]
        return min(free, key=lambda offer: self.capacity.usd_per_hour(offer.pool), default=None)

    def _offers(self, market: str) -> list[PoolOffer]:
        found = []
        for config in self.config["LaunchTemplateConfigs"]:
            specification = dict(config["LaunchTemplateSpecification"])
            version = self.ec2_backend._get_template_from_args(specification)
            for override in config.get("Overrides") or [{}]:
                zone = override.get("AvailabilityZone") or self._zone(override.get("SubnetId"))
                size = override.get("InstanceType") or version.instance_type
                pool = Pool(market=market, size=size, zone=zone)
                found.append(PoolOffer(config=config, override=override, pool=pool))
        return found

    def _zone(self, subnet_id: str | None) -> str:
        if subnet_id is None:
            return ""
        return str(self.ec2_backend.get_subnet(subnet_id).availability_zone)

    def _of(self, pool: Pool) -> list[FleetInstance]:
        """Return the running instances of a pool in all fleets."""
        return [
            item
            for fleet in _template_fleets(self.ec2_backend)
            for item in fleet.spot_requests
            if item.pool == pool and item.is_running
        ]

    def cancel(self, *, terminate: bool) -> None:
        """Stop maintaining the target for good, and terminate the instances or keep them."""
        self.state = "cancelled_terminating" if terminate else "cancelled_running"
        if terminate:
            self.config = self.config | {"TargetCapacity": 0, "OnDemandTargetCapacity": 0}
            self._end(list(self.spot_requests))

    def _end(self, requests: list[FleetInstance]) -> None:
        ids = [item.instance.id for item in requests if item.is_running]
        if ids:
            self.ec2_backend.terminate_instances(ids)
        self.spot_requests = [item for item in self.spot_requests if item not in requests]


def maintain_fleets(backend: Any) -> None:
    """Take back, end and replace instances of every fleet as due."""
    for fleet in _template_fleets(backend):
        fleet.reach_target()


def _template_fleets(backend: Any) -> list[TemplateFleet]:
    fleets = backend.spot_fleet_requests.values()
    return [fleet for fleet in fleets if isinstance(fleet, TemplateFleet)]
