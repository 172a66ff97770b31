"""Watchers and protections of a run may go only where somebody accepts it by name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from review.__main__ import parse_arguments
from review.assembly import Side
from review.comment import write_comment
from review.verdict import Review, judge
from tests.review.conftest import MakeSide, edited
from tests.stack_names import DATASET

Reviewer = Callable[..., Review]
PUBLIC = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": "*"}


def first(resources: dict[str, Any], kind: str, having: str = "") -> str:
    return next(
        name
        for name, each in resources.items()
        if each["Type"] == kind and having in f"{name} {json.dumps(each)}"
    )


def without(kind: str, having: str = "") -> Callable[[dict[str, Any]], None]:
    return lambda resources: resources.pop(first(resources, kind, having))


def with_property(kind: str, path: str, value: Any, having: str = "") -> Any:
    def edit(resources: dict[str, Any]) -> None:
        *outer, last = path.split(".")
        node = resources[first(resources, kind, having)]["Properties"]
        for name in outer:
            node = node[name]
        node[last] = value

    return edit


ALARM, RULE, FUNCTION = "AWS::CloudWatch::Alarm", "AWS::Events::Rule", "AWS::Lambda::Function"
TEMPLATE, CLOCK = "AWS::EC2::LaunchTemplate", "ScheduleExpression"


@pytest.mark.parametrize(
    ("edit", "accept", "what"),
    [
        (without(ALARM, "GuardSilent"), "alarms", "the alarm is removed"),
        (with_property(ALARM, "AlarmActions", []), "alarms", "the alarm has no AlarmActions"),
        (with_property(ALARM, "ActionsEnabled", False), "alarms", "the alarm is disabled"),
        (without(RULE, CLOCK), "guard", "the clock that calls the Guard is removed"),
        (with_property(RULE, "State", "DISABLED", CLOCK), "guard", "calls the Guard is disabled"),
        (with_property(RULE, "Targets", [], CLOCK), "guard", "calls the Guard has no Targets"),
        (without(FUNCTION), "guard", "the function that stops a run is removed"),
        (
            with_property(FUNCTION, "ReservedConcurrentExecutions", 0),
            "guard",
            "the function that stops a run is disabled",
        ),
        (
            with_property(TEMPLATE, "LaunchTemplateData.MetadataOptions.HttpTokens", "optional"),
            "imdsv1",
            "open to IMDSv1",
        ),
        (
            with_property(TEMPLATE, "LaunchTemplateData.MetadataOptions", {}),
            "imdsv1",
            "open to IMDSv1",
        ),
    ],
)
def test_fails_for_a_protection_that_goes_unless_it_is_accepted(
    base: Side, edit: Any, accept: str, what: str
) -> None:
    review = judge(base, edited(base, edit), [])
    (found,) = review.of("weakened")
    assert (found.accept, what in found.what) == (accept, True)
    assert review.exit_code("data-loss") == 1
    assert review.exit_code("data-loss", ["public"]) == 1
    assert review.exit_code("data-loss", [accept]) == 0
    comment = write_comment(review)
    assert "### Protections lost" in comment
    assert f"To accept it: `--accept {accept}`" in comment
    # What comes back, or was never there, is no loss.
    assert judge(edited(base, edit), base, []).of("weakened") == []
    assert judge(edited(base, edit), edited(base, edit), []).of("weakened") == []


def test_fails_where_nobody_gets_the_alarms_any_more(base: Side, make_side: MakeSide) -> None:
    mailed = make_side(**{"alarm.email": "a@example.org"})
    review = judge(mailed, base, [])
    (found,) = review.of("weakened")
    assert found.accept == "alarms"
    assert found.what == "a@example.org no longer gets the alarms, and nobody else does"
    assert review.exit_code("data-loss") == 1
    other = make_side(**{"alarm.email": "b@example.org"})
    assert judge(mailed, other, []).of("weakened") == judge(base, mailed, []).of("weakened") == []


def test_a_function_that_is_not_the_guard_may_go(base: Side) -> None:
    """With its role, its clock and whatever calls it: another team's app has functions too."""
    role = {"PolicyDocument": {"Statement": [{"Effect": "Allow", "Action": "sns:Publish"}]}}
    function = {"Handler": "index.handler", "Code": {}, "Role": {"Fn::GetAtt": ["OwnRole", "Arn"]}}
    clock = {"ScheduleExpression": "rate(1 hour)", "Targets": [{"Arn": {"Ref": "Own"}}]}
    theirs = {
        "Own": {"Type": FUNCTION, "Properties": {**function, "Timeout": 60}},
        "OwnRole": {"Type": "AWS::IAM::Role", "Properties": {"Policies": [role]}},
        "OwnClock": {"Type": RULE, "Properties": clock},
        "OwnCaller": {
            "Type": "AWS::Lambda::Permission",
            "Properties": {"FunctionName": {"Ref": "Own"}},
        },
    }
    before = edited(base, lambda resources: resources.update(theirs))
    assert judge(before, base, []).exit_code("data-loss") == 0

    def weaken(resources: dict[str, Any]) -> None:
        resources["Own"]["Properties"]["Timeout"] = 3
        for name in ("OwnClock", "OwnCaller"):
            del resources[name]
        del resources["OwnRole"]["Properties"]["Policies"]

    review = judge(before, edited(before, weaken), [])
    assert {each.accept for each in review.effects} == {""}


ADMINISTRATOR = {"ManagedPolicyArns": ["arn:aws:iam::aws:policy/AdministratorAccess"]}
ANYTHING = {"PolicyDocument": {"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}}


@pytest.mark.parametrize(
    ("kind", "properties", "says"),
    [
        ("RolePolicy", ANYTHING, "+ Allow * on *"),
        ("UserPolicy", ANYTHING, "+ Allow * on *"),
        ("GroupPolicy", ANYTHING, "+ Allow * on *"),
        ("User", {"Policies": [ANYTHING]}, "+ Allow * on *"),
        ("User", ADMINISTRATOR, "+ ManagedPolicyArns: arn:aws:iam::aws:policy/Administrator"),
        ("Group", ADMINISTRATOR, "+ ManagedPolicyArns: arn:aws:iam::aws:policy/Administrator"),
        ("User", {"Groups": ["Admins"]}, "+ Groups: Admins"),
        ("UserToGroupAddition", {"GroupName": "Admins", "Users": ["me"]}, "+ UserToGroupAddition"),
    ],
)
def test_fails_for_who_may_do_more(
    base: Side, kind: str, properties: dict[str, Any], says: str
) -> None:
    new = {"It": {"Type": f"AWS::IAM::{kind}", "Properties": properties}}
    review = judge(base, edited(base, lambda resources: resources.update(new)), [])
    (row,) = review.of("security")
    assert (row.action, row.accept) == ("widens", "permissions") and row.what.startswith(says)
    assert [review.exit_code("data-loss", each) for each in ([], ["permissions"])] == [1, 0]


def test_fails_for_a_permissions_boundary_that_goes_or_is_another(base: Side) -> None:
    def bound(by: object) -> Side:
        return edited(base, with_property("AWS::IAM::Role", "PermissionsBoundary", by))

    for after, told in (("", "-"), ({"Ref": "Wide"}, "${Wide}")):
        review = judge(bound("arn:aws:iam::1:policy/narrow"), bound(after) if after else base, [])
        (row,) = review.of("security")
        assert row.what == f"PermissionsBoundary: arn:aws:iam::1:policy/narrow → {told}"
        assert (row.action, row.accept) == ("widens", "permissions")
    (row,) = judge(base, bound("narrow"), []).of("security")
    assert row.accept == ""


def test_what_only_gets_another_logical_id_stays(base: Side) -> None:
    def rename(resources: dict[str, Any]) -> None:
        for kind, having in ((ALARM, "GpuHot"), (RULE, CLOCK)):
            name = first(resources, kind, having)
            resources[f"{name}2"] = resources.pop(name)

    assert judge(base, edited(base, rename), []).of("weakened") == []


def add_statement(**statement: Any) -> Callable[[dict[str, Any]], None]:
    def edit(resources: dict[str, Any]) -> None:
        policy = resources[first(resources, "AWS::S3::BucketPolicy", "RunBucket")]
        policy["Properties"]["PolicyDocument"]["Statement"].append({**PUBLIC, **statement})

    return edit


def open_bucket(resources: dict[str, Any]) -> None:
    bucket = resources[first(resources, "AWS::S3::Bucket", "RunBucket")]
    bucket["Properties"].pop("PublicAccessBlockConfiguration")


def test_fails_for_a_public_bucket_and_says_where_s3_refuses_it(base: Side) -> None:
    public = edited(base, add_statement(), DATASET)
    review = judge(base, public, [])
    (found,) = review.of("weakened")
    assert found.what.startswith("the bucket is open to anyone: Allow to * s3:GetObject on *")
    assert "S3 will refuse it: the bucket blocks public policies" in found.what
    assert [review.exit_code("data-loss", each) for each in ([], ["public"])] == [1, 0]
    both = edited(public, open_bucket, DATASET)
    opened, found = judge(base, both, []).of("weakened")
    assert opened.what.startswith("the bucket loses BlockPublicAcls, ")
    assert "refuse" not in found.what


@pytest.mark.parametrize(
    ("statement", "is_public"),
    [
        ({"Principal": {"AWS": "*"}}, True),
        ({"Principal": {"AWS": {"Fn::GetAtt": ["Role", "Arn"]}}}, False),
        ({"Principal": {"Service": "logging.s3.amazonaws.com"}}, False),
        ({"Effect": "Deny"}, False),
        ({"Condition": {"StringEquals": {"aws:PrincipalOrgID": "o-12345"}}}, False),
        ({"Condition": {"StringLike": {"aws:PrincipalOrgID": "o-*"}}}, True),
        ({"Condition": {"StringNotEquals": {"aws:PrincipalOrgID": "o-12345"}}}, True),
        ({"Condition": {"Bool": {"aws:SecureTransport": "true"}}}, True),
    ],
)
def test_public_is_what_s3_calls_public(
    base: Side, statement: dict[str, Any], is_public: bool
) -> None:
    review = judge(base, edited(base, add_statement(**statement), DATASET), [])
    assert bool(review.of("weakened")) == is_public


def test_fails_for_a_protection_that_has_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--accept", "everything"])
    assert "invalid choice: 'everything'" in capsys.readouterr().err


def of_code(resources: dict[str, Any]) -> str:
    """The hash of the code bundle, which the instances' role may read."""
    policy = json.dumps(resources[first(resources, "AWS::IAM::Policy", "InstanceRole")])
    return policy.partition(".zip")[0][-64:]


def test_other_code_alone_widens_nothing(base: Side) -> None:
    def change_code(resources: dict[str, Any]) -> None:
        text = json.dumps(resources).replace(of_code(resources), "0" * 64)
        resources.update(json.loads(text))

    review = judge(base, edited(base, change_code), [])
    assert any(each.type == "AWS::IAM::Policy" for each in review.changes)
    assert review.of("security") == []

    def allow_more(resources: dict[str, Any]) -> None:
        change_code(resources)
        policy = resources[first(resources, "AWS::IAM::Policy", "InstanceRole")]
        (read,) = [
            each
            for each in policy["Properties"]["PolicyDocument"]["Statement"]
            if each["Action"] == "s3:GetObject"
        ]
        read["Action"] = ["s3:GetObject", "s3:GetObjectVersion"]

    security = judge(base, edited(base, allow_more), []).of("security")
    assert {each.action for each in security} == {"widens"}
    assert all("s3:GetObjectVersion" in each.what for each in security)


def test_a_new_run_id_widens_nothing(base: Side, make_side: MakeSide) -> None:
    head = make_side(run_id="run-2")
    review = judge(base, head, [])
    assert review.of("security") == []
    assert "widened" not in write_comment(review)

    # Under it, what is more than the run before had is reported all the same.
    def keep_the_old_run(resources: dict[str, Any]) -> None:
        policy = resources[first(resources, "AWS::IAM::Policy", "InstanceRole")]
        statement = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "b/runs/run-1/*"}
        policy["Properties"]["PolicyDocument"]["Statement"].append(statement)

    (found,) = judge(base, edited(head, keep_the_old_run), []).of("security")
    assert (found.action, found.what) == ("widens", "+ Allow s3:GetObject on b/runs/run-1/*")


def test_a_runs_own_role_is_that_of_the_run_before(base: Side) -> None:
    """A role, a policy and a group for each run: they come and go with it, and allow the same."""

    def name_after(run_id: str, side: Side) -> Side:
        def rename(resources: dict[str, Any]) -> None:
            text = json.dumps(resources)
            for name, each in list(resources.items()):
                if "/InstanceRole/" in each.get("Metadata", {}).get("aws:cdk:path", ""):
                    text = text.replace(f'"{name}"', f'"{name}{run_id.replace("-", "")}"')
            text = text.replace("/InstanceRole/", f"/InstanceRole/{run_id}/")
            resources.clear()
            resources.update(json.loads(text.replace("run-1", run_id)))

        return edited(side, rename)

    review = judge(name_after("run-1", base), name_after("run-2", base), [])
    assert {"added", "removed"} <= {each.action for each in review.changes}
    assert review.of("security") == []
