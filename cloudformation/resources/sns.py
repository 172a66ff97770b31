"""SNS topics, their policies and subscriptions."""

import json
from typing import Any

from cloudformation.resource import Made, Registry, ResourceType, Wish
from cloudformation.resources.asking import ask, known

_ATTRIBUTES = ("DisplayName", "KmsMasterKeyId", "SignatureVersion", "TracingConfig")


def _create_topic(wish: Wish) -> Made:
    name = wish.get("TopicName") or wish.generated_name(longest=256)
    attributes = {key: str(value) for key, value in wish.pick(*_ATTRIBUTES).items()}
    if wish.get("FifoTopic"):
        attributes["FifoTopic"] = "true"
    arn = wish.client("sns").create_topic(
        Name=name, Attributes=attributes, Tags=wish.get("Tags", [])
    )["TopicArn"]
    return Made(id=arn, attributes={"TopicArn": arn, "TopicName": name})


def _configure_topic(wish: Wish) -> None:
    sns, arn = wish.client("sns"), wish.physical_id
    if wish.old:
        for name in _ATTRIBUTES:
            if wish.changed(name):
                sns.set_topic_attributes(
                    TopicArn=arn, AttributeName=name, AttributeValue=str(wish.get(name, ""))
                )
        gone = {tag["Key"] for tag in wish.old.get("Tags", [])} - {
            tag["Key"] for tag in wish.get("Tags", [])
        }
        if gone:
            sns.untag_resource(ResourceArn=arn, TagKeys=sorted(gone))
        if wish.get("Tags"):
            sns.tag_resource(ResourceArn=arn, Tags=wish.get("Tags"))
    for item in wish.get("Subscription", []):
        if item not in wish.old.get("Subscription", []):
            sns.subscribe(TopicArn=arn, Protocol=item["Protocol"], Endpoint=item["Endpoint"])


def _create_policy(wish: Wish) -> Made:
    return Made(id=wish.generated_name(longest=128), attributes={})


def _configure_policy(wish: Wish) -> None:
    for topic in wish.properties["Topics"]:
        _set_policy(wish, topic, wish.properties["PolicyDocument"])


def _set_policy(wish: Wish, topic: str, document: Any) -> None:
    wish.client("sns").set_topic_attributes(
        TopicArn=topic, AttributeName="Policy", AttributeValue=json.dumps(document)
    )


def _delete_policy(wish: Wish) -> None:
    # A topic always has a policy: without ours it is the one that lets its owner do everything.
    for topic in wish.properties["Topics"]:
        statement = {
            "Sid": "__default_statement_ID",
            "Effect": "Allow",
            "Principal": {"AWS": "*"},
            "Action": ["SNS:Publish", "SNS:Subscribe", "SNS:GetTopicAttributes"],
            "Resource": topic,
            "Condition": {"StringEquals": {"AWS:SourceOwner": wish.account.id}},
        }
        _set_policy(wish, topic, {"Version": "2008-10-17", "Statement": [statement]})


def _policy_exists(wish: Wish) -> bool:
    sns = wish.client("sns")
    for topic in wish.properties["Topics"]:
        found = ask(sns.get_topic_attributes, TopicArn=topic)
        if found is None:
            return False
        if json.loads(found["Attributes"]["Policy"]) != wish.properties["PolicyDocument"]:
            return False
    return True


def _subscribe(wish: Wish) -> Made:
    properties = wish.properties
    attributes: dict[str, str] = {}
    for name in ("FilterPolicy", "DeliveryPolicy", "RedrivePolicy"):
        if name in properties:
            attributes[name] = json.dumps(properties[name])
    if "RawMessageDelivery" in properties:
        attributes["RawMessageDelivery"] = str(properties["RawMessageDelivery"]).lower()
    arn = wish.client("sns").subscribe(
        TopicArn=properties["TopicArn"],
        Protocol=properties["Protocol"],
        Endpoint=properties.get("Endpoint", ""),
        Attributes=attributes,
        ReturnSubscriptionArn=True,
    )["SubscriptionArn"]
    return Made(id=arn, attributes={"Arn": arn})


TYPES: Registry = {
    "AWS::SNS::Topic": ResourceType(
        create=_create_topic,
        configure=_configure_topic,
        delete=lambda wish: wish.client("sns").delete_topic(TopicArn=wish.physical_id),
        exists=lambda wish: known(
            wish.client("sns").get_topic_attributes, TopicArn=wish.physical_id
        ),
    ),
    "AWS::SNS::TopicPolicy": ResourceType(
        create=_create_policy,
        configure=_configure_policy,
        delete=_delete_policy,
        exists=_policy_exists,
    ),
    "AWS::SNS::Subscription": ResourceType(
        create=_subscribe,
        delete=lambda wish: wish.client("sns").unsubscribe(SubscriptionArn=wish.physical_id),
        exists=lambda wish: known(
            wish.client("sns").get_subscription_attributes, SubscriptionArn=wish.physical_id
        ),
    ),
}
