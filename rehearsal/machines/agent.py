#!/usr/bin/env -S python3 -I -S
"""amazon-cloudwatch-agent-ctl of a rehearsed machine: checks the configuration, sends nothing.

It knows our configuration's sections and, for each, every measurement that AWS documents:
https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/metrics-collected-by-CloudWatch-agent.html
"""

import json
import os
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

CALL = ["-a", "fetch-config", "-m", "ec2", "-s", "-c"]
SECTIONS = {"agent", "metrics"}
METRICS = {"namespace", "aggregation_dimensions", "append_dimensions", "metrics_collected"}
PLUGIN = {"measurement", "resources", "drop_device", "append_dimensions"}
PLUGIN |= {"metrics_collection_interval"}
_USE = "free inodes_free inodes_total inodes_used total used used_percent"
_MEMORY = "active available available_percent buffered cached free inactive total used used_percent"
_INPUT_OUTPUT = "iops_in_progress io_time reads read_bytes read_time writes write_bytes write_time"
_EBS = (
    "total_read_ops total_write_ops total_read_bytes total_write_bytes total_read_time "
    "total_write_time volume_performance_exceeded_iops volume_performance_exceeded_tp "
    "ec2_instance_performance_exceeded_iops ec2_instance_performance_exceeded_tp "
    "volume_queue_length"
)
_GPU = (
    "utilization_gpu temperature_gpu power_draw utilization_memory fan_speed memory_total "
    "memory_used memory_free pcie_link_gen_current pcie_link_width_current "
    "encoder_stats_session_count encoder_stats_average_fps encoder_stats_average_latency "
    "clocks_current_graphics clocks_current_sm clocks_current_memory clocks_current_video"
)
MEASUREMENTS = {
    "disk": set(_USE.split()),
    "diskio": {*_INPUT_OUTPUT.split(), *(f"ebs_{name}" for name in _EBS.split())},
    "mem": set(_MEMORY.split()),
    "nvidia_gpu": set(_GPU.split()),
}


def find_faults(config: dict[str, Any]) -> list[str]:
    """List the names that the agent does not know, and for which it would send nothing."""
    faults = _unknown("the configuration", config, SECTIONS)
    metrics = config.get("metrics", {})
    faults += _unknown("metrics", metrics, METRICS)
    for name, plugin in metrics.get("metrics_collected", {}).items():
        if name not in MEASUREMENTS:
            faults += _unknown("metrics_collected", [name], MEASUREMENTS)
            continue
        faults += _unknown(name, plugin, PLUGIN)
        measured = plugin.get("measurement", [])
        faults += _unknown(f"{name}'s measurement", measured, MEASUREMENTS[name])
        if not measured:
            faults.append(f"{name} measures nothing")
    return faults


def _unknown(where: str, names: Iterable[str], known: Collection[str]) -> list[str]:
    has = ", ".join(sorted(known))
    return [f"{where} has no {name!r}; it has {has}" for name in names if name not in known]


def main() -> int:
    """Accept the one call that the boot programs make."""
    arguments = sys.argv[1:]
    if arguments[:-1] != CALL:
        print(f"rehearsed machines support only {' '.join(CALL)} file:PATH", file=sys.stderr)
        return 1
    config = json.loads(Path(arguments[-1].removeprefix("file:")).read_text())
    if faults := find_faults(config):
        print("\n".join(faults), file=sys.stderr)
        return 1
    folder = Path(os.environ.get("MACHINE_ROOT", "/")) / "opt/aws/amazon-cloudwatch-agent/etc"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "amazon-cloudwatch-agent.json").write_text(json.dumps(config, indent=1))
    print("Configuration validation succeeded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
