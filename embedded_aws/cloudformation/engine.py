"""The stacks of an account: plans, background operations, exports, missing resources.

Refuses what CloudFormation refuses before an operation starts.
"""

import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from embedded_aws.cloudformation import planning
from embedded_aws.cloudformation.account import RegionalAccount
from embedded_aws.cloudformation.errors import CloudFormationError, no_such_stack
from embedded_aws.cloudformation.operation import Provisioner, StackOperation
from embedded_aws.cloudformation.parameters import check_rules, decide_parameters
from embedded_aws.cloudformation.planning import Prediction
from embedded_aws.cloudformation.records import Stack, StackPlan, StackResource
from embedded_aws.cloudformation.resource import Registry
from embedded_aws.cloudformation.template import parse_template

_UPDATABLE = {
    "CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE", "CREATE_FAILED",
    "UPDATE_FAILED", "IMPORT_COMPLETE",
}  # fmt: skip


def not_updatable(stack: Stack) -> CloudFormationError:
    return CloudFormationError(
        f"Stack:{stack.id} is in {stack.status} state and can not be updated."
    )


class Engine:
    """All stacks of one account and region.

    Each operation runs in its own thread. The call that starts it returns when the operation ends,
    or after `patience_seconds`: the CDK CLI polls at once, then every five seconds.
    """

    def __init__(self, account: RegionalAccount, registry: Registry) -> None:
        self.account = account
        self.registry = registry
        self.patience_seconds = 3.0
        self.stacks: dict[str, Stack] = {}
        self.lock = threading.RLock()
        self._threads: list[threading.Thread] = []

    def find(self, name: str) -> Stack:
        """Return a stack by name (unless deleted) or by id (even if deleted)."""
        with self.lock:
            found = self.stacks.get(name) or self.find_active(name)
        if found is None:
            raise no_such_stack(name)
        return found

    def find_active(self, name: str) -> Stack | None:
        with self.lock:
            return next(
                (item for item in self.stacks.values() if item.name == name and not item.deleted),
                None,
            )

    def new_stack(self, name: str, status: str) -> Stack:
        stack = Stack(
            name=name,
            id=self.account.arn("cloudformation", f"stack/{name}/{uuid.uuid4()}"),
            status=status,
        )
        with self.lock:
            self.stacks[stack.id] = stack
        return stack

    def plan(self, request: Mapping[str, Any], stack: Stack | None) -> StackPlan:
        """Read and check a request: template, parameters, rules, capabilities."""
        previous = stack.plan if stack else None
        if request.get("TemplateBody"):
            template = parse_template(request["TemplateBody"])
        elif request.get("TemplateURL"):
            template = parse_template(self.account.read_template(request["TemplateURL"]))
        elif previous is not None and request.get("UsePreviousTemplate"):
            template = previous.template
        else:
            raise CloudFormationError("Either Template URL or Template Body must be specified.")
        planning.check_types(template, self.registry)
        parameters = decide_parameters(
            template,
            request.get("Parameters", []),
            previous=previous.parameters if previous else {},
            read_ssm=self.account.read_ssm,
            exists=self.account.exists,
        )
        check_rules(template, {name: item.value for name, item in parameters.items()})
        self._check_capabilities(template, request.get("Capabilities", []))
        tags = previous.tags if previous and "Tags" not in request else {
            tag["Key"]: tag["Value"] for tag in request.get("Tags", [])
        }  # fmt: skip
        # A real account did the same (2026-09): an identical request changes nothing, and any other
        # reads every SSM parameter again.
        is_same = previous is not None and (template.content, parameters, tags) == (
            previous.template.content, previous.parameters, previous.tags
        )  # fmt: skip
        return StackPlan(
            template=template,
            parameters=parameters,
            tags=tags,
            references=previous.references if previous and is_same else {},
            capabilities=list(request.get("Capabilities", [])),
            disable_rollback=bool(request.get("DisableRollback")),
            notification_arns=list(request.get("NotificationARNs", [])),
            role_arn=request.get("RoleARN"),
        )

    def predict(self, stack: Stack, plan: StackPlan) -> Prediction:
        return planning.predict(self.account, stack, plan, self.imported, self.registry)

    def is_unchanged(self, stack: Stack, plan: StackPlan, prediction: Prediction) -> bool:
        """Whether carrying the plan out would change nothing, outputs and tags included."""
        return (
            not prediction.changes
            and stack.plan is not None
            and not stack.status.endswith("FAILED")
            and stack.plan.tags == plan.tags
            and stack.plan.template.section("Outputs") == plan.template.section("Outputs")
        )

    def start(self, stack: Stack, status: str, work: Callable[[StackOperation], None],
              token: str | None) -> None:  # fmt: skip
        """Start an operation in the background."""
        with self.lock:
            if stack.in_progress:
                raise not_updatable(stack)
            stack.start_operation(status, token)
        operation = StackOperation(
            provisioner=self._provisioner(stack),
            imported=self.imported,
            check_exports=self._check_exports,
        )

        def run() -> None:
            try:
                work(operation)
            finally:
                # A bug of ours must not leave the CLI waiting forever.
                if stack.in_progress:
                    word = stack.status.removesuffix("_IN_PROGRESS").split("_COMPLETE")[0]
                    stack.set_status(f"{word}_FAILED", "Internal failure of the embedded AWS")

        thread = threading.Thread(target=run, name=f"stack {stack.name}", daemon=True)
        self._threads = [item for item in self._threads if item.is_alive()] + [thread]
        thread.start()
        thread.join(self.patience_seconds)

    def carry_out(
        self,
        stack: Stack,
        plan: StackPlan,
        *,
        creating: bool,
        token: str | None,
        problems: Mapping[str, list[str]],
    ) -> None:
        """Carry out a plan in the background: a new stack's first one, or an update."""
        if not creating:
            self.check_updatable(stack)
        # As on AWS, a stack keeps its role for later operations, including its deletion.
        stack.role_arn = plan.role_arn or stack.role_arn
        work = partial(StackOperation.carry_out, plan=plan, creating=creating, problems=problems)
        self.start(stack, f"{'CREATE' if creating else 'UPDATE'}_IN_PROGRESS", work, token)

    def check_updatable(self, stack: Stack) -> None:
        if stack.status not in _UPDATABLE:
            raise not_updatable(stack)

    def delete(self, stack: Stack, retained: set[str], token: str | None = None) -> None:
        if stack.termination_protection:
            raise CloudFormationError(
                f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled"
            )
        for name in stack.exports:
            self._refuse_if_imported(stack, name, "deleted")
        self.start(stack, "DELETE_IN_PROGRESS", lambda operation: operation.delete(retained), token)

    def exports(self) -> dict[str, tuple[str, Stack]]:
        with self.lock:
            return {
                name: (value, stack)
                for stack in self.stacks.values()
                if stack.deleted is None
                for name, value in stack.exports.items()
            }

    def imported(self, name: str) -> str:
        try:
            return self.exports()[name][0]
        except KeyError as error:
            raise CloudFormationError(f"No export named {name} found.") from error

    def missing_resources(self, stack_names: list[str]) -> list[str]:
        """List the stacks' resources that do not exist in their own service."""
        return [
            f"{stack.name}: {item.logical_id} ({item.type} {item.physical_id})"
            for stack in map(self.find, stack_names)
            for item, is_there in self.look_at(stack)
            if not is_there
        ]

    def look_at(self, stack: Stack) -> list[tuple[StackResource, bool]]:
        """Return a stack's resources, each with whether its own service knows it."""
        provisioner = self._provisioner(stack)
        return [(item, provisioner.exists(item)) for item in list(stack.resources.values())]

    def _provisioner(self, stack: Stack) -> Provisioner:
        account = self.account.acting_as(stack.role_arn)
        return Provisioner(account=account, registry=self.registry, stack=stack)

    def join(self, timeout_seconds: float) -> None:
        """Wait for the background operations."""
        for thread in self._threads:
            thread.join(timeout_seconds)

    def _check_capabilities(self, template: Any, given: list[str]) -> None:
        needed = planning.needed_capabilities(template)
        if needed and not {*needed, "CAPABILITY_NAMED_IAM"} & set(given):
            raise CloudFormationError(
                f"Requires capabilities : [{', '.join(needed)}]",
                "InsufficientCapabilitiesException",
            )

    def _check_exports(self, stack: Stack, outputs: list[dict[str, Any]]) -> None:
        new = {item["ExportName"]: item["OutputValue"] for item in outputs if "ExportName" in item}
        for name, (_, owner) in self.exports().items():
            if name in new and owner is not stack:
                raise CloudFormationError(
                    f"Export with name {name} is already exported by stack {owner.name}. "
                )
        for name, value in stack.exports.items():
            if name not in new:
                self._refuse_if_imported(stack, name, "deleted")
            elif new[name] != value:
                self._refuse_if_imported(stack, name, "updated")

    def _refuse_if_imported(self, stack: Stack, name: str, verb: str) -> None:
        with self.lock:
            others = [each for each in self.stacks.values() if each is not stack]
        importers = sorted(
            each.name for each in others if each.deleted is None and name in each.imports
        )
        if importers:
            raise CloudFormationError(
                f"Export {name} cannot be {verb} as it is in use by {' and '.join(importers)}"
            )
