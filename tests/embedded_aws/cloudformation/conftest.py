"""One embedded AWS for each test file, and stacks that go away after each test."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from botocore.exceptions import ClientError

from embedded_aws import EmbeddedAws


@dataclass(kw_only=True, slots=True)
class Stacks:
    """Deploys templates by the API, as a test reads best."""

    aws: EmbeddedAws
    names: list[str] = field(default_factory=list)

    @property
    def client(self) -> Any:
        return self.aws.client("cloudformation")

    def create(self, name: str, resources: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.names.append(name)
        arguments = self._arguments(resources, more)
        self.client.create_stack(StackName=name, **arguments)
        return self.describe(name)

    def update(self, name: str, resources: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.client.update_stack(StackName=name, **self._arguments(resources, more))
        return self.describe(name)

    def change_set(self, name: str, resources: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.names.append(name)
        kind = more.pop("kind", "UPDATE")
        self.client.create_change_set(
            StackName=name,
            ChangeSetName="change",
            ChangeSetType=kind,
            **self._arguments(resources, more),
        )
        return dict(self.client.describe_change_set(StackName=name, ChangeSetName="change"))

    def delete(self, name: str) -> None:
        self.client.delete_stack(StackName=name)

    def describe(self, name: str) -> dict[str, Any]:
        return dict(self.client.describe_stacks(StackName=name)["Stacks"][0])

    def physical(self, name: str, logical: str) -> str:
        found = self.client.describe_stack_resource(StackName=name, LogicalResourceId=logical)
        return str(found["StackResourceDetail"]["PhysicalResourceId"])

    def reasons(self, name: str) -> list[str]:
        events = self.client.describe_stack_events(StackName=name)["StackEvents"]
        return [event.get("ResourceStatusReason", "") for event in reversed(events)]

    def statuses(self, name: str, logical: str) -> list[str]:
        events = self.client.describe_stack_events(StackName=name)["StackEvents"]
        return [
            event["ResourceStatus"]
            for event in reversed(events)
            if event["LogicalResourceId"] == logical
        ]

    def refusal(self, name: str, resources: dict[str, Any], **more: Any) -> str:
        with pytest.raises(ClientError) as raised:
            self.create(name, resources, **more)
        return str(raised.value.response["Error"]["Message"])

    def _arguments(self, resources: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        names = ("Parameters", "Conditions", "Mappings", "Rules", "Outputs")
        sections = {name: more.pop(name) for name in names if name in more}
        values = more.pop("values", {})
        tags = more.pop("tags", {})
        return {
            "TemplateBody": json.dumps({"Resources": resources, **sections}),
            "Capabilities": ["CAPABILITY_NAMED_IAM"],
            "Parameters": [
                {"ParameterKey": key, "ParameterValue": value} for key, value in values.items()
            ],
            "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
            **more,
        }


@pytest.fixture(scope="module")
def aws() -> Iterator[EmbeddedAws]:
    with EmbeddedAws() as aws:
        # Answers once an operation is done, however busy this machine is.
        aws.engine.patience_seconds = 120.0
        yield aws


@pytest.fixture
def stacks(aws: EmbeddedAws) -> Iterator[Stacks]:
    stacks = Stacks(aws=aws)
    yield stacks
    for name in reversed(stacks.names):
        stack = aws.engine.find_active(name)
        if stack is not None:
            stack.termination_protection = False
            aws.engine.delete(stack, set())
