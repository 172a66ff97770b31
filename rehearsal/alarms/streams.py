"""What is published minute by minute in the life of a run: by agent, trainer, EC2 and Lambda.

The trainer's part goes through userdata/send_metrics.py, which publishes it on an instance, and the
agent's names come from userdata/cloudwatch-agent.json; the values are made up, a figure a minute.
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
# How the agent spells a plugin in front of its measurements.
PREFIXES = {"nvidia_gpu": "nvidia_smi_", "mem": "mem_", "disk": "disk_", "diskio": "diskio_"}


@cache
def agent_metrics(stack: str) -> dict[str, Metric]:
    """What the agent's file makes it publish over all instances, by the metric's name.

    With the rollup [] every metric is there without dimensions, with ["Stack"] those of a plugin
    that appends it. Its EBS receiver appends nothing (aws/amazon-cloudwatch-agent,
    translator/translate/otel/receiver/awsebsnvme), so a Stack asked for there is none.
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
class Machine:
    """What the agent measures of a machine in one minute; the defaults are a healthy one's."""

    utilization: float = 92
    memory_percent: float = 71
    celsius: float = 66
    disk_percent: float = 44
    # The share of the time in which EBS was asked for more than it gives, in percent.
    exceeded_percent: float = 2


IDLE = Machine(utilization=0, memory_percent=2, celsius=38)
GPU_MEMORY_MIB = 23_028


@dataclass(kw_only=True, slots=True)
class Stream:
    """A stack's metrics, written minute by minute; `fleet` and `guard` are what Refs name."""

    stack: str
    fleet: str
    guard: str
    series: dict[Metric, list[tuple[float, float]]] = field(default_factory=dict)
    now: float = 0
    target: int = 1
    machine: Machine = field(default_factory=Machine)
    commit_every: int = 20
    guard_fails: bool = False
    step: int = 0
    _watch: TrainingWatch = field(default_factory=TrainingWatch)

    def boot(self, minutes: int = 6) -> None:
        """A machine comes up: no trainer yet, the GPU idle."""
        self._watch = TrainingWatch()
        for _ in range(minutes):
            self._minute(replace(self.machine, **_gpu_of(IDLE)))

    def train(self, minutes: int, *, steps: int = 10, kind: str = "step") -> None:
        """The trainer writes `steps` lines a minute, and a commit every so often."""
        for minute in range(minutes):
            lines: list[dict[str, Any]] = []
            for _ in range(steps):
                self.step += kind == "step"
                lines.append({"kind": kind, "step": self.step})
            if steps and self.commit_every and minute % self.commit_every == 0:
                lines.append({"kind": "commit", "step": self.step})
            self._watch.read(map(json.dumps, lines), self.now)
            self._minute(self.machine, training=True)

    def notice(self, *, commits: bool) -> None:
        """The last two minutes of a machine, and what the publisher says of them."""
        lines = [{"kind": "step", "step": self.step + 1}]
        self.step += 1
        if commits:
            lines.append({"kind": "commit", "step": self.step})
        self._watch.read(map(json.dumps, lines), self.now)
        self._minute(self.machine, training=True)
        self._put_training({UNSAVED: float(self._watch.has_unsaved_steps)})

    def without_instance(self, minutes: int) -> None:
        """Nobody reports but the fleet and the Guard."""
        for _ in range(minutes):
            self._minute(None)

    def deleted(self, minutes: int) -> None:
        """The stack is gone: nothing reports at all."""
        self.now += minutes * MINUTE

    @contextmanager
    def changed(self, **changes: float) -> Iterator[None]:
        """A machine that is other than a healthy one for a while."""
        healthy, self.machine = self.machine, replace(self.machine, **changes)
        yield
        self.machine = healthy

    def _minute(self, machine: Machine | None, *, training: bool = False) -> None:
        if machine is not None:
            self._put_agent(machine)
        if training:
            self._put_training(self._watch.data(self.now))
            self._watch.sent()
        fleet = frozenset({("FleetRequestId", self.fleet)})
        self._put("AWS/EC2Spot", "TargetCapacity", fleet, self.target)
        self._put("AWS/EC2Spot", "FulfilledCapacity", fleet, float(machine is not None))
        if self.now % (10 * MINUTE) == 0:
            guard = frozenset({("FunctionName", self.guard)})
            self._put("AWS/Lambda", "Invocations", guard, 1)
            self._put("AWS/Lambda", "Errors", guard, float(self.guard_fails))
        self.now += MINUTE

    def _put_agent(self, machine: Machine) -> None:
        microseconds = machine.exceeded_percent / 100 * MINUTE * 1e6
        values = {
            "nvidia_smi_utilization_gpu": machine.utilization,
            "nvidia_smi_memory_used": machine.memory_percent / 100 * GPU_MEMORY_MIB,
            "nvidia_smi_memory_total": GPU_MEMORY_MIB,
            "nvidia_smi_temperature_gpu": machine.celsius,
            "disk_used_percent": machine.disk_percent,
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


def _gpu_of(machine: Machine) -> dict[str, float]:
    return {
        "utilization": machine.utilization,
        "memory_percent": machine.memory_percent,
        "celsius": machine.celsius,
    }
