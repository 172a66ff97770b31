"""The metrics published during a run, minute by minute, by agent, trainer and AWS services.

The trainer's metrics go through userdata/send_metrics.py, as on an instance, and the agent's names
come from userdata/cloudwatch-agent.json; the values are made up, one per minute.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rehearsal.alarms.evaluation import Dimensions, Metric
from userdata.send_metrics import UNSAVED, TrainingWatch

AGENT_FILE = Path(__file__).parents[2] / "userdata" / "cloudwatch-agent.json"
MINUTE = 60
# The agent's prefix for each plugin's measurements.
PREFIXES = {"nvidia_gpu": "nvidia_smi_", "mem": "mem_", "disk": "disk_", "diskio": "diskio_"}


@cache
def agent_metrics(stack: str) -> dict[str, Metric]:
    """Return, by name, the metrics that the agent publishes over all instances, by its file.

    With the rollup [], every metric is published without dimensions; with ["Stack"], those of
    plugins that append it. Its EBS receiver appends nothing (aws/amazon-cloudwatch-agent,
    translator/translate/otel/receiver/awsebsnvme), so it ignores a Stack in its section.
    """
    config = json.loads(AGENT_FILE.read_text(encoding="utf-8"))["metrics"]
    found = {}
    for plugin, section in config["metrics_collected"].items():
        appended = {} if plugin == "diskio" else section.get("append_dimensions", {})
        for measurement in section["measurement"]:
            dimensions: Dimensions = frozenset()
            if "Stack" in appended and ["Stack"] in config["aggregation_dimensions"]:
                dimensions = frozenset({("Stack", stack)})
            elif [] not in config["aggregation_dimensions"]:
                continue
            name = PREFIXES[plugin] + measurement
            namespace = config["namespace"].replace("{stack}", stack)
            found[name] = Metric(namespace=namespace, name=name, dimensions=dimensions)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentReadings:
    """The agent's measurements on an instance in one minute; the defaults are healthy."""

    utilization: float = 92
    memory_percent: float = 71
    celsius: float = 66
    disk_percent: float = 44
    # The percentage of time in which requests exceeded EBS's limit.
    exceeded_percent: float = 2


GPU_MEMORY_MIB = 23_028
# By type: AWS's namespace and dimension, and the metrics of what is wanted, runs, and only stays.
FLEETS: Mapping[str, tuple[str, ...]] = {
    "AWS::EC2::SpotFleet": (
        *("AWS/EC2Spot", "FleetRequestId"),
        *("TargetCapacity", "FulfilledCapacity"),
    ),
    "AWS::AutoScaling::AutoScalingGroup": (
        *("AWS/AutoScaling", "AutoScalingGroupName"),
        *("GroupDesiredCapacity", "GroupInServiceInstances", "GroupMinSize"),
    ),
}


@dataclass(kw_only=True, slots=True)
class Stream:
    """A stack's metrics, written minute by minute; `guard` and `clock` are logical ids.

    `fleet` are logical ids with their types: one of FLEETS, or groups, the first with the machine.
    """

    stack: str
    fleet: Mapping[str, str]
    guard: str
    clock: str
    series: dict[Metric, list[tuple[float, float]]] = field(default_factory=dict)
    now: float = 0
    target: int = 1
    readings: AgentReadings = field(default_factory=AgentReadings)
    commit_every: int = 20
    guard_fails: bool = False
    # Whether its clock calls the Guard; events of the account's other instances always do.
    clock_runs: bool = True
    step: int = 0
    # Whether a program trains, which reports its progress whenever it likes.
    is_program: bool = False
    _watch: TrainingWatch = field(default_factory=TrainingWatch)

    def boot(self, minutes: int = 6) -> None:
        """Boot an instance: no trainer runs yet, and the GPU is idle."""
        self._watch = TrainingWatch(is_program=self.is_program)
        for _ in range(minutes):
            self._minute(replace(self.readings, utilization=0, memory_percent=2, celsius=38))

    def begin(self, minutes: int) -> None:
        """Boot an instance, and train on it."""
        self.boot()
        self.train(minutes)

    def train(
        self, minutes: int, *, steps: int = 10, kind: str = "step", commits: bool = False
    ) -> None:
        """Train: `steps` lines a minute; commit each minute if `commits`, or as `commit_every`."""
        for minute in range(minutes):
            lines: list[dict[str, Any]] = []
            for _ in range(steps):
                self.step += kind == "step"
                seconds = MINUTE / steps
                lines.append({"kind": kind, "step": self.step, "seconds": seconds})
            is_due = steps and self.commit_every and minute % self.commit_every == 0
            if is_due or commits:
                lines.append({"kind": "commit", "step": self.step})
            self._watch.read(map(json.dumps, lines), self.now)
            self._minute(self.readings, training=True)

    def notice(self, *, commits: bool) -> None:
        """Let an instance's last minute pass, and publish whether steps are unsaved."""
        lines = [{"kind": "step", "step": self.step + 1}]
        self.step += 1
        if commits:
            lines.append({"kind": "commit", "step": self.step})
        self._watch.read(map(json.dumps, lines), self.now)
        self._minute(self.readings, training=True)
        self._put_training({UNSAVED: float(self._watch.has_unsaved_steps)})

    def without_instance(self, minutes: int) -> None:
        """Let minutes pass in which only the fleet and the Guard report."""
        for _ in range(minutes):
            self._minute(None)

    def without_fleet(self, minutes: int) -> None:
        """Let minutes pass after the fleet is deleted: only the Guard reports."""
        for _ in range(minutes):
            self._guard_minute()

    @contextmanager
    def changed(self, **changes: float) -> Iterator[None]:
        """Change the agent's readings inside the context."""
        before, self.readings = self.readings, replace(self.readings, **changes)
        yield
        self.readings = before

    def _minute(self, readings: AgentReadings | None, *, training: bool = False) -> None:
        if readings is not None:
            self._put_agent(readings)
        if training:
            self._put_training(self._watch.data(self.now))
            self._watch.sent()
        machines = [self.target, float(readings is not None), 0]
        for logical_id, kind in self.fleet.items():
            namespace, dimension, *names = FLEETS[kind]
            for name, value in zip(names, machines, strict=False):
                self._put(namespace, name, frozenset({(dimension, logical_id)}), value)
            machines = [0, 0.0, 0]
        self._guard_minute()

    def _guard_minute(self) -> None:
        if self.now % (10 * MINUTE) == 0:
            guard = frozenset({("FunctionName", self.guard)})
            self._put("AWS/Lambda", "Invocations", guard, 1 + self.clock_runs)
            self._put("AWS/Lambda", "Errors", guard, float(self.guard_fails))
            if self.clock_runs:
                clock = frozenset({("RuleName", self.clock)})
                self._put("AWS/Events", "Invocations", clock, 1)
        self.now += MINUTE

    def _put_agent(self, readings: AgentReadings) -> None:
        microseconds = readings.exceeded_percent / 100 * MINUTE * 1e6
        values = {
            "nvidia_smi_utilization_gpu": readings.utilization,
            "nvidia_smi_memory_used": readings.memory_percent / 100 * GPU_MEMORY_MIB,
            "nvidia_smi_memory_total": GPU_MEMORY_MIB,
            "nvidia_smi_temperature_gpu": readings.celsius,
            "disk_used_percent": readings.disk_percent,
            "diskio_ebs_ec2_instance_performance_exceeded_tp": microseconds,
            "diskio_ebs_volume_performance_exceeded_tp": 0,
        }
        for name, metric in agent_metrics(self.stack).items():
            if name in values:
                self._put(metric.namespace, name, metric.dimensions, values[name])

    def _put_training(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            own = frozenset({("Stack", self.stack)})
            self._put(f"Training/{self.stack}", name, own, value)

    def _put(self, namespace: str, name: str, dimensions: Dimensions, value: float) -> None:
        metric = Metric(namespace=namespace, name=name, dimensions=dimensions)
        self.series.setdefault(metric, []).append((self.now, value))
