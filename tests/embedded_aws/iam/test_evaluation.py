"""Published examples of AWS's evaluation logic, as cases: policies, a call, allowed or not.

docs.aws.amazon.com/IAM/latest/UserGuide/: reference_policies_evaluation-logic.html,
access_policies_boundaries.html, reference_policies_elements_condition.html,
 reference_policies_variables.html, reference_policies_elements_notprincipal.html
"""

import json
from typing import Any

import pytest

from embedded_aws.iam.evaluation import (
    BOUNDARY,
    IDENTITY,
    RESOURCE,
    ApiCall,
    Caller,
    evaluate,
    read_policy,
)
from tests.embedded_aws.iam.cases import (
    ACCOUNT,
    ARN,
    ROLE,
    USER,
    allow,
    deny,
    document,
    request,
    rule,
)

OBJECT = "arn:aws:s3:::runs/a/1"


def when(operator: str, **wanted: Any) -> dict[str, Any]:
    return {"Condition": {operator: {key.replace("__", ":"): v for key, v in wanted.items()}}}


def case(expected: bool, *identity: Any, **more: Any) -> Any:
    """Make a case of s3:GetObject on OBJECT, by a role's session unless told otherwise."""
    names = {"boundary": BOUNDARY, "resource": RESOURCE}
    policies = {names[name]: more.pop(name) for name in list(more) if name in names}
    context = {key.replace("__", ":"): value for key, value in more.pop("keys", {}).items()}
    made = request(more.pop("action", "s3:GetObject"), more.pop("on", OBJECT), **more)
    made["contextVariables"] = context
    return expected, {
        "request": made,
        IDENTITY: [document(*identity)] if identity else [],
        **{kind: [document(each)] for kind, each in policies.items()},
    }


def to(principal: Any, statement: Any) -> Any:
    return {**statement, "Principal": principal}


CASES = {
    "nothing is allowed by default": case(False),
    "an allow allows": case(True, allow("s3:Get*")),
    "a deny outranks every allow": case(False, allow(), deny("s3:GetObject", OBJECT)),
    "a boundary limits and grants nothing": case(False, boundary=allow()),
    "a boundary without the action denies": case(False, allow(), boundary=allow("ec2:*")),
    "a boundary with it lets the policy allow": case(True, allow(), boundary=allow("s3:*")),
    "a bucket allows without an identity policy": case(True, resource=to({"AWS": ROLE}, allow())),
    "a bucket that trusts the account leaves it to the account": case(
        False, resource=to({"AWS": f"arn:aws:iam::{ACCOUNT}:root"}, allow())
    ),
    "a grant to the role is limited by its boundary": case(
        False, resource=to({"AWS": ROLE}, allow()), boundary=allow("ec2:*")
    ),
    "a grant to the session is not limited by its boundary": case(
        True, resource=to({"AWS": ARN}, allow()), boundary=allow("ec2:*")
    ),
    "a grant to a user is not limited by its boundary": case(
        True, principal=USER, resource=to({"AWS": USER}, allow()), boundary=allow("ec2:*")
    ),
    "NotAction allows all else": case(
        False, {"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"}
    ),
    "NotResource denies all else": case(
        False, allow(), {"Effect": "Deny", "Action": "s3:*", "NotResource": "arn:aws:s3:::b/*"}
    ),
    "NotPrincipal excepts account, role and session together": case(
        True, allow(),
        resource={**deny(), "NotPrincipal": {"AWS": [ROLE, ARN, f"arn:aws:iam::{ACCOUNT}:root"]}},
    ),
    "NotPrincipal without the session denies it": case(
        False, allow(), resource={**deny(), "NotPrincipal": {"AWS": [ROLE]}}
    ),
    "all conditions must hold": case(
        False,
        allow(Condition={"StringLike": {"s3:prefix": "a*"}, "Bool": {"aws:SecureTransport": True}}),
        keys={"s3__prefix": "ab", "aws__SecureTransport": "false"},
    ),
    "one of a condition's values is enough": case(
        True, allow(**when("StringEquals", s3__prefix=["a", "b"])), keys={"s3__prefix": "b"}
    ),
    "an absent key fails": case(False, allow(**when("StringEquals", s3__prefix="a"))),
    "unless IfExists": case(True, allow(**when("StringEqualsIfExists", s3__prefix="a"))),
    "an absent key satisfies Not": case(True, allow(**when("StringNotEquals", s3__prefix="a"))),
    "Null asks for absence": case(True, allow(**when("Null", s3__prefix="true"))),
    "ForAllValues holds for none": case(
        True, allow(Condition={"ForAllValues:StringEquals": {"aws:TagKeys": ["Stack"]}})
    ),
    "ForAnyValue does not": case(
        False, allow(Condition={"ForAnyValue:StringEquals": {"aws:TagKeys": ["Stack"]}})
    ),
    "StringEquals takes * literally": case(
        False, allow(**when("StringEquals", s3__prefix="a*")), keys={"s3__prefix": "ab"}
    ),
    "an ARN's parts match one by one": case(
        False, allow(**when("ArnLike", aws__SourceArn="arn:aws:s3:::*/x")),
        keys={"aws__SourceArn": "arn:aws:sns:::y/x"},
    ),
    "numbers are compared as numbers": case(
        True, allow(**when("NumericLessThan", s3__TlsVersion="10")), keys={"s3__TlsVersion": "9"}
    ),
    "a variable has the request's value": case(
        True, allow("*", "arn:aws:s3:::runs/${aws:username}/*"), keys={"aws__username": "a"}
    ),
    "whose wildcards are letters": case(
        False, allow("*", "arn:aws:s3:::runs/${aws:username}/*"), keys={"aws__username": "*"}
    ),
    "a variable without value matches nothing": case(
        False, allow("*", "arn:aws:s3:::runs/${aws:username}/*")
    ),
    "unless it has a default": case(
        True, allow("*", "arn:aws:s3:::runs/${aws:username, 'a'}/*")
    ),
    "a literal star": case(False, allow("*", "arn:aws:s3:::runs/${*}")),
}  # fmt: skip


@pytest.mark.parametrize(("expected", "given"), CASES.values(), ids=list(CASES))
def test_published_example(expected: bool, given: Any) -> None:
    assert rule(given).allowed == expected


@pytest.mark.parametrize(
    ("statements", "allowed", "said"),
    [
        ([allow(**when("StringEquals", aws__SourceVpce="v"))], False,
         "does not know the condition key aws:SourceVpce of identity-based policy #1"),
        ([allow(), deny(**when("StringEquals", ec2__Vpc="v"))], False,
         "explicit deny in an identity-based policy (the embedded AWS does not know the condition"),
        ([allow(**when("IpAddress", s3__prefix="10.0.0.0/8"))], False, "operator IpAddress"),
        ([allow(**when("StringEquals", aws__SourceVpce="v")), allow()], True, ""),
    ],
)  # fmt: skip
def test_what_it_cannot_evaluate_denies_by_name(statements: Any, allowed: bool, said: str) -> None:
    ruling = rule(case(allowed, *statements)[1])
    assert ruling.allowed == allowed
    assert said in ruling.why


@pytest.mark.parametrize(
    ("principal", "expected"),
    [({"AWS": ROLE}, True), ({"AWS": f"arn:aws:iam::{ACCOUNT}:root"}, True), (None, False)],
)
def test_a_key_is_used_only_as_its_own_policy_says(principal: Any, expected: bool) -> None:
    """A key policy that names the account leaves it to identity policies; without one, nobody."""
    caller = Caller(arn=ARN, kind="AssumedRole", account=ACCOUNT, role=ROLE)
    call = ApiCall(action="kms:Decrypt", resource="arn:aws:kms:::key/1")
    own = [read_policy("own", IDENTITY, json.dumps(document(allow())))]
    key = json.dumps(document(to(principal, allow()))) if principal else '{"Statement": []}'
    for identity in (own, []):
        given = [read_policy("key", RESOURCE, key)]
        ruling = evaluate(caller, call, identity=identity, resource=given, needs_resource=True)
        named = principal == {"AWS": ROLE}
        assert ruling.allowed == (expected and (bool(identity) or named))
