"""Stacks, resources and change sets as CloudFormation's responses describe them."""

import uuid
from typing import Any

from embedded_aws.cloudformation.records import ChangeSet, Stack, StackPlan, StackResource, now


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
