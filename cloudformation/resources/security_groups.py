"""EC2 security groups, with their rules inside or as resources of their own."""

import re
from typing import Any

from cloudformation.errors import ResourceFailed
from cloudformation.resource import Made, Registry, ResourceType, Wish
from cloudformation.resources.asking import ask
from cloudformation.resources.ec2_network import deleted, described, retag, tags_for

_DESCRIPTION = re.compile(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]{0,255}")
_EVERYTHING = [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]


def _create_group(wish: Wish) -> Made:
    name = wish.get("GroupName") or wish.generated_name(longest=255)
    made = wish.client("ec2").create_security_group(
        GroupName=name,
        Description=wish.properties["GroupDescription"],
        **wish.pick("VpcId"),
        **tags_for(wish, "security-group"),
    )
    attributes = {"GroupId": made["GroupId"], "Id": made["GroupId"]}
    return Made(id=made["GroupId"], attributes=attributes | wish.pick("VpcId"))


def _configure_group(wish: Wish) -> None:
    ec2, group = wish.client("ec2"), wish.physical_id
    if not wish.old and wish.get("SecurityGroupEgress"):
        # A new group lets everything out; CloudFormation takes that away when rules are given.
        ec2.revoke_security_group_egress(GroupId=group, IpPermissions=_EVERYTHING)
    for name, allow, revoke in (
        ("SecurityGroupIngress", ec2.authorize_security_group_ingress,
         ec2.revoke_security_group_ingress),
        ("SecurityGroupEgress", ec2.authorize_security_group_egress,
         ec2.revoke_security_group_egress),
    ):  # fmt: skip
        old, new = wish.old.get(name, []), wish.get(name, [])
        gone = [permission(rule) for rule in old if rule not in new]
        added = [permission(rule) for rule in new if rule not in old]
        if gone:
            revoke(GroupId=group, IpPermissions=gone)
        if added:
            allow(GroupId=group, IpPermissions=added)
    retag(wish)


def permission(rule: dict[str, Any]) -> dict[str, Any]:
    """One rule of the template in the API's shape."""
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
    def create(wish: Wish) -> Made:
        allow = getattr(wish.client("ec2"), f"authorize_security_group_{direction}")
        allowed = allow(
            GroupId=wish.properties["GroupId"], IpPermissions=[permission(wish.properties)]
        )
        rules = allowed.get("SecurityGroupRules") or [{}]
        name = rules[0].get("SecurityGroupRuleId") or wish.generated_name(longest=64)
        return Made(id=name, attributes={"Id": name})

    def delete(wish: Wish) -> None:
        revoke = getattr(wish.client("ec2"), f"revoke_security_group_{direction}")
        revoke(GroupId=wish.properties["GroupId"], IpPermissions=[permission(wish.properties)])

    def exists(wish: Wish) -> bool:
        found = ask(
            wish.client("ec2").describe_security_group_rules,
            SecurityGroupRuleIds=[wish.physical_id],
        )
        return bool(found and found["SecurityGroupRules"])

    return ResourceType(create=create, delete=delete, exists=exists)


TYPES: Registry = {
    "AWS::EC2::SecurityGroup": ResourceType(
        create=_create_group,
        configure=_configure_group,
        delete=deleted("delete_security_group", "GroupId"),
        exists=described("describe_security_groups", "GroupIds"),
    ),
    "AWS::EC2::SecurityGroupIngress": _rule("ingress"),
    "AWS::EC2::SecurityGroupEgress": _rule("egress"),
}
