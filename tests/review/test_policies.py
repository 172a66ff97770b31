"""Permissions one by one: what a policy document allows, however its statements are arranged."""

import json
from typing import Any

from review.security import permissions, sentences


def document(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def allow(action: Any, resource: Any, **more: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **more}


def test_rearranged_statements_are_no_difference() -> None:
    one = document(allow(["s3:GetObject", "s3:PutObject"], ["a", "b"], Sid="Both"))
    other = document(allow("s3:PutObject", ["b", "a"]), allow("s3:GetObject", ["a", "b"]))
    assert permissions(one) == permissions(other)


def test_a_document_may_be_a_text() -> None:
    one = document(allow("s3:GetObject", "a"))
    assert permissions(json.dumps(one)) == permissions(one)


def test_only_what_came_is_told_in_one_sentence() -> None:
    old = permissions(document(allow(["s3:GetObject"], ["a", "b"])))
    new = permissions(document(allow(["s3:GetObject", "s3:PutObject"], ["a", "b"])))
    assert sentences(new - old) == ["Allow s3:PutObject on a, b"]
    assert sentences(old - new) == []


def test_a_condition_that_goes_is_a_permission_that_comes() -> None:
    bound = {"StringEquals": {"cloudwatch:namespace": "CWAgent"}}
    old = permissions(document(allow("cloudwatch:PutMetricData", "*", Condition=bound)))
    new = permissions(document(allow("cloudwatch:PutMetricData", "*")))
    assert sentences(new - old) == ["Allow cloudwatch:PutMetricData on *"]
    assert sentences(old - new)[0].endswith(
        'if {"StringEquals": {"cloudwatch:namespace": "CWAgent"}}'
    )


def test_principals_are_told_one_by_one() -> None:
    principal = {"Service": ["events.amazonaws.com", "sns.amazonaws.com"], "AWS": "*"}
    found = permissions(document(allow("sns:Publish", {"Ref": "Topic"}, Principal=principal)))
    assert sentences(found) == [
        "Allow to AWS * sns:Publish on ${Topic}",
        "Allow to Service events.amazonaws.com sns:Publish on ${Topic}",
        "Allow to Service sns.amazonaws.com sns:Publish on ${Topic}",
    ]


def test_all_but_some_actions_is_one_permission() -> None:
    statement = {"Effect": "Deny", "NotAction": ["s3:Get*", "s3:List*"], "Resource": "*"}
    found = permissions(document(statement))
    assert sentences(found) == ["Deny all but s3:Get*, s3:List* on *"]


def test_what_cannot_be_taken_apart_is_told_whole() -> None:
    (found,) = permissions({"Fn::If": ["Strict", {}, {}]})
    assert found.effect == "Allow"
    assert "Fn::If" in found.action
