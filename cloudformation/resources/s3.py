"""S3 buckets and their policies."""

import json
from typing import Any

from cloudformation.resource import Made, ResourceType, Wish, tag_list, tag_map
from cloudformation.resources.asking import known


def _create_bucket(wish: Wish) -> Made:
    s3 = wish.client("s3")
    name = wish.get("BucketName") or wish.generated_name(longest=63, lower=True)
    region = wish.account.region
    arguments: dict[str, Any] = {"Bucket": name}
    if region != "us-east-1":
        arguments["CreateBucketConfiguration"] = {"LocationConstraint": region}
    if "AccessControl" in wish.properties:
        arguments["ACL"] = _canned_acl(wish.properties["AccessControl"])
    if wish.get("ObjectLockEnabled"):
        arguments["ObjectLockEnabledForBucket"] = True
    s3.create_bucket(**arguments)
    return Made(
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


def _configure_bucket(wish: Wish) -> None:
    s3, bucket = wish.client("s3"), wish.physical_id
    _encryption(s3, bucket, wish)
    versioning = wish.get("VersioningConfiguration")
    if versioning or wish.old.get("VersioningConfiguration"):
        status = (versioning or {}).get("Status", "Suspended")
        s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": status})
    if "PublicAccessBlockConfiguration" in wish.properties:
        s3.put_public_access_block(
            Bucket=bucket,
            PublicAccessBlockConfiguration=wish.properties["PublicAccessBlockConfiguration"],
        )
    elif wish.old.get("PublicAccessBlockConfiguration"):
        s3.delete_public_access_block(Bucket=bucket)
    if "OwnershipControls" in wish.properties:
        s3.put_bucket_ownership_controls(
            Bucket=bucket, OwnershipControls=wish.properties["OwnershipControls"]
        )
    elif wish.old.get("OwnershipControls"):
        s3.delete_bucket_ownership_controls(Bucket=bucket)
    _lifecycle(s3, bucket, wish)
    if tag_map(wish.get("Tags")):
        s3.put_bucket_tagging(
            Bucket=bucket, Tagging={"TagSet": tag_list(tag_map(wish.get("Tags")))}
        )
    elif wish.old.get("Tags"):
        s3.delete_bucket_tagging(Bucket=bucket)
    _logging(s3, bucket, wish)
    _notifications(s3, bucket, wish)


def _encryption(s3: Any, bucket: str, wish: Wish) -> None:
    wanted = wish.get("BucketEncryption")
    if wanted:
        rules = []
        for item in wanted["ServerSideEncryptionConfiguration"]:
            default = dict(item.get("ServerSideEncryptionByDefault", {}))
            rule: dict[str, Any] = {"ApplyServerSideEncryptionByDefault": default}
            if "BucketKeyEnabled" in item:
                rule["BucketKeyEnabled"] = item["BucketKeyEnabled"]
            rules.append(rule)
        s3.put_bucket_encryption(Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": rules})
    elif wish.old.get("BucketEncryption"):
        s3.delete_bucket_encryption(Bucket=bucket)


def _lifecycle(s3: Any, bucket: str, wish: Wish) -> None:
    wanted = wish.get("LifecycleConfiguration")
    if wanted:
        rules = [_lifecycle_rule(rule) for rule in wanted["Rules"]]
        s3.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": rules}
        )
    elif wish.old.get("LifecycleConfiguration"):
        s3.delete_bucket_lifecycle(Bucket=bucket)


def _lifecycle_rule(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule of the template in the API's words: filters and expiration are nested there."""
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


def _logging(s3: Any, bucket: str, wish: Wish) -> None:
    wanted = wish.get("LoggingConfiguration")
    if not wanted and not wish.old.get("LoggingConfiguration"):
        return
    status = {}
    if wanted:
        status["LoggingEnabled"] = {
            "TargetBucket": wanted.get("DestinationBucketName", bucket),
            "TargetPrefix": wanted.get("LogFilePrefix", ""),
        }
    s3.put_bucket_logging(Bucket=bucket, BucketLoggingStatus=status)


def _notifications(s3: Any, bucket: str, wish: Wish) -> None:
    wanted = wish.get("NotificationConfiguration")
    if not wanted and not wish.old.get("NotificationConfiguration"):
        return
    configuration: dict[str, Any] = {}
    if (wanted or {}).get("EventBridgeConfiguration", {}).get("EventBridgeEnabled"):
        configuration["EventBridgeConfiguration"] = {}
    s3.put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration=configuration)


def _bucket_exists(wish: Wish) -> bool:
    return known(wish.client("s3").head_bucket, Bucket=wish.physical_id)


def _put_policy(wish: Wish) -> Made:
    bucket = wish.properties["Bucket"]
    wish.client("s3").put_bucket_policy(
        Bucket=bucket, Policy=json.dumps(wish.properties["PolicyDocument"])
    )
    return Made(id=bucket)


TYPES = {
    "AWS::S3::Bucket": ResourceType(
        create=_create_bucket,
        configure=_configure_bucket,
        # A bucket with objects is refused (BucketNotEmpty), as on AWS.
        delete=lambda wish: wish.client("s3").delete_bucket(Bucket=wish.physical_id),
        exists=_bucket_exists,
    ),
    "AWS::S3::BucketPolicy": ResourceType(
        create=_put_policy,
        update=_put_policy,
        delete=lambda wish: wish.client("s3").delete_bucket_policy(Bucket=wish.physical_id),
        exists=lambda wish: known(wish.client("s3").get_bucket_policy, Bucket=wish.physical_id),
    ),
}
