"""ECR repositories."""

from cloudformation.resource import HandlerRequest, Registry, ResourceType
from cloudformation.resources.calls import call, creates, finds


def _configure(request: HandlerRequest) -> None:
    ecr, name = request.client("ecr"), request.physical_id
    lifecycle = request.get("LifecyclePolicy", {}).get("LifecyclePolicyText")
    if lifecycle:
        ecr.put_lifecycle_policy(repositoryName=name, lifecyclePolicyText=lifecycle)
    elif request.old.get("LifecyclePolicy"):
        ecr.delete_lifecycle_policy(repositoryName=name)
    policy = request.get("RepositoryPolicyText")
    if policy:
        call(request, "ecr", "set_repository_policy", repositoryName=name, policyText=policy)
    elif request.old.get("RepositoryPolicyText"):
        ecr.delete_repository_policy(repositoryName=name)
    if request.old and request.changed("ImageTagMutability"):
        ecr.put_image_tag_mutability(
            repositoryName=name, imageTagMutability=request.get("ImageTagMutability", "MUTABLE")
        )


TYPES: Registry = {
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
        configure=_configure,
        delete=lambda request: request.client("ecr").delete_repository(
            repositoryName=request.physical_id, force=bool(request.get("EmptyOnDelete"))
        ),
        exists=finds("ecr", "describe_repositories", by="repositoryNames"),
    )
}
