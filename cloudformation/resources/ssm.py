"""SSM parameters."""

from cloudformation.resource import Provisioned, ResourceRequest, ResourceType, tag_list
from cloudformation.resources.lookups import deletes, finds


def _create(request: ResourceRequest) -> Provisioned:
    name = request.get("Name") or f"CFN-{request.generated_name(longest=200)}"
    arguments = request.pick("Type", "Value", "Description", "AllowedPattern", "Tier", "DataType")
    request.client("ssm").put_parameter(
        Name=name, Tags=tag_list(request.get("Tags", {})), **arguments
    )
    return _made(request, name)


def _update(request: ResourceRequest) -> Provisioned:
    ssm, name = request.client("ssm"), request.physical_id
    arguments = request.pick("Type", "Value", "Description", "AllowedPattern", "Tier", "DataType")
    ssm.put_parameter(Name=name, Overwrite=True, **arguments)
    if request.changed("Tags"):
        gone = sorted(set(request.old.get("Tags", {})) - set(request.get("Tags", {})))
        if gone:
            ssm.remove_tags_from_resource(ResourceType="Parameter", ResourceId=name, TagKeys=gone)
        if request.get("Tags"):
            ssm.add_tags_to_resource(
                ResourceType="Parameter", ResourceId=name, Tags=tag_list(request.get("Tags"))
            )
    return _made(request, name)


def _made(request: ResourceRequest, name: str) -> Provisioned:
    return Provisioned(
        id=name,
        attributes={"Type": request.properties["Type"], "Value": request.properties["Value"]},
    )


TYPES = {
    "AWS::SSM::Parameter": ResourceType(
        create=_create,
        update=_update,
        delete=deletes("ssm", "delete_parameter", "Name"),
        exists=finds("ssm", "get_parameter", "Name"),
        volatile=frozenset({"Value"}),
    ),
}
