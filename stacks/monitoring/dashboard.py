"""The dashboard: alarms on top, then training, GPU, disks and fleet on one page."""

from collections.abc import Sequence

from aws_cdk import Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from constructs import Construct

from stacks.monitoring.metrics import RunMetrics

_HALF, _WHOLE = 12, 24


class TrainingDashboard(Construct):
    """One page for a run; gaps in a graph are times without an instance."""

    name: str

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
        rows: list[list[cloudwatch.IWidget]] = [
            [
                cloudwatch.AlarmStatusWidget(
                    title=f"Run {run_id}: alarms", alarms=list(alarms), width=_WHOLE, height=3
                )
            ],
            [
                _graph("Work done in 5 minutes", metrics.own("training_steps", "Sum")),
                _graph(
                    "Seconds since the last commit", metrics.own("seconds_since_commit", "Maximum")
                ),
            ],
            [
                _graph(
                    "GPU, percent",
                    metrics.own("nvidia_smi_utilization_gpu", "Average"),
                    metrics.gpu_memory_percent,
                ),
                _graph(
                    "GPU, degrees Celsius and watts",
                    metrics.own("nvidia_smi_temperature_gpu", "Maximum"),
                    metrics.own("nvidia_smi_power_draw", "Average"),
                ),
            ],
            [
                _graph(
                    "Memory and disks, percent used",
                    metrics.own("mem_used_percent", "Maximum"),
                    metrics.own("disk_used_percent", "Maximum"),
                ),
                _graph("EBS above its limits, percent of time", metrics.ebs_exceeded_percent),
            ],
            [
                _graph(
                    "Fleet: instances",
                    metrics.fleet(metrics.kind.wanted),
                    metrics.fleet(metrics.kind.running),
                ),
                _graph("Guard", metrics.guard("Invocations"), metrics.guard("Errors")),
            ],
        ]
        dashboard = cloudwatch.Dashboard(self, "Dashboard", default_interval=Duration.hours(12))
        for row in rows:
            dashboard.add_widgets(*row)
        self.name = dashboard.dashboard_name


def _graph(title: str, *metrics: cloudwatch.IMetric) -> cloudwatch.GraphWidget:
    return cloudwatch.GraphWidget(title=title, left=list(metrics), width=_HALF)
