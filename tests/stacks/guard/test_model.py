"""The Guard holds its promises in the model, and the model finds a Guard that does not."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stacks.guard.model import (
    WITH_GROUPS,
    BudgetMachine,
    DeadlineMachine,
    GroupsBudgetMachine,
    GroupsDeadlineMachine,
    GroupsGuardMachine,
    GuardMachine,
)


def _settings(max_examples: int, steps: int = 40) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )


TestGuard = GuardMachine.TestCase
TestGuard.settings = _settings(25)
TestBudget = BudgetMachine.TestCase
TestBudget.settings = _settings(15)
TestDeadline = DeadlineMachine.TestCase
TestDeadline.settings = _settings(8)
TestGroupsGuard = GroupsGuardMachine.TestCase
TestGroupsGuard.settings = _settings(25)
TestGroupsBudget = GroupsBudgetMachine.TestCase
TestGroupsBudget.settings = _settings(15)
TestGroupsDeadline = GroupsDeadlineMachine.TestCase
TestGroupsDeadline.settings = _settings(8)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [*WITH_GROUPS, *WITH_GROUPS.values()])
def test_the_guard_for_long(machine: type) -> None:
    run_state_machine_as_test(machine, settings=_settings(5_000))
