"""The engine's records: stacks with their resources, events and change sets."""

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from embedded_aws.cloudformation.parameters import Parameter
from embedded_aws.cloudformation.template import Template

Tags = dict[str, str]


def now() -> datetime:
    return datetime.now(UTC)


@dataclass(kw_only=True, slots=True)
class StackResource:
    """An existing resource, with the evaluated properties of its last create or update."""

    logical_id: str
    type: str
    physical_id: str
    properties: dict[str, Any]
    attributes: dict[str, Any]
    metadata: Any = None
    needs: frozenset[str] = frozenset()
    deletion_policy: str = "Delete"
    replace_policy: str = "Delete"
    status: str = "CREATE_COMPLETE"
    reason: str | None = None
    changed: datetime = field(default_factory=now)


@dataclass(kw_only=True, slots=True)
class StackPlan:
    """A checked request: the template, parameter values and tags that a stack is to have."""

    template: Template
    parameters: dict[str, Parameter]
    tags: Tags
    capabilities: list[str] = field(default_factory=list)
    disable_rollback: bool = False
    notification_arns: list[str] = field(default_factory=list)
    role_arn: str | None = None
    references: dict[str, str] = field(default_factory=dict)  # dynamic ones, with their values


@dataclass(kw_only=True, slots=True)
class ChangeSet:
    """A change waiting to be executed, with the list of what it would do."""

    name: str
    id: str
    type: str
    plan: StackPlan
    changes: list[dict[str, Any]]
    description: str | None = None
    on_stack_failure: str | None = None
    status: str = "CREATE_COMPLETE"
    execution_status: str = "AVAILABLE"
    reason: str | None = None
    problems: list[dict[str, Any]] = field(default_factory=list)
    created: datetime = field(default_factory=now)


@dataclass(kw_only=True, slots=True)
class Stack:
    """One stack; `plan` is the last one carried out, None before the first."""

    name: str
    id: str
    status: str
    plan: StackPlan | None = None
    reason: str | None = None
    created: datetime = field(default_factory=now)
    updated: datetime | None = None
    deleted: datetime | None = None
    termination_protection: bool = False
    on_failure: str = "ROLLBACK"
    role_arn: str | None = None
    resources: dict[str, StackResource] = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    imports: frozenset[str] = frozenset()
    events: list[dict[str, Any]] = field(default_factory=list)
    change_sets: dict[str, ChangeSet] = field(default_factory=dict)
    operation: str = ""
    drift: dict[str, Any] = field(default_factory=lambda: {"StackDriftStatus": "NOT_CHECKED"})
    token: str | None = None

    @property
    def in_progress(self) -> bool:
        return self.status.endswith("IN_PROGRESS") and self.status != "REVIEW_IN_PROGRESS"

    @property
    def exports(self) -> dict[str, str]:
        return {
            output["ExportName"]: output["OutputValue"]
            for output in self.outputs
            if "ExportName" in output
        }

    def start_operation(self, status: str, token: str | None) -> None:
        """Start an operation; all its events carry one operation id."""
        self.operation = str(uuid.uuid4())
        self.token = token
        self.set_status(status, reason="User Initiated")

    def set_status(self, status: str, reason: str | None = None) -> None:
        """Set the stack's own status and record an event."""
        self.status = status
        self.reason = None if reason == "User Initiated" else reason
        self.record(self.name, "AWS::CloudFormation::Stack", self.id, status, reason)

    def record(
        self, logical_id: str, type_: str, physical_id: str, status: str, reason: str | None = None
    ) -> None:
        """Record an event, at least a millisecond after the last: the CLI sorts them by time."""
        time = now()
        if self.events:
            time = max(time, self.events[-1]["Timestamp"] + timedelta(milliseconds=1))
        event = {
            "StackId": self.id,
            "StackName": self.name,
            "EventId": f"{logical_id}-{status}-{uuid.uuid4()}",
            "OperationId": self.operation,
            "LogicalResourceId": logical_id,
            "PhysicalResourceId": physical_id,
            "ResourceType": type_,
            "Timestamp": time,
            "ResourceStatus": status,
            "ResourceStatusReason": reason,
            "ClientRequestToken": self.token,
        }
        self.events.append({key: value for key, value in event.items() if value is not None})
