"""A Spot fleet with launch templates and real capacity, which moto supports only in part.

An instance starts from the template version in the fleet's configuration, in the cheapest override
whose pool has a free machine.
"""

from collections.abc import Iterator
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.utils import convert_tag_spec, random_spot_fleet_request_id
from moto.sts.models import AssumedRole

from embedded_aws.capacity import ON_DEMAND, SPOT, Pool
from embedded_aws.fleet import ACCESS, LOCK, FleetInstance, InstanceFleet, PoolOffer
from embedded_aws.iam.evaluation import ApiCall

FLEET_TAG = "aws:ec2spot:fleet-request-id"
DECREASE = "capacity decreased"


class TemplateFleet(InstanceFleet):
    """A Spot fleet request whose instances come from launch templates.

    It replaces moto's SpotFleetRequest and has the attributes that moto's code reads.
    """

    service_roles = (
        "spotfleet.amazonaws.com/AWSServiceRoleForEC2SpotFleet",
        "spot.amazonaws.com/AWSServiceRoleForEC2Spot",
    )

    def __init__(self, backend: Any, config: dict[str, Any]) -> None:
        super().__init__(backend)
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
        self.session: AssumedRole | None = None

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
        with LOCK:
            self.spot_requests = [item for item in self.spot_requests if item.is_running]
            on_demand = int(self.config.get("OnDemandTargetCapacity") or 0)
            wanted = {ON_DEMAND: on_demand, SPOT: self.target_capacity - on_demand}
            self.reclaim()
            policy = self.config.get("ExcessCapacityTerminationPolicy", "default")
            if self.state == "active" and policy.lower() == "default":
                # On-demand instances stay: EC2 documents a decrease only for Spot instances.
                for request in self._kept(SPOT)[max(wanted[SPOT], 0) :]:
                    if request.instance.id not in self.capacity.endings:
                        self.capacity.end(
                            request.instance.id, DECREASE, has_notice=True, is_excess=True
                        )
            self.end_due()
            if self.state == "active":
                for market in (ON_DEMAND, SPOT):
                    self.launch(market, wanted[market] - len(self._kept(market)))

    def _kept(self, market: str) -> list[FleetInstance]:
        """Return the instances that count towards the target; lost ones do until they are gone."""
        endings = self.capacity.endings
        return [
            item
            for item in self.spot_requests
            if item.pool.market == market
            and not (item.instance.id in endings and endings[item.instance.id].is_excess)
        ]

    def may_launch(self, offer: PoolOffer) -> bool:
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
        data = self.ec2_backend._get_template_from_args(offer.template).data
        if profile := data.get("IamInstanceProfile"):
            passed = access.role_of_profile(profile.get("Arn") or profile["Name"])
            to = {"iam:passedtoservice": "ec2.amazonaws.com"}
            wanted.append(ApiCall(action="iam:PassRole", resource=passed, keys=to))
        return all(access.allows(self.session, one) for one in wanted)

    def offers(self, market: str) -> Iterator[PoolOffer]:
        for config in self.config["LaunchTemplateConfigs"]:
            template = dict(config["LaunchTemplateSpecification"])
            version = self.ec2_backend._get_template_from_args(template)
            for override in config.get("Overrides") or [{}]:
                zone = override.get("AvailabilityZone") or self.zone_of(override.get("SubnetId"))
                size = override.get("InstanceType") or version.instance_type
                pool = Pool(market=market, size=size, zone=zone)
                yield PoolOffer(template=template, override=override, pool=pool)

    def request(self, offer: PoolOffer) -> FleetInstance:
        return FleetInstance(
            offer,
            backend=self.ec2_backend,
            tags={FLEET_TAG: self.id},
            price=offer.override.get("SpotPrice") or self.config.get("SpotPrice") or "",
            spot_fleet_id=self.id,
            instance_interruption_behaviour=self.config.get("InstanceInterruptionBehavior"),
        )

    def cancel(self, *, terminate: bool) -> None:
        """Stop maintaining the target for good, and terminate the instances or keep them."""
        self.state = "cancelled_terminating" if terminate else "cancelled_running"
        if terminate:
            self.config = self.config | {"TargetCapacity": 0, "OnDemandTargetCapacity": 0}
            self.end(list(self.spot_requests))

    def end(self, requests: list[FleetInstance]) -> None:
        super().end(requests)
        self.spot_requests = [item for item in self.spot_requests if item not in requests]
