"""Reading units: what is honoured, and that the rest is refused by name."""

import signal

import pytest

from rehearsal.machines.services import UnitError, parse_seconds, parse_unit, stop_order

PLAIN = "[Service]\nExecStart=/bin/true\n"


def test_defaults_are_those_of_systemd() -> None:
    unit = parse_unit("a.service", PLAIN)
    assert (unit.kind, unit.restart, unit.restart_seconds) == ("simple", "no", 0.1)
    assert (unit.start_limit_burst, unit.start_limit_seconds) == (5, 10)
    assert (unit.kill_signal, unit.stop_timeout_seconds) == (signal.SIGTERM, 90)


@pytest.mark.parametrize(
    "line",
    [
        "DynamicUser=yes",
        "ExecReload=/bin/true",
        "Restart=on-abnormal",
        "StandardOutput=socket",
        "ExecStopPost=-/bin/true",
        "ExecStopPost=/bin/echo $HOME",
    ],
)
def test_fails_on_what_is_not_honoured_by_its_name(line: str) -> None:
    with pytest.raises(UnitError, match=line.partition("=")[2].strip("-").split("/")[0] or "a.ser"):
        parse_unit("a.service", PLAIN + line + "\n")


def test_a_sandbox_has_no_effect() -> None:
    sandbox = "ProtectSystem=strict\nSystemCallFilter=@system-service\nSystemCallFilter=~@swap\n"
    assert parse_unit("a.service", PLAIN + sandbox) == parse_unit("a.service", PLAIN)


def test_fails_on_a_directive_in_the_wrong_section() -> None:
    with pytest.raises(UnitError, match=r"do not support 'OnFailure=b.service' in \[Service\]"):
        parse_unit("a.service", PLAIN + "OnFailure=b.service\n")


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5), ("500ms", 0.5), ("1min 30s", 90), ("6h", 21600)]
)
def test_time_spans_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


def test_units_stop_in_the_reverse_of_their_order() -> None:
    first = parse_unit("first.service", PLAIN)
    second = parse_unit("second.service", f"[Unit]\nAfter=first.service other.target\n{PLAIN}")
    assert [unit.name for unit in stop_order([first, second])] == [
        "second.service",
        "first.service",
    ]
