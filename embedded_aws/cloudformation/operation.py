"""Carries out a plan: resources one after the other, rollback on failure, deletion.

Only this file calls the handlers of resource types.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

from botocore.exceptions import ClientError, ParamValidationError

from embedded_aws.cloudformation import planning, schema
from embedded_aws.cloudformation.account import RegionalAccount
from embedded_aws.cloudformation.errors import CloudFormationError, ResourceFailed
from embedded_aws.cloudformation.intrinsics import Expressions
from embedded_aws.cloudformation.records import Stack, StackPlan, StackResource, now
from embedded_aws.cloudformation.resource import HandlerRequest, Registry
from embedded_aws.cloudformation.resources.calls import is_absent
from embedded_aws.cloudformation.template import Template, dependencies

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

    def check_update(self, after: StackResource, existing: StackResource) -> None:
        """Refuse to change in place what no handler would."""
        type_ = self.registry[after.type]
        has_none = type_.update is None and type_.configure is None
        changed = schema.changed_properties(after.type, existing.properties, after.properties)
        if fixed := [name for name, _ in changed if has_none or name in type_.fixed]:
            names = ", ".join(fixed)
            raise ResourceFailed(f"The embedded AWS cannot update {names} of {after.type} in place")

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


_REPLACING = (
    "Requested update requires the creation of a new physical resource; hence creating one."
)
# Checks a stack's new exports and refuses any that would break another stack.
CheckExports = Callable[[Stack, list[dict[str, Any]]], None]


@dataclass(kw_only=True, slots=True)
class StackOperation:
    """One operation on one stack. `undo` holds (before, after) for each change made so far."""

    provisioner: Provisioner
    imported: Callable[[str], str]
    check_exports: CheckExports
    imports: set[str] = field(default_factory=set)
    undo: list[tuple[StackResource | None, StackResource]] = field(default_factory=list)

    @property
    def stack(self) -> Stack:
        return self.provisioner.stack

    def carry_out(
        self, plan: StackPlan, *, creating: bool, problems: Mapping[str, list[str]]
    ) -> None:
        """Create or update every resource, then clean up; roll back on failure.

        `problems` are what the prediction found; if there are any, nothing is touched.
        """
        word = "CREATE" if creating else "UPDATE"
        outputs: list[dict[str, Any]] = []
        if creating:
            self.stack.plan = plan
        else:
            self.stack.updated = now()
        try:
            self._refuse(plan.template, problems, word)
            expressions = planning.expressions_for(
                self.provisioner.account, self.stack, plan, self._imported
            )
            order = plan.template.wanted(expressions)
            for name in order:
                self._apply(name, plan, expressions)
            outputs = _outputs(plan, expressions)
            self.check_exports(self.stack, outputs)
        except FAILURES as error:
            self._fail(plan, word, reason_of(error))
            return
        self._finish(plan, order, outputs)
        if not creating:
            self.stack.set_status("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
            self._clean_up(set(order))
        self.stack.set_status(f"{word}_COMPLETE")

    def delete(self, retained: set[str]) -> None:
        """Delete every resource in reverse order; a failure makes the stack DELETE_FAILED."""
        failed: list[str] = []
        needed: set[str] = set()  # by resources that could not be deleted
        for resource in _reverse_order(self.stack):
            name = resource.logical_id
            if name in needed:
                needed |= resource.needs
                continue
            if _is_retained(resource) or name in retained:
                self.provisioner.record(resource, "DELETE_SKIPPED")
            elif not self.provisioner.delete(resource):
                failed.append(name)
                needed |= resource.needs
                continue
            del self.stack.resources[name]
        if failed:
            names = ", ".join(failed)
            self.stack.set_status(
                "DELETE_FAILED", f"The following resource(s) failed to delete: [{names}]. "
            )
            return
        self.stack.outputs = []
        self.stack.imports = frozenset()
        self.stack.deleted = now()
        self.stack.set_status("DELETE_COMPLETE")

    def _imported(self, name: str) -> str:
        self.imports.add(name)
        return self.imported(name)

    def _refuse(self, template: Template, problems: Mapping[str, list[str]], word: str) -> None:
        for name, found in problems.items():
            existing = self.stack.resources.get(name)
            self.stack.record(
                name,
                template.resources[name]["Type"],
                existing.physical_id if existing else "",
                f"{word}_FAILED",
                _invalid(name, found),
            )
        if problems:
            names = ", ".join(problems)
            raise ResourceFailed(f"The following resource(s) failed to {word.lower()}: [{names}]. ")

    def _apply(self, name: str, plan: StackPlan, expressions: Expressions) -> None:
        resource = plan.template.resources[name]
        existing = self.stack.resources.get(name)
        word = "UPDATE" if existing else "CREATE"
        after = StackResource(
            logical_id=name,
            type=resource["Type"],
            physical_id=existing.physical_id if existing else "",
            properties={},
            attributes=existing.attributes if existing else {},
            metadata=resource.get("Metadata"),
            deletion_policy=resource.get("DeletionPolicy", "Delete"),
            needs=frozenset(dependencies(resource) & set(plan.template.resources)),
        )
        try:
            after.properties = planning.wanted_properties(resource, expressions, plan.tags)
            found = schema.problems(after.type, after.properties)
            if found:
                raise ResourceFailed(_invalid(name, found))
            if existing is None or existing.properties != after.properties:
                self._provision(after, existing)
                self.stack.resources[name] = after
        except FAILURES as error:
            self.provisioner.record(after, f"{word}_FAILED", reason_of(error))
            raise ResourceFailed(
                f"The following resource(s) failed to {word.lower()}: [{name}]. "
            ) from error

    def _provision(self, after: StackResource, existing: StackResource | None) -> None:
        if existing is not None and not schema.replacing_paths(
            after.type, existing.properties, after.properties
        ):
            self.provisioner.record(after, "UPDATE_IN_PROGRESS")
            self.provisioner.check_update(after, existing)
            self.undo.append((existing, after))
            self.provisioner.update(after, existing)
            self.provisioner.record(after, "UPDATE_COMPLETE")
            return
        word = "CREATE" if existing is None else "UPDATE"
        self.provisioner.record(after, f"{word}_IN_PROGRESS", _REPLACING if existing else None)
        self.provisioner.create(after, existing)
        self.undo.append((existing, after))
        self.provisioner.configure(after)
        self.provisioner.record(after, f"{word}_COMPLETE")

    def _finish(self, plan: StackPlan, order: list[str], outputs: list[dict[str, Any]]) -> None:
        """Update the stack's records, once nothing can fail any more."""
        self.stack.plan = plan
        self.stack.outputs = outputs
        self.stack.imports = frozenset(self.imports)
        for name in order:
            wanted, resource = plan.template.resources[name], self.stack.resources[name]
            resource.metadata = wanted.get("Metadata")
            resource.needs = frozenset(dependencies(wanted) & set(plan.template.resources))
            resource.deletion_policy = wanted.get("DeletionPolicy", "Delete")
            resource.replace_policy = wanted.get("UpdateReplacePolicy", "Delete")

    def _clean_up(self, wanted: set[str]) -> None:
        for before, after in reversed(self.undo):
            if before is None or before.physical_id == after.physical_id:
                continue
            if before.replace_policy == "Retain":
                self.provisioner.record(before, "DELETE_SKIPPED")
            else:
                self.provisioner.delete(before)
        for resource in _reverse_order(self.stack):
            if resource.logical_id in wanted:
                continue
            if _is_retained(resource):
                self.provisioner.record(resource, "DELETE_SKIPPED")
            else:
                self.provisioner.delete(resource)
            del self.stack.resources[resource.logical_id]

    def _fail(self, plan: StackPlan, word: str, reason: str) -> None:
        keep = plan.disable_rollback or (word == "CREATE" and self.stack.on_failure == "DO_NOTHING")
        if keep:
            self._delete_partial()
            self.stack.set_status(f"{word}_FAILED", reason)
        elif word == "CREATE" and self.stack.on_failure == "DELETE":
            self._roll_back()
            self.stack.set_status("DELETE_IN_PROGRESS", reason)
            self.delete(set())
        elif word == "CREATE":
            self.stack.set_status("ROLLBACK_IN_PROGRESS", f"{reason}Rollback requested by user.")
            failed = self._roll_back()
            self.stack.set_status(
                "ROLLBACK_FAILED" if failed else "ROLLBACK_COMPLETE", _left(failed)
            )
        else:
            self.stack.set_status("UPDATE_ROLLBACK_IN_PROGRESS", reason)
            failed = self._roll_back()
            if failed:
                self.stack.set_status("UPDATE_ROLLBACK_FAILED", _left(failed))
                return
            self.stack.set_status("UPDATE_ROLLBACK_COMPLETE_CLEANUP_IN_PROGRESS")
            self.stack.set_status("UPDATE_ROLLBACK_COMPLETE")

    def _delete_partial(self) -> None:
        """Delete the remains of a failed resource, which the next update creates again."""
        if self.undo and not self.undo[-1][1].status.endswith("_COMPLETE"):
            before, after = self.undo[-1]
            if before is None or before.physical_id != after.physical_id:
                self.provisioner.delete(after)

    def _roll_back(self) -> list[str]:
        """Undo the changes, newest first; return the ids of what could not be undone."""
        failed = []
        for before, after in reversed(self.undo):
            name = after.logical_id
            if before is None and after.deletion_policy == "Retain":
                self.provisioner.record(after, "DELETE_SKIPPED")
            elif before is None or before.physical_id != after.physical_id:
                done = self.provisioner.delete(after)
                failed += [] if done else [name]
            elif not self._revert(before, after):
                failed.append(name)
                continue
            if before is None:
                self.stack.resources.pop(name, None)
            else:
                self.stack.resources[name] = before
        return failed

    def _revert(self, before: StackResource, after: StackResource) -> bool:
        self.provisioner.record(after, "UPDATE_IN_PROGRESS")
        try:
            self.provisioner.update(before, after)
        except FAILURES as error:
            self.provisioner.record(after, "UPDATE_FAILED", reason_of(error))
            return False
        self.provisioner.record(before, "UPDATE_COMPLETE")
        return True


def _outputs(plan: StackPlan, expressions: Expressions) -> list[dict[str, Any]]:
    outputs = []
    for name, output in planning.outputs_of(plan.template, expressions).items():
        described = {"OutputKey": name, "OutputValue": str(expressions.value(output["Value"]))}
        if "Description" in output:
            described["Description"] = output["Description"]
        if "Export" in output:
            described["ExportName"] = expressions.value(output["Export"]["Name"])
        outputs.append(described)
    return outputs


def _invalid(name: str, found: list[str]) -> str:
    return f"Properties validation failed for resource {name} with message:\n" + "\n".join(found)


def _left(failed: list[str]) -> str | None:
    names = ", ".join(failed)
    return f"The following resource(s) could not be rolled back: [{names}]. " if failed else None


def _is_retained(resource: StackResource) -> bool:
    return resource.deletion_policy in ("Retain", "RetainExceptOnCreate")


def _reverse_order(stack: Stack) -> list[StackResource]:
    graph = {
        name: resource.needs & set(stack.resources) for name, resource in stack.resources.items()
    }
    names = list(TopologicalSorter(graph).static_order())
    return [stack.resources[name] for name in reversed(names)]
