"""Tries every alarm of a synthesized template on healthy runs and faults: `rehearsal alarms`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rehearsal.alarms.evaluation import ALARM, INSUFFICIENT, Alarm
from rehearsal.alarms.streams import FLEETS, MINUTE, AgentReadings, Stream

Scenario = Callable[[Stream], None]
HOUR = 60


def good_run(stream: Stream) -> None:
    stream.boot()
    stream.train(40, steps=1, kind="prepare")
    stream.train(3 * HOUR)
    with stream.changed(utilization=0.8 * stream.readings.utilization):
        stream.train(10, steps=0)
    stream.train(1, steps=1, kind="evaluation")
    stream.train(HOUR)


def _loses_its_instance(
    minutes: int, *, commits: bool | None, first: int = 2 * HOUR, then: int = HOUR
) -> Scenario:
    """Return a scenario in which an instance is lost for some minutes; None: without a notice."""

    def scenario(stream: Stream) -> None:
        stream.begin(first)
        if commits is not None:
            stream.notice(commits=commits)
        stream.without_instance(minutes)
        if then:
            stream.begin(then)

    return scenario


interruption = _loses_its_instance(12, commits=True, then=2 * HOUR)
no_notice = _loses_its_instance(5, commits=None)
unsaved = _loses_its_instance(5, commits=False, first=2 * HOUR + 7)
no_capacity = _loses_its_instance(HOUR, commits=True, first=HOUR, then=0)


def waits_for_its_dataset(stream: Stream) -> None:
    stream.boot(30)
    with stream.changed(exceeded_percent=40):
        stream.boot(30)
    stream.train(HOUR)


def after_the_end(stream: Stream) -> None:
    stream.begin(2 * HOUR)
    stream.target = 0
    stream.without_instance(6 * HOUR)


def without_its_fleet(stream: Stream) -> None:
    stream.begin(2 * HOUR)
    stream.without_fleet(3 * HOUR)


def loses_what_it_did(stream: Stream) -> None:
    stream.commit_every = 0
    for _ in range(6):
        stream.begin(18)
        stream.without_instance(1)


def _program(minutes: int, *, steps: int, commits: bool = False) -> Scenario:
    """Return a scenario of a program that reports only once in so many minutes."""

    def scenario(stream: Stream) -> None:
        stream.is_program = True
        stream.boot()
        for _ in range(6):
            stream.train(minutes, steps=0)
            stream.train(1, steps=steps, commits=commits)

    return scenario


def _slowed(share: float, *, steps: int, **readings: float) -> Scenario:
    """Return a fault in which the GPU is busy for only a share of its usual time."""

    def scenario(stream: Stream) -> None:
        stream.boot()
        with stream.changed(utilization=share * stream.readings.utilization, **readings):
            stream.train(2 * HOUR, steps=steps)

    return scenario


def _one_hour_in(*, steps: int = 10, **readings: float) -> Scenario:
    """Return a fault that changes the agent's readings after an hour of training."""

    def scenario(stream: Stream) -> None:
        stream.begin(HOUR)
        with stream.changed(**readings):
            stream.train(HOUR, steps=steps)

    return scenario


def _after_an_hour(hours: int = 1, **changes: int) -> Scenario:
    """Return a fault that changes the stream itself after an hour of training."""

    def scenario(stream: Stream) -> None:
        stream.begin(HOUR)
        for name, value in changes.items():
            setattr(stream, name, value)
        stream.train(hours * HOUR)

    return scenario


# By what happens in it.
HEALTHY: Mapping[str, Scenario] = {
    "boots, prepares features, trains, evaluates, finishes": good_run,
    "loses its instance with a notice, waits 12 minutes, resumes elsewhere": interruption,
    "loses its instance without a notice": no_notice,
    "waits 30 minutes for a dataset, then syncs it for 30": waits_for_its_dataset,
    "finishes; the fleet stays at zero": after_the_end,
    "finishes; its fleet is deleted": without_its_fleet,
    "a program that reports no steps but saves": _program(20, steps=0, commits=True),
    "a program that reports its loss every 40 minutes and saves then": _program(40, steps=1),
}
# By the alarm's construct id, which follows "Alarms" in its logical id: what happens, and how.
FAULTS: Mapping[str, tuple[str, Scenario]] = {
    "GpuUtilizationLow": ("data arrives at a tenth of the pace", _slowed(0.1, steps=1)),
    "GpuMemoryNearlyFull": ("GPU memory fills up", _one_hour_in(memory_percent=97)),
    "GpuHot": ("the card's cooling fails", _one_hour_in(celsius=90)),
    "StepsStandStill": (
        "a collective hangs, the GPU spins",
        _one_hour_in(steps=0, utilization=100),
    ),
    "CommitTooOld": (
        "training continues, but no commit succeeds",
        _after_an_hour(3, commit_every=0),
    ),
    "GoodputLow": ("each machine is lost before it commits", loses_what_it_did),
    "NoticeWithoutCommit": ("a notice comes, and there is no time to save", unsaved),
    "DiskNearlyFull": ("the data volume fills up", _one_hour_in(disk_percent=93)),
    "EbsThroughputExceeded": (
        "training reads more than EBS sustains",
        _slowed(0.65, steps=5, exceeded_percent=80),
    ),
    "FleetBelowTarget": ("an hour without Spot capacity", no_capacity),
    "GuardErrors": ("the Guard raises an error at every call", _after_an_hour(guard_fails=True)),
    "GuardSilent": (
        "the Guard's clock is disabled; only other instances' events wake it",
        _after_an_hour(clock_runs=False),
    ),
}


# After its end, a scenario continues with only the Guard for as long as any alarm looks back.
EXTRA_MINUTES = 60
BUSY = AgentReadings().utilization


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmTrial:
    """One alarm's trial: when it fired in its fault, and where it fired in healthy runs."""

    alarm: str
    fault: str
    fired_after_minutes: int | None
    healthy_runs: int
    false_alarms: Sequence[str]
    also_fired_in: Sequence[str]

    @property
    def is_passed(self) -> bool:
        """Whether the alarm fires in its fault and in no healthy run."""
        return self.fired_after_minutes is not None and not self.false_alarms


def read_alarms(template: Mapping[str, Any]) -> dict[str, Alarm]:
    """Return a template's alarms by construct id; refuse an alarm that has no fault."""
    found = {}
    for logical_id, resource in template["Resources"].items():
        if resource["Type"] != "AWS::CloudWatch::Alarm":
            continue
        name = re.sub(r"^Alarms|[0-9A-F]{8}$", "", logical_id)
        if name not in FAULTS:
            raise ValueError(f"alarm {name} has no fault in rehearsal/alarms/trial.py; add one")
        found[name] = Alarm.from_properties(name, resource["Properties"])
    return found


def play(template: Mapping[str, Any], scenario: Scenario, busy_percent: float = BUSY) -> Stream:
    """Return a scenario's metrics as the template's stack, fleet and Guard would publish them."""
    stream = Stream(
        stack=_stack_name(template),
        fleet={
            name: each["Type"]
            for name, each in template["Resources"].items()
            if each["Type"] in FLEETS
        },
        guard=_logical_id(template, "AWS::Lambda::Function"),
        clock=_logical_id(template, "AWS::Events::Rule", "ScheduleExpression"),
        readings=AgentReadings(utilization=busy_percent),
    )
    scenario(stream)
    stream.without_fleet(EXTRA_MINUTES)
    return stream


def _stack_name(template: Mapping[str, Any]) -> str:
    """Return the name of a template's stack, from the fleet's parameter that starts with it."""
    kind = "AWS::SSM::Parameter"
    names = [r["Properties"]["Name"] for r in template["Resources"].values() if r["Type"] == kind]
    (fleet,) = [name for name in names if name.endswith("/fleet-id")]
    return str(fleet).split("/")[1]


def first_alarm(alarm: Alarm, stream: Stream) -> int | None:
    """Return the minute in which an alarm first fires, evaluated every minute as by CloudWatch."""
    state = INSUFFICIENT
    for minute in range(1, int(stream.now / MINUTE) + 1):
        state = alarm.state(lambda metric: stream.series.get(metric, []), minute * MINUTE, state)
        if state == ALARM:
            return minute
    return None


def try_alarms(template: Mapping[str, Any], busy_percent: float = BUSY) -> list[AlarmTrial]:
    """Try every alarm on its fault, on all healthy runs and on the others' faults.

    `busy_percent` is how busy a healthy GPU is, by the plan's lower limit.
    """
    alarms = read_alarms(template)
    faults = dict(FAULTS.values())
    scenarios = {**HEALTHY, **faults}
    streams = {text: play(template, each, busy_percent) for text, each in scenarios.items()}
    trials = []
    for name, alarm in alarms.items():
        minutes = {text: first_alarm(alarm, stream) for text, stream in streams.items()}
        fired = [text for text, minute in minutes.items() if minute is not None]
        fault, _ = FAULTS[name]
        trials.append(
            AlarmTrial(
                alarm=name,
                fault=fault,
                fired_after_minutes=minutes[fault],
                healthy_runs=len(HEALTHY),
                false_alarms=[text for text in fired if text in HEALTHY],
                also_fired_in=[text for text in fired if text in faults and text != fault],
            )
        )
    return trials


def trial_table(trials: Sequence[AlarmTrial]) -> Table:
    """Return the table: each alarm with its fault, and whether it fires in healthy runs."""
    table = Table("alarm", "its fault", "fires in minute", "quiet in healthy runs", "also fires in")
    for trial in trials:
        quiet = trial.healthy_runs - len(trial.false_alarms)
        table.add_row(
            trial.alarm,
            trial.fault,
            str(trial.fired_after_minutes or "never"),
            f"{quiet} of {trial.healthy_runs}",
            "; ".join([*trial.false_alarms, *trial.also_fired_in]) or "-",
        )
    return table


def _logical_id(template: Mapping[str, Any], type_name: str, having: str = "") -> str:
    (found,) = [
        name
        for name, each in template["Resources"].items()
        if each["Type"] == type_name and (not having or having in each["Properties"])
    ]
    return str(found)
