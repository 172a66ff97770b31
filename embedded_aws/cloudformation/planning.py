"""Compares a plan with its stack: what would be added, changed and removed, in which order.

It predicts and refuses; it never changes a resource.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from embedded_aws.cloudformation import schema
from embedded_aws.cloudformation.account import RegionalAccount
from embedded_aws.cloudformation.errors import CloudFormationError, format_error, template_error
from embedded_aws.cloudformation.intrinsics import Expressions, Unknown, has_unknown
from embedded_aws.cloudformation.records import Stack, StackPlan, StackResource
from embedded_aws.cloudformation.resource import Registry
from embedded_aws.cloudformation.template import Template, references, unresolved

Import = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The predicted effects of carrying out a plan."""

    changes: list[dict[str, Any]]
    problems: dict[str, list[str]]


def check_types(template: Template, registry: Registry) -> None:
    """Refuse resource types that do not exist or cannot be created here, and unknown attributes."""
    types = {resource["Type"] for resource in template.resources.values()}
    unknown = sorted(name for name in types if schema.schema_of(name) is None)
    if unknown:
        raise format_error(f"Unrecognized resource types: [{', '.join(unknown)}]")
    unsupported = sorted(types - set(registry))
    if unsupported:
        raise format_error(
            f"Unrecognized resource types: [{', '.join(unsupported)}] (they "
            "exist on AWS, but the embedded AWS cannot create them; see "
            "embedded_aws/cloudformation/resources)"
        )
    for name, attribute in references(dict(template.content)):
        resource = template.resources.get(name)
        if resource and attribute and attribute not in schema.attributes_of(resource["Type"]):
            raise template_error(
                f"resource {name} does not support attribute type {attribute} in Fn::GetAtt"
            )


def needed_capabilities(template: Template) -> list[str]:
    """Return the capability that a template with IAM resources requires."""
    named = {"AWS::IAM::Role": "RoleName", "AWS::IAM::ManagedPolicy": "ManagedPolicyName",
             "AWS::IAM::InstanceProfile": "InstanceProfileName",
             "AWS::IAM::User": "UserName", "AWS::IAM::Group": "GroupName"}  # fmt: skip
    iam = [item for item in template.resources.values() if item["Type"].startswith("AWS::IAM::")]
    if any(named.get(item["Type"], "") in item.get("Properties", {}) for item in iam):
        return ["CAPABILITY_NAMED_IAM"]
    return ["CAPABILITY_IAM"] if iam else []


def expressions_for(
    account: RegionalAccount,
    stack: Stack,
    plan: StackPlan,
    imported: Import,
    *,
    reference: Callable[[str], str] | None = None,
    attribute: Callable[[str, str], Any] | None = None,
) -> Expressions:
    """Return a plan's expressions; by default they refer to the stack's existing resources."""
    return Expressions(
        parameters={
            "AWS::AccountId": account.id,
            "AWS::Region": account.region,
            "AWS::Partition": "aws",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::StackName": stack.name,
            "AWS::StackId": stack.id,
            "AWS::NotificationARNs": plan.notification_arns,
            **{name: item.value for name, item in plan.parameters.items()},
        },
        mappings=plan.template.section("Mappings"),
        conditions=plan.template.section("Conditions"),
        reference=reference or (lambda name: stack.resources[name].physical_id),
        attribute=attribute or (lambda name, key: attribute_of(stack.resources[name], key)),
        imported=imported,
        zones=account.zones,
        dynamic=lambda reference: _dynamic(account, plan, reference),
    )


def _dynamic(account: RegionalAccount, plan: StackPlan, reference: str) -> str:
    """Return the value of a dynamic reference, which is read once for each plan."""
    service, _, name = reference.partition(":")
    if service != "ssm" or ":" in name:
        raise template_error(f"the embedded AWS does not resolve {{{{resolve:{reference}}}}}")
    if reference not in plan.references:
        found = account.read_ssm([name])
        if name not in found:
            raise CloudFormationError(f"Parameters: [{reference}] cannot be found.")
        plan.references[reference] = found[name]
    return plan.references[reference]


def attribute_of(resource: StackResource, name: str) -> Any:
    if name not in resource.attributes:
        raise CloudFormationError(
            f"The embedded AWS does not know the attribute {name} of {resource.type} "
            f"({resource.logical_id})"
        )
    return resource.attributes[name]


def wanted_properties(
    resource: Mapping[str, Any], expressions: Expressions, tags: Mapping[str, str]
) -> dict[str, Any]:
    """Return evaluated properties, with the schema's types and the stack's tags."""
    type_ = resource["Type"]
    properties = schema.coerce(type_, expressions.value(resource.get("Properties", {})))
    name = schema.tag_property(type_)
    if not tags or name is None:
        return properties
    own = properties.get(name)
    if not schema.tags_are_list(type_):
        return properties | {name: {**tags, **(own or {})}}
    keys = {tag.get("Key") for tag in own or []}
    more = [{"Key": key, "Value": value} for key, value in tags.items() if key not in keys]
    return properties | {name: [*(own or []), *more]}


def predict(
    account: RegionalAccount, stack: Stack, plan: StackPlan, imported: Import, registry: Registry
) -> Prediction:
    """Predict what carrying out the plan would change, and find invalid properties."""
    moving: dict[str, str] = {}  # logical id -> Add, Replace or Modify, as the loop finds them
    order, block = list[str](), "Resources"

    def existing(name: str) -> StackResource | None:
        """Return a resource that stays, None for a new one; refuse one whose condition is false."""
        if name not in order:
            raise unresolved([name], block)
        return None if moving.get(name) in ("Add", "Replace") else stack.resources[name]

    def reference(name: str) -> str:
        found = existing(name)
        return found.physical_id if found else Unknown(f"{{{{{name}}}}}")

    def attribute(name: str, key: str) -> Any:
        found = existing(name)
        if not found or (moving.get(name) == "Modify" and key in registry[found.type].volatile):
            return Unknown(f"{{{{{name}.{key}}}}}")
        return attribute_of(found, key)

    expressions = expressions_for(
        account, stack, plan, imported, reference=reference, attribute=attribute
    )
    order = plan.template.wanted(expressions)
    changes, problems = [], {}
    for name in order:
        resource = plan.template.resources[name]
        properties = wanted_properties(resource, expressions, plan.tags)
        found = schema.problems(resource["Type"], properties)
        if found:
            problems[name] = found
        change = _change(stack.resources.get(name), name, resource, properties)
        if change:
            changes.append(change)
            moving[name] = _movement(change)
    block = "Outputs"
    expressions.value(outputs_of(plan.template, expressions))
    changes += [_removal(item) for name, item in stack.resources.items() if name not in order]
    return Prediction(changes=changes, problems=problems)


def outputs_of(template: Template, expressions: Expressions) -> dict[str, Any]:
    """Return the outputs whose condition is true, not evaluated."""
    return {
        name: output
        for name, output in template.section("Outputs").items()
        if "Condition" not in output or expressions.condition(output["Condition"])
    }


def _movement(change: Mapping[str, Any]) -> str:
    if change["Action"] == "Add":
        return "Add"
    return "Replace" if change.get("Replacement") in ("True", "Conditional") else "Modify"


def _change(
    existing: StackResource | None,
    name: str,
    resource: Mapping[str, Any],
    properties: dict[str, Any],
) -> dict[str, Any] | None:
    base = {"LogicalResourceId": name, "ResourceType": resource["Type"]}
    if existing is None:
        return base | {"Action": "Add", "Scope": [], "Details": []}
    base["PhysicalResourceId"] = existing.physical_id
    if existing.type != resource["Type"]:
        raise CloudFormationError(
            f"Update of resource type is not permitted. The new template modifies resource type "
            f"of the following resources: [{name}]"
        )
    changed = schema.changed_properties(existing.type, existing.properties, properties)
    details = [_detail(name, recreation, properties.get(name)) for name, recreation in changed]
    tag_name = schema.tag_property(existing.type)
    scope = sorted({"Tags" if name == tag_name else "Properties" for name, _ in changed})
    if existing.metadata != resource.get("Metadata"):
        scope.append("Metadata")
        details.append({"Target": {"Attribute": "Metadata", "RequiresRecreation": "Never"},
                        "Evaluation": "Static", "ChangeSource": "DirectModification"})  # fmt: skip
    if not scope:
        return None
    kinds = {recreation for _, recreation in changed}
    replacement = (
        "True" if "Always" in kinds else "Conditional" if "Conditionally" in kinds else "False"
    )
    return base | {
        "Action": "Modify", "Replacement": replacement, "Scope": scope, "Details": details
    }  # fmt: skip


def _detail(name: str, recreation: str, value: Any) -> dict[str, Any]:
    dynamic = has_unknown(value)
    return {
        "Target": {"Attribute": "Properties", "Name": name, "RequiresRecreation": recreation},
        "Evaluation": "Dynamic" if dynamic else "Static",
        "ChangeSource": "ResourceAttribute" if dynamic else "DirectModification",
    }


def _removal(existing: StackResource) -> dict[str, Any]:
    return {
        "Action": "Remove",
        "LogicalResourceId": existing.logical_id,
        "PhysicalResourceId": existing.physical_id,
        "ResourceType": existing.type,
        "PolicyAction": "Retain" if existing.deletion_policy.startswith("Retain") else "Delete",
        "Scope": [],
        "Details": [],
    }
