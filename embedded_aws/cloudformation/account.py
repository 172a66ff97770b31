"""The account as stacks see it: services, SSM parameters, zones and templates in S3."""

import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from embedded_aws.cloudformation.errors import CloudFormationError


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionalAccount:
    """An account in one region, reached through the services' own APIs.

    `client` returns a cached boto3 client by service name (creating one takes 50 ms); with
    `role_arn`, one that acts as that role.
    """

    id: str
    region: str
    client: Callable[..., Any]

    def acting_as(self, role_arn: str | None) -> "RegionalAccount":
        """Return the account as seen by the role in which CloudFormation carries out a stack."""
        if not role_arn:
            return self
        return replace(self, client=partial(self.client, role_arn=role_arn))

    def arn(self, service: str, resource: str) -> str:
        return f"arn:aws:{service}:{self.region}:{self.id}:{resource}"

    def read_ssm(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the values of SSM parameters by name, without those that do not exist."""
        found: dict[str, str] = {}
        for start in range(0, len(names), 10):  # GetParameters takes ten names at most
            wanted = sorted(set(names[start : start + 10]))
            answer = self.client("ssm").get_parameters(Names=wanted)
            found |= {item["Name"]: item["Value"] for item in answer["Parameters"]}
        return found

    def exists(self, kind: str, value: str) -> bool:
        """Whether a value of an AWS-specific parameter type exists; True for unknown kinds."""
        lookup = _LOOKUPS.get(kind)
        if lookup is None:
            return True
        service, operation, argument = lookup
        try:
            getattr(self.client(service), operation)(**{argument: [value]})
        except ClientError:
            return False
        return True

    def zones(self) -> list[str]:
        answer = self.client("ec2").describe_availability_zones()
        return sorted(zone["ZoneName"] for zone in answer["AvailabilityZones"])

    def read_template(self, url: str) -> str:
        """Return the text of a template in S3, given any form of its URL."""
        bucket, key = s3_location(url)
        try:
            body = self.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read()
        except ClientError as error:
            raise CloudFormationError(
                f"S3 error: {error.response['Error']['Message']} ({url})"
            ) from error
        return str(body.decode())


_LOOKUPS = {
    "AWS::EC2::Image::Id": ("ec2", "describe_images", "ImageIds"),
    "AWS::EC2::KeyPair::KeyName": ("ec2", "describe_key_pairs", "KeyNames"),
    "AWS::EC2::SecurityGroup::Id": ("ec2", "describe_security_groups", "GroupIds"),
    "AWS::EC2::Subnet::Id": ("ec2", "describe_subnets", "SubnetIds"),
    "AWS::EC2::VPC::Id": ("ec2", "describe_vpcs", "VpcIds"),
}


def s3_location(url: str) -> tuple[str, str]:
    """Return bucket and key of an S3 URL: path style, virtual-hosted style or s3://."""
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(parts.path).lstrip("/")
    if parts.scheme == "s3":
        return parts.netloc, path
    hosted = re.match(r"(.+)\.s3[.-]", parts.netloc)
    if hosted:
        return hosted.group(1), path
    bucket, _, key = path.partition("/")
    if not key:
        raise CloudFormationError("TemplateURL must be a supported URL.")
    return bucket, key
