"""SSM parameters."""

from cloudformation.resource import Made, ResourceType, Wish, tag_list
from cloudformation.resources.asking import known


def _create(wish: Wish) -> Made:
    name = wish.get("Name") or f"CFN-{wish.generated_name(longest=200)}"
    arguments = wish.pick("Type", "Value", "Description", "AllowedPattern", "Tier", "DataType")
    wish.client("ssm").put_parameter(Name=name, Tags=tag_list(wish.get("Tags", {})), **arguments)
    return _made(wish, name)


def _update(wish: Wish) -> Made:
    ssm, name = wish.client("ssm"), wish.physical_id
    arguments = wish.pick("Type", "Value", "Description", "AllowedPattern", "Tier", "DataType")
    ssm.put_parameter(Name=name, Overwrite=True, **arguments)
    if wish.changed("Tags"):
        gone = sorted(set(wish.old.get("Tags", {})) - set(wish.get("Tags", {})))
        if gone:
            ssm.remove_tags_from_resource(ResourceType="Parameter", ResourceId=name, TagKeys=gone)
        if wish.get("Tags"):
            ssm.add_tags_to_resource(
                ResourceType="Parameter", ResourceId=name, Tags=tag_list(wish.get("Tags"))
            )
    return _made(wish, name)


def _made(wish: Wish, name: str) -> Made:
    return Made(
        id=name, attributes={"Type": wish.properties["Type"], "Value": wish.properties["Value"]}
    )


TYPES = {
    "AWS::SSM::Parameter": ResourceType(
        create=_create,
        update=_update,
        delete=lambda wish: wish.client("ssm").delete_parameter(Name=wish.physical_id),
        exists=lambda wish: known(wish.client("ssm").get_parameter, Name=wish.physical_id),
        volatile=frozenset({"Value"}),
    ),
}
