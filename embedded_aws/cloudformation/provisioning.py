"""Creates, updates and deletes a stack's resources one at a time, and records their events.

Only this file calls the handlers of resource types.
"""

import uuid
from dataclasses import dataclass

from botocore.exceptions import ClientError, ParamValidationError

from embedded_aws.cloudformation import schema
from embedded_aws.cloudformation.account import RegionalAccount
from embedded_aws.cloudformation.errors import CloudFormationError, ResourceFailed
from embedded_aws.cloudformation.records import Stack, StackResource, now
from embedded_aws.cloudformation.resource import HandlerRequest, Registry
from embedded_aws.cloudformation.resources.calls import is_absent

# How a service or a handler may refuse; any other exception is a bug of ours.
FAILURES = (ClientError, ParamValidationError, ResourceFailed, CloudFormationError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Provisioner:
    """Acts on the resources of one stack through their services."""

    account: RegionalAccount
    registry: Registry
    stack: Stack

    def create(self, after: StackResource, existing: StackResource | None) -> None:
        """Create a resource that replaces `existing`, if given; call `configure` next."""
        type_ = self.registry[after.type]
        name = schema.custom_name(after.type, after.properties)
        if name is not None:
            if existing is not None and existing.physical_id == name:
                raise ResourceFailed(
                    "CloudFormation cannot update a stack when a custom-named resource requires "
                    f"replacing. Rename {name} and update the stack again."
                )
            after.physical_id = name
            if type_.exists(self._request(after, physical=after)):
                after.physical_id = existing.physical_id if existing else ""
                raise ResourceFailed(
                    f"Resource of type '{after.type}' with identifier '{name}' already exists."
                )
        made = type_.create(self._request(after))
        after.physical_id, after.attributes = made.id, made.attributes
        if existing is None:
            self.record(after, "CREATE_IN_PROGRESS", "Resource creation Initiated")

    def configure(self, after: StackResource) -> None:
        """Set what `create` left unset on a new resource."""
        configure = self.registry[after.type].configure
        if configure is not None:
            configure(self._request(after, physical=after))

    def update(self, after: StackResource, existing: StackResource) -> None:
        """Update a resource in place."""
        type_ = self.registry[after.type]
        request = self._request(after, existing)
        after.physical_id, after.attributes = existing.physical_id, existing.attributes
        if type_.update is not None:
            made = type_.update(request)
            after.physical_id, after.attributes = made.id, made.attributes
        elif type_.configure is not None:
            type_.configure(request)
        else:
            changed = schema.changed_properties(after.type, existing.properties, after.properties)
            raise ResourceFailed(
                f"The embedded AWS cannot update {', '.join(name for name, _ in changed)} of "
                f"{after.type} in place"
            )

    def delete(self, resource: StackResource) -> bool:
        """Delete a resource; one that no longer exists counts as deleted."""
        self.record(resource, "DELETE_IN_PROGRESS")
        try:
            self.registry[resource.type].delete(self._request(resource, resource))
        except FAILURES as error:
            gone = isinstance(error, ClientError) and is_absent(error)
            # "Not found" may refer to something that the resource needs: check the resource itself.
            if not gone or self.exists(resource):
                self.record(resource, "DELETE_FAILED", reason_of(error))
                return False
        self.record(resource, "DELETE_COMPLETE")
        return True

    def exists(self, resource: StackResource) -> bool:
        """Whether the resource's own service knows it."""
        return self.registry[resource.type].exists(self._request(resource, resource))

    def record(self, resource: StackResource, status: str, reason: str | None = None) -> None:
        """Set a resource's status and record an event."""
        resource.status, resource.reason, resource.changed = status, reason, now()
        self.stack.record(resource.logical_id, resource.type, resource.physical_id, status, reason)

    def _request(
        self,
        wanted: StackResource,
        existing: StackResource | None = None,
        physical: StackResource | None = None,
    ) -> HandlerRequest:
        physical = physical or existing
        return HandlerRequest(
            account=self.account,
            stack_name=self.stack.name,
            logical_id=wanted.logical_id,
            properties=wanted.properties,
            old=existing.properties if existing else {},
            physical_id=physical.physical_id if physical else "",
            attributes=physical.attributes if physical else {},
        )


def reason_of(error: BaseException) -> str:
    """Return an event's reason, with a handler's error in the real service's words."""
    if isinstance(error, ClientError):
        message = error.response["Error"].get("Message", "")
        code = error.response["Error"].get("Code", "")
        return (
            f'Resource handler returned message: "{message} (Operation: {error.operation_name}, '
            f'Error Code: {code})" (RequestToken: {uuid.uuid4()}, '
            "HandlerErrorCode: GeneralServiceException)"
        )
    return str(error)
