"""The metrics of a run, none by instance id: a replacement continues the same ones.

Published by userdata/cloudwatch-agent.json, userdata/send_metrics.py, EC2, Lambda and EventBridge.
A test compares the names here with those files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch

from stacks.fleet import FleetKind

PERIOD = Duration.minutes(5)
# How often the Guard's clock calls it.
GUARD_PERIOD = Duration.minutes(10)
EXCEEDED = "performance_exceeded_tp"


def metrics_namespace(stack_name: str) -> str:
    """Return the stack's own namespace, the only one that its instances may publish in."""
    return f"Training/{stack_name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetrics:
    """Builds the metrics of one stack; the default period is five minutes."""

    stack_name: str
    kind: FleetKind
    fleet_members: Sequence[str]
    guard_name: str
    clock_name: str

    def own(self, name: str, statistic: str, period: Duration = PERIOD) -> cloudwatch.Metric:
        """Return a metric of the CloudWatch agent or of userdata/send_metrics.py.

        The agent's are over the stack's GPUs, disks and instances.
        """
        return self._metric(
            metrics_namespace(self.stack_name), name, statistic, period, Stack=self.stack_name
        )

    def ebs(self, name: str) -> cloudwatch.Metric:
        """Return the microseconds above an EBS limit, summed over the stack's namespace.

        Without a dimension, because the agent's EBS receiver takes none.
        """
        namespace = metrics_namespace(self.stack_name)
        return self._metric(namespace, f"diskio_ebs_{name}_{EXCEEDED}", "Sum", PERIOD)

    def fleet(self, name: str, period: Duration = PERIOD) -> cloudwatch.IMetric:
        """Return a metric that AWS publishes for the fleet: the sum over its members."""
        dimension, namespace = self.kind.dimension, self.kind.namespace
        each: dict[str, cloudwatch.IMetric] = {
            f"member{number}{name}": self._metric(
                namespace, name, "Average", period, **{dimension: member}
            )
            for number, member in enumerate(self.fleet_members)
        }
        if len(each) == 1:
            return next(iter(each.values()))
        return cloudwatch.MathExpression(
            expression=" + ".join(each), label=name, period=period, using_metrics=each
        )

    def guard(self, name: str) -> cloudwatch.Metric:
        """Return a metric that Lambda publishes for the Guard."""
        return self._metric("AWS/Lambda", name, "Sum", GUARD_PERIOD, FunctionName=self.guard_name)

    @property
    def guard_by_the_clock(self) -> cloudwatch.MathExpression:
        """Calls of the Guard in a period in which its clock called it, else 0.

        Other calls say nothing: events of any instance of the account wake it, too.
        """
        return _math(
            "clock * calls",
            "calls of the Guard by its clock",
            GUARD_PERIOD,
            clock=self._metric(
                "AWS/Events", "Invocations", "Sum", GUARD_PERIOD, RuleName=self.clock_name
            ),
            calls=self.guard("Invocations"),
        )

    @property
    def gpu_memory_percent(self) -> cloudwatch.MathExpression:
        """GPU memory in use, as a share of the driver's total.

        The catalogue's total is CUDA's, without what the driver keeps."""
        return _math(
            "100 * used / total",
            "GPU memory used, percent",
            used=self.own("nvidia_smi_memory_used", "Maximum"),
            total=self.own("nvidia_smi_memory_total", "Maximum"),
        )

    @property
    def ebs_exceeded_percent(self) -> cloudwatch.MathExpression:
        """Share of the time in which EBS demand exceeded the limits of the size or the volume."""
        microseconds = PERIOD.to_seconds() * 1_000_000
        return _math(
            f"100 * (instance + volume) / {microseconds:.0f}",
            "time above EBS limits, percent",
            instance=self.ebs("ec2_instance"),
            volume=self.ebs("volume"),
        )

    @property
    def missing_capacity(self) -> cloudwatch.MathExpression:
        """Number of instances that the fleet lacks."""
        names = (self.kind.wanted, *self.kind.kept, self.kind.running)
        totals = {f"total{name}": self.fleet(name) for name in names}
        return _math(" - ".join(totals), "instances missing", PERIOD, **totals)

    def goodput_percent(self, period: Duration) -> cloudwatch.MathExpression:
        """Training that a commit has made safe, as a share of paid time; none without a trainer.

        What a lost machine had not committed never counts.
        """
        return _math(
            f"IF(useful >= 0, 100 * useful / (paid * {period.to_seconds():.0f}))",
            "goodput in training, percent",
            period,
            useful=self.own("useful_seconds", "Sum", period),
            paid=self.fleet(self.kind.running, period),
        )

    @property
    def gpu_in_training(self) -> cloudwatch.MathExpression:
        """GPU utilization while the trainer runs, else 100: without a trainer nothing is low."""
        return _math(
            "IF(running, gpu, 100)",
            "GPU utilization in training, percent",
            running=self.own("training_running", "Maximum"),
            gpu=self.own("nvidia_smi_utilization_gpu", "Average"),
        )

    @property
    def gpu_without_steps(self) -> cloudwatch.MathExpression:
        """GPU utilization while no step is done, else 0."""
        return _math(
            "IF(steps < 1, gpu, 0)",
            "GPU utilization without a step, percent",
            steps=self.own("training_steps", "Sum"),
            gpu=self.own("nvidia_smi_utilization_gpu", "Average"),
        )

    @staticmethod
    def _metric(
        namespace: str, name: str, statistic: str, period: Duration, **dimensions: str
    ) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=namespace,
            metric_name=name,
            dimensions_map=dimensions or None,
            statistic=statistic,
            period=period,
        )


def _math(
    expression: str, label: str, period: Duration = PERIOD, **metrics: cloudwatch.IMetric
) -> cloudwatch.MathExpression:
    return cloudwatch.MathExpression(
        expression=expression, label=label, period=period, using_metrics=metrics
    )
