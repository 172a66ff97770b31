"""EC2 security groups, with rules inline or as separate resources."""

import re
import time
from typing import Any

from botocore.exceptions import ClientError

from cloudformation.errors import ResourceFailed
from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, deletes, finds, tags_for
from cloudformation.resources.ec2_network import retag_ec2

_DESCRIPTION = re.compile(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{0,255}")
# How long CloudFormation tries is not documented; people wait for a quarter of an hour and more.
_IN_USE_SECONDS, _POLL_SECONDS = 900.0, 0.2
_EVERYTHING = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]


def _configure_group(request: HandlerRequest) -> None:
    ec2, group = request.client("ec2"), request.physical_id
    if not request.old and request.get("SecurityGroupEgress"):
        # A new group allows all egress; CloudFormation revokes that if the template has rules.
        ec2.revoke_security_group_egress(GroupId=group, IpPermissions=_EVERYTHING)
    for direction in ("ingress", "egress"):
        name = f"SecurityGroup{direction.capitalize()}"
        for verb, rules in (("revoke", request.removed(name)), ("authorize", request.added(name))):
            permissions = [permission(rule) for rule in rules]
            if permissions:
                operation = getattr(ec2, f"{verb}_security_group_{direction}")
                operation(GroupId=group, IpPermissions=permissions)
    retag_ec2(request)


def permission(rule: dict[str, Any]) -> dict[str, Any]:
    """Return one rule of the template in the API's form."""
    made: dict[str, Any] = {"IpProtocol": rule.get("IpProtocol", "-1")}
    made |= {name: rule[name] for name in ("FromPort", "ToPort") if name in rule}
    note = {"Description": rule["Description"]} if "Description" in rule else {}
    if not _DESCRIPTION.fullmatch(rule.get("Description", "")):
        raise ResourceFailed(
            "Invalid rule description. Valid descriptions are strings less than 256 characters "
            f"from the following set: a-zA-Z0-9. _-:/()#,@[]+=&;{{}}!$*, got {note['Description']}"
        )
    if "CidrIp" in rule:
        made["IpRanges"] = [{"CidrIp": rule["CidrIp"], **note}]
    if "CidrIpv6" in rule:
        made["Ipv6Ranges"] = [{"CidrIpv6": rule["CidrIpv6"], **note}]
    other = rule.get("SourceSecurityGroupId") or rule.get("DestinationSecurityGroupId")
    if other:
        made["UserIdGroupPairs"] = [{"GroupId": other, **note}]
    prefixes = rule.get("SourcePrefixListId") or rule.get("DestinationPrefixListId")
    if prefixes:
        made["PrefixListIds"] = [{"PrefixListId": prefixes, **note}]
    return made


def _rule(direction: str) -> ResourceType:
    def send(request: HandlerRequest, verb: str) -> Any:
        return getattr(request.client("ec2"), f"{verb}_security_group_{direction}")(
            GroupId=request.properties["GroupId"], IpPermissions=[permission(request.properties)]
        )

    def create(request: HandlerRequest) -> Provisioned:
        rules = send(request, "authorize").get("SecurityGroupRules") or [{}]
        name = rules[0].get("SecurityGroupRuleId") or request.generated_name(longest=64)
        return Provisioned(id=name, attributes={"Id": name})

    return ResourceType(
        create=create,
        delete=lambda request: send(request, "revoke"),
        exists=finds(
            "ec2",
            "describe_security_group_rules",
            by="SecurityGroupRuleIds",
            answer="SecurityGroupRules",
        ),
    )


def _create_group(request: HandlerRequest) -> Provisioned:
    name = request.get("GroupName") or request.generated_name(longest=255)
    group = call(
        request,
        "ec2",
        "create_security_group",
        GroupName=name,
        Description=request.properties["GroupDescription"],
        **tags_for(request, "security-group"),
    )["GroupId"]
    return Provisioned(id=group, attributes={"GroupId": group, "Id": group} | request.pick("VpcId"))


_DELETE = deletes("ec2", "delete_security_group", by="GroupId")


def _delete_group(request: HandlerRequest) -> None:
    """Delete a group; as CloudFormation does, try again while an instance in it shuts down."""
    give_up_at = time.monotonic() + _IN_USE_SECONDS
    while True:
        try:
            return _DELETE(request)
        except ClientError as error:
            is_in_use = error.response["Error"]["Code"] == "DependencyViolation"
            if not is_in_use or time.monotonic() > give_up_at:
                raise
        time.sleep(_POLL_SECONDS)


TYPES: Registry = {
    "AWS::EC2::SecurityGroup": ResourceType(
        create=_create_group,
        configure=_configure_group,
        delete=_delete_group,
        exists=finds("ec2", "describe_security_groups", by="GroupIds"),
    ),
    "AWS::EC2::SecurityGroupIngress": _rule("ingress"),
    "AWS::EC2::SecurityGroupEgress": _rule("egress"),
}
