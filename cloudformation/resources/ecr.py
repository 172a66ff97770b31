"""ECR repositories."""

import json
from typing import Any

from cloudformation.resource import Made, ResourceType, Wish
from cloudformation.resources.asking import known


def _create(wish: Wish) -> Made:
    name = wish.get("RepositoryName") or wish.generated_name(longest=256, lower=True)
    arguments = wish.pick("ImageTagMutability", "Tags")
    scanning = wish.get("ImageScanningConfiguration")
    if scanning:
        arguments["imageScanningConfiguration"] = {"scanOnPush": scanning.get("ScanOnPush", False)}
    if "ImageTagMutability" in arguments:
        arguments["imageTagMutability"] = arguments.pop("ImageTagMutability")
    if "Tags" in arguments:
        arguments["tags"] = arguments.pop("Tags")
    made = wish.client("ecr").create_repository(repositoryName=name, **arguments)["repository"]
    return Made(
        id=name, attributes={"Arn": made["repositoryArn"], "RepositoryUri": made["repositoryUri"]}
    )


def _configure(wish: Wish) -> None:
    ecr, name = wish.client("ecr"), wish.physical_id
    lifecycle = wish.get("LifecyclePolicy", {}).get("LifecyclePolicyText")
    if lifecycle:
        ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=lifecycle)
    elif wish.old.get("LifecyclePolicy"):
        ecr.delete_lifecycle_policy(repositoryName=name)
    policy: Any = wish.get("RepositoryPolicyText")
    if policy:
        text = policy if isinstance(policy, str) else json.dumps(policy)
        ecr.set_repository_policy(repositoryName=name, policyText=text)
    elif wish.old.get("RepositoryPolicyText"):
        ecr.delete_repository_policy(repositoryName=name)
    if wish.old and wish.changed("ImageTagMutability"):
        ecr.put_image_tag_mutability(
            repositoryName=name, imageTagMutability=wish.get("ImageTagMutability", "MUTABLE")
        )


TYPES = {
    "AWS::ECR::Repository": ResourceType(
        create=_create,
        configure=_configure,
        delete=lambda wish: wish.client("ecr").delete_repository(
            repositoryName=wish.physical_id, force=bool(wish.get("EmptyOnDelete"))
        ),
        exists=lambda wish: known(
            wish.client("ecr").describe_repositories, repositoryNames=[wish.physical_id]
        ),
    ),
}
