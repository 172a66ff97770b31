"""The metrics of a run, none by instance id: a replacement continues the same ones.

Published by userdata/cloudwatch-agent.json, userdata/send_metrics.py, EC2, Lambda and EventBridge.
A test compares the names here with those files.
"""

from dataclasses import dataclass

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch

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
    fleet_id: str
    guard_name: str
    clock_name: str

    def agent(self, name: str, statistic: str) -> cloudwatch.Metric:
        """Return a metric of the CloudWatch agent, over the stack's GPUs, disks and instances."""
        return self._own(name, statistic, PERIOD)

    def training(self, name: str, statistic: str, period: Duration = PERIOD) -> cloudwatch.Metric:
        """Return a metric of userdata/send_metrics.py."""
        return self._own(name, statistic, period)

    def ebs(self, name: str) -> cloudwatch.Metric:
        """Return the microseconds above an EBS limit, summed over the stack's namespace.

        Without a dimension, because the agent's EBS receiver takes none.
        """
        return cloudwatch.Metric(
            namespace=metrics_namespace(self.stack_name),
            metric_name=f"diskio_ebs_{name}_{EXCEEDED}",
            statistic="Sum",
            period=PERIOD,
        )

    def fleet(self, name: str) -> cloudwatch.Metric:
        """Return a metric that EC2 publishes for the Spot fleet."""
        return cloudwatch.Metric(
            namespace="AWS/EC2Spot",
            metric_name=name,
            dimensions_map={"FleetRequestId": self.fleet_id},
            statistic="Average",
            period=PERIOD,
        )

    def guard(self, name: str) -> cloudwatch.Metric:
        """Return a metric that Lambda publishes for the Guard."""
        return cloudwatch.Metric(
            namespace="AWS/Lambda",
            metric_name=name,
            dimensions_map={"FunctionName": self.guard_name},
            statistic="Sum",
            period=GUARD_PERIOD,
        )

    @property
    def guard_by_the_clock(self) -> cloudwatch.MathExpression:
        """Calls of the Guard in a period in which its clock called it, else 0.

        Other calls say nothing: events of any instance of the account wake it, too.
        """
        clock = cloudwatch.Metric(
            namespace="AWS/Events",
            metric_name="Invocations",
            dimensions_map={"RuleName": self.clock_name},
            statistic="Sum",
            period=GUARD_PERIOD,
        )
        return _math(
            "clock * calls",
            "calls of the Guard by its clock",
            GUARD_PERIOD,
            clock=clock,
            calls=self.guard("Invocations"),
        )

    @property
    def gpu_memory_percent(self) -> cloudwatch.MathExpression:
        """GPU memory in use, as a share of the driver's total.

        The catalogue's total is 1 GiB too large on a T4."""
        return _math(
            "100 * used / total",
            "GPU memory used, percent",
            used=self.agent("nvidia_smi_memory_used", "Maximum"),
            total=self.agent("nvidia_smi_memory_total", "Maximum"),
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
        return _math(
            "target - fulfilled",
            "instances missing",
            target=self.fleet("TargetCapacity"),
            fulfilled=self.fleet("FulfilledCapacity"),
        )

    @property
    def gpu_in_training(self) -> cloudwatch.MathExpression:
        """GPU utilization while the trainer runs, else 100: without a trainer nothing is low."""
        return _math(
            "IF(running, gpu, 100)",
            "GPU utilization in training, percent",
            running=self.training("training_running", "Maximum"),
            gpu=self.agent("nvidia_smi_utilization_gpu", "Average"),
        )

    @property
    def gpu_without_steps(self) -> cloudwatch.MathExpression:
        """GPU utilization while no step is done, else 0."""
        return _math(
            "IF(steps < 1, gpu, 0)",
            "GPU utilization without a step, percent",
            steps=self.training("training_steps", "Sum"),
            gpu=self.agent("nvidia_smi_utilization_gpu", "Average"),
        )

    def _own(self, name: str, statistic: str, period: Duration) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=metrics_namespace(self.stack_name),
            metric_name=name,
            dimensions_map={"Stack": self.stack_name},
            statistic=statistic,
            period=period,
        )


def _math(
    expression: str, label: str, period: Duration = PERIOD, **metrics: cloudwatch.IMetric
) -> cloudwatch.MathExpression:
    return cloudwatch.MathExpression(
        expression=expression, label=label, period=period, using_metrics=metrics
    )
