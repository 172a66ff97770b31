"""The alarms: somebody publishes what they watch, and what they say reaches a person."""

from collections.abc import Callable
from typing import Any

import pytest
from aws_cdk import App, Stack
from aws_cdk.assertions import Annotations, Match, Template
from aws_cdk.aws_sns import Topic

from contract.goodput import USEFUL as USEFUL_SHARE
from rehearsal.alarms.evaluation import Alarm, Metric
from rehearsal.alarms.streams import agent_metrics
from stacks.events import TrainingTopic
from stacks.fleet import KINDS
from stacks.monitoring.alarms import TrainingAlarms
from stacks.monitoring.metrics import RunMetrics
from stacks.parameters import StackParameters
from tests.stack_names import TRAINING
from tests.stacks.templates import every, only
from userdata.send_metrics import COMMIT_AGE, RUNNING, STEPS, UNSAVED, USEFUL

# Of EC2 and Lambda, not in the stack's namespace.
ELSEWHERE = ("TargetCapacity", "FulfilledCapacity", "Errors", "Invocations")


@pytest.fixture(scope="module")
def alarms(templates: dict[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix("Alarms")[:-8]: resource["Properties"]
        for name, resource in templates["TrainingStack"]["Resources"].items()
        if resource["Type"] == "AWS::CloudWatch::Alarm"
    }


@pytest.fixture(scope="module")
def published(templates: dict[str, Any]) -> set[Metric]:
    """Everything that agent, trainer, EC2 and Lambda publish for this stack."""
    ids = {each["Type"]: name for name, each in templates["TrainingStack"]["Resources"].items()}
    training = {
        Metric(
            namespace=f"Training/{TRAINING}",
            name=name,
            dimensions=frozenset({("Stack", TRAINING)}),
        )
        for name in (RUNNING, STEPS, COMMIT_AGE, UNSAVED, USEFUL)
    }
    fleet = frozenset({("FleetRequestId", ids["AWS::EC2::SpotFleet"])})
    guard = frozenset({("FunctionName", ids["AWS::Lambda::Function"])})
    clocks = [name for name in templates["TrainingStack"]["Resources"] if "GuardClock" in name]
    (clock,) = [name for name in clocks if "Permission" not in name and "Allow" not in name]
    services = {
        *(
            Metric(namespace="AWS/EC2Spot", name=name, dimensions=fleet)
            for name in ("TargetCapacity", "FulfilledCapacity")
        ),
        *(
            Metric(namespace="AWS/Lambda", name=name, dimensions=guard)
            for name in ("Errors", "Invocations")
        ),
        Metric(
            namespace="AWS/Events",
            name="Invocations",
            dimensions=frozenset({("RuleName", clock)}),
        ),
    }
    return {*agent_metrics(TRAINING).values(), *training, *services}


def test_somebody_publishes_every_metric_that_an_alarm_watches(
    alarms: dict[str, Any], published: set[Metric]
) -> None:
    for name, properties in alarms.items():
        for statistic in Alarm.from_properties(name, properties).statistics.values():
            assert statistic.metric in published, name


def test_every_metric_of_the_dashboard_is_published(
    templates: dict[str, Any], published: set[Metric]
) -> None:
    dashboard = only(templates["TrainingStack"], "AWS::CloudWatch::Dashboard")
    text = str(dashboard["DashboardBody"])
    shown = [metric.name for metric in published if f'"{metric.name}"' in text]
    assert {"training_steps", "nvidia_smi_power_draw", "mem_used_percent"} <= set(shown)
    assert text.count(f'"Training/{TRAINING}","') == len(
        [name for name in shown if name not in ELSEWHERE]
    )


def test_no_alarm_knows_an_instance(alarms: dict[str, Any]) -> None:
    for name, properties in alarms.items():
        assert "InstanceId" not in str(properties), name


def test_every_alarm_says_why_missing_data_is_what_it_is(alarms: dict[str, Any]) -> None:
    for name, properties in alarms.items():
        treated = "breaching" if name == "GuardSilent" else "notBreaching"
        assert properties["TreatMissingData"] == treated, name
        # Else a new stack's alarm would go off before its Guard can have been called.
        waits = {"WarmUpPeriodDurationInMinutes": 30} if name == "GuardSilent" else None
        assert properties.get("WarmUpConfiguration") == waits, name
        description = properties["AlarmDescription"]
        assert any(word in description for word in ("issing", "Lambda reports", "EC2 reports"))
        assert len(description) <= 1024, name


def test_math_stays_within_what_alarms_may_use(alarms: dict[str, Any]) -> None:
    for name, properties in alarms.items():
        queries = properties.get("Metrics", [])
        assert len(queries) <= 10, name
        periods = {each["MetricStat"]["Period"] for each in queries if "MetricStat" in each}
        assert len(periods) <= 1, name


def test_thresholds_follow_the_context(synthesize: Callable[..., Any]) -> None:
    template = synthesize(**{"alarm.disk_percent": "80", "alarm.commit_seconds": "3600"})[
        "TrainingStack"
    ]
    thresholds = {
        name.removeprefix("Alarms")[:-8]: each["Properties"]["Threshold"]
        for name, each in template["Resources"].items()
        if each["Type"] == "AWS::CloudWatch::Alarm"
    }
    assert (thresholds["DiskNearlyFull"], thresholds["CommitTooOld"]) == (80, 3600)


def test_a_full_instance_store_is_not_said_to_grow_with_a_volume(
    synthesize: Callable[..., Any],
) -> None:
    said = str(synthesize(data_on="nvme"))
    assert "a larger root_volume.gib or size, or data_on=ebs: the next instance gets it" in said
    assert "data_volume.gib" not in said


@pytest.mark.parametrize(
    "name", ["DiskNearlyFull", "EbsThroughputExceeded", "CommitTooOld", "FleetBelowTarget"]
)
def test_a_deploy_that_an_alarm_advises_keeps_the_runs_options(
    name: str, alarms: dict[str, Any]
) -> None:
    """One with the advised option alone would begin another run."""
    said = alarms[name]["AlarmDescription"].lower()
    assert "deploy with the run's options (deploycommand, if the stack prints it) and" in said


def test_an_address_is_subscribed_only_where_one_is_given(
    templates: dict[str, Any], synthesize: Callable[..., Any]
) -> None:
    assert every(templates["TrainingStack"], "AWS::SNS::Subscription") == []
    told = synthesize(**{"alarm.email": "me@example.org"})["TrainingStack"]
    one = only(told, "AWS::SNS::Subscription")
    assert (one["Protocol"], one["Endpoint"]) == ("email", "me@example.org")


@pytest.mark.parametrize(("epoch_seconds", "is_warned_of"), [(3000.0, False), (5000.0, True)])
def test_an_alarm_that_would_go_off_in_health_is_warned_of(
    epoch_seconds: float, is_warned_of: bool
) -> None:
    stack = _alone("2epochs", epoch_seconds=epoch_seconds)
    said = Annotations.from_stack(stack)
    # What they find stays with jsii, which cannot always name the type of an annotation.
    hold = said.has_warning if is_warned_of else said.has_no_warning
    hold("*", Match.string_like_regexp("set alarm.commit_seconds=15000 or a shorter interval"))


def _alone(interval: str = "auto", **figures: object) -> Stack:
    """A stack of alarms alone, with these figures of a plan."""
    stack = Stack(App(), "Alone")
    TrainingAlarms(
        stack,
        "Alarms",
        parameters=StackParameters.for_size("g5.xlarge", **{"train.checkpoint_interval": interval}),
        metrics=RunMetrics(
            stack_name="Alone",
            kind=KINDS["spot"],
            fleet_members=["sfr-1"],
            guard_name="guard",
            clock_name="clock",
        ),
        topic=Topic(stack, "Topic"),
        plan={
            "epoch_seconds": 600.0,
            "stages": [{"seconds": 1e6}],
            "checkpoint_interval_seconds": 60.0,
            "gpu_busy_percent": [100.0],
            "gpu_share": 1.0,
            "goodput": {USEFUL_SHARE: 0.8},
            **figures,
        },
    )
    return stack


@pytest.mark.parametrize(
    ("least_busy_percent", "share", "threshold"),
    [(100.0, 1.0, 20), (90.0, 1.0, 20), (9.0, 1.0, 4.5), (90.0, 0.25, 5), (9.0, 0.25, 1.125)],
)
def test_a_run_that_launches_bind_keeps_its_gpu_idle_in_health(
    least_busy_percent: float, share: float, threshold: float
) -> None:
    stack = _alone(gpu_busy_percent=[least_busy_percent], gpu_share=share)
    template = Template.from_stack(stack).to_json()
    (alarm,) = (
        one
        for one in every(template, "AWS::CloudWatch::Alarm")
        if one["ComparisonOperator"] == "LessThanThreshold"
        and "GPU has been busy" in one["AlarmDescription"]
    )
    assert alarm["Threshold"] == threshold
    says_plan = "by the plan, at least 9 % is healthy here" in alarm["AlarmDescription"]
    assert says_plan == (least_busy_percent < 40)
    says_share = (
        f"{threshold:.3g} % as the mean of all GPUs, of which 25 % train"
        in alarm["AlarmDescription"]
    )
    assert says_share == (share < 1)


@pytest.mark.parametrize(
    ("interval", "planned", "period"),
    [
        ("2epochs", None, 2100),
        ("7000steps", 3000.0, 3000),
        ("7000steps", None, 1200),
        # The trainer may find another one than the plan, but waits for two epochs at most.
        ("auto", 60.0, 1200),
        ("auto", 600.0, 1800),
        ("auto", 900.0, 2100),
        ("auto", 2400.0, 2400),
        ("auto", None, 1200),
    ],
)
def test_goodput_is_judged_by_half_of_its_plan_over_periods_that_have_a_commit(
    interval: str, planned: float | None, period: int
) -> None:
    stack = _alone(interval, epoch_seconds=1000.0, checkpoint_interval_seconds=planned)
    template = Template.from_stack(stack).to_json()
    (alarm,) = (
        each for name, each in template["Resources"].items() if name.startswith("AlarmsGoodputLow")
    )
    statistics = Alarm.from_properties("GoodputLow", alarm["Properties"]).statistics
    assert {each.period for each in statistics.values()} == {period}
    assert alarm["Properties"]["Threshold"] == 40


@pytest.mark.parametrize("email", ["", "me@example.org"])
def test_synth_warns_when_nobody_gets_the_mails(email: str) -> None:
    stack = Stack(App(), "TrainingStack")
    TrainingTopic(stack, "Notifications", email=email, key=None)
    said = Annotations.from_stack(stack)
    hold = said.has_no_warning if email else said.has_warning
    hold("*", Match.string_like_regexp("alarm.email is empty: .* set -c alarm.email="))
