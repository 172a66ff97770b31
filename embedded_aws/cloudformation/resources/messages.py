"""EventBridge rules, SNS topics, and the Lambda functions that they call."""

import io
import json
import zipfile
from typing import Any

from embedded_aws.cloudformation.errors import ResourceFailed
from embedded_aws.cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import (
    call,
    creates,
    deletes,
    finds,
    look_up,
    retag,
)

# What the rehearsal's event bus would not honour.
_NOT_DELIVERED = ("InputPath", "InputTransformer")
_TOPIC = ("DisplayName", "KmsMasterKeyId", "SignatureVersion", "TracingConfig")
_SUBSCRIPTION = ("FilterPolicy", "DeliveryPolicy", "RedrivePolicy", "RawMessageDelivery")


# Rules with their targets


_put_rule = creates(
    "events",
    "put_rule",
    name="Name",
    attributes={"Arn": "RuleArn"},
    # EventBridge ignores tags for an existing rule.
    more=lambda request: {"Tags": None} if request.old else {},
)


def _update_rule(request: HandlerRequest) -> Provisioned:
    made = _put_rule(request)
    _set_targets(request)
    return made


def _set_targets(request: HandlerRequest) -> None:
    ids = {target["Id"] for target in request.get("Targets", [])}
    gone = [target["Id"] for target in request.old.get("Targets", []) if target["Id"] not in ids]
    if gone:
        call(request, "events", "remove_targets", Rule=request.physical_id, Ids=gone)
    others = {key for each in request.get("Targets", []) for key in each if key in _NOT_DELIVERED}
    if others:
        raise ResourceFailed(f"The embedded AWS cannot set {', '.join(sorted(others))} of a target")
    if ids:
        answer = call(request, "events", "put_targets", Rule=request.physical_id)
        assert not answer["FailedEntryCount"], answer


def _delete_rule(request: HandlerRequest) -> None:
    _set_targets(request.emptied())
    call(request, "events", "delete_rule", Name=request.physical_id)


# Functions, and the permissions to call them


def _code(request: HandlerRequest) -> dict[str, Any]:
    code = request.properties["Code"]
    if "ZipFile" not in code:
        return {
            name: code[name] for name in ("S3Bucket", "S3Key", "S3ObjectVersion") if name in code
        }
    # In a template, ZipFile is the source code itself, which becomes a file named index.
    suffix = "py" if str(request.get("Runtime", "")).startswith("python") else "js"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"index.{suffix}"), code["ZipFile"])
    return {"ZipFile": packed.getvalue()}


def _configure_function(request: HandlerRequest) -> None:
    if not request.old:
        return
    name = request.physical_id
    if request.changed("Code") or request.changed("Architectures"):
        call(request, "lambda", "update_function_code", FunctionName=name, **_code(request))
    call(request, "lambda", "update_function_configuration", FunctionName=name)
    retag(request, "lambda", Resource=request.attributes["Arn"])


def _allow(request: HandlerRequest) -> Provisioned:
    statement = request.generated_name(longest=100)
    call(request, "lambda", "add_permission", StatementId=statement)
    return Provisioned(id=statement, attributes={"Id": statement})


# Topics


def _create_topic(request: HandlerRequest) -> Provisioned:
    name = request.get("TopicName") or request.generated_name(longest=256)
    attributes = request.pick(*_TOPIC, "FifoTopic")
    made = call(request, "sns", "create_topic", Name=name, Attributes=attributes)["TopicArn"]
    return Provisioned(id=made, attributes={"TopicArn": made, "TopicName": name})


def _configure_topic(request: HandlerRequest) -> None:
    sns, arn = request.client("sns"), request.physical_id
    for name in _TOPIC if request.old else ():
        if request.changed(name):
            sns.set_topic_attributes(
                TopicArn=arn, AttributeName=name, AttributeValue=str(request.get(name, ""))
            )
    retag(request, "sns", ResourceArn=arn)
    for item in request.added("Subscription"):
        sns.subscribe(TopicArn=arn, Protocol=item["Protocol"], Endpoint=item["Endpoint"])


def _configure_policy(request: HandlerRequest) -> None:
    for topic in request.properties["Topics"]:
        _set_policy(request, topic, request.properties["PolicyDocument"])


def _set_policy(request: HandlerRequest, topic: str, document: Any) -> None:
    request.client("sns").set_topic_attributes(
        TopicArn=topic, AttributeName="Policy", AttributeValue=json.dumps(document)
    )


def _delete_policy(request: HandlerRequest) -> None:
    # A topic always has a policy. Restore the default one, which allows its owner everything.
    for topic in request.properties["Topics"]:
        statement = {
            "Sid": "__default_statement_ID",
            "Effect": "Allow",
            "Principal": {"AWS": "*"},
            "Action": ["SNS:Publish", "SNS:Subscribe", "SNS:GetTopicAttributes"],
            "Resource": topic,
            "Condition": {"StringEquals": {"AWS:SourceOwner": request.account.id}},
        }
        _set_policy(request, topic, {"Version": "2008-10-17", "Statement": [statement]})


def _policy_exists(request: HandlerRequest) -> bool:
    wanted = request.properties["PolicyDocument"]
    found = [
        look_up(request, "sns", "get_topic_attributes", TopicArn=topic)
        for topic in request.properties["Topics"]
    ]
    return all(each and json.loads(each["Attributes"]["Policy"]) == wanted for each in found)


TYPES: Registry = {
    "AWS::Events::Rule": ResourceType(
        create=_put_rule,
        configure=_set_targets,
        update=_update_rule,
        delete=_delete_rule,
        exists=finds("events", "describe_rule", "EventBusName", by="Name"),
    ),
    "AWS::Lambda::Function": ResourceType(
        create=creates(
            "lambda",
            "create_function",
            name="FunctionName",
            attributes={"Arn": "FunctionArn"},
            more=lambda request: {"Code": _code(request)},
        ),
        configure=_configure_function,
        delete=deletes("lambda", "delete_function", by="FunctionName"),
        exists=finds("lambda", "get_function", by="FunctionName"),
    ),
    "AWS::Lambda::Permission": ResourceType(
        create=_allow,
        delete=deletes("lambda", "remove_permission", "FunctionName", by="StatementId"),
        exists=finds(
            "lambda",
            "get_policy",
            "FunctionName",
            where=lambda request, found: f'"{request.physical_id}"' in found["Policy"],
        ),
    ),
    "AWS::SNS::Topic": ResourceType(
        create=_create_topic,
        configure=_configure_topic,
        delete=deletes("sns", "delete_topic", by="TopicArn"),
        exists=finds("sns", "get_topic_attributes", by="TopicArn"),
    ),
    "AWS::SNS::TopicPolicy": ResourceType(
        create=lambda request: Provisioned(id=request.generated_name(longest=128)),
        configure=_configure_policy,
        delete=_delete_policy,
        exists=_policy_exists,
    ),
    "AWS::SNS::Subscription": ResourceType(
        create=creates(
            "sns",
            "subscribe",
            by="SubscriptionArn",
            attributes={"Arn": "SubscriptionArn"},
            more=lambda request: {
                "Endpoint": request.get("Endpoint", ""),
                "Attributes": request.pick(*_SUBSCRIPTION),
                "ReturnSubscriptionArn": True,
            },
        ),
        delete=deletes("sns", "unsubscribe", by="SubscriptionArn"),
        exists=finds("sns", "get_subscription_attributes", by="SubscriptionArn"),
    ),
}
