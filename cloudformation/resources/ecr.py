"""ECR repositories."""

import json
from typing import Any

from cloudformation.resource import Provisioned, ResourceRequest, ResourceType
from cloudformation.resources.lookups import finds


def _create(request: ResourceRequest) -> Provisioned:
    name = request.get("RepositoryName") or request.generated_name(longest=256, lower=True)
    arguments = request.pick("ImageTagMutability", "Tags")
    scanning = request.get("ImageScanningConfiguration")
    if scanning:
        arguments["imageScanningConfiguration"] = {"scanOnPush": scanning.get("ScanOnPush", False)}
    if "ImageTagMutability" in arguments:
        arguments["imageTagMutability"] = arguments.pop("ImageTagMutability")
    if "Tags" in arguments:
        arguments["tags"] = arguments.pop("Tags")
    made = request.client("ecr").create_repository(repositoryName=name, **arguments)["repository"]
    return Provisioned(
        id=name, attributes={"Arn": made["repositoryArn"], "RepositoryUri": made["repositoryUri"]}
    )


def _configure(request: ResourceRequest) -> None:
    ecr, name = request.client("ecr"), request.physical_id
    lifecycle = request.get("LifecyclePolicy", {}).get("LifecyclePolicyText")
    if lifecycle:
        ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=lifecycle)
    elif request.old.get("LifecyclePolicy"):
        ecr.delete_lifecycle_policy(repositoryName=name)
    policy: Any = request.get("RepositoryPolicyText")
    if policy:
        text = policy if isinstance(policy, str) else json.dumps(policy)
        ecr.set_repository_policy(repositoryName=name, policyText=text)
    elif request.old.get("RepositoryPolicyText"):
        ecr.delete_repository_policy(repositoryName=name)
    if request.old and request.changed("ImageTagMutability"):
        ecr.put_image_tag_mutability(
            repositoryName=name, imageTagMutability=request.get("ImageTagMutability", "MUTABLE")
        )


TYPES = {
    "AWS::ECR::Repository": ResourceType(
        create=_create,
        configure=_configure,
        delete=lambda request: request.client("ecr").delete_repository(
            repositoryName=request.physical_id, force=bool(request.get("EmptyOnDelete"))
        ),
        exists=finds("ecr", "describe_repositories", "repositoryNames", listed=True),
    ),
}
