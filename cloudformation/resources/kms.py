"""KMS keys and aliases."""

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, deletes, finds


def _create_key(request: HandlerRequest) -> Provisioned:
    tags = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in request.get("Tags", [])]
    made = call(request, "kms", "create_key", Policy=request.get("KeyPolicy"), Tags=tags)
    key = made["KeyMetadata"]
    return Provisioned(id=key["KeyId"], attributes={"Arn": key["Arn"], "KeyId": key["KeyId"]})


def _configure_key(request: HandlerRequest) -> None:
    kms, key = request.client("kms"), request.physical_id
    if request.get("EnableKeyRotation"):
        kms.enable_key_rotation(KeyId=key)
    else:
        kms.disable_key_rotation(KeyId=key)
    if request.old and "KeyPolicy" in request.properties:
        policy = request.properties["KeyPolicy"]
        call(request, "kms", "put_key_policy", KeyId=key, PolicyName="default", Policy=policy)
    if request.old and "Description" in request.properties:
        call(request, "kms", "update_key_description", KeyId=key)


def _put_alias(request: HandlerRequest) -> Provisioned:
    name = request.properties["AliasName"]
    known = request.physical_id == name
    call(request, "kms", "update_alias" if known else "create_alias")
    return Provisioned(id=name)


TYPES: Registry = {
    "AWS::KMS::Key": ResourceType(
        create=_create_key,
        configure=_configure_key,
        delete=deletes("kms", "schedule_key_deletion", "PendingWindowInDays", by="KeyId"),
        exists=finds(
            "kms",
            "describe_key",
            by="KeyId",
            where=lambda _, found: found["KeyMetadata"]["KeyState"] != "PendingDeletion",
        ),
    ),
    "AWS::KMS::Alias": ResourceType(
        create=_put_alias,
        update=_put_alias,
        delete=deletes("kms", "delete_alias", by="AliasName"),
        exists=finds(
            "kms",
            "list_aliases",
            answer="Aliases",
            where=lambda request, alias: alias["AliasName"] == request.physical_id,
        ),
    ),
}
