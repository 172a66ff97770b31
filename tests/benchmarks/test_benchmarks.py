"""The benchmarks refuse nonsense; what they measure is logged, never asserted."""

import pytest

from benchmarks import boot, synth
from benchmarks.__main__ import machine, parse_arguments


def test_fails_a_benchmark_of_no_rounds() -> None:
    with pytest.raises(ValueError, match="at least one round, got 0"):
        synth.measure(rounds=0)


def test_fails_a_benchmark_of_no_machines() -> None:
    with pytest.raises(ValueError, match="at least one machine, got 0"):
        boot.measure(machines=0)


def test_the_machine_is_named_without_its_host_name() -> None:
    assert machine().endswith("logical CPUs")


def test_every_benchmark_is_on_the_command_line() -> None:
    assert parse_arguments(["synth", "--rounds", "2"]).rounds == 2
    assert parse_arguments(["boot", "--machines", "1", "--json"]).json
