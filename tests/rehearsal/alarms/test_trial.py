"""Every alarm of the synthesized template on its fault, on healthy runs, and through an AWS."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from embedded_aws import EmbeddedAws
from rehearsal.alarms.evaluation import Alarm, Metric
from rehearsal.alarms.streams import MINUTE, Stream
from rehearsal.alarms.trial import (
    FAULTS,
    HEALTHY,
    first_alarm,
    good_run,
    interruption,
    no_notice,
    play,
    read_alarms,
    try_alarms,
)
from rehearsal.rehearsal_command import main
from stacks.parameters import StackParameters
from tests.stacks.conftest import synthesize, templates  # noqa: F401

# Of cdk.json's run: p10, p50 and p90.
PLANNED = StackParameters.for_size("g5.xlarge").plans[0].work.busy_percent


@pytest.fixture(scope="module")
def template(templates: dict[str, Any]) -> Any:  # noqa: F811
    return templates["TrainingStack"]


def test_each_alarm_fires_in_its_fault_and_in_no_healthy_run_as_the_documentation_says(
    template: Any,
) -> None:
    trials = {trial.alarm: trial for trial in try_alarms(template, PLANNED[0])}
    assert set(trials) == set(FAULTS)
    assert [name for name, trial in trials.items() if not trial.is_passed] == []
    assert {trial.healthy_runs for trial in trials.values()} == {len(HEALTHY)}
    text = (Path(__file__).parents[3] / "docs/watch.md").read_text(encoding="utf-8")
    row = rf"^\| (\w+) \| .* \| (\d+) \| {len(HEALTHY)} of {len(HEALTHY)} \|$"
    documented = {name: int(minute) for name, minute in re.findall(row, text, re.MULTILINE)}
    assert documented == {name: trial.fired_after_minutes for name, trial in trials.items()}


@pytest.mark.slow  # they are the fleet's, of another source
def test_the_alarms_of_groups_behave_the_same(synthesize: Any) -> None:  # noqa: F811
    groups = synthesize(fleet="asg")["TrainingStack"]
    trials = {each.alarm: each for each in try_alarms(groups, PLANNED[0])}
    assert [name for name, each in trials.items() if not each.is_passed] == []
    assert trials["FleetBelowTarget"].fired_after_minutes


def test_an_interval_that_the_trainer_chooses_is_the_plans(synthesize: Any) -> None:  # noqa: F811
    template = synthesize(workload="detection", recipe="coco_12")["TrainingStack"]
    goodput = read_alarms(template)["GoodputLow"]
    assert first_alarm(goodput, play(template, FAULTS["GoodputLow"][1])) is not None


def test_commits_may_be_as_far_apart_as_steps_make_them(synthesize: Any) -> None:  # noqa: F811
    steps = {"train.checkpoint_interval": "7000steps", "alarm.commit_seconds": 13072}
    template = synthesize(workload="detection", recipe="coco_12", **steps)["TrainingStack"]

    def healthy(stream: Stream) -> None:
        stream.commit_every = 145  # minutes: 8,715 s by the plan
        stream.begin(8 * 60)

    alarms, stream = read_alarms(template), play(template, healthy)
    assert first_alarm(alarms["GoodputLow"], stream) is None
    assert first_alarm(alarms["CommitTooOld"], stream) is None


def test_idle_gpus_of_a_machine_neither_raise_nor_hide_an_alarm(
    synthesize: Any,  # noqa: F811
) -> None:
    options = {"size": "g5.48xlarge", "run_id": "d1"}
    template = synthesize(workload="growth", recipe="full", **options)["TrainingStack"]
    trials = {each.alarm: each for each in try_alarms(template, 97 / 8)}
    assert [name for name, each in trials.items() if not each.is_passed] == []
    alarms = read_alarms(template)
    assert first_alarm(alarms["GpuUtilizationLow"], play(template, good_run, 100 / 8)) is None

    def hangs(stream: Stream) -> None:
        stream.begin(60)
        with stream.changed(utilization=100 / 8):
            stream.train(60, steps=0)

    assert first_alarm(alarms["StepsStandStill"], play(template, hangs)) is not None


def test_what_is_wrong_with_an_alarm_is_found_out(template: Any) -> None:
    changed = json.loads(json.dumps(template))
    alarms = {
        name.removeprefix("Alarms")[:-8]: resource["Properties"]
        for name, resource in changed["Resources"].items()
        if resource["Type"] == "AWS::CloudWatch::Alarm"
    }
    # A dimension that nobody publishes.
    alarms["GpuHot"]["Dimensions"] = [{"Name": "InstanceId", "Value": "i-0"}]
    # The agent's EBS receiver appends no dimension, whatever its section says.
    for query in alarms["EbsThroughputExceeded"]["Metrics"]:
        if "MetricStat" in query:
            dimensions = [{"Name": "Stack", "Value": "TrainingStack"}]
            query["MetricStat"]["Metric"]["Dimensions"] = dimensions
    # Impatience.
    alarms["FleetBelowTarget"] |= {"EvaluationPeriods": 1, "DatapointsToAlarm": 1}
    # A threshold above what the plan calls busy.
    assert alarms["GpuUtilizationLow"]["Threshold"] < PLANNED[0]
    alarms["GpuUtilizationLow"]["Threshold"] = PLANNED[0] + 1.0
    failed = {t.alarm: t for t in try_alarms(changed, PLANNED[0]) if not t.is_passed}
    silent = {name for name, trial in failed.items() if trial.fired_after_minutes is None}
    assert silent == {"GpuHot", "EbsThroughputExceeded"}
    assert failed.keys() - silent == {"FleetBelowTarget", "GpuUtilizationLow"}
    impatient = [HEALTHY[text] for text in failed["FleetBelowTarget"].false_alarms]
    assert impatient == [interruption, no_notice]
    assert next(iter(HEALTHY)) in failed["GpuUtilizationLow"].false_alarms


def test_fails_for_an_alarm_without_a_fault(template: Any) -> None:
    changed = {"Resources": {"AlarmsNew0123ABCD": {"Type": "AWS::CloudWatch::Alarm"}}}
    with pytest.raises(ValueError, match="alarm New has no fault"):
        read_alarms(changed)


@pytest.mark.parametrize(
    "has_plan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["workload", "program"]
)
def test_the_command_prints_the_table_and_succeeds_when_every_alarm_passes(
    has_plan: bool, template: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synth(*words: Any) -> None:
        folder = Path(words[-1])
        (folder / "TrainingStack.template.json").write_text(json.dumps(template))
        if has_plan:
            plan = json.dumps({"gpu_busy_percent": PLANNED, "gpu_share": 1.0})
            (folder / "TrainingStack.plan.json").write_text(plan)

    monkeypatch.setattr("rehearsal.rehearsal_command.run_cdk", synth)
    monkeypatch.setattr("sys.argv", ["rehearsal", "alarms", "--json"])
    assert main() == 0
    assert len(json.loads(capsys.readouterr().out)) == len(FAULTS)


class Published:
    """A stream put to an AWS and read back, one statistic a query."""

    def __init__(self, aws: EmbeddedAws, stream: Stream) -> None:
        self.cloudwatch = aws.client("cloudwatch")
        # The stream's minute 0; whole minutes, as CloudWatch's periods are.
        self.began = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=12)
        for metric, values in stream.series.items():
            data = [
                {
                    "MetricName": metric.name,
                    "Dimensions": [{"Name": n, "Value": v} for n, v in metric.dimensions],
                    "Timestamp": self.began + timedelta(seconds=time),
                    "Value": value,
                }
                for time, value in values
            ]
            for first in range(0, len(data), 500):
                self.cloudwatch.put_metric_data(
                    Namespace=metric.namespace, MetricData=data[first : first + 500]
                )

    def values(self, metric: Metric) -> list[tuple[float, float]]:
        """Back from GetMetricData, a value a minute."""
        query = {
            "Id": "m",
            "MetricStat": {
                "Metric": {
                    "Namespace": metric.namespace,
                    "MetricName": metric.name,
                    "Dimensions": [{"Name": n, "Value": v} for n, v in metric.dimensions],
                },
                "Period": MINUTE,
                "Stat": "Sum",
            },
        }
        answer = self.cloudwatch.get_metric_data(
            MetricDataQueries=[query],
            StartTime=self.began,
            EndTime=self.began + timedelta(hours=4),
            ScanBy="TimestampAscending",
        )["MetricDataResults"][0]
        times = [(each - self.began).total_seconds() for each in answer["Timestamps"]]
        return list(zip(times, answer["Values"], strict=True))


@pytest.mark.slow  # the arithmetic is the trial's
def test_alarms_behave_the_same_through_the_embedded_aws(template: Any) -> None:
    stream = play(template, FAULTS["StepsStandStill"][1])
    with EmbeddedAws() as aws:
        published = Published(aws, stream)
        for resource in template["Resources"].values():
            if resource["Type"] == "AWS::CloudWatch::Alarm":
                properties = json.loads(json.dumps(resource["Properties"]))
                aws.client("cloudwatch").put_metric_alarm(
                    **_without_refs(properties), AlarmName=_name(template, resource)
                )
        stored = aws.client("cloudwatch").describe_alarms()["MetricAlarms"]
        series = {metric: published.values(metric) for metric in stream.series}
    read_back = Stream(
        stack=stream.stack, fleet=stream.fleet, guard=stream.guard, clock=stream.clock
    )
    read_back.series, read_back.now = series, stream.now
    defined = read_alarms(template)
    assert len(stored) == len(defined)
    for each in stored:
        alarm = Alarm.from_properties(each["AlarmName"], each)
        known = defined[each["AlarmName"]]
        assert set(alarm.statistics.values()) == set(known.statistics.values())
        assert first_alarm(alarm, read_back) == first_alarm(known, stream), each["AlarmName"]
    fired = {name for name, each in defined.items() if first_alarm(each, read_back) is not None}
    assert fired == {"StepsStandStill", "GoodputLow"}


def _name(template: Any, wanted: Any) -> str:
    (logical_id,) = [name for name, each in template["Resources"].items() if each is wanted]
    return str(logical_id).removeprefix("Alarms")[:-8]


def _without_refs(properties: Any) -> Any:
    """As CloudFormation hands them to CloudWatch; a Ref becomes the name that it refers to."""
    text = json.dumps(properties)
    resolved = json.loads(text, object_hook=lambda each: each.get("Ref", each))
    resolved["AlarmActions"] = ["arn:aws:sns:us-east-1:123456789012:topic"]
    return resolved
