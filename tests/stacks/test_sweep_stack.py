"""SweepStack: made when asked for; a queue with a limit, and jobs that reach sweeps/ alone."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from cfnlint.api import ManualArgs, lint
from moto.events.models import EventPattern

from contract.stack_names import SHARED_QUEUE
from stacks.parameters import StackParameters
from tests.stacks.templates import every, only

GIVEN = {
    "sweep.instances": "4",
    "sweep.shares": "vision=3 text=1",
    "alarm.email": "you@example.org",
    "kms": "create",
}
QUEUE = "arn:aws:batch:us-east-1:123456789012:job-queue/Queue-1"
# https://docs.aws.amazon.com/batch/latest/userguide/service-job-events.html, and
# batch-service-job-queue-blocked-events.html.
EVENT = {
    "version": "0",
    "source": "aws.batch",
    "account": "123456789012",
    "region": "us-east-1",
    "detail-type": "Batch Service Job State Change",
    "resources": ["arn:aws:batch:us-east-1:123456789012:service-job/4c7599ae"],
    "detail": {
        "jobName": "rates-1",
        "jobQueue": QUEUE,
        "serviceJobType": "SAGEMAKER_TRAINING",
        "status": "FAILED",
    },
}
BLOCKED = "Batch Service Job Queue Blocked"


@pytest.fixture(scope="module")
def template(synthesize: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = synthesize(**GIVEN)["SweepStack"]
    return found


def test_it_is_left_out_unless_asked_for_and_changes_no_other_stack(
    templates: dict[str, Any], synthesize: Callable[..., Any]
) -> None:
    assert "SweepStack" not in templates
    asked = synthesize(**{"sweep.instances": "1"})
    assert asked.keys() - templates.keys() == {"SweepStack"}
    outputs = [each["TrainingStack"]["Outputs"] for each in (asked, templates)]
    command, usual = (each["DeployCommand"]["Value"] for each in outputs)
    assert command == f"{usual} -c sweep.instances=1"
    assert asked["TrainingStack"] == {
        **templates["TrainingStack"],
        "Outputs": {**outputs[1], "DeployCommand": {"Value": command}},
    }
    first_in_first_out = asked["SweepStack"]
    assert not every(first_in_first_out, "AWS::Batch::SchedulingPolicy")
    assert "SchedulingPolicyArn" not in only(first_in_first_out, "AWS::Batch::JobQueue")


def test_shares_make_another_queue_as_none_gains_or_loses_them(
    template: dict[str, Any], synthesize: Callable[..., Any]
) -> None:
    without = synthesize(**{"sweep.instances": "4"})["SweepStack"]
    queues = [
        {name for name, each in one["Resources"].items() if each["Type"] == "AWS::Batch::JobQueue"}
        for one in (template, without)
    ]
    assert queues == [{SHARED_QUEUE}, {"Queue"}]


def test_the_queue_has_its_limit_and_its_shares(template: dict[str, Any]) -> None:
    environment = only(template, "AWS::Batch::ServiceEnvironment")
    assert environment == {
        "ServiceEnvironmentType": "SAGEMAKER_TRAINING",
        "CapacityLimits": [{"CapacityUnit": "NUM_INSTANCES", "MaxCapacity": 4}],
    }
    queue = only(template, "AWS::Batch::JobQueue")
    assert queue["JobQueueType"] == "SAGEMAKER_TRAINING" and "ComputeEnvironmentOrder" not in queue
    (order,) = queue["ServiceEnvironmentOrder"]
    assert order["ServiceEnvironment"]["Fn::GetAtt"][1] == "ServiceEnvironmentArn"
    policy = only(template, "AWS::Batch::SchedulingPolicy")["FairsharePolicy"]
    weights = {one["ShareIdentifier"]: one["WeightFactor"] for one in policy["ShareDistribution"]}
    # Batch: "a weight factor of 0.125 (1/8) get 8 times the compute resources" of one of 1.
    assert weights == {"vision": 0.3333, "text": 1}
    # docs.aws.amazon.com/batch/latest/userguide/sm_job_stuck_in_runnable_time_limit_actions.html:
    # Batch compares the reason with its own, and knows these two of a queue without quota shares.
    actions = queue["JobStateTimeLimitActions"]
    assert {each["Reason"] for each in actions} == {
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
        "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE",
    }
    # After a day: the least, ten minutes, would end a sweep that waits for capacity.
    assert {(each["Action"], each["MaxTimeSeconds"]) for each in actions} == {("TERMINATE", 86_400)}


def test_a_job_writes_below_sweeps_alone(template: dict[str, Any]) -> None:
    (statement,) = only(template, "AWS::IAM::Role")["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    assert statement["Condition"] == {
        "StringEquals": {"aws:SourceAccount": {"Ref": "AWS::AccountId"}}
    }
    statements = {
        each.get("Sid", "Key"): each
        for each in only(template, "AWS::IAM::Policy")["PolicyDocument"]["Statement"]
    }
    written = statements["WriteSweeps"]
    assert written["Resource"]["Fn::Join"][1][-1] == "/sweeps/*"
    assert sorted(statements["Key"]["Action"]) == ["kms:Decrypt", "kms:GenerateDataKey"]
    # `runs resume` submits what these say, with the rights of the person who calls it.
    denied = statements.pop("LeaveJobsToOperators")
    assert denied["Effect"] == "Deny"
    assert set(denied["Action"]) == {"s3:PutObject", "s3:DeleteObject"}
    queued = {each["Fn::Join"][1][-1] for each in denied["Resource"]}
    assert queued == {"/sweeps/*/sweep.json", "/sweeps/*/jobs.json"}
    others = [sid for sid, each in statements.items() if "s3:PutObject" in each["Action"]]
    assert others == ["WriteSweeps"]
    # A job may begin with any run's weights (init-from).
    read = [each["Fn::Join"][1][-1] for each in statements["Read"]["Resource"]]
    assert sorted(read) == ["/*", "/runs/*", "/sweeps/*"]
    anywhere = [sid for sid, each in statements.items() if each["Resource"] == "*"]
    assert anywhere == ["SignInToRegistry", "PublishMetrics"]


def test_its_faults_reach_people_and_raise_alarms(template: dict[str, Any]) -> None:
    rules = {
        name: each["Properties"]
        for name, each in template["Resources"].items()
        if each["Type"] == "AWS::Events::Rule"
    }
    patterns = {}
    for name, rule in rules.items():
        assert [list(target["Arn"]) for target in rule["Targets"]] == [["Ref"]]  # the topic
        pattern = rule["EventPattern"]
        assert pattern["detail"]["jobQueue"][0]["Fn::GetAtt"] == [SHARED_QUEUE, "JobQueueArn"]
        pattern["detail"]["jobQueue"] = [QUEUE]
        patterns[name[:-8]] = EventPattern.load(json.dumps(pattern))
    detail = EVENT["detail"]
    assert isinstance(detail, dict)
    others = {
        "Failed": [EVENT, EVENT | {"detail": detail | {"isTerminated": False}}],
        "Blocked": [EVENT | {"detail-type": BLOCKED, "detail": detail | {"status": "RUNNABLE"}}],
        "": [
            EVENT | {"detail": detail | {"status": "RUNNING"}},
            EVENT | {"detail": detail | {"jobQueue": f"{QUEUE}0"}},
            # By `runs stop`.
            EVENT | {"detail": detail | {"isTerminated": True}},
        ],
    }
    for wanted, events in others.items():
        for event in events:
            matching = [name for name, each in patterns.items() if each.matches_event(event)]
            assert matching == [wanted] * bool(wanted)
    for alarm in every(template, "AWS::CloudWatch::Alarm"):
        (dimension,) = alarm["Dimensions"]
        assert dimension["Name"] == "RuleName" and dimension["Value"]["Ref"] in rules
        assert alarm["AlarmActions"] and alarm["TreatMissingData"] == "notBreaching"
        assert alarm["ComparisonOperator"] == "GreaterThanOrEqualToThreshold"


def test_cfn_lint_finds_nothing(template: dict[str, Any]) -> None:
    found = lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))
    ignored = {"W3005", "W6001"}  # .cfnlintrc says why
    assert [str(each) for each in found if each.rule.id not in ignored] == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sweep.instances", "-1", "sweep.instances is -1"),
        ("sweep.shares", "vision", "sweep.shares is 'vision'; use a name of letters and digits"),
        ("sweep.shares", "a=1 a=2", "sweep.shares are a=1, a=2; name each only once"),
        ("sweep.shares", "a=0.001", "sweep.shares has 'a=0.001'; use a name of"),
        ("sweep.shares", " ".join(f"s{n}=1" for n in range(501)), "are 501; Batch takes 500"),
        ("sweep.repository", "Training", "sweep.repository is 'Training'; use a name such as"),
    ],
)
def test_fails_for_a_queue_that_batch_could_not_have(name: str, value: str, words: str) -> None:
    with pytest.raises(ValueError) as mistake:
        StackParameters.for_size("g5.xlarge", **{name: value})
    assert words in str(mistake.value)
