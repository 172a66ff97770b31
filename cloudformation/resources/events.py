"""EventBridge rules and their targets."""

import json
from typing import Any

from cloudformation.resource import Made, Registry, ResourceType, Wish
from cloudformation.resources.asking import known


def _bus(wish: Wish) -> dict[str, str]:
    return {"EventBusName": wish.properties["EventBusName"]} if wish.get("EventBusName") else {}


def _put(wish: Wish) -> Made:
    name = wish.get("Name") or wish.physical_id or wish.generated_name(longest=64)
    arguments: dict[str, Any] = wish.pick("ScheduleExpression", "State", "Description", "RoleArn")
    if "EventPattern" in wish.properties:
        arguments["EventPattern"] = json.dumps(wish.properties["EventPattern"])
    if wish.get("Tags") and not wish.old:
        arguments["Tags"] = wish.properties["Tags"]
    made = wish.client("events").put_rule(Name=name, **arguments, **_bus(wish))
    return Made(id=name, attributes={"Arn": made["RuleArn"]})


def _update(wish: Wish) -> Made:
    made = _put(wish)
    _configure(wish)
    return made


def _configure(wish: Wish) -> None:
    events, name = wish.client("events"), wish.physical_id
    wanted = wish.get("Targets", [])
    ids = {target["Id"] for target in wanted}
    gone = [target["Id"] for target in wish.old.get("Targets", []) if target["Id"] not in ids]
    if gone:
        events.remove_targets(Rule=name, Ids=gone, **_bus(wish))
    if wanted:
        answer = events.put_targets(Rule=name, Targets=wanted, **_bus(wish))
        assert not answer["FailedEntryCount"], answer


def _delete(wish: Wish) -> None:
    events, name = wish.client("events"), wish.physical_id
    ids = [target["Id"] for target in wish.get("Targets", [])]
    if ids:
        events.remove_targets(Rule=name, Ids=ids, **_bus(wish))
    events.delete_rule(Name=name, **_bus(wish))


TYPES: Registry = {
    "AWS::Events::Rule": ResourceType(
        create=_put,
        configure=_configure,
        update=_update,
        delete=_delete,
        exists=lambda wish: known(
            wish.client("events").describe_rule, Name=wish.physical_id, **_bus(wish)
        ),
    ),
}
