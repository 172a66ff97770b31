"""The model check finds what it is there for: each fault, planted alone in the Guard, breaks it."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from contract.keys import EVENTS
from stacks.guard import duties, fleet, handler, reasons, records
from stacks.guard.budget import Budget
from stacks.guard.ledger import Ledger
from stacks.guard.settings import GuardSettings, quick_client
from stacks.guard.tick import Tick
from tests.stacks.guard.model import (
    SETTINGS,
    WITH_GROUPS,
    BudgetMachine,
    DeadlineMachine,
    GroupsDeadlineMachine,
    GroupsGuardMachine,
    GuardMachine,
    RunMachine,
)
from tests.stacks.guard.shared_budget import EightGuards
from tests.stacks.guard.world import HOUR

look, read_head, progress_of = Tick.look, records.read_head, records.progress_of
machine_events = records.machine_events
more = itertools.count(1)


def _nothing(*_: object) -> None:
    """Do nothing, at any call."""


def _refuse(*_: object) -> None:
    raise fleet.NotCancelledError("planted")


def _look_without_head(tick: Tick) -> None:
    look(tick)
    tick.is_headless = False


def _progress_without_syncs(settings: GuardSettings, instance_id: str) -> tuple[str, int]:
    step, done = progress_of(settings, instance_id)
    return step, done if step != "dataset" else 0


def _events_by_machines_clocks(settings: GuardSettings, since: float) -> records.MachineEvents:
    found = machine_events(settings, 0)
    pages = quick_client("s3").list_objects_v2(
        Bucket=settings.run_bucket, Prefix=f"{settings.run_prefix}/{EVENTS}"
    )
    names = [each["Key"].rpartition("/")[2] for each in pages["Contents"]]
    times = {
        name.partition("Z-")[2].removesuffix("-machine-failed.json"): datetime.strptime(
            name[:15], "%Y%m%dT%H%M%S"
        ).replace(tzinfo=UTC)
        for name in names
    }
    failures = [(each, times[each].timestamp(), said) for each, _, said in found.failures]
    return found._replace(failures=[each for each in failures if each[1] >= since - HOUR])


def _events_without_steps(settings: GuardSettings, since: float) -> records.MachineEvents:
    return machine_events(settings, since)._replace(steps={})


def _plant(owner: Any, name: str, fault: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, fault)


FAULTS: Mapping[str, tuple[type[RunMachine], Callable[[], Any]]] = {
    "no reserve before max_usd": (
        BudgetMachine,
        _plant(Tick, "usd_ahead", 0.0),
    ),
    "versions of guard.json ignored": (
        BudgetMachine,
        _plant(records, "_versions", lambda *_: []),
    ),
    "heartbeats ignored": (
        GuardMachine,
        _plant(records, "read_head", lambda settings: (read_head(settings)[0], 0.0)),
    ),
    "progress ignored": (GuardMachine, _plant(Ledger, "note_progress", lambda *_: None)),
    "any word counted as progress": (
        GuardMachine,
        _plant(records, "progress_of", lambda *_: ("", next(more))),
    ),
    "no heartbeat during a sync": (
        GuardMachine,
        _plant(records, "progress_of", _progress_without_syncs),
    ),
    "steps of a boot ignored": (
        GuardMachine,
        _plant(records, "machine_events", _events_without_steps),
    ),
    "machines' clocks believed": (
        GuardMachine,
        _plant(records, "machine_events", _events_by_machines_clocks),
    ),
    "machine-failed ignored": (GuardMachine, _plant(Ledger, "record_failures", lambda *_: None)),
    "an hour of patience": (
        GuardMachine,
        _plant(GuardMachine, "settings", replace(SETTINGS, heartbeat_timeout_seconds=HOUR)),
    ),
    "silence counted while S3 was down": (GuardMachine, _plant(Ledger, "note_look", _nothing)),
    "silence ignored": (GuardMachine, _plant(reasons, "_silent", lambda *_: None)),
    "no second way to stop": (GuardMachine, _plant(fleet.SpotFleet, "cancel", _refuse)),
    "no third way to stop": (GuardMachine, _plant(duties, "_end", lambda *_: False)),
    "a refusal not reported": (GuardMachine, _plant(duties, "_report_refusal", lambda *_: None)),
    "takebacks counted as barren": (BudgetMachine, _plant(fleet, "TAKEN_BACK", frozenset())),
    "the market's price ignored": (BudgetMachine, _plant(fleet, "spot_prices", lambda *_: {})),
    "the plan's price billed": (
        BudgetMachine,
        _plant(fleet, "spot_prices", lambda *_: {("g5.xlarge", "us-east-1a"): [(0.0, 0.4)]}),
    ),
    "a missing head not seen": (GuardMachine, _plant(Tick, "look", _look_without_head)),
    "the deadline ignored": (
        DeadlineMachine,
        _plant(handler, "DUTIES", (duties.stop, duties.end_instances, Tick.send_notes)),
    ),
    "barren on Spot is the end": (
        DeadlineMachine,
        _plant(Ledger, "is_barren_on_spot", lambda *_: False),
    ),
}  # fmt: skip
# Of calls that only one kind of fleet has.
FAULTS_OF_BUDGETS: Mapping[str, tuple[Any, Callable[[], Any]]] = {
    "a budget that no one judges": (EightGuards, _plant(reasons, "_over_budget", _nothing)),
    "a run that counts itself alone": (
        EightGuards,
        _plant(Budget, "usd", property(lambda own: max(run["usd"] for run in own.runs.values()))),
    ),
    "what was billed left out": (
        EightGuards,
        _plant(Ledger, "billed_in", lambda own, period: 0.0),
    ),
}
FAULTS_OF_GROUPS: Mapping[str, tuple[type[RunMachine], Callable[[], Any]]] = {
    **{name: (WITH_GROUPS[machine], plant) for name, (machine, plant) in FAULTS.items()},
    "no second way to stop": (GroupsGuardMachine, _plant(fleet.ScalingGroups, "cancel", _refuse)),
    "a new group left empty": (
        GroupsDeadlineMachine,
        _plant(fleet.ScalingGroups, "is_new", lambda _: False),
    ),
    "an ended fleet started again": (
        GroupsGuardMachine,
        _plant(fleet.ScalingGroups, "is_new", lambda _: True),
    ),
    "on demand ended before Spot is there": (
        GroupsDeadlineMachine,
        _plant(fleet, "PRESENT", ("none",)),
    ),
    "only Spot to zero": (
        GroupsDeadlineMachine,
        _plant(fleet.ScalingGroups, "groups", property(lambda own: (own.id, f"{own.id}.x"))),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "faults"),
    [
        pytest.param(name, faults, id=f"{name}, {kind}")
        for kind, faults in (
            ("Spot fleet", FAULTS),
            ("groups", FAULTS_OF_GROUPS),
            ("a budget", FAULTS_OF_BUDGETS),
        )
        for name in faults
    ],
)
def test_the_model_check_finds_a_fault(
    name: str,
    faults: Mapping[str, tuple[type[RunMachine], Callable[[], Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine, plant = faults[name]
    machine.examples = 0
    quick = settings(
        max_examples=2_000,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with plant(), pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=quick)
    with capsys.disabled():
        print(f"\n{name}: found by example {machine.examples}")
