"""How a machine ends itself or its run: what userdata's service_failed.sh and give_up.sh do."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract.errors import UserError
from contract.keys import HEAD
from tests.simulation.bucket import GuardService, SimulatedStore
from tests.simulation.clock import sleep
from tests.stacks.guard.world import Machine
from training.durable.report.receipt import fail_run
from training.durable.store.protocol import StoreError

if TYPE_CHECKING:
    from tests.simulation.world import Universe


class Ends:
    """A host's ends, by the machine's AWS CLI."""

    world: "Universe"
    machine: Machine
    folder: Path
    cli: dict[str, GuardService]

    def leave_event(self, name: str, status: str, **fields: Any) -> None:
        raise NotImplementedError

    def send_once(self) -> None:
        raise NotImplementedError

    def _s3(self, operation: str, **request: Any) -> Any:
        return getattr(self.cli["s3"], operation)(Bucket="runs", **request)

    def _terminate_self(self) -> None:
        while True:
            try:
                self.cli["ec2"].terminate_instances(InstanceIds=[self.machine.id])
                return
            except Exception:
                sleep(60)

    def end_as(self, how: str, why: str) -> None:
        """What service_failed.sh does: the run ends (give_up.sh), or this machine."""
        if how == "give up":
            self.leave_event("run-given-up", "failed", message=why)
            try:
                fail_run(SimulatedStore(self.world, self.machine.id), self.machine.id, why)
            except (StoreError, UserError):
                self.leave_event("head-not-marked", "failed", message=why)
            self.send_once()
            self.fleet_to_zero()
            return
        self.leave_event("machine-failed", "failed", message=why)
        self.send_once()
        self._terminate_self()

    def fleet_to_zero(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "stopping").touch()
        before = self.run_state()
        for _ in range(10):
            with suppress(Exception):
                fleet = self.cli["ssm"].get_parameter(Name="fleet")["Parameter"]["Value"]
                if fleet.startswith("sfr-"):
                    self.cli["ec2"].modify_spot_fleet_request(
                        SpotFleetRequestId=fleet, TargetCapacity=0, OnDemandTargetCapacity=0
                    )
                    if self.machine.market == "on-demand":
                        self.cli["ec2"].terminate_instances(InstanceIds=[self.machine.id])
                else:
                    for group in (fleet, f"{fleet}.on-demand"):
                        self.cli["autoscaling"].update_auto_scaling_group(
                            AutoScalingGroupName=group, MinSize=0, MaxSize=0, DesiredCapacity=0
                        )
                return
            sleep(6)
            now = self.run_state()
            if before in ("finished", "failed") and now and now != before:
                self._terminate_self()  # a person has taken the run's end back
                return

    def run_state(self) -> str | None:
        """The head's state, as run_state.sh reads it; None if it cannot be read."""
        try:
            found = self._s3("get_object", Key=self.world.prefix + HEAD)
            return str(json.loads(found["Body"].read())["state"])
        except Exception as failure:
            return "" if "NoSuchKey" in str(failure) else None
