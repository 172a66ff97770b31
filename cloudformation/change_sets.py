"""CloudFormation's operations on change sets: create, describe, execute, delete."""

import uuid
from typing import Any

from cloudformation.described import (
    described_change_set,
    described_parameters,
    described_tags,
    validation_event,
)
from cloudformation.engine import Engine
from cloudformation.errors import CloudFormationError, no_such_stack
from cloudformation.records import ChangeSet, Stack, StackPlan

Request = dict[str, Any]
Response = dict[str, Any]

NO_CHANGES = (
    "The submitted information didn't contain changes. Submit different information to create a "
    "change set."
)
EARLY_VALIDATION = (
    "The following hook(s)/validation failed: [AWS::EarlyValidation::PropertyValidation]. To "
    "troubleshoot Early Validation errors, use the DescribeEvents API for detailed failure "
    "information."
)


class ChangeSetOperations:
    """The operations on change sets, by their names in boto3."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def create_change_set(self, request: Request) -> Response:
        """Create a change set; on return it is complete or has failed."""
        name, kind = request["StackName"], request.get("ChangeSetType", "UPDATE")
        stack = self.engine.find_active(name)
        if kind not in ("CREATE", "UPDATE"):
            raise CloudFormationError(
                f"The embedded AWS does not create change sets of type {kind}"
            )
        if kind == "CREATE" and stack and stack.status != "REVIEW_IN_PROGRESS":
            raise CloudFormationError(
                f"Stack [{name}] already exists and cannot be created again with the changeSet "
                f"[{request['ChangeSetName']}]."
            )
        if kind == "UPDATE":
            if stack is None:
                raise no_such_stack(name)
            self.engine.check_updatable(stack)
        plan = self.engine.plan(request, stack)
        stack = stack or self.engine.new_stack(name, "REVIEW_IN_PROGRESS")
        change_set = self._draft(request, kind, stack, plan)
        if change_set.name in stack.change_sets:
            raise CloudFormationError(
                f"ChangeSet {change_set.name} already exists", "AlreadyExistsException"
            )
        stack.change_sets[change_set.name] = change_set
        if not stack.events:
            stack.set_status("REVIEW_IN_PROGRESS", "User Initiated")
        return {"Id": change_set.id, "StackId": stack.id}

    def _draft(self, request: Request, kind: str, stack: Stack, plan: StackPlan) -> ChangeSet:
        change_set = ChangeSet(
            name=request["ChangeSetName"],
            id=self.engine.account.arn(
                "cloudformation", f"changeSet/{request['ChangeSetName']}/{uuid.uuid4()}"
            ),
            type=kind,
            plan=plan,
            changes=[],
            description=request.get("Description"),
            on_stack_failure=request.get("OnStackFailure"),
        )
        try:
            prediction = self.engine.predict(stack, plan)
        except CloudFormationError as error:
            return _failed(change_set, str(error))
        change_set.changes = [
            {"Type": "Resource", "ResourceChange": change} for change in prediction.changes
        ]
        if prediction.problems:
            change_set.problems = [
                validation_event(stack, change_set, name, problem)
                for name, found in prediction.problems.items()
                for problem in found
            ]
            return _failed(change_set, EARLY_VALIDATION)
        if self.engine.is_unchanged(stack, plan, prediction):
            return _failed(change_set, NO_CHANGES)
        return change_set

    def describe_change_set(self, request: Request) -> Response:
        stack, change_set = self.find_change_set(request)
        return described_change_set(stack, change_set) | {
            "Changes": change_set.changes,
            "Parameters": described_parameters(change_set.plan),
            "Capabilities": change_set.plan.capabilities,
            "NotificationARNs": change_set.plan.notification_arns,
            "Tags": described_tags(change_set.plan),
        }

    def list_change_sets(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        return {
            "Summaries": [described_change_set(stack, item) for item in stack.change_sets.values()]
        }

    def execute_change_set(self, request: Request) -> Response:
        stack, change_set = self.find_change_set(request)
        if change_set.execution_status != "AVAILABLE":
            raise CloudFormationError(
                f"ChangeSet [{change_set.id}] cannot be executed in its current status of "
                f"[{change_set.status}]",
                "InvalidChangeSetStatus",
            )
        change_set.plan.disable_rollback = bool(request.get("DisableRollback"))
        if change_set.on_stack_failure:
            stack.on_failure = change_set.on_stack_failure
        # Executing one change set makes the others obsolete.
        stack.change_sets.clear()
        self.engine.carry_out(
            stack,
            change_set.plan,
            creating=change_set.type == "CREATE",
            token=request.get("ClientRequestToken"),
        )
        return {}

    def delete_change_set(self, request: Request) -> Response:
        try:
            stack, change_set = self.find_change_set(request)
        except CloudFormationError:
            return {}
        del stack.change_sets[change_set.name]
        return {}

    def find_change_set(self, request: Request) -> tuple[Stack, ChangeSet]:
        """Return the change set that a request names, by its ARN or by its name and stack."""
        wanted = request["ChangeSetName"]
        stacks = (
            [self.engine.find(request["StackName"])]
            if request.get("StackName")
            else list(self.engine.stacks.values())
        )
        for stack in stacks:
            for change_set in stack.change_sets.values():
                if wanted in (change_set.name, change_set.id):
                    return stack, change_set
        raise CloudFormationError(f"ChangeSet [{wanted}] does not exist", "ChangeSetNotFound")


def _failed(change_set: ChangeSet, reason: str) -> ChangeSet:
    change_set.status = "FAILED"
    change_set.execution_status = "UNAVAILABLE"
    change_set.reason = reason
    return change_set
