"""Options with each other, and every size: cdk-nag, cfn-lint and our own assertions, clean.

All in one process: the fixture synthesizes with cdk-nag on, which raises where it finds anything.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from cfnlint.api import ManualArgs, lint

from sizing import catalogue
from sizing.plan.checks import PROBLEMS
from stacks.user_data import MAX_BYTES, TOKEN_ALLOWANCE_BYTES
from tests.stacks.templates import every, only

Synthesize = Callable[..., Any]
OPTIONS = [
    {"on_demand_base": base, "kms": kms, "access_logs": logs}
    for base, kms, logs in itertools.product(("0", "1"), ("", "create"), ("false", "true"))
]
FAMILIES = ("g4dn", "g5", "g6", "g6e")
KEPT = {
    "DatasetBucket9BE8B15B",
    "DatasetBucketPolicy87D5E6FC",
    "RunBucketCA76775A",
    "RunBucketPolicy9A154720",
    "DataKey2A0DE9E6",
    "AccessLogs8B620ECA",
    "AccessLogsPolicyABDC4D2D",
}


def _deployable(families: Collection[str]) -> list[str]:
    """Every size of the families that the stack can deploy, in the catalogue's order."""
    return [
        size
        for size, instance in catalogue.instances().items()
        if instance.family in families
        and instance.is_trainable
        and not instance.needs_own_image
        and instance.on_demand_usd_per_hour is not None
    ]


def _combinations(*, pairs: bool = False) -> Iterator[tuple[str, dict[str, str]]]:
    """Every family with every combination of options; as many sizes of it as there are.

    Pairs: every family and every combination, and each value of an option with each family.
    """
    for place, family in enumerate(FAMILIES):
        sizes = _deployable([family])
        for number, options in enumerate(OPTIONS):
            # Two combinations that have no value in common.
            if not pairs or place % 4 in (number, len(OPTIONS) - 1 - number):
                yield sizes[number % len(sizes)], options


def _others() -> list[str]:
    """Sizes of other families that the stack can deploy."""
    families = {each.family for each in catalogue.instances().values()} - set(FAMILIES)
    return _deployable(families)


@pytest.mark.parametrize(
    ("size", "options"),
    list(_combinations(pairs=True)),
    ids=lambda value: value if isinstance(value, str) else "-".join(filter(None, value.values())),
)
def test_every_pair_of_family_and_options_is_secure(
    size: str, options: dict[str, str], synthesize: Synthesize
) -> None:
    _check(synthesize, size, options)


def _check(synthesize: Synthesize, size: str, options: dict[str, str]) -> None:
    hours = "2000" if options["on_demand_base"] == "0" else "0"
    templates = synthesize(
        size=size, accept=",".join(PROBLEMS), deadline_hours=hours, max_wait_hours="0", **options
    )
    _check_instances(templates, has_key=bool(options["kms"]))
    _check_buckets(templates, has_key=bool(options["kms"]))
    _check_network_and_types(templates)
    topic = only(templates["TrainingStack"], "AWS::SNS::Topic")
    assert ("KmsMasterKeyId" in topic) == bool(options["kms"])
    fleet = only(templates["TrainingStack"], "AWS::EC2::SpotFleet")
    config = fleet["SpotFleetRequestConfigData"]
    assert config["OnDemandTargetCapacity"] == int(options["on_demand_base"])
    guard = only(templates["TrainingStack"], "AWS::Lambda::Function")["Environment"]["Variables"]
    assert guard["ON_DEMAND_BASE"] == options["on_demand_base"]
    rules = every(templates["TrainingStack"], "AWS::Events::Rule")
    (schedule,) = [each["ScheduleExpression"] for each in rules if "ScheduleExpression" in each]
    assert schedule == ("rate(2 minutes)" if float(hours) else "rate(10 minutes)")
    sizes = {each["InstanceType"] for each in config["LaunchTemplateConfigs"][0]["Overrides"]}
    assert size in sizes
    assert {catalogue.find(each).gpu for each in sizes} == {catalogue.find(size).gpu}


@pytest.mark.parametrize("size", _others())
def test_every_other_size_is_secure_too(size: str, synthesize: Synthesize) -> None:
    templates = synthesize(size=size, accept=",".join(PROBLEMS))
    _check_instances(templates, has_key=False)
    fleet = only(templates["TrainingStack"], "AWS::EC2::SpotFleet")
    overrides = fleet["SpotFleetRequestConfigData"]["LaunchTemplateConfigs"][0]["Overrides"]
    assert 2 <= len(overrides) <= 10


def test_cfn_lint_finds_nothing_with_every_option_on(synthesize: Synthesize) -> None:
    """`make check` lints the defaults."""
    _lint(synthesize(**OPTIONS[-1]))


@pytest.mark.slow  # a fleet is looked at
def test_groups_are_as_secure_with_every_option_on(synthesize: Synthesize) -> None:
    templates = synthesize(fleet="asg", **OPTIONS[-1])
    _check_instances(templates, has_key=True)
    _check_network_and_types(templates)
    _lint(templates)


@pytest.mark.slow
def test_every_combination_is_secure_and_cfn_lint_finds_nothing_in_it(
    synthesize: Synthesize,
) -> None:
    for size, options in _combinations():
        _check(synthesize, size, options)
        _lint(synthesize(size=size, accept=",".join(PROBLEMS), **options))
    for size in _others():
        _lint(synthesize(size=size, accept=",".join(PROBLEMS)))


def _lint(templates: Any) -> None:
    for name, template in templates.items():
        found = lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))
        ignored = {"W3005", "W6001"}  # .cfnlintrc says why
        assert [str(each) for each in found if each.rule.id not in ignored] == [], name


def test_what_is_kept_keeps_its_logical_ids(synthesize: Synthesize) -> None:
    kept = synthesize(**OPTIONS[-1])["DatasetStack"]["Resources"]
    assert set(kept) == KEPT
    for name, resource in kept.items():
        # A key costs from its first day; a bucket that a first deploy leaves is empty, and free.
        is_key = resource["Type"] == "AWS::KMS::Key"
        assert resource["DeletionPolicy"] == "Retain" + is_key * "ExceptOnCreate", name
        assert resource["UpdateReplacePolicy"] == "Retain", name


def _check_instances(templates: Any, *, has_key: bool) -> None:
    """Check the launch template, which cdk-nag does not look into."""
    template = only(templates["TrainingStack"], "AWS::EC2::LaunchTemplate")
    data = template["LaunchTemplateData"]
    options = data["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1)
    assert len(data["BlockDeviceMappings"]) == 2
    for mapping in data["BlockDeviceMappings"]:
        assert mapping["Ebs"]["Encrypted"] is True
        assert mapping["Ebs"]["DeleteOnTermination"] is True
        assert ("KmsKeyId" in mapping["Ebs"]) == has_key
    # A fleet refuses market options and interface ids; a key would be a second way in.
    assert not {"KeyName", "InstanceMarketOptions", "NetworkInterfaces"} & set(data)
    (join,) = data["UserData"].values()
    text = "".join(part for part in join["Fn::Join"][1] if isinstance(part, str))
    assert len(text.encode()) + TOKEN_ALLOWANCE_BYTES < MAX_BYTES


def _check_buckets(templates: Any, *, has_key: bool) -> None:
    buckets = templates["DatasetStack"]["Resources"]
    for name, resource in buckets.items():
        if resource["Type"] == "AWS::S3::Bucket":
            properties = resource["Properties"]
            assert set(properties["PublicAccessBlockConfiguration"].values()) == {True}
            (rule,) = properties["BucketEncryption"]["ServerSideEncryptionConfiguration"]
            algorithm = rule["ServerSideEncryptionByDefault"]["SSEAlgorithm"]
            # S3 delivers access logs into buckets with its own encryption only.
            is_own = has_key and not name.startswith("AccessLogs")
            assert algorithm == ("aws:kms" if is_own else "AES256"), name
            # Else each object is a call to KMS, which is billed.
            assert rule.get("BucketKeyEnabled", False) == is_own, name
        elif resource["Type"] == "AWS::S3::BucketPolicy":
            denied = [
                each["Condition"]
                for each in resource["Properties"]["PolicyDocument"]["Statement"]
                if each["Effect"] == "Deny" and each["Action"] == "s3:*"
            ]
            assert {"Bool": {"aws:SecureTransport": "false"}} in denied, name


def _check_network_and_types(templates: Any) -> None:
    types = [
        each["Type"] for template in templates.values() for each in template["Resources"].values()
    ]
    assert not [each for each in types if each.startswith("Custom::")]
    assert "AWS::CloudFormation::CustomResource" not in types
    ways_in = {"AWS::EC2::SecurityGroupIngress", "AWS::EC2::NatGateway", "AWS::EC2::KeyPair"}
    assert not ways_in & set(types)
    group = only(templates["TrainingStack"], "AWS::EC2::SecurityGroup")
    assert "SecurityGroupIngress" not in group
    endpoint = only(templates["NetworkStack"], "AWS::EC2::VPCEndpoint")
    assert endpoint["VpcEndpointType"] == "Gateway"
    assert types.count("AWS::EC2::FlowLog") == types.count("AWS::Lambda::Function") == 1
