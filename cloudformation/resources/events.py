"""EventBridge rules and their targets."""

import json
from typing import Any

from cloudformation.resource import Provisioned, Registry, ResourceRequest, ResourceType
from cloudformation.resources.lookups import is_found


def _bus(request: ResourceRequest) -> dict[str, str]:
    return (
        {"EventBusName": request.properties["EventBusName"]} if request.get("EventBusName") else {}
    )


def _put(request: ResourceRequest) -> Provisioned:
    name = request.get("Name") or request.physical_id or request.generated_name(longest=64)
    arguments: dict[str, Any] = request.pick(
        "ScheduleExpression", "State", "Description", "RoleArn"
    )
    if "EventPattern" in request.properties:
        arguments["EventPattern"] = json.dumps(request.properties["EventPattern"])
    if request.get("Tags") and not request.old:
        arguments["Tags"] = request.properties["Tags"]
    made = request.client("events").put_rule(Name=name, **arguments, **_bus(request))
    return Provisioned(id=name, attributes={"Arn": made["RuleArn"]})


def _update(request: ResourceRequest) -> Provisioned:
    made = _put(request)
    _configure(request)
    return made


def _configure(request: ResourceRequest) -> None:
    events, name = request.client("events"), request.physical_id
    wanted = request.get("Targets", [])
    ids = {target["Id"] for target in wanted}
    gone = [target["Id"] for target in request.old.get("Targets", []) if target["Id"] not in ids]
    if gone:
        events.remove_targets(Rule=name, Ids=gone, **_bus(request))
    if wanted:
        answer = events.put_targets(Rule=name, Targets=wanted, **_bus(request))
        assert not answer["FailedEntryCount"], answer


def _delete(request: ResourceRequest) -> None:
    events, name = request.client("events"), request.physical_id
    ids = [target["Id"] for target in request.get("Targets", [])]
    if ids:
        events.remove_targets(Rule=name, Ids=ids, **_bus(request))
    events.delete_rule(Name=name, **_bus(request))


TYPES: Registry = {
    "AWS::Events::Rule": ResourceType(
        create=_put,
        configure=_configure,
        update=_update,
        delete=_delete,
        exists=lambda request: is_found(
            request.client("events").describe_rule, Name=request.physical_id, **_bus(request)
        ),
    ),
}
