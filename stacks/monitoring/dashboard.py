"""The dashboard: alarms on top, then training, GPU, disks and fleet on one page."""

from collections.abc import Sequence

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from stacks.monitoring.metrics import RunMetrics

_HALF, _WHOLE = 12, 24


class TrainingDashboard(Construct):
    """One page for a run; gaps in a graph are times without an instance."""

    dashboard: cloudwatch.Dashboard

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        run_id: str,
        metrics: RunMetrics,
        alarms: Sequence[cloudwatch.IAlarm],
    ) -> None:
        super().__init__(scope, construct_id)
        self.dashboard = cloudwatch.Dashboard(
            self, "Dashboard", default_interval=Duration.hours(12)
        )
        self.dashboard.add_widgets(
            cloudwatch.AlarmStatusWidget(
                title=f"Run {run_id}: alarms", alarms=list(alarms), width=_WHOLE, height=3
            )
        )
        self.dashboard.add_widgets(
            _graph("Work done in 5 minutes", metrics.training("training_steps", "Sum")),
            _graph(
                "Seconds since the last commit", metrics.training("seconds_since_commit", "Maximum")
            ),
        )
        self.dashboard.add_widgets(
            _graph(
                "GPU, percent",
                metrics.agent("nvidia_smi_utilization_gpu", "Average"),
                metrics.gpu_memory_percent,
            ),
            _graph(
                "GPU, degrees Celsius and watts",
                metrics.agent("nvidia_smi_temperature_gpu", "Maximum"),
                metrics.agent("nvidia_smi_power_draw", "Average"),
            ),
        )
        self.dashboard.add_widgets(
            _graph(
                "Memory and disks, percent used",
                metrics.agent("mem_used_percent", "Maximum"),
                metrics.agent("disk_used_percent", "Maximum"),
            ),
            _graph("EBS above its limits, percent of time", metrics.ebs_exceeded_percent),
        )
        self.dashboard.add_widgets(
            _graph(
                "Fleet: instances",
                metrics.fleet("TargetCapacity"),
                metrics.fleet("FulfilledCapacity"),
            ),
            _graph(
                "Guard",
                metrics.guard("Invocations"),
                metrics.guard("Errors"),
            ),
        )


def _graph(title: str, *metrics: cloudwatch.IMetric) -> cloudwatch.GraphWidget:
    return cloudwatch.GraphWidget(title=title, left=list(metrics), width=_HALF)
