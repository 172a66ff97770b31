"""SNS topics, their policies and subscriptions."""

import json
from typing import Any

from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType
from cloudformation.resources.lookups import deletes, finds, look_up

_ATTRIBUTES = ("DisplayName", "KmsMasterKeyId", "SignatureVersion", "TracingConfig")


def _create_topic(request: ResourceRequest) -> Provisioned:
    name = request.get("TopicName") or request.generated_name(longest=256)
    attributes = {key: str(value) for key, value in request.pick(*_ATTRIBUTES).items()}
    if request.get("FifoTopic"):
        attributes["FifoTopic"] = "true"
    arn = request.client("sns").create_topic(
        Name=name, Attributes=attributes, Tags=request.get("Tags", [])
    )["TopicArn"]
    return Provisioned(id=arn, attributes={"TopicArn": arn, "TopicName": name})


def _configure_topic(request: ResourceRequest) -> None:
    sns, arn = request.client("sns"), request.physical_id
    if request.old:
        for name in _ATTRIBUTES:
            if request.changed(name):
                sns.set_topic_attributes(
                    TopicArn=arn, AttributeName=name, AttributeValue=str(request.get(name, ""))
                )
        gone = {tag["Key"] for tag in request.old.get("Tags", [])} - {
            tag["Key"] for tag in request.get("Tags", [])
        }
        if gone:
            sns.untag_resource(ResourceArn=arn, TagKeys=sorted(gone))
        if request.get("Tags"):
            sns.tag_resource(ResourceArn=arn, Tags=request.get("Tags"))
    for item in request.get("Subscription", []):
        if item not in request.old.get("Subscription", []):
            sns.subscribe(TopicArn=arn, Protocol=item["Protocol"], Endpoint=item["Endpoint"])


def _create_policy(request: ResourceRequest) -> Provisioned:
    return Provisioned(id=request.generated_name(longest=128), attributes={})


def _configure_policy(request: ResourceRequest) -> None:
    for topic in request.properties["Topics"]:
        _set_policy(request, topic, request.properties["PolicyDocument"])


def _set_policy(request: ResourceRequest, topic: str, document: Any) -> None:
    request.client("sns").set_topic_attributes(
        TopicArn=topic, AttributeName="Policy", AttributeValue=json.dumps(document)
    )


def _delete_policy(request: ResourceRequest) -> None:
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


def _policy_exists(request: ResourceRequest) -> bool:
    sns = request.client("sns")
    for topic in request.properties["Topics"]:
        found = look_up(sns.get_topic_attributes, TopicArn=topic)
        if found is None:
            return False
        if json.loads(found["Attributes"]["Policy"]) != request.properties["PolicyDocument"]:
            return False
    return True


def _subscribe(request: ResourceRequest) -> Provisioned:
    properties = request.properties
    attributes: dict[str, str] = {}
    for name in ("FilterPolicy", "DeliveryPolicy", "RedrivePolicy"):
        if name in properties:
            attributes[name] = json.dumps(properties[name])
    if "RawMessageDelivery" in properties:
        attributes["RawMessageDelivery"] = str(properties["RawMessageDelivery"]).lower()
    arn = request.client("sns").subscribe(
        TopicArn=properties["TopicArn"],
        Protocol=properties["Protocol"],
        Endpoint=properties.get("Endpoint", ""),
        Attributes=attributes,
        ReturnSubscriptionArn=True,
    )["SubscriptionArn"]
    return Provisioned(id=arn, attributes={"Arn": arn})


TYPES: Registry = {
    "AWS::SNS::Topic": ResourceType(
        create=_create_topic,
        configure=_configure_topic,
        delete=deletes("sns", "delete_topic", "TopicArn"),
        exists=finds("sns", "get_topic_attributes", "TopicArn"),
    ),
    "AWS::SNS::TopicPolicy": ResourceType(
        create=_create_policy,
        configure=_configure_policy,
        delete=_delete_policy,
        exists=_policy_exists,
    ),
    "AWS::SNS::Subscription": ResourceType(
        create=_subscribe,
        delete=deletes("sns", "unsubscribe", "SubscriptionArn"),
        exists=finds("sns", "get_subscription_attributes", "SubscriptionArn"),
    ),
}
