"""The benchmarks refuse nonsense; what they measure is logged, never asserted."""

from benchmarks.__main__ import machine, parse_arguments


def test_the_machine_is_named_without_its_host_name() -> None:
    assert machine().endswith("logical CPUs")


def test_every_benchmark_is_on_the_command_line() -> None:
    assert parse_arguments(["gpu", "--seconds", "2", "--json"]).seconds == 2
    assert parse_arguments(["spot", "--traces", "x"]).starts == 25
