"""S3 buckets and their policies."""

import json
from typing import Any

from cloudformation.resource import Provisioned, ResourceRequest, ResourceType, tag_list, tag_map
from cloudformation.resources.lookups import deletes, finds


def _create_bucket(request: ResourceRequest) -> Provisioned:
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


def _configure_bucket(request: ResourceRequest) -> None:
    s3, bucket = request.client("s3"), request.physical_id
    _encryption(s3, bucket, request)
    versioning = request.get("VersioningConfiguration")
    if versioning or request.old.get("VersioningConfiguration"):
        status = (versioning or {}).get("Status", "Suspended")
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
    if "PublicAccessBlockConfiguration" in request.properties:
        s3.put_public_access_block(
            Bucket=bucket,
            PublicAccessBlockConfiguration=request.properties["PublicAccessBlockConfiguration"],
        )
    elif request.old.get("PublicAccessBlockConfiguration"):
        s3.delete_public_access_block(Bucket=bucket)
    if "OwnershipControls" in request.properties:
        s3.put_bucket_ownership_controls(
            Bucket=bucket, OwnershipControls=request.properties["OwnershipControls"]
        )
    elif request.old.get("OwnershipControls"):
        s3.delete_bucket_ownership_controls(Bucket=bucket)
    _lifecycle(s3, bucket, request)
    if tag_map(request.get("Tags")):
        s3.put_bucket_tagging(
            Bucket=bucket, Tagging={"TagSet": tag_list(tag_map(request.get("Tags")))}
        )
    elif request.old.get("Tags"):
        s3.delete_bucket_tagging(Bucket=bucket)
    _logging(s3, bucket, request)
    _notifications(s3, bucket, request)


def _encryption(s3: Any, bucket: str, request: ResourceRequest) -> None:
    wanted = request.get("BucketEncryption")
    if wanted:
        rules = []
        for item in wanted["ServerSideEncryptionConfiguration"]:
            default = dict(item.get("ServerSideEncryptionByDefault", {}))
            rule: dict[str, Any] = {"ApplyServerSideEncryptionByDefault": default}
            if "BucketKeyEnabled" in item:
                rule["BucketKeyEnabled"] = item["BucketKeyEnabled"]
            rules.append(rule)
        s3.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": rules})
    elif request.old.get("BucketEncryption"):
        s3.delete_bucket_encryption(Bucket=bucket)


def _lifecycle(s3: Any, bucket: str, request: ResourceRequest) -> None:
    wanted = request.get("LifecycleConfiguration")
    if wanted:
        rules = [_lifecycle_rule(rule) for rule in wanted["Rules"]]
        s3.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": rules}
        )
    elif request.old.get("LifecycleConfiguration"):
        s3.delete_bucket_lifecycle(Bucket=bucket)


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


def _logging(s3: Any, bucket: str, request: ResourceRequest) -> None:
    wanted = request.get("LoggingConfiguration")
    if not wanted and not request.old.get("LoggingConfiguration"):
        return
    status = {}
    if wanted:
        status["LoggingEnabled"] = {
            "TargetBucket": wanted.get("DestinationBucketName", bucket),
            "TargetPrefix": wanted.get("LogFilePrefix", ""),
        }
    s3.put_bucket_logging(Bucket=bucket, BucketLoggingStatus=status)


def _notifications(s3: Any, bucket: str, request: ResourceRequest) -> None:
    wanted = request.get("NotificationConfiguration")
    if not wanted and not request.old.get("NotificationConfiguration"):
        return
    configuration: dict[str, Any] = {}
    if (wanted or {}).get("EventBridgeConfiguration", {}).get("EventBridgeEnabled"):
        configuration["EventBridgeConfiguration"] = {}
    s3.put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration=configuration)


def _put_policy(request: ResourceRequest) -> Provisioned:
    bucket = request.properties["Bucket"]
    request.client("s3").put_bucket_policy(
        Bucket=bucket, Policy=json.dumps(request.properties["PolicyDocument"])
    )
    return Provisioned(id=bucket)


TYPES = {
    "AWS::S3::Bucket": ResourceType(
        create=_create_bucket,
        configure=_configure_bucket,
        # A bucket with objects is refused (BucketNotEmpty), as on AWS.
        delete=deletes("s3", "delete_bucket", "Bucket"),
        exists=finds("s3", "head_bucket", "Bucket"),
    ),
    "AWS::S3::BucketPolicy": ResourceType(
        create=_put_policy,
        update=_put_policy,
        delete=deletes("s3", "delete_bucket_policy", "Bucket"),
        exists=finds("s3", "get_bucket_policy", "Bucket"),
    ),
}
