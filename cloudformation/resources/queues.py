"""AWS Batch's queues of service jobs: their environments, scheduling policies, and themselves."""

from functools import partial

from cloudformation.resource import HandlerRequest, Registry, ResourceType
from cloudformation.resources.calls import call, creates, finds


def _update(operation: str, argument: str, request: HandlerRequest) -> None:
    if request.old:
        call(request, "batch", operation, **{argument: request.physical_id})


def _delete(kind: str, argument: str, request: HandlerRequest) -> None:
    batch, which = request.client("batch"), {argument: request.physical_id}
    if argument != "arn":  # a policy has no state; others CloudFormation disables first
        getattr(batch, f"update_{kind}")(**which, state="DISABLED")
    getattr(batch, f"delete_{kind}")(**which)


def _type(kind: str, plural: str, *, name: str, argument: str, arn: str, by: str) -> ResourceType:
    """One whose Ref is its ARN: operations answer it as `arn`, and take it as `argument`."""
    words = plural.split("_")
    return ResourceType(
        create=creates(
            "batch",
            f"create_{kind}",
            name=name,
            longest=128,
            by=arn,
            attributes={arn[0].upper() + arn[1:]: arn},
        ),
        configure=partial(_update, f"update_{kind}", argument),
        delete=partial(_delete, kind, argument),
        exists=finds(
            "batch",
            f"describe_{plural}",
            by=by,
            answer=words[0] + "".join(map(str.capitalize, words[1:])),
        ),
    )


TYPES: Registry = {
    "AWS::Batch::ServiceEnvironment": _type(
        "service_environment",
        "service_environments",
        name="ServiceEnvironmentName",
        argument="serviceEnvironment",
        arn="serviceEnvironmentArn",
        by="serviceEnvironments",
    ),
    "AWS::Batch::JobQueue": _type(
        "job_queue",
        "job_queues",
        name="JobQueueName",
        argument="jobQueue",
        arn="jobQueueArn",
        by="jobQueues",
    ),
    "AWS::Batch::SchedulingPolicy": _type(
        "scheduling_policy",
        "scheduling_policies",
        name="Name",
        argument="arn",
        arn="arn",
        by="arns",
    ),
}
