"""TrainingStack: one run's fleet and everything around it. Disposable: S3 keeps what matters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aws_cdk import Annotations, CfnOutput, Stack, Stage, Tags
from aws_cdk import aws_sns as sns
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from contract.keys import RUNS
from contract.stack_names import DESCRIPTIONS
from stacks import user_data
from stacks.bundle import CodeBundle
from stacks.events import FleetEvents, InstanceEvents, TrainingTopic
from stacks.fleet import KINDS, TrainingFleet
from stacks.guard.construct import Guard
from stacks.launch_template import TrainingLaunchTemplate
from stacks.monitoring.alarms import TrainingAlarms
from stacks.monitoring.dashboard import TrainingDashboard
from stacks.monitoring.metrics import RunMetrics
from stacks.parameters import StackParameters
from stacks.parameters.checks import OURS, refuse_unless
from stacks.parameters.programs import program_of
from stacks.plan_at_synth import annotate, limits, offered, prediction, price_book, write_plan
from stacks.program_source import write_source
from stacks.roles import InstanceRole, RunData, named_buckets
from stacks.run_image import RunImageStack

ROOT = Path(__file__).parent.parent


class TrainingStack(Stack):
    """Trains one run to completion on Spot instances, then costs nothing."""

    plan: dict[str, Any] | None

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        dataset_bucket_name: str,
        run_bucket_name: str,
        key_arn: str,
        vpc_id: str,
        subnet_ids: Sequence[str],
        wheels: Path | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, construct_id, description=DESCRIPTIONS["TrainingStack"], **kwargs)
        refuse_unless(
            subnet_ids and not isinstance(subnet_ids, str),
            f"subnet_ids is {subnet_ids!r}; list one or more (without NAT, no subnet is private)",
        )
        refuse_unless(
            not self.stack_name.lower().startswith(("aws", "ssm")),
            f"{self.stack_name} begins with aws or ssm, which Systems Manager reserves; rename it",
        )
        Tags.of(self).add("Stack", self.stack_name, priority=OURS)
        self.plan = annotate(self, parameters)
        stage = Stage.of(self)
        if self.plan is not None and stage is not None:
            write_plan(Path(stage.outdir), self.artifact_id, self.plan)
        self._parameters = parameters
        self._parameter_name = f"/{self.stack_name}/fleet-id"
        # By name, which is known before the fleet exists: role and Guard are created first.
        self._fleet_parameter = ssm.StringParameter.from_string_parameter_attributes(
            self,
            "FleetParameter",
            parameter_name=self._parameter_name,
            force_dynamic_reference=True,
        )
        data = self._data(dataset_bucket_name, run_bucket_name, key_arn)
        self._image_id = self._image(scope, kwargs)
        role, template = self._machine(data, vpc_id, wheels)
        topic = TrainingTopic(
            self, "Notifications", email=parameters.alarm.email, key=data.key
        ).topic
        guard = Guard(
            self,
            "Guard",
            parameters=parameters,
            plan=self.plan,
            run_bucket=data.run_bucket,
            run_prefix=data.run_prefix,
            fleet_parameter=self._fleet_parameter,
            topic=topic,
            subnet_ids=subnet_ids,
        )
        fleet = self._fleet(subnet_ids, role, template, guard, topic)
        dashboard = self._watch(fleet, guard, topic)
        outputs = {
            "DatasetUri": data.dataset_uri,
            "RunUri": data.run_uri,
            "FleetIdOutput": fleet.fleet_id,
            "Image": self._image_id,
            "TopicArn": topic.topic_arn,
            "GuardFunction": guard.function.function_name,
            "Dashboard": f"https://{self.region}.console.aws.amazon.com/cloudwatch/home?"
            f"region={self.region}#dashboards/dashboard/{dashboard}",
            # Annotations are not in `cdk diff`; outputs are, and each deploy ends with them.
            "Sizes": offered(parameters, price_book(self, parameters)),
            "Limits": limits(parameters),
        }
        for name, value in outputs.items():
            CfnOutput(self, name, value=value)

    def _data(self, dataset_bucket_name: str, run_bucket_name: str, key_arn: str) -> RunData:
        key, dataset_bucket, run_bucket = named_buckets(
            self, dataset_bucket_name, run_bucket_name, key_arn
        )
        return RunData(
            key=key,
            dataset_bucket=dataset_bucket,
            dataset_prefix=self._parameters.dataset,
            run_bucket=run_bucket,
            run_prefix=f"{RUNS}{self._parameters.run_id}",
            init_from=program_of(p).init_from if (p := self._parameters).program else "",
        )

    def _image(self, scope: Construct, like: Mapping[str, Any]) -> str:
        """Return the id of the machines' image: as given, or from the run's own stack."""
        p = self._parameters
        if not p.image_stack:
            return p.pytorch_ami_parameter
        construct_id, env = p.image_stack, self.environment
        found = scope.node.try_find_child(construct_id)
        if found and Stack.of(found).environment != env:  # whose exports do not reach here
            construct_id += env.removeprefix("aws:/").replace("/", "-")
        stack = scope.node.try_find_child(construct_id) or RunImageStack(
            scope,
            construct_id,
            newest_by=p.pytorch_ami_parameter,
            stack_name=p.name_of(p.image_stack),
            **{name: like.get(name) for name in ("env", "synthesizer")},
        )
        assert isinstance(stack, RunImageStack)
        self.add_stack_dependency(stack)
        Annotations.of(self).add_info_v2(
            "image",
            f"{p.run_id} starts the image that {stack.stack_name} keeps: the newest of "
            f"{p.pytorch_ami_parameter} at the run's first deploy; `make doctor` names it",
        )
        return stack.image_id

    def _machine(
        self, data: RunData, vpc_id: str, wheels: Path | str | None
    ) -> tuple[InstanceRole, TrainingLaunchTemplate]:
        """Create the instances' role and launch template."""
        bundle = CodeBundle(
            self,
            "Bundle",
            root=ROOT,
            wheels=Path(wheels) if wheels else None,
            workload=self._parameters.workload,
            add=self._add_source,
        )
        if bundle.packages_without_wheel:
            Annotations.of(self).add_warning_v2(
                "wheels",
                f"the bundle lacks wheels of {', '.join(bundle.packages_without_wheel)}: if the "
                "image lacks them too, each boot needs a package index; `make setup` fetches them",
            )
        # Not in the launch template: new code then makes no new version of it, and the fleet stays.
        bundle_parameter = ssm.StringParameter(
            bundle,
            "Uri",
            parameter_name=f"/{self.stack_name}/{user_data.BUNDLE_PARAMETER}",
            string_value=bundle.s3_object_url,
            description="The code of this stack's new runs; a run that has started keeps its own",
        )
        role = InstanceRole(
            self,
            "InstanceRole",
            stack_parameters=self._parameters,
            data=data,
            bundle=bundle,
            parameters=[self._fleet_parameter, bundle_parameter],
        )
        run_env = user_data.run_env(
            self._parameters,
            prediction=prediction(self.plan),
            dataset_uri=data.dataset_uri,
            run_uri=data.run_uri,
            stack_name=self.stack_name,
            region=self.region,
            fleet_parameter=self._parameter_name,
        )
        template = TrainingLaunchTemplate(
            self,
            "LaunchTemplate",
            parameters=self._parameters,
            role=role,
            vpc_id=vpc_id,
            key=data.key,
            image_id=self._image_id,
            user_data=user_data.render(run_env),
        )
        return role, template

    def _add_source(self, bundle: Path) -> None:
        if self._parameters.source:
            write_source(self._parameters, bundle)

    def _fleet(
        self,
        subnet_ids: Sequence[str],
        role: InstanceRole,
        template: TrainingLaunchTemplate,
        guard: Guard,
        topic: sns.ITopic,
    ) -> TrainingFleet:
        """Create the fleet, after everything that its instances and the Guard need."""
        fleet = TrainingFleet(
            self,
            "Fleet",
            parameters=self._parameters,
            launch_template=template.template,
            subnet_ids=subnet_ids,
            security_group=template.group,
            parameter_name=self._parameter_name,
            guard=guard.function,
        )
        # A fleet refers only to subnets and roles: without these dependencies its first
        # instance could boot before its permissions or the Guard exist.
        events = InstanceEvents(self, "InstanceEvents", guard=guard.function)
        fleet.node.add_dependency(role, guard, events)
        FleetEvents(
            self,
            "FleetEvents",
            fleet=fleet,
            kind=self._parameters.fleet,
            topic=topic,
            guard=guard.function,
        )
        return fleet

    def _watch(self, fleet: TrainingFleet, guard: Guard, topic: sns.ITopic) -> str:
        """Create alarms and dashboard; return the dashboard's name."""
        metrics = RunMetrics(
            stack_name=self.stack_name,
            kind=KINDS[self._parameters.fleet],
            fleet_members=fleet.members,
            guard_name=guard.function.function_name,
            clock_name=guard.clock.rule_name,
        )
        alarms = TrainingAlarms(
            self,
            "Alarms",
            parameters=self._parameters,
            metrics=metrics,
            topic=topic,
            plan=self.plan,
        ).alarms
        run_id = self._parameters.run_id
        return TrainingDashboard(
            self, "Overview", run_id=run_id, metrics=metrics, alarms=alarms
        ).name
