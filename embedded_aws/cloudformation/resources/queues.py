"""AWS Batch's queues of service jobs, with their environments and scheduling policies."""

from functools import partial

from botocore import xform_name

from embedded_aws.cloudformation.resource import HandlerRequest, Registry, ResourceType
from embedded_aws.cloudformation.resources.calls import call, creates, finds


def _update(operation: str, argument: str, request: HandlerRequest) -> None:
    if request.old:
        call(request, "batch", operation, **{argument: request.physical_id})


def _delete(kind: str, argument: str, request: HandlerRequest) -> None:
    batch, which = request.client("batch"), {argument: request.physical_id}
    if argument != "arn":  # CloudFormation disables all but policies first: these have no state
        getattr(batch, f"update_{kind}")(**which, state="DISABLED")
    getattr(batch, f"delete_{kind}")(**which)


def _type(kind: str, **irregular: str) -> ResourceType:
    """Make a type whose Ref is its ARN; `irregular` overrides words that Batch forms differently.

    They are its plural, its `name` in templates, the argument of operations that take one
    (`argument`) or several (`by`), and the ARN's name in responses (`arn`).
    """
    word, call_name = kind[0].lower() + kind[1:], xform_name(kind)
    words = {
        "plural": f"{word}s",
        "name": f"{kind}Name",
        "argument": word,
        "by": f"{word}s",
        "arn": f"{word}Arn",
        **irregular,
    }
    arn = words["arn"]
    return ResourceType(
        create=creates(
            "batch",
            f"create_{call_name}",
            name=words["name"],
            longest=128,
            by=arn,
            attributes={arn[0].upper() + arn[1:]: arn},
        ),
        configure=partial(_update, f"update_{call_name}", words["argument"]),
        delete=partial(_delete, call_name, words["argument"]),
        exists=finds(
            "batch",
            f"describe_{xform_name(words['plural'])}",
            by=words["by"],
            answer=words["plural"],
        ),
    )


TYPES: Registry = {
    "AWS::Batch::ServiceEnvironment": _type("ServiceEnvironment"),
    "AWS::Batch::JobQueue": _type("JobQueue"),
    "AWS::Batch::SchedulingPolicy": _type(
        "SchedulingPolicy",
        plural="schedulingPolicies",
        name="Name",
        argument="arn",
        by="arns",
        arn="arn",
    ),
}
