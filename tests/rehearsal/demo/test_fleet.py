"""What a machine ran is compared with the template; Auto Scaling groups are followed."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from embedded_aws import EmbeddedAws, EventBus
from rehearsal.demo.fleet import Fleet, MachineLife, user_data_faults
from tests.embedded_aws.fleets import Fleets
from tests.rehearsal.demo.no_machine import NoMachine, life

TEMPLATE = b"#!/bin/bash\necho hello\n"


@dataclass
class Booted(NoMachine):
    """A machine that has got its user data."""

    file: Path
    metrics: Path = Path("nowhere")

    @property
    def user_data_file(self) -> Path:
        return self.file

    @property
    def metrics_file(self) -> Path:
        return self.metrics


def booted(file: Path, metrics: Path = Path("nowhere")) -> MachineLife:
    return life(Booted(file, metrics), template_user_data=TEMPLATE)


def test_one_byte_of_other_user_data_is_a_fault_that_names_its_file(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    same.write_bytes(TEMPLATE)
    other.write_bytes(TEMPLATE.rstrip())
    assert user_data_faults([booted(same), booted(tmp_path / "ended before it got any")]) == []
    (fault,) = user_data_faults([booted(same), booted(other)])
    assert fault == f"i-1 ran other user data than the template's: {other}"


def test_user_data_that_nobody_finds_are_a_fault_of_a_machine_that_has_trained(
    tmp_path: Path,
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    assert len(user_data_faults([booted(tmp_path / "elsewhere", metrics)])) == 1


class Bus:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.types: list[str] = []

    def publish(self, _: str, detail_type: str, *__: object) -> None:
        self.types.append(detail_type)


def test_it_follows_groups_whose_first_machine_somebody_requests() -> None:
    with EmbeddedAws() as aws:
        scaling, fleets = aws.client("autoscaling"), Fleets(aws)
        version = {"LaunchTemplateId": fleets.template, "Version": "1"}
        which = {"AutoScalingGroupName": "S-run-1"}
        scaling.create_auto_scaling_group(
            **which, MinSize=0, MaxSize=2, VPCZoneIdentifier=fleets.subnets[0],
            MixedInstancesPolicy={"LaunchTemplate": {"LaunchTemplateSpecification": version}},
            Tags=[{"Key": "Stack", "Value": "S", "PropagateAtLaunch": True}],
        )  # fmt: skip
        bus, said = Bus(), list[str]()
        fleet = Fleet(aws=aws, bus=cast(EventBus, bus), id="S-run-1", boot=lambda _: NoMachine(),
                      say=said.append, stack="S")  # fmt: skip
        fleet.step()
        assert (fleet.running(), fleet.is_over(), bus.types) == ([], False, [])
        scaling.update_auto_scaling_group(**which, MaxSize=1, DesiredCapacity=1)
        fleet.step()
        (machine,) = fleet.running()
        assert machine.template_user_data == b"#!/bin/bash\necho one\n"
        assert bus.types[0] == "EC2 Instance Launch Successful"
        assert (fleet.target_capacity(), fleet.is_over()) == (1, False)
        scaling.update_auto_scaling_group(**which, MaxSize=0, DesiredCapacity=0)
        for _ in range(3):
            fleet.step()
        assert fleet.is_over()
        assert machine.reason == "terminated by an API call", "without a notice"
        assert bus.types[-1] == "EC2 Instance Terminate Successful"
