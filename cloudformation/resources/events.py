"""EventBridge rules and their targets."""

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, finds


def _put(request: HandlerRequest) -> Provisioned:
    name = request.get("Name") or request.physical_id or request.generated_name(longest=64)
    tags = None if request.old else request.get("Tags")
    made = call(request, "events", "put_rule", Name=name, Tags=tags)
    return Provisioned(id=name, attributes={"Arn": made["RuleArn"]})


def _update(request: HandlerRequest) -> Provisioned:
    made = _put(request)
    _configure(request)
    return made


def _configure(request: HandlerRequest) -> None:
    wanted = request.get("Targets", [])
    ids = {target["Id"] for target in wanted}
    gone = [target["Id"] for target in request.old.get("Targets", []) if target["Id"] not in ids]
    if gone:
        call(request, "events", "remove_targets", Rule=request.physical_id, Ids=gone)
    if wanted:
        answer = call(request, "events", "put_targets", Rule=request.physical_id)
        assert not answer["FailedEntryCount"], answer


def _delete(request: HandlerRequest) -> None:
    ids = [target["Id"] for target in request.get("Targets", [])]
    if ids:
        call(request, "events", "remove_targets", Rule=request.physical_id, Ids=ids)
    call(request, "events", "delete_rule", Name=request.physical_id)


TYPES: Registry = {
    "AWS::Events::Rule": ResourceType(
        create=_put,
        configure=_configure,
        update=_update,
        delete=_delete,
        exists=finds("events", "describe_rule", "EventBusName", by="Name"),
    ),
}
