"""The metrics of a run, none by instance id: a replacement goes on with the same ones.

Who publishes them: userdata/cloudwatch-agent.json, userdata/send_metrics.py, EC2 and Lambda. A test
holds the names here against those files.
"""

from dataclasses import dataclass

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch

PERIOD = Duration.minutes(5)
EXCEEDED = "performance_exceeded_tp"


def metrics_namespace(stack_name: str) -> str:
    """Where the instances of a stack publish: a namespace of its own, which its role is held to."""
    return f"Training/{stack_name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMetrics:
    """Makes the metrics of one stack; without a period given, of five minutes."""

    stack_name: str
    fleet_id: str
    guard_name: str

    def agent(self, name: str, statistic: str) -> cloudwatch.Metric:
        """A metric of the CloudWatch agent, over all GPUs, disks and instances of the stack."""
        return self._own(name, statistic, PERIOD)

    def training(self, name: str, statistic: str, period: Duration = PERIOD) -> cloudwatch.Metric:
        """A metric of userdata/send_metrics.py."""
        return self._own(name, statistic, period)

    def ebs(self, name: str) -> cloudwatch.Metric:
        """Microseconds in which a limit held EBS up: the agent's EBS receiver takes no dimension.

        So these are summed over the namespace, which is the stack's own.
        """
        return cloudwatch.Metric(
            namespace=metrics_namespace(self.stack_name),
            metric_name=f"diskio_ebs_{name}_{EXCEEDED}",
            statistic="Sum",
            period=PERIOD,
        )

    def fleet(self, name: str) -> cloudwatch.Metric:
        """A metric that EC2 publishes for the Spot fleet."""
        return cloudwatch.Metric(
            namespace="AWS/EC2Spot",
            metric_name=name,
            dimensions_map={"FleetRequestId": self.fleet_id},
            statistic="Average",
            period=PERIOD,
        )

    def guard(self, name: str, period: Duration) -> cloudwatch.Metric:
        """A metric that Lambda publishes for the Guard."""
        return cloudwatch.Metric(
            namespace="AWS/Lambda",
            metric_name=name,
            dimensions_map={"FunctionName": self.guard_name},
            statistic="Sum",
            period=period,
        )

    @property
    def gpu_memory_percent(self) -> cloudwatch.MathExpression:
        """Of what the driver reports: the catalogue's figure is 1 GiB above it on a T4."""
        return cloudwatch.MathExpression(
            expression="100 * used / total",
            label="GPU memory used, percent",
            period=PERIOD,
            using_metrics={
                "used": self.agent("nvidia_smi_memory_used", "Maximum"),
                "total": self.agent("nvidia_smi_memory_total", "Maximum"),
            },
        )

    @property
    def ebs_exceeded_percent(self) -> cloudwatch.MathExpression:
        """The share of the time in which EBS was asked for more than size or volume give."""
        microseconds = PERIOD.to_seconds() * 1_000_000
        return cloudwatch.MathExpression(
            expression=f"100 * (instance + volume) / {microseconds:.0f}",
            label="time above the EBS limits, percent",
            period=PERIOD,
            using_metrics={
                "instance": self.ebs("ec2_instance"),
                "volume": self.ebs("volume"),
            },
        )

    @property
    def missing_capacity(self) -> cloudwatch.MathExpression:
        """How many instances the fleet is asked for and does not have."""
        return cloudwatch.MathExpression(
            expression="target - fulfilled",
            label="instances missing",
            period=PERIOD,
            using_metrics={
                "target": self.fleet("TargetCapacity"),
                "fulfilled": self.fleet("FulfilledCapacity"),
            },
        )

    @property
    def gpu_in_training(self) -> cloudwatch.MathExpression:
        """GPU utilisation while the trainer runs; at 100 while it does not, so nothing is low."""
        return cloudwatch.MathExpression(
            expression="IF(running, gpu, 100)",
            label="GPU utilisation in training, percent",
            period=PERIOD,
            using_metrics={
                "running": self.training("training_running", "Maximum"),
                "gpu": self.agent("nvidia_smi_utilization_gpu", "Average"),
            },
        )

    @property
    def gpu_without_steps(self) -> cloudwatch.MathExpression:
        """GPU utilisation where nothing got done; at 0 where something did."""
        return cloudwatch.MathExpression(
            expression="IF(steps < 1, gpu, 0)",
            label="GPU utilisation without a step, percent",
            period=PERIOD,
            using_metrics={
                "steps": self.training("training_steps", "Sum"),
                "gpu": self.agent("nvidia_smi_utilization_gpu", "Average"),
            },
        )

    def _own(self, name: str, statistic: str, period: Duration) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=metrics_namespace(self.stack_name),
            metric_name=name,
            dimensions_map={"Stack": self.stack_name},
            statistic=statistic,
            period=period,
        )
