"""Storage: S3 buckets and their policies, SSM parameters, ECR repositories."""

from collections.abc import Callable
from typing import Any

from embedded_aws.cloudformation.errors import ResourceFailed
from embedded_aws.cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import (
    call,
    creates,
    deletes,
    finds,
    retag,
    tag_list,
    tag_map,
)


def _create_bucket(request: HandlerRequest) -> Provisioned:
    unknown = sorted({*request.properties} - {*_SETTINGS, "BucketName", "AccessControl"})
    if unknown or request.get("AccessControl", "Private") != "Private":
        what = ", ".join(unknown) or "that AccessControl"
        raise ResourceFailed(f"The embedded AWS cannot set {what} on a bucket")
    name = request.get("BucketName") or request.generated_name(longest=63, lower=True)
    region = request.account.region
    where = {"LocationConstraint": region} if region != "us-east-1" else None
    call(request, "s3", "create_bucket", Bucket=name, CreateBucketConfiguration=where)
    return Provisioned(
        id=name,
        attributes={
            "Arn": f"arn:aws:s3:::{name}",
            "DomainName": f"{name}.s3.amazonaws.com",
            "RegionalDomainName": f"{name}.s3.{region}.amazonaws.com",
        },
    )


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
    # The template and the API have different names for the default.
    default = "ServerSideEncryptionByDefault"
    return {
        "Rules": [
            {f"Apply{default}": rule.get(default, {})}
            | {key: value for key, value in rule.items() if key == "BucketKeyEnabled"}
            for rule in wanted["ServerSideEncryptionConfiguration"]
        ]
    }


# A lifecycle rule's properties that the API shares, and those that it nests under Expiration.
_SAME = ("Status", "AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration")
_EXPIRATION = {"ExpirationInDays": "Days", "ExpiredObjectDeleteMarker": "ExpiredObjectDeleteMarker"}


def _lifecycle_rule(rule: dict[str, Any]) -> dict[str, Any]:
    """Convert a template's rule to the API's form, in which filter and expiration are nested."""
    if unknown := sorted({*rule} - {*_SAME, *_EXPIRATION, "Id", "Prefix"}):
        raise ResourceFailed(f"The embedded AWS cannot set {', '.join(unknown)} in lifecycle rules")
    made: dict[str, Any] = {name: rule[name] for name in _SAME if name in rule}
    if "Id" in rule:
        made["ID"] = rule["Id"]
    if expiration := {name: rule[key] for key, name in _EXPIRATION.items() if key in rule}:
        made["Expiration"] = expiration
    return {**made, "Filter": {"Prefix": rule.get("Prefix", "")}}


def _logging(wanted: dict[str, Any], bucket: str) -> dict[str, Any]:
    target = wanted.get("DestinationBucketName", bucket)
    prefix = wanted.get("LogFilePrefix", "")
    return {"LoggingEnabled": {"TargetBucket": target, "TargetPrefix": prefix}}


def _same(wanted: Any, _bucket: str) -> Any:
    return wanted


# property: (the operation that sets it, its argument, a conversion of the value to its form there,
# and what unsets it: an operation of its own, or the value that means "off")
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
}  # fmt: skip


def _put_policy(request: HandlerRequest) -> Provisioned:
    call(request, "s3", "put_bucket_policy", Policy=request.properties["PolicyDocument"])
    return Provisioned(id=request.properties["Bucket"])


def _create_parameter(request: HandlerRequest) -> Provisioned:
    name = request.get("Name") or f"CFN-{request.generated_name(longest=200)}"
    call(request, "ssm", "put_parameter", Name=name)
    return Provisioned(id=name, attributes=request.pick("Type", "Value"))


def _update_parameter(request: HandlerRequest) -> Provisioned:
    name = request.physical_id
    # SSM refuses tags together with Overwrite.
    call(request, "ssm", "put_parameter", Name=name, Overwrite=True, Tags=None)
    tag, untag = "add_tags_to_resource", "remove_tags_from_resource"
    retag(request, "ssm", tag, untag, ResourceType="Parameter", ResourceId=name)
    return Provisioned(id=name, attributes=request.pick("Type", "Value"))


def _configure_repository(request: HandlerRequest) -> None:
    ecr, name = request.client("ecr"), request.physical_id
    if lifecycle := request.get("LifecyclePolicy", {}).get("LifecyclePolicyText"):
        ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=lifecycle)
    if policy := request.get("RepositoryPolicyText"):
        call(request, "ecr", "set_repository_policy", repositoryName=name, policyText=policy)
    if request.old and request.changed("ImageTagMutability"):
        ecr.put_image_tag_mutability(
            repositoryName=name, imageTagMutability=request.get("ImageTagMutability", "MUTABLE")
        )


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
    "AWS::SSM::Parameter": ResourceType(
        create=_create_parameter,
        update=_update_parameter,
        delete=deletes("ssm", "delete_parameter", by="Name"),
        exists=finds("ssm", "get_parameter", by="Name"),
        volatile=frozenset({"Value"}),
    ),
    "AWS::ECR::Repository": ResourceType(
        create=creates(
            "ecr",
            "create_repository",
            name="RepositoryName",
            longest=256,
            lower=True,
            answer="repository",
            attributes={"Arn": "repositoryArn", "RepositoryUri": "repositoryUri"},
        ),
        configure=_configure_repository,
        delete=lambda request: request.client("ecr").delete_repository(
            repositoryName=request.physical_id, force=bool(request.get("EmptyOnDelete"))
        ),
        exists=finds("ecr", "describe_repositories", by="repositoryNames"),
    ),
}
