"""EC2 security groups, with rules inline or as separate resources."""

import re
from typing import Any

from cloudformation.errors import ResourceFailed
from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType
from cloudformation.resources.ec2_network import retag, tags_for
from cloudformation.resources.lookups import deletes, finds, look_up

_DESCRIPTION = re.compile(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{0,255}")
_EVERYTHING = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]


def _create_group(request: ResourceRequest) -> Provisioned:
    name = request.get("GroupName") or request.generated_name(longest=255)
    made = request.client("ec2").create_security_group(
        GroupName=name,
        Description=request.properties["GroupDescription"],
        **request.pick("VpcId"),
        **tags_for(request, "security-group"),
    )
    attributes = {"GroupId": made["GroupId"], "Id": made["GroupId"]}
    return Provisioned(id=made["GroupId"], attributes=attributes | request.pick("VpcId"))


def _configure_group(request: ResourceRequest) -> None:
    ec2, group = request.client("ec2"), request.physical_id
    if not request.old and request.get("SecurityGroupEgress"):
        # A new group allows all egress; CloudFormation revokes that if the template has rules.
        ec2.revoke_security_group_egress(GroupId=group, IpPermissions=_EVERYTHING)
    for name, allow, revoke in (
        ("SecurityGroupIngress", ec2.authorize_security_group_ingress,
         ec2.revoke_security_group_ingress),
        ("SecurityGroupEgress", ec2.authorize_security_group_egress,
         ec2.revoke_security_group_egress),
    ):  # fmt: skip
        old, new = request.old.get(name, []), request.get(name, [])
        gone = [permission(rule) for rule in old if rule not in new]
        added = [permission(rule) for rule in new if rule not in old]
        if gone:
            revoke(GroupId=group, IpPermissions=gone)
        if added:
            allow(GroupId=group, IpPermissions=added)
    retag(request)


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
    def create(request: ResourceRequest) -> Provisioned:
        allow = getattr(request.client("ec2"), f"authorize_security_group_{direction}")
        allowed = allow(
            GroupId=request.properties["GroupId"], IpPermissions=[permission(request.properties)]
        )
        rules = allowed.get("SecurityGroupRules") or [{}]
        name = rules[0].get("SecurityGroupRuleId") or request.generated_name(longest=64)
        return Provisioned(id=name, attributes={"Id": name})

    def delete(request: ResourceRequest) -> None:
        revoke = getattr(request.client("ec2"), f"revoke_security_group_{direction}")
        revoke(
            GroupId=request.properties["GroupId"], IpPermissions=[permission(request.properties)]
        )

    def exists(request: ResourceRequest) -> bool:
        found = look_up(
            request.client("ec2").describe_security_group_rules,
            SecurityGroupRuleIds=[request.physical_id],
        )
        return bool(found and found["SecurityGroupRules"])

    return ResourceType(create=create, delete=delete, exists=exists)


TYPES: Registry = {
    "AWS::EC2::SecurityGroup": ResourceType(
        create=_create_group,
        configure=_configure_group,
        delete=deletes("ec2", "delete_security_group", "GroupId"),
        exists=finds("ec2", "describe_security_groups", "GroupIds", listed=True),
    ),
    "AWS::EC2::SecurityGroupIngress": _rule("ingress"),
    "AWS::EC2::SecurityGroupEgress": _rule("egress"),
}
