"""KMS keys and aliases."""

import json

from cloudformation.resource import Provisioned, ResourceRequest, ResourceType
from cloudformation.resources.lookups import deletes, look_up


def _create_key(request: ResourceRequest) -> Provisioned:
    arguments = request.pick("Description", "KeyUsage", "KeySpec", "MultiRegion")
    if "KeyPolicy" in request.properties:
        arguments["Policy"] = json.dumps(request.properties["KeyPolicy"])
    tags = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in request.get("Tags", [])]
    made = request.client("kms").create_key(**arguments, Tags=tags)["KeyMetadata"]
    return Provisioned(id=made["KeyId"], attributes={"Arn": made["Arn"], "KeyId": made["KeyId"]})


def _configure_key(request: ResourceRequest) -> None:
    kms, key = request.client("kms"), request.physical_id
    if request.get("EnableKeyRotation"):
        kms.enable_key_rotation(KeyId=key)
    else:
        kms.disable_key_rotation(KeyId=key)
    if request.old and "KeyPolicy" in request.properties:
        policy = json.dumps(request.properties["KeyPolicy"])
        kms.put_key_policy(KeyId=key, PolicyName="default", Policy=policy)
    if request.old and "Description" in request.properties:
        kms.update_key_description(KeyId=key, Description=request.properties["Description"])


def _key_exists(request: ResourceRequest) -> bool:
    found = look_up(request.client("kms").describe_key, KeyId=request.physical_id)
    return found is not None and found["KeyMetadata"]["KeyState"] != "PendingDeletion"


def _put_alias(request: ResourceRequest) -> Provisioned:
    kms, name = request.client("kms"), request.properties["AliasName"]
    put = kms.update_alias if request.physical_id == name else kms.create_alias
    put(AliasName=name, TargetKeyId=request.properties["TargetKeyId"])
    return Provisioned(id=name)


def _alias_exists(request: ResourceRequest) -> bool:
    pages = request.client("kms").get_paginator("list_aliases").paginate()
    return any(
        alias["AliasName"] == request.physical_id for page in pages for alias in page["Aliases"]
    )


TYPES = {
    "AWS::KMS::Key": ResourceType(
        create=_create_key,
        configure=_configure_key,
        delete=lambda request: request.client("kms").schedule_key_deletion(
            KeyId=request.physical_id, PendingWindowInDays=request.get("PendingWindowInDays", 30)
        ),
        exists=_key_exists,
    ),
    "AWS::KMS::Alias": ResourceType(
        create=_put_alias,
        update=_put_alias,
        delete=deletes("kms", "delete_alias", "AliasName"),
        exists=_alias_exists,
    ),
}
