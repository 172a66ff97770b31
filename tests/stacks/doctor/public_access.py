"""VPC Block Public Access, which the embedded EC2 lacks."""

from typing import Any

import pytest
from moto.core.responses import ActionResult
from moto.ec2.responses.vpcs import VPCs


def block_public_access(monkeypatch: pytest.MonkeyPatch, mode: str) -> dict[str, Any]:
    """Let EC2 answer with a mode, and take exclusions of VPCs; return those by VPC."""
    excluded: dict[str, Any] = {}

    def options(_: Any) -> ActionResult:
        found = {"InternetGatewayBlockMode": mode, "ExclusionsAllowed": "allowed"}
        return ActionResult({"VpcBlockPublicAccessOptions": found})

    def exclude(self: Any) -> ActionResult:
        vpc = self._get_param("VpcId")
        self.ec2_backend.get_vpc(vpc)
        excluded[vpc] = {
            "ExclusionId": "vpcbpa-exclude-1",
            "InternetGatewayExclusionMode": self._get_param("InternetGatewayExclusionMode"),
            "ResourceArn": f"arn:aws:ec2:{self.region}:{self.current_account}:vpc/{vpc}",
            "State": "create-complete",
        }
        return ActionResult({"VpcBlockPublicAccessExclusion": excluded[vpc]})

    def exclusions(_: Any) -> ActionResult:
        return ActionResult({"VpcBlockPublicAccessExclusions": [*excluded.values()]})

    for name, answer in (
        ("describe_vpc_block_public_access_options", options),
        ("create_vpc_block_public_access_exclusion", exclude),
        ("describe_vpc_block_public_access_exclusions", exclusions),
    ):
        monkeypatch.setattr(VPCs, name, answer, raising=False)
    return excluded
