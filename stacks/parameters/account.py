"""Checks of what a stack shares with others in its account: its name, network and tags."""

import re

from stacks.parameters.checks import check_match, refuse_unless
from stacks.parameters.fields import ParameterFields

# A run id begins with the name, and a stack's name ends with it. With the prefix and Training- it
# stays far below CloudFormation's 128 characters.
_STACK = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,39}")
# The fleet's parameter begins with the stack's name, and Systems Manager reserves these two.
_PREFIX = re.compile(rf"(?!(?i:aws|ssm)){_STACK.pattern}")
_VPC = re.compile(r"vpc-([0-9a-f]{8}|[0-9a-f]{17})")
_SUBNET = re.compile(r"subnet-([0-9a-f]{8}|[0-9a-f]{17})")
# EC2 refuses an instance whose tags its metadata could not show: keys with a space or a slash.
_TAG_KEY = re.compile(r"[A-Za-z0-9_.:=+@-]{1,128}")
_TAG_VALUE = re.compile(r"[\w .:/=+@-]{0,256}")
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}=\d{1,5}(\.\d+)?")
_REPOSITORY = re.compile(r"[a-z0-9]+([._/-][a-z0-9]+)*")
# Permissions, metrics and the Guard rely on the first two.
OUR_TAGS = ("Stack", "RunId", "Name")
# The limit per resource; what AWS adds itself (aws:) does not count.
_MAX_TAGS = 50 - len(OUR_TAGS)


def check_name(p: ParameterFields) -> None:
    """Refuse a name or a prefix that a stack cannot have."""
    advice = "use a letter, then letters, digits and - (40)"
    if p.name:
        check_match("name", p.name, _STACK, advice)
    if p.prefix:
        check_match("prefix", p.prefix, _PREFIX, f"{advice}, not beginning with aws or ssm")


def check_sweep(p: ParameterFields) -> None:
    """Refuse shares that Batch would refuse, and a repository that ECR cannot have."""
    for share in p.sweep.shares:
        advice = "use a name of letters and digits and its parts, 0.001 to 10000, as in vision=3"
        check_match("sweep.shares", share, _SHARE, advice)
        parts = float(share.partition("=")[2])
        refuse_unless(0.001 < parts <= 10_000, f"sweep.shares has {share!r}; {advice}")
    names = [share.partition("=")[0] for share in p.sweep.shares]
    refuse_unless(
        len(set(names)) == len(names),
        f"sweep.shares are {', '.join(p.sweep.shares)}; name each only once",
    )
    advice = "use a name such as training or team/training"
    check_match("sweep.repository", p.sweep.repository, _REPOSITORY, advice)


def check_network(p: ParameterFields) -> None:
    """Refuse half of an existing network, and zones that its subnets decide."""
    if not (p.vpc or p.subnets):
        return
    refuse_unless(
        p.vpc,
        f"subnets are {', '.join(p.subnets)}, but vpc is empty; add vpc=vpc-..., or drop them",
    )
    refuse_unless(
        p.subnets, f"vpc is {p.vpc!r} without subnets; add subnets=subnet-..., its private ones"
    )
    check_match("vpc", p.vpc, _VPC, "use an id like vpc-0123456789abcdef0, or nothing")
    for subnet in p.subnets:
        check_match("subnets", subnet, _SUBNET, "use ids like subnet-0123456789abcdef0")
    refuse_unless(
        len(set(p.subnets)) == len(p.subnets),
        f"subnets are {', '.join(p.subnets)}; name each only once",
    )
    refuse_unless(
        not p.zones, f"zones are {', '.join(p.zones)}, but the subnets decide them; drop zones"
    )


def check_tags(p: ParameterFields) -> None:
    """Refuse tags that EC2, S3 or IAM would refuse mid-deploy, and the stack's own."""
    for key, value in p.tags.items():
        refuse_unless(
            not key.lower().startswith("aws:"), f"tags.{key} begins with aws:, which AWS reserves"
        )
        refuse_unless(
            key not in OUR_TAGS,
            f"tags.{key} is the stack's own, on which its permissions rely; use another key",
        )
        advice = "use 1 to 128 letters, digits and _ . : = + @ -"
        refuse_unless(_TAG_KEY.fullmatch(key), f"the tag's key is {key!r}; {advice}")
        check_match(
            f"tags.{key}", value, _TAG_VALUE, "use at most 256 letters, digits, spaces and _.:/=+@-"
        )
    refuse_unless(
        len(p.tags) <= _MAX_TAGS,
        f"{len(p.tags)} tags are given; a resource takes {_MAX_TAGS} besides {', '.join(OUR_TAGS)}",
    )
