"""Who may do what, over all policies of both stacks."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cfnlint
import pytest
from moto.events.models import EventPattern

from tests.stack_names import TRAINING

ROOT = Path(__file__).parent.parent.parent

# Every wildcard that a policy of these stacks holds, by the policy's role, with its reason.
WILDCARDS = {
    # Objects get their names in the run; the dataset's are in its manifest.
    ("InstanceRole", "<DatasetBucket>/trajectory/*"),
    ("InstanceRole", "<RunBucket>/runs/run-1/*"),
    ("GuardRole", "<RunBucket>/runs/run-1/*"),
    ("GuardRole", "<RunBucket>/runs/run-1/events/*"),
    # Runs share derived data, which is named by what it was made of.
    ("InstanceRole", "<RunBucket>/artifacts/*"),
    # By tag: naming the fleet would be a cycle.
    ("InstanceRole", "spot-fleet-request/*"),
    ("GuardRole", "spot-fleet-request/*"),
    # A condition limits it to the instance that asks.
    ("InstanceRole", "instance/*"),
    # By tag: instances get their ids during the run.
    ("GuardRole", "instance/*"),
    # Named when pools rest: the template by tag, subnets also of an account that shares them.
    ("GuardRole", "launch-template/*"),
    ("GuardRole", "*:subnet/*"),
    # PutMetricData knows no resources, its namespace is a condition; Session Manager's channels.
    ("InstanceRole", "*"),
    # EC2's Describe calls know no resources.
    ("GuardRole", "*"),
}

# With a key of one's own: grant_publish writes it, next to that key only.
KEY_WILDCARDS = {("GuardRole", "kms:GenerateDataKey*")}
# The same for policies that stand at a resource, allowing statements only: what it is, the
# statement, and what in it is a wildcard. A key's policy has to spell its own key as "*".
RESOURCE_WILDCARDS = {
    # The account's administrators decide who may use the key: KMS's own default.
    ("AWS::KMS::Key", "", "kms:*"),
    ("AWS::KMS::Key", "", "Resource"),
    # Two roles of EC2, named in a condition: KMS refuses a principal that is not there yet.
    ("AWS::KMS::Key", "SpotMakesVolumes", "kms:GenerateDataKey*"),
    ("AWS::KMS::Key", "SpotMakesVolumes", "kms:ReEncrypt*"),
    ("AWS::KMS::Key", "SpotMakesVolumes", "Principal"),
    ("AWS::KMS::Key", "SpotMakesVolumes", "Resource"),
    ("AWS::KMS::Key", "SpotAttachesVolumes", "Principal"),
    ("AWS::KMS::Key", "SpotAttachesVolumes", "Resource"),
    # A message is encrypted with and without the plain text of its data key.
    ("AWS::KMS::Key", "AlarmsAndEventsPublish", "kms:GenerateDataKey*"),
    ("AWS::KMS::Key", "AlarmsAndEventsPublish", "Resource"),
    # Access logs get their names from S3, under the prefix of the bucket that they are of.
    ("AWS::S3::BucketPolicy", "", "DatasetBucket/*"),
    ("AWS::S3::BucketPolicy", "", "RunBucket/*"),
}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _statements(resources: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for resource in resources.values():
        if resource["Type"] == "AWS::IAM::Policy":
            (role,) = resource["Properties"]["Roles"]
            for statement in resource["Properties"]["PolicyDocument"]["Statement"]:
                yield role["Ref"][:-8].replace("run1Role", ""), statement


def _spelled(resource: Any) -> str:
    """Spell a resource as this file does: the bucket in angle brackets, the rest as it is."""
    text = str(resource)
    tail = resource if isinstance(resource, str) else ""
    if isinstance(resource, dict) and "Fn::Join" in resource:
        tail = str(resource["Fn::Join"][1][-1])
    for name in ("DatasetBucket", "RunBucket", "assets"):
        if name in text:
            return f"<{name}>{tail}"
    return tail.lstrip(":")


def _wildcards(resources: dict[str, Any]) -> set[tuple[str, str]]:
    found = set()
    for role, statement in _statements(resources):
        found |= {(role, each) for each in _listed(statement["Action"]) if "*" in each}
        for resource in map(_spelled, _listed(statement["Resource"])):
            if "*" in resource:
                found.add((role, resource))
    return found


@pytest.fixture(scope="module")
def all_on(synthesize: Callable[..., Any]) -> dict[str, Any]:
    """All resources with every option on that adds a policy."""
    templates = synthesize(kms="create", access_logs="true")
    return {**templates["DatasetStack"]["Resources"], **templates["TrainingStack"]["Resources"]}


def test_every_wildcard_has_its_reason(resources: dict[str, Any]) -> None:
    assert _wildcards(resources) == WILDCARDS


def test_every_wildcard_of_a_key_has_its_reason(all_on: dict[str, Any]) -> None:
    assert _wildcards(all_on) == WILDCARDS | KEY_WILDCARDS
    (key,) = [name for name, each in all_on.items() if each["Type"] == "AWS::KMS::Key"]
    for _, statement in _statements(all_on):
        if any(action.startswith("kms:") for action in _listed(statement["Action"])):
            assert key in str(statement["Resource"])


def test_every_wildcard_at_a_resource_has_its_reason(all_on: dict[str, Any]) -> None:
    found = set()
    for resource in all_on.values():
        properties = resource.get("Properties", {})
        document = properties.get("KeyPolicy") or properties.get("PolicyDocument", {})
        if resource["Type"] == "AWS::IAM::Policy" or not isinstance(document, dict):
            continue
        for statement in document.get("Statement", []):
            if statement["Effect"] == "Allow":
                name = (resource["Type"], statement.get("Sid", ""))
                found |= {(*name, each) for each in _listed(statement["Action"]) if "*" in each}
                if statement["Principal"] in ("*", {"AWS": "*"}):
                    found.add((*name, "Principal"))
                for each in _listed(statement["Resource"]):
                    if "*" in str(each):
                        tail = each["Fn::Join"][1][-1].lstrip("/") if each != "*" else "Resource"
                        found.add((*name, tail))
    assert found == RESOURCE_WILDCARDS


def test_spots_own_roles_may_use_the_key_and_nobody_else(all_on: dict[str, Any]) -> None:
    (key,) = [each["Properties"] for each in all_on.values() if each["Type"] == "AWS::KMS::Key"]
    assert key["EnableKeyRotation"] is True
    by_sid = {each.get("Sid"): each for each in key["KeyPolicy"]["Statement"]}
    for sid in ("SpotMakesVolumes", "SpotAttachesVolumes"):
        condition = by_sid[sid]["Condition"]
        assert condition["StringEquals"] == {"kms:CallerAccount": {"Ref": "AWS::AccountId"}}
        roles = [each["Fn::Join"][1][-1] for each in condition["ArnLike"]["aws:PrincipalArn"]]
        assert [role.rpartition("/")[2] for role in roles] == [
            "AWSServiceRoleForEC2SpotFleet",
            "AWSServiceRoleForEC2Spot",
            "AWSServiceRoleForAutoScaling",
        ]
    grant = by_sid["SpotAttachesVolumes"]
    assert grant["Action"] == "kms:CreateGrant"
    assert grant["Condition"]["Bool"] == {"kms:GrantIsForAWSResource": "true"}


# Every call that boot, trainer and agent make, by the permission that AWS asks for it.
INSTANCE_ACTIONS = {
    "s3:GetObject",
    "s3:ListBucket",
    "s3:PutObject",
    "s3:AbortMultipartUpload",
    # Not s3:DeleteObjectVersion, nor any call that reads one: old versions are the safety net.
    "s3:DeleteObject",
    # The own fleet's id, nothing else that is a parameter.
    "ssm:GetParameter",
    "ec2:ModifySpotFleetRequest",
    # Itself, where it cannot train.
    "ec2:TerminateInstances",
    "cloudwatch:PutMetricData",
    # Session Manager; AWS's managed policy would read all parameters as well.
    "ssm:UpdateInstanceInformation",
    "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel",
    "ssmmessages:OpenControlChannel",
    "ssmmessages:OpenDataChannel",
}


def test_an_instance_may_do_what_it_does_and_nothing_else(
    resources: dict[str, Any], all_on: dict[str, Any]
) -> None:
    for deployed, more in ((resources, set()), (all_on, {"kms:Decrypt", "kms:GenerateDataKey"})):
        actions = {
            action
            for role, statement in _statements(deployed)
            if role == "InstanceRole"
            for action in _listed(statement["Action"])
        }
        assert actions == INSTANCE_ACTIONS | more
    (role,) = [name for name in resources if re.fullmatch(r"InstanceRole\w+Role[0-9A-F]{8}", name)]
    assert "ManagedPolicyArns" not in resources[role]["Properties"]


def test_an_instance_reads_two_parameters_and_one_asset(resources: dict[str, Any]) -> None:
    mine = [statement for role, statement in _statements(resources) if role == "InstanceRole"]
    (named,) = [each["Resource"] for each in mine if each["Action"] == "ssm:GetParameter"]
    bundle, fleet = sorted(named, key=lambda each: "fleet-id" in str(each))
    assert str(fleet).endswith(f":parameter/{TRAINING}/fleet-id']]}}")
    assert "'Ref': 'BundleUri" in str(bundle)
    (readable,) = [each["Resource"] for each in mine if each["Action"] == "s3:GetObject"]
    (asset,) = [str(each) for each in readable if "cdk-" in str(each)]
    assert re.search(r"-assets-[^/]*/[0-9a-f]{64}\.zip'", asset)


def test_metrics_go_to_the_stacks_own_namespace_only(resources: dict[str, Any]) -> None:
    agent = json.loads((ROOT / "userdata" / "cloudwatch-agent.json").read_text())
    namespace = agent["metrics"]["namespace"].replace("{stack}", TRAINING)
    holders = []
    for role, statement in _statements(resources):
        if "cloudwatch:PutMetricData" in _listed(statement["Action"]):
            holders.append(role)
            assert statement["Condition"] == {"StringEquals": {"cloudwatch:namespace": namespace}}
    assert holders == ["InstanceRole"]


# Of each kind of fleet: the calls that change and end it, and what limits an instance to zero.
FLEET_CALLS = {
    "spot": (
        "ec2:ModifySpotFleetRequest",
        "ec2:CancelSpotFleetRequests",
        {
            "StringEqualsIfExists": {
                "ec2:Attribute/TargetCapacity": "0",
                "ec2:Attribute/OnDemandTargetCapacity": "0",
            }
        },
    ),
    "asg": (
        "autoscaling:UpdateAutoScalingGroup",
        "autoscaling:DeleteAutoScalingGroup",
        {"NumericEquals": {"autoscaling:MaxSize": "0"}},
    ),
}


@pytest.mark.parametrize("kind", FLEET_CALLS)
def test_only_the_own_fleet_may_be_modified_and_by_an_instance_only_to_zero(
    synthesize: Callable[..., Any], kind: str
) -> None:
    resources = synthesize(fleet=kind)["TrainingStack"]["Resources"]
    stack, run = {"aws:ResourceTag/Stack": TRAINING}, {"aws:ResourceTag/RunId": "run-1"}
    modify, cancel, zero = FLEET_CALLS[kind]
    assert _conditions(resources, modify) == {
        "GuardRole": {"StringEquals": stack},
        "InstanceRole": {"StringEquals": {**stack, **run}, **zero},
    }
    if kind == "asg":  # AWS suspends the launches of a group that had none for a day
        assert list(_conditions(resources, "autoscaling:ResumeProcesses")) == ["GuardRole"]
    assert _conditions(resources, cancel) == {"GuardRole": {"StringEquals": stack}}
    for other in {*FLEET_CALLS} - {kind}:
        for call in FLEET_CALLS[other][:2]:
            assert not _conditions(resources, call)


def test_the_guard_may_change_a_fleets_pools_by_all_that_ec2_asks_for(
    resources: dict[str, Any], only: Callable[[str], Any]
) -> None:
    """The call names the launch template and subnets: each has to be allowed, too."""
    spec = Path(cfnlint.__file__).with_name("data") / "AdditionalSpecs" / "Policies.json"
    asked = json.loads(spec.read_text())["ec2"]["Actions"]["modifyspotfleetrequest"]["Resources"]
    given = {
        _spelled(resource).split("/")[0].rpartition(":")[2]: statement.get("Condition")
        for role, statement in _statements(resources)
        if role == "GuardRole" and "ec2:ModifySpotFleetRequest" in _listed(statement["Action"])
        for resource in _listed(statement["Resource"])
    }
    own = {"StringEquals": {"aws:ResourceTag/Stack": TRAINING}}
    assert given == {"launch-template": own, "spot-fleet-request": own, "subnet": None}
    assert sorted(given) == sorted(asked)
    # The template has the tag itself, not only what is started from it.
    (tags,) = only("AWS::EC2::LaunchTemplate")["TagSpecifications"]
    assert tags["ResourceType"] == "launch-template"
    assert {"Key": "Stack", "Value": TRAINING} in tags["Tags"]


# Every call that the Guard makes, by the permission that AWS asks for it.
GUARD_READS = (
    "s3:GetObject s3:GetObjectVersion s3:ListBucket s3:ListBucketVersions ssm:GetParameter "
    "ec2:DescribeSpotFleetRequests autoscaling:DescribeAutoScalingGroups "
    "ec2:DescribeInstances ec2:DescribeSpotPriceHistory ec2:DescribeSubnets"
)
GUARD_WRITES = "s3:PutObject sns:Publish logs:CreateLogStream logs:PutLogEvents"
# The stop, and what is left where it is refused: a deny or a mistake in one leaves the others.
GUARD_STOPS = "ec2:ModifySpotFleetRequest ec2:CancelSpotFleetRequests ec2:TerminateInstances"


def test_the_guard_may_do_what_it_does_and_nothing_else(resources: dict[str, Any]) -> None:
    given = [s for role, s in _statements(resources) if role == "GuardRole"]
    actions = f"{GUARD_READS} {GUARD_WRITES} {GUARD_STOPS}".split()
    assert {action for s in given for action in _listed(s["Action"])} == {*actions}
    own = {"StringEquals": {"aws:ResourceTag/Stack": TRAINING}}
    stops = [s for s in given if set(_listed(s["Action"])) & set(GUARD_STOPS.split())]
    assert [(_listed(s["Action"]), s["Condition"]) for s in stops if "Condition" in s] == [
        ([action], own) for action in GUARD_STOPS.split()
    ]


def test_the_guard_keeps_its_own_budget_and_no_other(
    resources: dict[str, Any], synthesize: Callable[..., dict[str, Any]]
) -> None:
    shared = {"budget.name": "team", "budget.usd": "300"}
    there = synthesize(**shared)["TrainingStack"]["Resources"]

    def given(found: dict[str, Any]) -> set[tuple[str, str]]:
        return {
            (action, _spelled(resource))
            for role, s in _statements(found)
            if role == "GuardRole"
            for action in _listed(s["Action"])
            for resource in _listed(s["Resource"])
        }

    assert given({**resources, **there}) - given(resources) == {
        (f"s3:{name}", "<RunBucket>/budgets/team/*")
        for name in ("GetObject", "GetObjectVersion", "PutObject")
    }


def test_the_guard_counts_what_a_machine_costs_and_is_never_late(
    only: Callable[[str], Any],
) -> None:
    given = only("AWS::Lambda::Function")["Environment"]["Variables"]
    # 300 GiB of gp3 for a month, and an address.
    assert float(given["STORAGE_USD_PER_HOUR"]) == pytest.approx(300 * 0.08 / 730 + 0.005, abs=1e-6)
    # The clock's ten minutes, and a minute in which a schedule may fire.
    assert (given["CALL_EVERY_SECONDS"], given["MAX_WAIT_HOURS"]) == ("660", "24")


def test_each_role_writes_and_deletes_what_is_its_own_alone(resources: dict[str, Any]) -> None:
    changed = {
        (role, action.removeprefix("s3:"), _spelled(resource))
        for role, s in _statements(resources)
        if s["Effect"] == "Allow"
        for action in _listed(s["Action"])
        if action in ("s3:PutObject", "s3:DeleteObject")
        for resource in _listed(s["Resource"])
    }
    own = "<RunBucket>/runs/run-1"
    assert changed == {
        ("InstanceRole", "PutObject", f"{own}/*"),
        ("InstanceRole", "DeleteObject", f"{own}/*"),
        ("InstanceRole", "PutObject", "<RunBucket>/artifacts/*"),
        ("GuardRole", "PutObject", f"{own}/guard.json"),
        ("GuardRole", "PutObject", f"{own}/events/*"),
        ("GuardRole", "PutObject", "<RunBucket>/spot.json"),
    }


def test_no_instance_may_write_what_the_guard_counts(resources: dict[str, Any]) -> None:
    denied = [(role, s) for role, s in _statements(resources) if s["Effect"] == "Deny"]
    ((role, statement),) = denied
    assert role == "InstanceRole"
    assert sorted(statement["Action"]) == ["s3:DeleteObject", "s3:PutObject"]
    assert _spelled(statement["Resource"]) == "<RunBucket>/runs/run-1/guard.json"


def _conditions(resources: dict[str, Any], action: str) -> dict[str, Any]:
    return {
        role: statement["Condition"]
        for role, statement in _statements(resources)
        if action in _listed(statement["Action"]) and statement.get("Sid") != "OfferSubnets"
    }


def test_an_instance_may_terminate_itself_only(resources: dict[str, Any]) -> None:
    (statement,) = [
        statement
        for role, statement in _statements(resources)
        if role == "InstanceRole" and "ec2:TerminateInstances" in _listed(statement["Action"])
    ]
    condition = statement["Condition"]
    assert condition["StringEquals"] == {"aws:ResourceTag/Stack": TRAINING}
    # The key is who asks, the variable what is asked for.
    asks = condition["ArnEquals"]["ec2:SourceInstanceARN"]["Fn::Join"][1]
    assert asks[-1] == ":instance/${ec2:InstanceID}"
    assert asks[:-1] == statement["Resource"]["Fn::Join"][1][:-1]


def test_each_role_of_a_run_has_the_tag_that_a_secrets_policy_names(
    templates: dict[str, Any],
) -> None:
    """docs/your-script.md: no policy at the role, which would keep it from being deleted."""
    roles = [
        each["Properties"]["Tags"]
        for each in templates["TrainingStack"]["Resources"].values()
        if each["Type"] == "AWS::IAM::Role"
    ]
    assert roles == [[{"Key": "Stack", "Value": TRAINING}]] * 3


def test_another_accounts_fleet_cannot_take_the_fleets_role(resources: dict[str, Any]) -> None:
    (statement,) = [
        statement
        for role in resources.values()
        if role["Type"] == "AWS::IAM::Role"
        for statement in role["Properties"]["AssumeRolePolicyDocument"]["Statement"]
        if statement["Principal"] == {"Service": "spotfleet.amazonaws.com"}
    ]
    assert statement["Condition"]["StringEquals"] == {
        "aws:SourceAccount": {"Ref": "AWS::AccountId"}
    }
    assert "aws:SourceArn" in statement["Condition"]["ArnLike"]


def test_events_and_alarms_may_publish_over_tls_only(only: Callable[[str], Any]) -> None:
    policy = only("AWS::SNS::TopicPolicy")
    statements = policy["PolicyDocument"]["Statement"]
    publishers = {
        each["Principal"]["Service"]: each.get("Condition")
        for each in statements
        if each["Effect"] == "Allow"
    }
    # EventBridge publishes nothing where the policy asks for its source account.
    assert publishers == {
        "events.amazonaws.com": None,
        "cloudwatch.amazonaws.com": {
            "StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}
        },
    }
    assert any(
        each["Effect"] == "Deny" and each["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
        for each in statements
    )
    # With alias/aws/sns neither of the two could publish.
    assert "KmsMasterKeyId" not in only("AWS::SNS::Topic")


def test_every_alarm_reaches_a_topic_that_takes_it_and_a_key_that_opens(
    resources: dict[str, Any], all_on: dict[str, Any]
) -> None:
    for deployed in (resources, all_on):
        alarms = [each for each in deployed.values() if each["Type"] == "AWS::CloudWatch::Alarm"]
        assert len(alarms) == 12
        for alarm in alarms:
            (action,) = alarm["Properties"]["AlarmActions"]
            topic = deployed[action["Ref"]]["Properties"]
            assert _may_use(deployed, "AWS::SNS::TopicPolicy", "sns:Publish", action["Ref"])
            if "KmsMasterKeyId" in topic:
                for call in ("kms:Decrypt", "kms:GenerateDataKey*"):
                    assert _may_use(deployed, "AWS::KMS::Key", call, "")


def _may_use(resources: dict[str, Any], type_name: str, action: str, mention: str) -> bool:
    """Whether both services that send messages may take an action at a resource of the type."""
    allowed = {
        service
        for each in resources.values()
        if each["Type"] == type_name and mention in str(each)
        for statement in (
            each["Properties"].get("KeyPolicy") or each["Properties"]["PolicyDocument"]
        )["Statement"]
        if statement["Effect"] == "Allow" and action in _listed(statement["Action"])
        for service in _listed(statement["Principal"].get("Service", []))
    }
    return {"cloudwatch.amazonaws.com", "events.amazonaws.com"} <= allowed


def test_the_fleets_events_reach_record_and_guard_and_its_faults_reach_people(
    resources: dict[str, Any],
) -> None:
    rules = [each["Properties"] for each in resources.values() if each["Type"].endswith("::Rule")]
    patterns = dict[str, list[Any]]()
    for rule in rules:
        if "aws.ec2spotfleet" in str(rule.get("EventPattern")):
            assert "FleetRequest" in str(rule["EventPattern"]["resources"])
            for target in rule["Targets"]:
                patterns.setdefault(str(target["Arn"]), []).append(
                    {name: rule["EventPattern"].get(name) for name in ("detail-type", "detail")}
                )

    def patterns_to(name: str) -> Any:
        (found,) = [each for target, each in patterns.items() if name in target]
        return found

    everything = [{"detail-type": None, "detail": None}]
    assert patterns_to("GuardFunction") == everything
    assert patterns_to(f"log-group:/aws/events/{TRAINING}") == everything
    rules = [EventPattern.load(json.dumps(each)) for each in patterns_to("NotificationsTopic")]
    for name, description, is_told in (
        ("iamFleetRoleInvalid", "", True),
        ("spotInstanceCountLimitExceeded", "", True),
        ("spotFleetRequestConfigurationInvalid", "The parameter groupId cannot be used", True),
        # As EC2 has said it where there was no capacity, over and over.
        (
            "spotFleetRequestConfigurationInvalid",
            "m3.large, ami-1, Linux/UNIX: There is no Spot capacity available that matches your "
            "request.",
            False,
        ),
        (
            "spotFleetRequestConfigurationInvalid",
            "We currently do not have sufficient p2.xlarge capacity in the Availability Zone you "
            "requested",
            False,
        ),
        ("allLaunchSpecsTemporarilyBlacklisted", "", False),
    ):
        event = {
            "detail-type": "EC2 Spot Fleet Error",
            "detail": {"sub-type": name, "description": description},
        }
        told = [each.matches_event(event) for each in rules]  # type: ignore[arg-type]
        assert any(told) == is_told, description


def test_the_guard_hears_of_interruptions_and_of_time(resources: dict[str, Any]) -> None:
    rules = [each["Properties"] for each in resources.values() if each["Type"].endswith("::Rule")]
    assert [each["ScheduleExpression"] for each in rules if "ScheduleExpression" in each] == [
        "rate(10 minutes)"
    ]
    (pattern,) = [
        each["EventPattern"]
        for each in rules
        if each.get("EventPattern", {}).get("source") == ["aws.ec2"]
    ]
    assert pattern["detail-type"] == [
        "EC2 Spot Instance Interruption Warning",
        "EC2 Instance Rebalance Recommendation",
    ]


def test_descriptions_have_no_character_that_ec2_refuses(only: Callable[[str], Any]) -> None:
    group = only("AWS::EC2::SecurityGroup")
    texts = [
        group["GroupDescription"],
        *(rule["Description"] for rule in group["SecurityGroupEgress"]),
    ]
    for text in texts:
        assert re.fullmatch(r"[a-zA-Z0-9. _\-:/()#,@\[\]+=&;{}!$*]*", text), text
