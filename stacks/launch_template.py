"""The launch template: image, volumes, role and user data of an instance."""

from typing import Any

from aws_cdk import Acknowledgment, Size, Stack, Tags, Validations
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_kms as kms
from constructs import Construct, IDependable

from contract.aws_limits import aws_limits
from stacks.parameters import StackParameters
from stacks.parameters.checks import GP3_MAX_IOPS, OURS, ROOT_DEVICE_NAME
from stacks.roles import InstanceRole
from stacks.user_data import DATA_DEVICE_NAME

# cfn-lint's E3671, which every synth runs as well, knows the most that gp3 had until 2025.
_RULE_MAX_IOPS = 16_000


class TrainingLaunchTemplate(Construct):
    """A Deep Learning AMI with two encrypted volumes, IMDSv2 only, no SSH key, no market options.

    The fleet sets the market options: it refuses a template that brings its own.
    """

    template: ec2.LaunchTemplate
    group: ec2.SecurityGroup

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        role: InstanceRole,
        vpc_id: str,
        key: kms.IKey | None,
        image_id: str,
        user_data: str,
    ) -> None:
        super().__init__(scope, construct_id)
        self.group = self._group_of(parameters.run_id, vpc_id, role)
        self.template = ec2.LaunchTemplate(
            self,
            "Template",
            instance_type=ec2.InstanceType(parameters.size),
            user_data=ec2.UserData.custom(user_data),
            instance_profile=role.profile,
            security_group=self.group,
            block_devices=_block_devices(parameters, key),
            require_imdsv2=True,
            http_endpoint=True,
            http_put_response_hop_limit=1,
        )
        resource = self.template.node.default_child
        assert isinstance(resource, ec2.CfnLaunchTemplate)
        resource.add_property_override("LaunchTemplateData.ImageId", image_id)
        if parameters.data_on != "nvme" and parameters.data_volume.iops > _RULE_MAX_IOPS:
            resource.add_metadata("cfn-lint", {"config": {"ignore_checks": ["E3671"]}})
            reason = f"gp3 has up to {GP3_MAX_IOPS:,} IOPS: {aws_limits()['volume-iops'].page}"
            Validations.of(self.template).acknowledge(
                Acknowledgment(id="CloudFormation-Validate::E3671", reason=reason)
            )
        # These reach the launch template, its instances and their volumes; a fleet's tags do not.
        Tags.of(self.template).add("Name", f"{Stack.of(self).stack_name}-{parameters.run_id}")
        Tags.of(self.template).add("RunId", parameters.run_id, priority=OURS)

    def _group_of(self, run_id: str, vpc_id: str, role: IDependable) -> ec2.SecurityGroup:
        """Create the run's security group, which is deleted before its role.

        EC2 does not delete a group while an instance is in it, and CloudFormation waits for that,
        so a machine that a deploy or a destroy shuts down can still save.
        """
        group = ec2.SecurityGroup(
            Construct(self, run_id),
            "Group",
            # The zones do not matter here.
            vpc=ec2.Vpc.from_vpc_attributes(self, "Vpc", vpc_id=vpc_id, availability_zones=[""]),
            description="Training instances: outbound only, reached through Session Manager",
            allow_all_outbound=True,
        )
        group.node.add_dependency(role)
        return group


def _block_devices(parameters: StackParameters, key: kms.IKey | None) -> list[ec2.BlockDevice]:
    def disk(device_name: str, gib: int, **more: Any) -> ec2.BlockDevice:
        volume = ec2.BlockDeviceVolume.ebs(
            gib,
            volume_type=ec2.EbsDeviceVolumeType.GP3,
            encrypted=True,
            kms_key=key,
            # EC2's default for non-root volumes is false: every interruption would leave a
            # 200 GiB orphan behind.
            delete_on_termination=True,
            **more,
        )
        return ec2.BlockDevice(device_name=device_name, volume=volume)

    root, data = parameters.root_volume, parameters.data_volume
    rate = root.initialization_mib_per_second
    faster = {"volume_initialization_rate": Size.mebibytes(rate)} if rate else {}
    disks = [disk(ROOT_DEVICE_NAME, root.gib, **faster)]
    # Nothing would use a volume on nvme: EC2 attaches a size's instance store without a mapping.
    if parameters.data_on != "nvme":
        speed = {"iops": data.iops, "throughput": data.mib_per_second}
        disks.append(disk(DATA_DEVICE_NAME, data.gib, **speed))
    return disks
