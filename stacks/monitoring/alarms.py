"""The alarms: each fires on its fault and stays quiet without an instance.

`python -m rehearsal alarms` shows both for every alarm. Each description says what to do, and why
missing data is treated as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aws_cdk import Annotations, Duration
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_cloudwatch_actions as actions
from aws_cdk import aws_sns as sns
from constructs import Construct

from contract.auto_interval import MAX_EPOCHS
from contract.goodput import LEAST_SHARE, USEFUL
from contract.grammar import parse_interval
from stacks.monitoring.metrics import GUARD_PERIOD, RunMetrics
from stacks.parameters import StackParameters
from stacks.plan_at_synth import epoch_seconds, least_busy_percent

_GOODPUT_SECONDS = 20 * 60
# With `auto` the trainer goes by what its saves cost and how long machines live, in fact.
_AUTO_MARGIN = 3
_NOBODY_THERE = "Missing data is healthy: nothing reports between two instances or after the run."

_STANDS_STILL = (
    "No step, evaluation or prepared shard for 15 minutes while the GPU is busy: most likely a "
    "collective or a kernel hangs. The trainer's watchdog restarts it from the last commit; if it "
    "does not, terminate the instance."
)
_PROGRAM_STANDS_STILL = (
    "While the GPU is busy, the program has said nothing of its steps for 45 minutes, and three "
    "times longer than ever before: most likely a collective or a kernel hangs. Nothing restarts "
    "it: terminate the instance, and the next one resumes from the last snapshot."
)
# A deploy with one option alone would begin another run, and end this one.
_OPTIONS = "with the run's options (DeployCommand, if the stack prints it) and"
_COMMITS = "Look for save errors in the training log"
_SAVES = (
    "Look in the training log for whether the program saves, and whether its checkpoint folder "
    "was ever quiet or a commit requested; let it save more often"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmPlan:
    """One alarm: `points` of the last `periods` periods, or all, must be beyond the threshold."""

    construct_id: str
    metric: cloudwatch.IMetric
    threshold: float
    says: str
    missing: str = _NOBODY_THERE
    is_missing_bad: bool = False
    is_below: bool = False
    periods: int
    points: int | None = None


class TrainingAlarms(Construct):
    """All alarms of a stack, to one topic; a return to OK sends nothing."""

    alarms: Sequence[cloudwatch.Alarm]

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        parameters: StackParameters,
        metrics: RunMetrics,
        topic: sns.ITopic,
        plan: dict[str, Any] | None,
    ) -> None:
        super().__init__(scope, construct_id)
        interval_text = parameters.trainer_option("checkpoint_interval")
        interval = commit_interval_seconds(interval_text, plan)
        if interval > parameters.alarm.commit_seconds:
            Annotations.of(self).add_warning_v2(
                "alarms:commit",
                f"healthy commits are up to {interval:.0f} s apart (train.checkpoint_interval "
                f"{interval_text}), so the alarm CommitTooOld at "
                f"{parameters.alarm.commit_seconds} s would fire without a fault; set "
                f"alarm.commit_seconds={math.ceil(1.5 * interval)} or a shorter interval",
            )
        goodput = plan["goodput"].get(USEFUL) if plan else None
        # The agent's metrics are averages over all GPUs of the machine.
        share = plan["gpu_share"] if plan else 1.0
        plans = [
            *_gpu_alarms(parameters, metrics, least_busy_percent(plan), share),
            *_training_alarms(parameters, metrics, share),
            *([_goodput_alarm(metrics, goodput, interval)] if goodput else []),
            *_machine_alarms(parameters, metrics),
            *_fleet_alarms(metrics),
        ]
        self.alarms = [self._alarm(plan) for plan in plans]
        for alarm in self.alarms:
            alarm.add_alarm_action(actions.SnsAction(topic))

    def _alarm(self, plan: AlarmPlan) -> cloudwatch.Alarm:
        comparison, missing = cloudwatch.ComparisonOperator, cloudwatch.TreatMissingData
        above = comparison.GREATER_THAN_OR_EQUAL_TO_THRESHOLD
        alarm = cloudwatch.Alarm(
            self,
            plan.construct_id,
            metric=plan.metric,
            threshold=plan.threshold,
            comparison_operator=comparison.LESS_THAN_THRESHOLD if plan.is_below else above,
            datapoints_to_alarm=plan.points or plan.periods,
            evaluation_periods=plan.periods,
            treat_missing_data=missing.BREACHING if plan.is_missing_bad else missing.NOT_BREACHING,
            alarm_description=f"{plan.says} {plan.missing}",
        )
        if plan.is_missing_bad:
            resource = alarm.node.default_child
            assert isinstance(resource, cloudwatch.CfnAlarm)
            minutes = plan.periods * GUARD_PERIOD.to_minutes()
            warm_up = {"WarmUpPeriodDurationInMinutes": minutes}
            resource.add_property_override("WarmUpConfiguration", warm_up)
        return alarm


def commit_interval_seconds(interval: str, plan: dict[str, Any] | None) -> float:
    """Return how far apart healthy commits may be; 0 if that is unknown before the run."""
    read, epoch = parse_interval(interval), epoch_seconds(plan) or 0.0
    planned = (plan or {}).get("checkpoint_interval_seconds") or 0.0
    auto = max(planned, min(_AUTO_MARGIN * planned, MAX_EPOCHS * epoch))
    apart = {"s": read.value, "epochs": read.value * epoch, "steps": planned, "auto": auto}
    return float(apart[read.unit])


def _gpu_alarms(
    p: StackParameters, metrics: RunMetrics, least_busy_percent: float | None, share: float
) -> list[AlarmPlan]:
    low, planned = p.alarm.gpu_utilization_percent, ""
    if least_busy_percent is not None and least_busy_percent / 2 < low:
        low = least_busy_percent / 2
        planned = f" (by the plan, at least {least_busy_percent:.3g} % is healthy here)"
    if share < 1:
        planned += (
            f" ({share * low:.3g} % as the mean of all GPUs, of which {100 * share:g} % train)"
        )
    return [
        AlarmPlan(
            construct_id="GpuUtilizationLow",
            metric=metrics.gpu_in_training,
            threshold=share * low,
            is_below=True,
            periods=6,
            says=f"Training runs, but the GPU has been busy less than {low:.3g} % of the time for "
            f"half an hour{planned}: data arrives too slowly, or the run hangs outside the GPU. "
            "Check the data-wait share in the training log and the EBS alarm; more vCPUs or a "
            "larger size may be cheaper.",
            missing="Counted only while training.service runs and does not merely wait for its "
            "first data, so missing data during boot, data sync and gaps between instances is "
            "healthy; a running trainer without GPU metrics "
            "counts as 0 %, because then the agent is down.",
        ),
        AlarmPlan(
            construct_id="GpuMemoryNearlyFull",
            metric=metrics.gpu_memory_percent,
            threshold=p.alarm.gpu_memory_percent,
            periods=3,
            says=f"GPU memory has been {p.alarm.gpu_memory_percent:g} % full for 15 minutes: a "
            "larger batch or a fragmented allocator would end the run. Use a smaller micro-batch "
            "or a size with more GPU memory.",
        ),
        AlarmPlan(
            construct_id="GpuHot",
            metric=metrics.own("nvidia_smi_temperature_gpu", "Maximum"),
            threshold=p.alarm.gpu_celsius,
            periods=2,
            says=f"A GPU has been at {p.alarm.gpu_celsius:g} degrees Celsius or above for ten "
            "minutes; its driver will soon lower the clock. Training cannot fix that: terminate "
            "the instance, and the fleet starts another one.",
        ),
    ]


def _training_alarms(p: StackParameters, metrics: RunMetrics, share: float) -> list[AlarmPlan]:
    minutes = p.alarm.commit_seconds / 60
    shorter = "" if p.program else "a shorter train.checkpoint_interval or "
    return [
        AlarmPlan(
            construct_id="StepsStandStill",
            metric=metrics.gpu_without_steps,
            threshold=share * p.alarm.gpu_utilization_percent,
            periods=3,
            says=_PROGRAM_STANDS_STILL if p.program else _STANDS_STILL,
        ),
        AlarmPlan(
            construct_id="CommitTooOld",
            metric=metrics.own("seconds_since_commit", "Maximum"),
            threshold=p.alarm.commit_seconds,
            periods=2,
            says=f"The last commit is older than {minutes:g} minutes while training runs: losing "
            f"the machine would lose that much work. {_SAVES if p.program else _COMMITS}, or "
            f"deploy {_OPTIONS} {shorter}a larger alarm.commit_seconds.",
        ),
        AlarmPlan(
            construct_id="NoticeWithoutCommit",
            metric=metrics.own("notice_without_commit", "Maximum", Duration.minutes(1)),
            threshold=1,
            periods=1,
            says="An instance was interrupted with steps that no commit contains: they are "
            "repeated from the last commit. Compare step time, checkpoint size and "
            "notice_budget_seconds.",
            missing="Published once per notice, so missing data is normal.",
        ),
    ]


def _goodput_alarm(metrics: RunMetrics, planned: float, commit_interval: float) -> AlarmPlan:
    # Each period has a commit, and CloudWatch looks back for a week at most.
    minutes = min(math.ceil(max(_GOODPUT_SECONDS, commit_interval) / 300) * 5, 7 * 24 * 20)
    # In steps of five: another size's forecast alone is no other alarm.
    least = max(5, math.floor(100 * LEAST_SHARE * planned / 5) * 5)
    return AlarmPlan(
        construct_id="GoodputLow",
        metric=metrics.goodput_percent(Duration.minutes(minutes)),
        threshold=least,
        is_below=True,
        periods=3,
        says=f"For {3 * minutes} minutes, less than {least} % of the paid time became training "
        f"that a commit holds, half of what was planned: machines are lost before they commit, or "
        "steps wait. `runs cost` says where time and dollars went, and why each machine ended.",
    )


def _machine_alarms(p: StackParameters, metrics: RunMetrics) -> list[AlarmPlan]:
    larger = "data_volume.gib" if p.data_on == "ebs" else "size, or data_on=ebs"
    return [
        AlarmPlan(
            construct_id="DiskNearlyFull",
            metric=metrics.own("disk_used_percent", "Maximum"),
            threshold=p.alarm.disk_percent,
            periods=2,
            says=f"The root or data volume is {p.alarm.disk_percent:g} % full: the next "
            f"checkpoint may not fit. Deploy {_OPTIONS} a larger root_volume.gib or {larger}: the "
            "next instance gets it.",
        ),
        AlarmPlan(
            construct_id="EbsThroughputExceeded",
            metric=metrics.ebs_exceeded_percent,
            threshold=50,
            periods=6,
            says="For half an hour, EBS demand exceeded the limits of the size or the volume at "
            f"least half of the time. Deploy {_OPTIONS} a higher data_volume.mib_per_second if the "
            "size can use it (make parameters), otherwise a larger size.",
        ),
    ]


def _fleet_alarms(metrics: RunMetrics) -> list[AlarmPlan]:
    return [
        AlarmPlan(
            construct_id="FleetBelowTarget",
            metric=metrics.missing_capacity,
            threshold=1,
            periods=4,
            says="The fleet has been without its instance for 20 minutes: no Spot capacity, no "
            "quota, or a failing launch (the fleet's events say which). Wait, or deploy "
            f"{_OPTIONS} other GPUs (mix_gpus), more zones, or on_demand_base=1.",
            missing="EC2 reports only while the fleet is active; a deleted fleet is not a fault.",
        ),
        AlarmPlan(
            construct_id="GuardErrors",
            metric=metrics.guard("Errors"),
            threshold=1,
            points=2,
            periods=3,
            says="Part of the Guard's work failed in two of the last three periods of ten "
            "minutes, so what it guards may continue: max_hours, max_usd, max_wait_hours, the "
            "deadline, silence, a finished run. Its log group names the calls that failed.",
            missing="Lambda reports errors only when the function is called; GuardSilent watches "
            "whether it is called at all.",
        ),
        AlarmPlan(
            construct_id="GuardSilent",
            metric=metrics.guard_by_the_clock,
            threshold=1,
            is_below=True,
            periods=3,
            says="The Guard's clock has not called it for half an hour: nothing ends a run that "
            "is finished, failed, silent or over max_hours, max_usd or max_wait_hours, and nothing "
            "keeps its deadline. Look at the clock's rule (disabled?) and at the function "
            "(throttled, deleted?); until it runs, stop the fleet yourself.",
            missing="Missing data is the fault: a clock that has stopped and a function that is "
            "never called report nothing. Its first evaluation waits for three periods.",
            is_missing_bad=True,
        ),
    ]
