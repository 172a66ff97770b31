"""CloudFormation's operations: each reads a request, calls the engine and writes the response."""

from cloudformation.change_sets import ChangeSetOperations, Request, Response
from cloudformation.described import described_resource, described_stack, description_of
from cloudformation.errors import CloudFormationError, no_such_stack
from cloudformation.records import Stack
from cloudformation.template import parse_template


class CloudFormation(ChangeSetOperations):
    """All operations of the API that the engine has, by their names in boto3."""

    # Stacks

    def create_stack(self, request: Request) -> Response:
        name = request["StackName"]
        if self.engine.find_active(name):
            raise CloudFormationError(f"Stack [{name}] already exists", "AlreadyExistsException")
        plan = self.engine.plan(request, None)
        # Predicted for a stack that is not registered: a refusal leaves none behind.
        prediction = self.engine.predict(Stack(name=name, id="", status=""), plan)
        stack = self.engine.new_stack(name, "REVIEW_IN_PROGRESS")
        stack.termination_protection = bool(request.get("EnableTerminationProtection"))
        stack.on_failure = request.get("OnFailure", "ROLLBACK")
        self.engine.carry_out(
            stack,
            plan,
            creating=True,
            token=request.get("ClientRequestToken"),
            problems=prediction.problems,
        )
        return {"StackId": stack.id}

    def update_stack(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        self.engine.check_updatable(stack)
        plan = self.engine.plan(request, stack)
        prediction = self.engine.predict(stack, plan)
        if self.engine.is_unchanged(stack, plan, prediction):
            raise CloudFormationError("No updates are to be performed.")
        self.engine.carry_out(
            stack,
            plan,
            creating=False,
            token=request.get("ClientRequestToken"),
            problems=prediction.problems,
        )
        return {"StackId": stack.id}

    def delete_stack(self, request: Request) -> None:
        stack = self.engine.find_active(request["StackName"]) or next(
            (item for item in list(self.engine.stacks.values()) if item.id == request["StackName"]),
            None,
        )
        # Deleting what does not exist succeeds, as on AWS.
        if stack is None or stack.deleted:
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

    # Events, resources, exports, templates

    def describe_stack_events(self, request: Request) -> Response:
        stack = self.engine.find(request["StackName"])
        return {"StackEvents": list(reversed(stack.events))}

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
        stack = self.engine.find(request["StackName"])
        name = request["LogicalResourceId"]
        if name not in stack.resources:
            raise CloudFormationError(f"Resource {name} does not exist for stack {stack.name}")
        return {"StackResourceDetail": described_resource(stack, stack.resources[name])}

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
        stack = self.engine.find(request["StackName"])
        resources = list(stack.resources.values())
        return {"StackResourceSummaries": [described_resource(stack, item) for item in resources]}

    def list_exports(self, _request: Request) -> Response:
        return {
            "Exports": [
                {"Name": name, "Value": value, "ExportingStackId": stack.id}
                for name, (value, stack) in self.engine.exports().items()
            ]
        }

    def list_imports(self, request: Request) -> Response:
        importers = self.engine.importers(request["ExportName"])
        if not importers:
            raise CloudFormationError(
                f"Export '{request['ExportName']}' is not imported by any stack."
            )
        return {"Imports": importers}

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
