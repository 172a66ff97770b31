"""KMS keys and aliases."""

import json

from cloudformation.resource import Made, ResourceType, Wish
from cloudformation.resources.asking import ask


def _create_key(wish: Wish) -> Made:
    arguments = wish.pick("Description", "KeyUsage", "KeySpec", "MultiRegion")
    if "KeyPolicy" in wish.properties:
        arguments["Policy"] = json.dumps(wish.properties["KeyPolicy"])
    tags = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in wish.get("Tags", [])]
    made = wish.client("kms").create_key(**arguments, Tags=tags)["KeyMetadata"]
    return Made(id=made["KeyId"], attributes={"Arn": made["Arn"], "KeyId": made["KeyId"]})


def _configure_key(wish: Wish) -> None:
    kms, key = wish.client("kms"), wish.physical_id
    if wish.get("EnableKeyRotation"):
        kms.enable_key_rotation(KeyId=key)
    else:
        kms.disable_key_rotation(KeyId=key)
    if wish.old and "KeyPolicy" in wish.properties:
        policy = json.dumps(wish.properties["KeyPolicy"])
        kms.put_key_policy(KeyId=key, PolicyName="default", Policy=policy)
    if wish.old and "Description" in wish.properties:
        kms.update_key_description(KeyId=key, Description=wish.properties["Description"])


def _key_exists(wish: Wish) -> bool:
    found = ask(wish.client("kms").describe_key, KeyId=wish.physical_id)
    return found is not None and found["KeyMetadata"]["KeyState"] != "PendingDeletion"


def _put_alias(wish: Wish) -> Made:
    kms, name = wish.client("kms"), wish.properties["AliasName"]
    put = kms.update_alias if wish.physical_id == name else kms.create_alias
    put(AliasName=name, TargetKeyId=wish.properties["TargetKeyId"])
    return Made(id=name)


def _alias_exists(wish: Wish) -> bool:
    pages = wish.client("kms").get_paginator("list_aliases").paginate()
    return any(
        alias["AliasName"] == wish.physical_id for page in pages for alias in page["Aliases"]
    )


TYPES = {
    "AWS::KMS::Key": ResourceType(
        create=_create_key,
        configure=_configure_key,
        delete=lambda wish: wish.client("kms").schedule_key_deletion(
            KeyId=wish.physical_id, PendingWindowInDays=wish.get("PendingWindowInDays", 30)
        ),
        exists=_key_exists,
    ),
    "AWS::KMS::Alias": ResourceType(
        create=_put_alias,
        update=_put_alias,
        delete=lambda wish: wish.client("kms").delete_alias(AliasName=wish.physical_id),
        exists=_alias_exists,
    ),
}
