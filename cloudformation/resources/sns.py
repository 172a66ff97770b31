"""SNS topics, their policies and subscriptions."""

import json
from typing import Any

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, deletes, finds, look_up, retag

_ATTRIBUTES = ("DisplayName", "KmsMasterKeyId", "SignatureVersion", "TracingConfig")


def _create_topic(request: HandlerRequest) -> Provisioned:
    name = request.get("TopicName") or request.generated_name(longest=256)
    attributes = request.pick(*_ATTRIBUTES)
    if request.get("FifoTopic"):
        attributes["FifoTopic"] = True
    made = call(request, "sns", "create_topic", Name=name, Attributes=attributes)["TopicArn"]
    return Provisioned(id=made, attributes={"TopicArn": made, "TopicName": name})


def _configure_topic(request: HandlerRequest) -> None:
    sns, arn = request.client("sns"), request.physical_id
    if request.old:
        for name in _ATTRIBUTES:
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
    # A topic always has a policy: without ours, the default one, which allows its owner everything.
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
    for topic in request.properties["Topics"]:
        found = look_up(request, "sns", "get_topic_attributes", TopicArn=topic)
        if found is None:
            return False
        if json.loads(found["Attributes"]["Policy"]) != request.properties["PolicyDocument"]:
            return False
    return True


def _subscribe(request: HandlerRequest) -> Provisioned:
    names = ("FilterPolicy", "DeliveryPolicy", "RedrivePolicy", "RawMessageDelivery")
    attributes = request.pick(*names)
    arn = call(
        request,
        "sns",
        "subscribe",
        Endpoint=request.get("Endpoint", ""),
        Attributes=attributes,
        ReturnSubscriptionArn=True,
    )["SubscriptionArn"]
    return Provisioned(id=arn, attributes={"Arn": arn})


TYPES: Registry = {
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
        create=_subscribe,
        delete=deletes("sns", "unsubscribe", by="SubscriptionArn"),
        exists=finds("sns", "get_subscription_attributes", by="SubscriptionArn"),
    ),
}
