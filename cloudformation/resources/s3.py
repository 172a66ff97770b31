"""S3 buckets and their policies."""

from collections.abc import Callable
from typing import Any

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, deletes, finds, tag_list, tag_map


def _create_bucket(request: HandlerRequest) -> Provisioned:
    s3 = request.client("s3")
    name = request.get("BucketName") or request.generated_name(longest=63, lower=True)
    region = request.account.region
    arguments: dict[str, Any] = {"Bucket": name}
    if region != "us-east-1":
        arguments["CreateBucketConfiguration"] = {"LocationConstraint": region}
    if "AccessControl" in request.properties:
        arguments["ACL"] = _canned_acl(request.properties["AccessControl"])
    if request.get("ObjectLockEnabled"):
        arguments["ObjectLockEnabledForBucket"] = True
    s3.create_bucket(**arguments)
    return Provisioned(
        id=name,
        attributes={
            "Arn": f"arn:aws:s3:::{name}",
            "DomainName": f"{name}.s3.amazonaws.com",
            "RegionalDomainName": f"{name}.s3.{region}.amazonaws.com",
            "DualStackDomainName": f"{name}.s3.dualstack.{region}.amazonaws.com",
            "WebsiteURL": f"http://{name}.s3-website-{region}.amazonaws.com",
        },
    )


def _canned_acl(text: str) -> str:
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in text)[1:]


def _configure_bucket(request: HandlerRequest) -> None:
    s3, bucket = request.client("s3"), request.physical_id
    for name, (put, argument, form, unset) in _SETTINGS.items():
        wanted = request.get(name)
        if wanted:
            getattr(s3, put)(Bucket=bucket, **{argument: form(wanted, bucket)})
        elif request.old.get(name) and isinstance(unset, str):
            getattr(s3, unset)(Bucket=bucket)
        elif request.old.get(name):
            getattr(s3, put)(Bucket=bucket, **{argument: unset})


def _encryption(wanted: dict[str, Any], _bucket: str) -> dict[str, Any]:
    # The template's name for the default differs from the API's.
    default = "ServerSideEncryptionByDefault"
    return {
        "Rules": [
            {f"Apply{default}": rule.get(default, {})}
            | {key: value for key, value in rule.items() if key == "BucketKeyEnabled"}
            for rule in wanted["ServerSideEncryptionConfiguration"]
        ]
    }


def _lifecycle_rule(rule: dict[str, Any]) -> dict[str, Any]:
    """Return a template's rule in the API's form, where filters and expiration are nested."""
    same = ("Status", "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration")
    made: dict[str, Any] = {name: rule[name] for name in same if name in rule}
    if "Id" in rule:
        made["ID"] = rule["Id"]
    if "NoncurrentVersionExpirationInDays" in rule:
        days = rule["NoncurrentVersionExpirationInDays"]
        made["NoncurrentVersionExpiration"] = {"NoncurrentDays": days}
    expiration = {
        name: rule[key]
        for key, name in (
            ("ExpirationInDays", "Days"),
            ("ExpirationDate", "Date"),
            ("ExpiredObjectDeleteMarker", "ExpiredObjectDeleteMarker"),
        )
        if key in rule
    }
    if expiration:
        made["Expiration"] = expiration
    if "Transitions" in rule:
        made["Transitions"] = [
            {("Days" if key == "TransitionInDays" else key.removeprefix("Transition")): value
             for key, value in item.items()}
            for item in rule["Transitions"]
        ]  # fmt: skip
    made["Filter"] = _lifecycle_filter(rule)
    return made


def _lifecycle_filter(rule: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if "Prefix" in rule:
        parts["Prefix"] = rule["Prefix"]
    for name in ("ObjectSizeGreaterThan", "ObjectSizeLessThan"):
        if name in rule:
            parts[name] = int(rule[name])
    tags = rule.get("TagFilters", [])
    if not tags and len(parts) <= 1:
        return parts or {"Prefix": ""}
    if len(tags) == 1 and not parts:
        return {"Tag": tags[0]}
    return {"And": parts | ({"Tags": tags} if tags else {})}


def _logging(wanted: dict[str, Any], bucket: str) -> dict[str, Any]:
    target = wanted.get("DestinationBucketName", bucket)
    prefix = wanted.get("LogFilePrefix", "")
    return {"LoggingEnabled": {"TargetBucket": target, "TargetPrefix": prefix}}


def _notifications(wanted: dict[str, Any], _bucket: str) -> dict[str, Any]:
    on = wanted.get("EventBridgeConfiguration", {}).get("EventBridgeEnabled")
    return {"EventBridgeConfiguration": {}} if on else {}


def _same(wanted: Any, _bucket: str) -> Any:
    return wanted


# property: (the operation that sets it, its argument, the value's form there, and what unsets it:
# an operation of its own, or the value that says "off")
_SETTINGS: dict[str, tuple[str, str, Callable[[Any, str], Any], str | dict[str, Any]]] = {
    "BucketEncryption": (
        "put_bucket_encryption",
        "ServerSideEncryptionConfiguration",
        _encryption,
        "delete_bucket_encryption",
    ),
    "VersioningConfiguration": (
        "put_bucket_versioning", "VersioningConfiguration", _same, {"Status": "Suspended"}
    ),
    "PublicAccessBlockConfiguration": (
        "put_public_access_block",
        "PublicAccessBlockConfiguration",
        _same,
        "delete_public_access_block",
    ),
    "OwnershipControls": (
        "put_bucket_ownership_controls",
        "OwnershipControls",
        _same,
        "delete_bucket_ownership_controls",
    ),
    "LifecycleConfiguration": (
        "put_bucket_lifecycle_configuration",
        "LifecycleConfiguration",
        lambda wanted, _: {"Rules": [_lifecycle_rule(rule) for rule in wanted["Rules"]]},
        "delete_bucket_lifecycle",
    ),
    "Tags": (
        "put_bucket_tagging",
        "Tagging",
        lambda tags, _: {"TagSet": tag_list(tag_map(tags))},
        "delete_bucket_tagging",
    ),
    "LoggingConfiguration": ("put_bucket_logging", "BucketLoggingStatus", _logging, {}),
    "NotificationConfiguration": (
        "put_bucket_notification_configuration", "NotificationConfiguration", _notifications, {}
    ),
}  # fmt: skip


def _put_policy(request: HandlerRequest) -> Provisioned:
    bucket = request.properties["Bucket"]
    call(request, "s3", "put_bucket_policy", Policy=request.properties["PolicyDocument"])
    return Provisioned(id=bucket)


TYPES: Registry = {
    "AWS::S3::Bucket": ResourceType(
        create=_create_bucket,
        configure=_configure_bucket,
        # A bucket with objects is refused (BucketNotEmpty), as on AWS.
        delete=deletes("s3", "delete_bucket", by="Bucket"),
        exists=finds("s3", "head_bucket", by="Bucket"),
    ),
    "AWS::S3::BucketPolicy": ResourceType(
        create=_put_policy,
        update=_put_policy,
        delete=deletes("s3", "delete_bucket_policy", by="Bucket"),
        exists=finds("s3", "get_bucket_policy", by="Bucket"),
    ),
}
