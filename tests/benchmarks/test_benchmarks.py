"""The benchmarks refuse nonsense; what they measure is logged, never asserted."""

import shlex

import yaml

from benchmarks import REPOSITORY
from benchmarks.__main__ import machine, parse_arguments
from benchmarks.kills.kill_table import ROWS


def test_the_machine_is_named_without_its_host_name() -> None:
    assert machine().endswith("logical CPUs")


def test_every_benchmark_is_on_the_command_line() -> None:
    assert parse_arguments(["gpu", "--seconds", "2", "--json"]).seconds == 2


def test_the_weekly_workflow_asks_for_what_there_is() -> None:
    workflow = REPOSITORY / ".github" / "workflows" / "ci.yml"
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    lines = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    (asked,) = (shlex.split(line) for line in lines if "-m benchmarks" in line)
    given = parse_arguments(asked[asked.index("benchmarks") + 1 :])
    assert given.command == "kill_table"
    assert {*given.rows} <= {row.name for row in ROWS}
