"""One run on moto, as the Guard's tests see it: its fleet, instances, objects and mails."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason
from moto.sns.models import sns_backends

from embedded_aws.fleet import maintain_fleets
from stacks.guard import handler as guard
from stacks.guard.settings import GuardSettings, quick_client

ACCOUNT, REGION = "123456789012", "us-east-1"
# One that moto knows by itself; it warns about others.
MOTOS_IMAGE = "ami-12c6146b"
TICK = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}
TAGS = [{"Key": "Stack", "Value": "TrainingStack"}, {"Key": "RunId", "Value": "run-1"}]
SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The run, its stack and the Guard's variables; `tick` is one call of the Guard."""

    fleet_id: str
    topic_arn: str
    # A time of this tick's own; moto's clock is the real one.
    variables: dict[str, str] = field(default_factory=dict)

    def tick(
        self, *, hours_later: float = 0, event: dict[str, Any] = TICK, **settings: object
    ) -> dict[str, str]:
        variables = {**self.variables, **{name: str(value) for name, value in settings.items()}}
        now = datetime.now(UTC).timestamp() + hours_later * 3600
        return guard.respond(GuardSettings.from_environment(variables), event, now)

    def write(self, name: str, document: Any) -> None:
        body = json.dumps(document).encode()
        quick_client("s3").put_object(Bucket="runs", Key=f"runs/run-1/{name}", Body=body)

    def read(self, name: str) -> Any:
        answer = quick_client("s3").get_object(Bucket="runs", Key=f"runs/run-1/{name}")
        return json.loads(answer["Body"].read())

    def head(self, state: str, *names: str, **fields: str) -> None:
        checkpoints = [{"name": name} for name in names]
        self.write("head.json", {"state": state, "checkpoints": checkpoints, **fields})

    def failed(
        self, instance_id: str, message: str, *, hours_ago: float = 0, name: str = "machine-failed"
    ) -> None:
        when = datetime.fromtimestamp(datetime.now(UTC).timestamp() - hours_ago * 3600, UTC)
        key = f"events/{when:%Y%m%dT%H%M%S.%fZ}-{instance_id}-{name}.json"
        self.write(key, {"name": name, "instance_id": instance_id, "message": message})

    def events(self) -> list[Any]:
        """The Guard's own events, oldest first."""
        found = quick_client("s3").list_objects_v2(Bucket="runs", Prefix="runs/run-1/events/")
        names = [each["Key"].removeprefix("runs/run-1/") for each in found.get("Contents", [])]
        return [self.read(name) for name in names if "-guard-" in name]

    def instances(self) -> list[str]:
        pages = quick_client("ec2").describe_instances()["Reservations"]
        return [each["InstanceId"] for page in pages for each in page["Instances"]]

    def live(self) -> list[str]:
        running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        pages = quick_client("ec2").describe_instances(Filters=running)["Reservations"]
        return [each["InstanceId"] for page in pages for each in page["Instances"]]

    def start(self, tags: list[dict[str, str]] = TAGS, **options: Any) -> str:
        started = quick_client("ec2").run_instances(
            ImageId=MOTOS_IMAGE,
            InstanceType="g5.xlarge",
            MinCount=1,
            MaxCount=1,
            TagSpecifications=[{"ResourceType": "instance", "Tags": tags}],
            **options,
        )
        return str(started["Instances"][0]["InstanceId"])

    def end(self, *instance_ids: str) -> None:
        quick_client("ec2").terminate_instances(InstanceIds=list(instance_ids))

    def take_back(self, *instance_ids: str, code: str = "Server.SpotInstanceTermination") -> None:
        """End them as EC2 does when it wants its Spot capacity back."""
        self.end(*instance_ids)
        for each in instance_ids:
            instance = ec2_backends[ACCOUNT][REGION].get_instance(each)
            instance.state_reason = StateReason(f"{code}: no capacity", code)

    def maintain(self) -> None:
        """Let the fleet replace what it lost."""
        maintain_fleets(ec2_backends[ACCOUNT][REGION])

    def state(self) -> str:
        fleets = quick_client("ec2").describe_spot_fleet_requests(
            SpotFleetRequestIds=[self.fleet_id]
        )
        return str(fleets["SpotFleetRequestConfigs"][0]["SpotFleetRequestState"])

    def capacity(self) -> int:
        fleets = quick_client("ec2").describe_spot_fleet_requests(
            SpotFleetRequestIds=[self.fleet_id]
        )
        (fleet,) = fleets["SpotFleetRequestConfigs"]
        return int(fleet["SpotFleetRequestConfig"]["TargetCapacity"])

    def set_capacity(self, target: int) -> None:
        quick_client("ec2").modify_spot_fleet_request(
            SpotFleetRequestId=self.fleet_id, TargetCapacity=target
        )

    def mails(self) -> list[str]:
        sent = sns_backends[ACCOUNT][REGION].topics[self.topic_arn].sent_notifications
        return [str(message) for _, message, *_ in sent]
