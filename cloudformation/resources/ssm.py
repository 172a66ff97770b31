"""SSM parameters."""

from cloudformation.resource import HandlerRequest, Provisioned, Registry, ResourceType
from cloudformation.resources.calls import call, deletes, finds, retag


def _create(request: HandlerRequest) -> Provisioned:
    name = request.get("Name") or f"CFN-{request.generated_name(longest=200)}"
    call(request, "ssm", "put_parameter", Name=name)
    return Provisioned(id=name, attributes=request.pick("Type", "Value"))


def _update(request: HandlerRequest) -> Provisioned:
    name = request.physical_id
    # SSM refuses tags with Overwrite.
    call(request, "ssm", "put_parameter", Name=name, Overwrite=True, Tags=None)
    tag, untag = "add_tags_to_resource", "remove_tags_from_resource"
    retag(request, "ssm", tag, untag, ResourceType="Parameter", ResourceId=name)
    return Provisioned(id=name, attributes=request.pick("Type", "Value"))


TYPES: Registry = {
    "AWS::SSM::Parameter": ResourceType(
        create=_create,
        update=_update,
        delete=deletes("ssm", "delete_parameter", by="Name"),
        exists=finds("ssm", "get_parameter", by="Name"),
        volatile=frozenset({"Value"}),
    ),
}
