"""CloudFormation's operations: each reads a request, calls the engine and returns a response."""

import uuid
from collections.abc import Mapping
from typing import Any

from embedded_aws.cloudformation.engine import Engine
from embedded_aws.cloudformation.errors import CloudFormationError, no_such_stack
from embedded_aws.cloudformation.records import ChangeSet, Stack, StackPlan, StackResource, now
from embedded_aws.cloudformation.template import parse_template

Request = dict[str, Any]
Response = dict[str, Any]
Problems = Mapping[str, list[str]]

NO_CHANGES = (
    "The submitted information didn't contain changes. Submit different information to create a "
    "change set."
)
EARLY_VALIDATION = (
    "The following hook(s)/validation failed: [AWS::EarlyValidation::PropertyValidation]. To "
    "troubleshoot Early Validation errors, use the DescribeEvents API for detailed failure "
    "information."
)


class CloudFormation:
    """The API operations that the engine supports, under their boto3 names."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # Stacks

    def create_stack(self, request: Request) -> Response:
        name = request["StackName"]
        if self.engine.find_active(name):
            raise CloudFormationError(f"Stack [{name}] already exists", "AlreadyExistsException")
        plan = self.engine.plan(request, None)
        # Predict for an unregistered stack, so that a refusal leaves no stack behind.
        prediction = self.engine.predict(Stack(name=name, id="", status=""), plan)
        stack = self.engine.new_stack(name, "REVIEW_IN_PROGRESS")
        stack.termination_protection = bool(request.get("EnableTerminationProtection"))
        stack.on_failure = request.get("OnFailure", "ROLLBACK")
        return self._carry_out(request, stack, plan, prediction.problems, creating=True)

    def update_stack(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        self.engine.check_updatable(stack)
        plan = self.engine.plan(request, stack)
        prediction = self.engine.predict(stack, plan)
        if self.engine.is_unchanged(stack, plan, prediction):
            raise CloudFormationError("No updates are to be performed.")
        return self._carry_out(request, stack, plan, prediction.problems, creating=False)

    def _carry_out(
        self, request: Request, stack: Stack, plan: StackPlan, problems: Problems, *, creating: bool
    ) -> Response:
        token = request.get("ClientRequestToken")
        self.engine.carry_out(stack, plan, creating=creating, token=token, problems=problems)
        return {"StackId": stack.id}

    def delete_stack(self, request: Request) -> None:
        try:
            stack = self.engine.find(request["StackName"])
        except CloudFormationError:  # deleting what does not exist succeeds, as on AWS
            return
        if stack.deleted:
            return
        self.engine.delete(
            stack, set(request.get("RetainResources", [])), request.get("ClientRequestToken")
        )

    def describe_stacks(self, request: Request) -> Response:
        if request.get("StackName"):
            return {"Stacks": [described_stack(self.engine.find(request["StackName"]))]}
        stacks = [item for item in list(self.engine.stacks.values()) if item.deleted is None]
        return {"Stacks": [described_stack(item) for item in stacks]}

    def list_stacks(self, request: Request) -> Response:
        wanted = request.get("StackStatusFilter")
        return {
            "StackSummaries": [
                described_stack(item) | {"TemplateDescription": description_of(item)}
                for item in list(self.engine.stacks.values())
                if not wanted or item.status in wanted
            ]
        }

    def update_termination_protection(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        stack.termination_protection = bool(request["EnableTerminationProtection"])
        return {"StackId": stack.id}

    # Change sets

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
        return {
            **described_change_set(stack, change_set),
            **described_plan(change_set.plan),
            "Changes": change_set.changes,
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
        self._carry_out(request, stack, change_set.plan, {}, creating=change_set.type == "CREATE")
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
        wanted, name = request["ChangeSetName"], request.get("StackName")
        stacks = [self.engine.find(name)] if name else list(self.engine.stacks.values())
        for stack in stacks:
            for change_set in stack.change_sets.values():
                if wanted in (change_set.name, change_set.id):
                    return stack, change_set
        raise CloudFormationError(f"ChangeSet [{wanted}] does not exist", "ChangeSetNotFound")

    def list_hook_results(self, request: Request) -> Response:
        """Return none: the account has no hooks. The CLI asks after a failed change set."""
        return {"HookResults": []}

    # Events, resources, exports, templates

    def describe_stack_events(self, request: Request) -> Response:
        return {"StackEvents": self.engine.find(request["StackName"]).events[::-1]}

    def describe_events(self, request: Request) -> Response:
        if request.get("ChangeSetName"):
            _, change_set = self.find_change_set(request)
            return {"OperationEvents": change_set.problems}
        stack = self.engine.find(request["StackName"])
        failed_only = (request.get("Filters") or {}).get("FailedEvents")
        return {
            "OperationEvents": [
                event | {"EventType": "STACK_EVENT"}
                for event in reversed(stack.events)
                if not failed_only or event["ResourceStatus"].endswith("FAILED")
            ]
        }

    def describe_stack_resource(self, request: Request) -> Response:
        found = self.describe_stack_resources(request)["StackResources"]
        if not found:
            name, stack = request["LogicalResourceId"], self.engine.find(request["StackName"]).name
            raise CloudFormationError(f"Resource {name} does not exist for stack {stack}")
        return {"StackResourceDetail": found[0]}

    def describe_stack_resources(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        wanted = request.get("LogicalResourceId")
        return {
            "StackResources": [
                described_resource(stack, item)
                for item in list(stack.resources.values())
                if not wanted or item.logical_id == wanted
            ]
        }

    def list_stack_resources(self, request: Request) -> Response:
        return {"StackResourceSummaries": self.describe_stack_resources(request)["StackResources"]}

    def list_exports(self, _request: Request) -> Response:
        return {
            "Exports": [
                {"Name": name, "Value": value, "ExportingStackId": stack.id}
                for name, (value, stack) in self.engine.exports().items()
            ]
        }

    # Drift: what is gone; changed properties are not read back.

    def detect_stack_drift(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        is_whole = all(is_there for _, is_there in self.engine.look_at(stack))
        status = "IN_SYNC" if is_whole else "DRIFTED"
        stack.drift = {"StackDriftStatus": status, "LastCheckTimestamp": now()}
        # A UUID, as the stack's id ends with one: the last detection is all that is kept.
        return {"StackDriftDetectionId": stack.id.rpartition("/")[2]}

    def describe_stack_drift_detection_status(self, request: Request) -> Response:
        detection = request["StackDriftDetectionId"]
        found = (name for name in self.engine.stacks if name.endswith(f"/{detection}"))
        stack = self.engine.find(next(found, detection))
        done = {"DetectionStatus": "DETECTION_COMPLETE", "StackId": stack.id, **request}
        return {**done, **stack.drift, "Timestamp": stack.drift["LastCheckTimestamp"]}

    def describe_stack_resource_drifts(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        wanted = request.get("StackResourceDriftStatusFilters") or ["IN_SYNC", "DELETED"]
        found = [
            described_resource(stack, item)
            | {"StackResourceDriftStatus": "IN_SYNC" if is_there else "DELETED"}
            for item, is_there in self.engine.look_at(stack)
        ]
        drifts = [each for each in found if each["StackResourceDriftStatus"] in wanted]
        return {"StackResourceDrifts": drifts}

    def get_template(self, request: Request) -> Response:
        if request.get("ChangeSetName"):
            return {"TemplateBody": self.find_change_set(request)[1].plan.template.body}
        stack = self.engine.find(request["StackName"])
        if stack.plan is None:
            return {}
        return {"TemplateBody": stack.plan.template.body, "StagesAvailable": ["Original"]}

    def get_template_summary(self, request: Request) -> Response:
        if request.get("StackName"):
            plan = self.engine.find(request["StackName"]).plan
            if plan is None:
                raise no_such_stack(request["StackName"])
            template = plan.template
        else:
            body = request.get("TemplateBody") or self.engine.account.read_template(
                request["TemplateURL"]
            )
            template = parse_template(body)
        return {
            "Description": template.content.get("Description"),
            "Parameters": [
                {"ParameterKey": name, "DefaultValue": item.get("Default"),
                 "ParameterType": item["Type"], "NoEcho": item.get("NoEcho", False),
                 "Description": item.get("Description")}
                for name, item in template.section("Parameters").items()
            ],
            "ResourceTypes": sorted({item["Type"] for item in template.resources.values()}),
        }  # fmt: skip

    validate_template = get_template_summary


def _failed(change_set: ChangeSet, reason: str) -> ChangeSet:
    change_set.status = "FAILED"
    change_set.execution_status = "UNAVAILABLE"
    change_set.reason = reason
    return change_set


def described_stack(stack: Stack) -> dict[str, Any]:
    return {
        "StackId": stack.id,
        "StackName": stack.name,
        "StackStatus": stack.status,
        "StackStatusReason": stack.reason,
        "Description": description_of(stack),
        "CreationTime": stack.created,
        "LastUpdatedTime": stack.updated,
        "DeletionTime": stack.deleted,
        "EnableTerminationProtection": stack.termination_protection,
        "DisableRollback": bool(stack.plan and stack.plan.disable_rollback),
        **described_plan(stack.plan),
        "RoleARN": stack.plan.role_arn if stack.plan else None,
        "Outputs": stack.outputs,
        "DriftInformation": stack.drift,
    }


def description_of(stack: Stack) -> str | None:
    return stack.plan.template.content.get("Description") if stack.plan else None


def described_plan(plan: StackPlan | None) -> dict[str, Any]:
    parameters, tags = (plan.parameters, plan.tags) if plan else ({}, {})
    return {
        "Parameters": [each.described(name) for name, each in parameters.items()],
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
        "Capabilities": plan.capabilities if plan else [],
        "NotificationARNs": plan.notification_arns if plan else [],
    }


def described_change_set(stack: Stack, change_set: ChangeSet) -> dict[str, Any]:
    return {
        "ChangeSetName": change_set.name,
        "ChangeSetId": change_set.id,
        "StackId": stack.id,
        "StackName": stack.name,
        "Description": change_set.description,
        "CreationTime": change_set.created,
        "Status": change_set.status,
        "StatusReason": change_set.reason,
        "ExecutionStatus": change_set.execution_status,
    }


def described_resource(stack: Stack, resource: StackResource) -> dict[str, Any]:
    return {
        "StackName": stack.name,
        "StackId": stack.id,
        "LogicalResourceId": resource.logical_id,
        "PhysicalResourceId": resource.physical_id,
        "ResourceType": resource.type,
        "ResourceStatus": resource.status,
        "ResourceStatusReason": resource.reason,
        "Timestamp": resource.changed,
        "LastUpdatedTimestamp": resource.changed,
        "DriftInformation": {"StackResourceDriftStatus": "NOT_CHECKED"},
    }


def validation_event(
    stack: Stack, change_set: ChangeSet, name: str, problem: str
) -> dict[str, Any]:
    """Return one finding of the early validation as DescribeEvents reports it."""
    path, _, message = problem.partition(": ")
    return {
        "EventId": str(uuid.uuid4()),
        "StackId": stack.id,
        "OperationId": change_set.id,
        "OperationType": "CREATE_CHANGESET",
        "EventType": "VALIDATION_ERROR",
        "LogicalResourceId": name,
        "PhysicalResourceId": "",
        "ResourceType": change_set.plan.template.resources[name]["Type"],
        "Timestamp": now(),
        "ValidationFailureMode": "FAIL",
        "ValidationName": "PROPERTY_VALIDATION",
        "ValidationStatus": "FAILED",
        "ValidationStatusReason": f"Properties validation failed for resource {name}: {message}",
        "ValidationPath": f"/Resources/{name}/Properties{path.removeprefix('#')}",
    }
