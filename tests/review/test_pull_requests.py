"""What pull requests do to these stacks, one change each: the row, the headline, the exit code."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from review.assembly import Side
from review.comment import write_comment
from review.verdict import Review, headline, judge
from tests.review.conftest import REPOSITORY, MakeSide, changed, edited
from tests.stack_names import DATASET, NETWORK, TRAINING

Resources = dict[str, Any]
Edit = Callable[[Resources], object]


def _named(resources: Resources, kind: str, having: str) -> list[str]:
    """The names of the resources of a kind that have a text; at least one."""
    found = [
        name
        for name, each in resources.items()
        if each["Type"] == f"AWS::{kind}" and having in f"{name} {json.dumps(each)}"
    ]
    assert found, (kind, having)
    return found


def at(kind: str, having: str, path: str, value: Any = None) -> Edit:
    """Set a property of the resources of a kind, or delete it (None); `*` is each list item."""

    def edit(resources: Resources) -> None:
        for resource in [resources[name] for name in _named(resources, kind, having)]:
            *outer, last = path.split(".")
            nodes = [resource if outer[:1] == ["^"] else resource["Properties"]]
            for name in [each for each in outer if each != "^"]:
                nodes = [item for node in nodes for item in (node if name == "*" else [node[name]])]
            for node in nodes:
                if value is None:
                    del node[last]
                else:
                    node[last] = value(node.get(last)) if callable(value) else value

    return edit


def gone(kind: str, having: str) -> Edit:
    def edit(resources: Resources) -> None:
        for name in _named(resources, kind, having):
            del resources[name]

    return edit


def allow(having: str, actions: Any, resource: str = "*", **more: Any) -> Edit:
    statement = {"Effect": "Allow", "Action": actions, "Resource": resource, **more}
    path = "PolicyDocument.Statement"
    return at("IAM::Policy", having, path, lambda old: [*old, statement])


def without(having: str, word: str, kind: str = "IAM::Policy") -> Edit:
    def drop(old: list[Any]) -> list[Any]:
        kept = [each for each in old if word not in json.dumps(each)]
        assert len(kept) < len(old)
        return kept

    return at(kind, having, "PolicyDocument.Statement", drop)


def both(*edits: Edit) -> Edit:
    return lambda resources: [edit(resources) for edit in edits]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An edit, the kind of the row that must tell it, its words, and what accepts it."""

    edit: Edit
    kind: str
    says: str
    accept: str | None = None  # None: the review passes; "": nothing accepts it
    stack: str = TRAINING


LAUNCH, GUARD, RULE, ALARM = (
    "EC2::LaunchTemplate",
    "Lambda::Function",
    "Events::Rule",
    "CloudWatch::Alarm",
)
DATA, FLEET, RUNS = "LaunchTemplateData", "SpotFleetRequestConfigData", "RunBucket"
LIFECYCLE = "LifecycleConfiguration.Rules"
HEARD = "EventPattern.detail-type"


def rule(**more: Any) -> Callable[[Any], Any]:
    return lambda old: [*old, {"Id": "It", "Status": "Enabled", **more}]


CASES = {
    # The seventeen, in their order.
    "lifecycle": Case(
        edit=at("S3::Bucket", RUNS, LIFECYCLE, rule(Prefix="runs/", ExpirationInDays=30)),
        kind="loss", says="deletes current objects under runs/ after 30 days",
        accept="", stack=DATASET,
    ),
    "ssh": Case(
        edit=at("EC2::SecurityGroup", "", "SecurityGroupIngress",
                [{"CidrIp": "0.0.0.0/0", "IpProtocol": "tcp", "FromPort": 22, "ToPort": 22}]),
        kind="weakened", says="the SecurityGroup is open to anyone", accept="public",
    ),
    "no public address": Case(
        edit=at("EC2::Subnet", "", "MapPublicIpOnLaunch", False),
        kind="boot", says="a new machine cannot boot: in Network/Vpc/PublicSubnet", accept="boot",
        stack=NETWORK,
    ),
    "ledger's denial": Case(
        edit=at("IAM::Policy", "InstanceRole", "PolicyDocument.Statement",
                lambda old: [{**each, "Action": "s3:DeleteObject"} if each["Effect"] == "Deny"
                             else each for each in old]),
        kind="security", says="− Deny s3:PutObject on", accept="permissions",
    ),
    "admin": Case(
        edit=at("IAM::Role", "InstanceRole", "ManagedPolicyArns", ["AdministratorAccess"]),
        kind="security", says="+ ManagedPolicyArns: AdministratorAccess",
        accept="permissions",
    ),
    "alarms off": Case(
        edit=at(ALARM, "", "ActionsEnabled", False),
        kind="weakened", says="the alarm is disabled", accept="alarms",
    ),
    "Guard's timeout": Case(
        edit=at(GUARD, "", "Timeout", 3),
        kind="weakened", says="gets a Timeout of 3, no longer 180", accept="guard",
    ),
    "heads' policy": Case(
        edit=without(RUNS, "head.json", "S3::BucketPolicy"),
        kind="security", says="− Deny to AWS * s3:PutObject", accept="permissions", stack=DATASET,
    ),
    "lowest price": Case(
        edit=at("EC2::SpotFleet", "", f"{FLEET}.AllocationStrategy", "lowestPrice"),
        kind="run", says="AllocationStrategy priceCapacityOptimized → lowestPrice",
    ),
    "volume kept": Case(
        edit=at(LAUNCH, "", f"{DATA}.BlockDeviceMappings.*.Ebs.DeleteOnTermination", False),
        kind="run", says="leaves its volume /dev/sda1 behind",
    ),
    "volume kept by default": Case(
        edit=at(LAUNCH, "", f"{DATA}.BlockDeviceMappings.*.Ebs.DeleteOnTermination"),
        kind="run", says="leaves its volume /dev/sdf behind",
    ),
    "unversioned": Case(
        edit=at("S3::Bucket", RUNS, "VersioningConfiguration"),
        kind="loss", says="versioning is suspended", accept="", stack=DATASET,
    ),
    "events kept a day": Case(
        edit=at("Logs::LogGroup", "FleetEvents", "RetentionInDays", 1),
        kind="loss", says="RetentionInDays of the log group goes from 90 to 1", accept="retention",
    ),
    "no notices": Case(
        edit=at(RULE, "InstanceEvents", HEARD,
                lambda old: [each for each in old if "Interruption" not in each]),
        kind="weakened", says="the rule that calls the Guard no longer hears detail-type EC2 Spot",
        accept="guard",
    ),
    "barren attempts": Case(
        edit=at(GUARD, "", "Environment.Variables.MAX_BARREN_ATTEMPTS", "100"),
        kind="run", says="stops the run at 100 attempts in a row that commit nothing, no longer 5",
    ),
    "uploads never aborted": Case(
        edit=at("S3::Bucket", RUNS, LIFECYCLE,
                lambda old: [{key: value for key, value in each.items() if "Abort" not in key}
                             for each in old]),
        kind="data", says="DaysAfterInitiation 1 → -", stack=DATASET,
    ),
    # Others.
    "delete anything": Case(
        edit=allow("InstanceRole", "s3:DeleteObject"),
        kind="security", says="+ Allow s3:DeleteObject on *", accept="permissions",
    ),
    "pass a role": Case(
        edit=allow("GuardRole", "iam:PassRole", "arn:aws:iam::1:role/it"),
        kind="security", says="+ Allow iam:PassRole", accept="permissions",
    ),
    "delete by a wildcard": Case(
        edit=allow("InstanceRole", "s3:D*", "arn:aws:s3:::it/*"),
        kind="security", says="+ Allow s3:D*", accept="permissions",
    ),
    "read anything": Case(
        edit=allow("InstanceRole", "s3:GetObject", "arn:aws:s3:::*"),
        kind="security", says="+ Allow s3:GetObject", accept="permissions",
    ),
    "see": Case(
        edit=allow("InstanceRole", ["ec2:DescribeVolumes"]),
        kind="security", says="+ Allow ec2:DescribeVolumes on *",
    ),
    "Guard without its call": Case(
        edit=without("GuardRole", "ec2:ModifySpotFleetRequest"),
        kind="security", says="− Allow ec2:ModifySpotFleetRequest",
        accept="guard",
    ),
    "machines without their data": Case(
        edit=without("InstanceRole", "s3:GetObject"),
        kind="security", says="− Allow s3:GetObject",
    ),
    "Guard not callable": Case(
        edit=gone("Lambda::Permission", "Clock"),
        kind="security", says="− Permission", accept="guard",
    ),
    "Guard's memory": Case(
        edit=at(GUARD, "", "MemorySize", 128),
        kind="weakened", says="gets a MemorySize of 128, no longer 256", accept="guard",
    ),
    "Guard's role": Case(
        edit=at(GUARD, "", "Role", "arn:aws:iam::1:role/other"),
        kind="run", says="changes: Role ${GuardRole87F67C2B.Arn} → arn:aws:iam",
    ),
    "slow clock": Case(
        edit=at(RULE, "Clock", "ScheduleExpression", "rate(1 day)"),
        kind="weakened", says="rate(10 minutes) becomes rate(1 day)", accept="guard",
    ),
    "fleet's events": Case(
        edit=at(RULE, "FleetEventsRule", "EventPattern.detail-type", ["EC2 Spot Fleet Error"]),
        kind="weakened", says="no longer hears events without detail-type", accept="guard",
    ),
    "no record": Case(
        edit=gone(RULE, "LogRule"),
        kind="weakened", says="the rule that keeps the record is removed", accept="retention",
    ),
    "log group": Case(
        edit=gone("Logs::LogGroup", "GuardLog"),
        kind="loss", says="the log group is removed and deleted along", accept="retention",
    ),
    "threshold": Case(
        edit=at(ALARM, "GpuHot", "Threshold", 200),
        kind="alarm", says="**fires later**: Threshold 85 → 200",
    ),
    "threshold of a low value": Case(
        edit=at(ALARM, "GpuUtilizationLow", "Threshold", 1),
        kind="alarm", says="**fires later**: Threshold 20 → 1",
    ),
    "silence": Case(
        edit=at(ALARM, "GuardSilent", "TreatMissingData", "notBreaching"),
        kind="weakened", says="no longer fires where nothing reports", accept="alarms",
    ),
    "topic's policy": Case(
        edit=without("", "PublishAlarms", "SNS::TopicPolicy"),
        kind="security", says="− Allow to Service cloudwatch", accept="alarms",
    ),
    "egress": Case(
        edit=at("EC2::SecurityGroup", "", "SecurityGroupEgress",
                [{"CidrIp": "10.0.0.0/8", "IpProtocol": "-1"}]),
        kind="boot", says="its security group lets no HTTPS out", accept="boot",
    ),
    "route": Case(
        edit=gone("EC2::Route", ""),
        kind="boot", says="neither a public address nor another way", accept="boot", stack=NETWORK,
    ),
    "no metadata": Case(
        edit=at(LAUNCH, "", f"{DATA}.MetadataOptions.HttpEndpoint", "disabled"),
        kind="boot", says="without HttpEndpoint it has no credentials", accept="boot",
    ),
    "no role": Case(
        edit=at(LAUNCH, "", f"{DATA}.IamInstanceProfile"),
        kind="boot", says="without a role it can read nothing", accept="boot",
    ),
    "user data": Case(
        edit=at(LAUNCH, "", f"{DATA}.UserData", {"Fn::Base64": "#!/bin/bash\n"}),
        kind="boot", says="its boot script writes no run.env", accept="boot",
    ),
    "plain volumes": Case(
        edit=at(LAUNCH, "", f"{DATA}.BlockDeviceMappings.*.Ebs.Encrypted", False),
        kind="security", says="Ebs.Encrypted: true → false", accept="encryption",
    ),
    "machines without their tag": Case(
        edit=at(LAUNCH, "", f"{DATA}.TagSpecifications",
                lambda old: [{**each, "Tags": [tag for tag in each["Tags"]
                                               if tag["Key"] != "Stack"]} for each in old]),
        kind="run", says="Tags.Stack.Key Stack → -",
    ),
    "plain http": Case(
        edit=without("DatasetBucket", "SecureTransport", "S3::BucketPolicy"),
        kind="security", says="− Deny to AWS * s3:*", accept="permissions", stack=DATASET,
    ),
    "frozen": Case(
        edit=at("S3::Bucket", "DatasetBucket", LIFECYCLE,
                rule(Transitions=[{"StorageClass": "GLACIER", "TransitionInDays": 30}])),
        kind="loss", says="moves current objects to GLACIER", accept="", stack=DATASET,
    ),
    "frozen deep": Case(
        edit=at("S3::Bucket", "DatasetBucket", LIFECYCLE,
                rule(Transitions=[{"StorageClass": "DEEP_ARCHIVE", "TransitionInDays": 30}])),
        kind="loss", says="moves current objects to DEEP_ARCHIVE", accept="", stack=DATASET,
    ),
    "shorter artifacts": Case(
        edit=at("S3::Bucket", RUNS, LIFECYCLE,
                lambda old: [{**each, "ExpirationInDays": 1} if "ExpirationInDays" in each else each
                             for each in old]),
        kind="loss", says="under artifacts/ after 1 days, no longer 90", accept="", stack=DATASET,
    ),
    "removal policy": Case(
        edit=at("S3::Bucket", RUNS, "^.DeletionPolicy", "Delete"),
        kind="loss", says="DeletionPolicy of the bucket goes from Retain to Delete", accept="",
        stack=DATASET,
    ),
    "fleet left out": Case(
        edit=gone("EC2::SpotFleet", ""), kind="run", says="**The fleet Fleet/Request is removed**",
    ),
}  # fmt: skip


def assert_it_says_so(review: Review, kind: str, says: str, accept: str | None) -> None:
    rows = [each for each in review.effects if each.kind == kind and says in each.what]
    assert rows, [(each.kind, each.what) for each in review.effects]
    assert review.exit_code("data-loss") == int(accept is not None)
    if accept:
        assert {each.accept for each in rows} == {accept}
        words = sorted({each.accept for each in review.effects} - {""})
        assert review.exit_code("data-loss", words) == 0
    comment = write_comment(review)
    assert headline(review.effects) in comment
    assert says.replace("|", "\\|") in comment
    assert "Nothing changes" not in comment
    assert ("No data loss. " in comment) == (not review.of("loss", "data"))
    others = [each for each in review.effects if each.kind != "cost"]
    idle = ("widens", "added", "changed")
    assert ("Not affected." in comment) == all(each.action in idle for each in others)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_change_is_told_by_its_row_and_in_the_headline(base: Side, case: Case) -> None:
    review = judge(base, edited(base, case.edit, case.stack), [])
    assert_it_says_so(review, case.kind, case.says, case.accept)


def test_a_rule_that_gets_enabled_deletes_as_a_new_one_does(base: Side) -> None:
    off, on = (
        edited(
            base, at("S3::Bucket", RUNS, LIFECYCLE, rule(Status=each, ExpirationInDays=30)), DATASET
        )
        for each in ("Disabled", "Enabled")
    )
    assert_it_says_so(judge(off, on, []), "loss", "deletes current objects under every key", "")


@pytest.mark.parametrize(
    "value", [{"Ref": "It"}, {"Fn::If": ["It", {"Ref": "One"}, {"Ref": "Two"}]}]
)
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (ALARM, "Period"),
        (ALARM, "Metrics"),
        (GUARD, "MemorySize"),
        (GUARD, "Environment.Variables"),
        (LAUNCH, f"{DATA}.BlockDeviceMappings"),
        (LAUNCH, f"{DATA}.BlockDeviceMappings.*.Ebs.VolumeSize"),
        ("EC2::SpotFleet", f"{FLEET}.OnDemandTargetCapacity"),
        ("EC2::SpotFleet", f"{FLEET}.LaunchTemplateConfigs"),
        ("EC2::SecurityGroup", "SecurityGroupEgress"),
        ("EC2::SecurityGroup", "SecurityGroupEgress.*.CidrIp"),
        ("EC2::SecurityGroup", "SecurityGroupEgress.*.FromPort"),
        ("IAM::Role", "Policies"),
        (RULE, "ScheduleExpression"),
        (RULE, "EventPattern"),
    ],
)
def test_what_only_a_deploy_knows_stops_no_review(
    base: Side, kind: str, path: str, value: object
) -> None:
    """Apps that import the stacks have parameters and conditions."""
    head = edited(base, at(kind, "", path, value))
    for before, after in ((base, head), (head, base)):
        review = judge(before, after, [])
        assert review.of("resource") and write_comment(review)


KEPT = ("S3::Bucket", "KMS::Key", "Logs::LogGroup", "EC2::Volume", "EFS::FileSystem",
        "FSx::FileSystem", "DynamoDB::Table", "SecretsManager::Secret")  # fmt: skip


def test_what_cannot_be_made_again_is_a_loss_of_whatever_kind(base: Side) -> None:
    more = {each.replace(":", ""): {"Type": f"AWS::{each}", "Properties": {}} for each in KEPT}
    review = judge(edited(base, lambda resources: resources.update(more)), base, [])
    assert {each.path for each in review.of("loss")} == {*more}


def test_fails_without_termination_protection(base: Side) -> None:
    head = changed(base, DATASET, is_protected=False)
    assert_it_says_so(judge(base, head, []), "loss", "termination protection is removed", "")


def test_another_image_is_told(base: Side, make_side: MakeSide) -> None:
    image = json.loads((REPOSITORY / "cdk.json").read_text())["context"]["pytorch_ami_parameter"]
    head = make_side(pytorch_ami_parameter=image.replace("2.12", "2.11"))
    assert_it_says_so(judge(base, head, []), "run", "", None)


def test_an_export_that_goes_is_told(base: Side) -> None:
    template = {**base.stacks[NETWORK].template, "Outputs": {}}
    alone = replace(base, stacks={NETWORK: base.stacks[NETWORK]})
    review = judge(alone, changed(alone, NETWORK, template=template), [])
    assert_it_says_so(review, "run", "changes: exports.", None)
