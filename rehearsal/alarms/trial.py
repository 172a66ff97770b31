"""Tries every alarm of a synthesized template on every scenario: `python -m rehearsal alarms`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from rehearsal.alarms.evaluation import ALARM, INSUFFICIENT, Alarm
from rehearsal.alarms.scenarios import FAULTS, HEALTHY, Scenario
from rehearsal.alarms.streams import MINUTE, AgentReadings, Stream

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
            raise ValueError(f"alarm {name} has no fault in rehearsal/alarms/scenarios.py; add one")
        found[name] = Alarm.from_properties(name, resource["Properties"])
    return found


def play(template: Mapping[str, Any], scenario: Scenario, busy_percent: float = BUSY) -> Stream:
    """Return a scenario's metrics as the template's stack, fleet and Guard would publish them."""
    stream = Stream(
        stack=_stack_name(template),
        fleet=_logical_id(template, "AWS::EC2::SpotFleet"),
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
