"""Reads systemd service units as far as a process machine supports them.

An unsupported directive is refused by name: a rehearsal that ignored one would prove nothing about
the real machine.
"""

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

UNIT = ("Description", "After", "Wants", "OnFailure", "StartLimitIntervalSec", "StartLimitBurst")
SERVICE = (
    "Type", "WorkingDirectory", "Environment", "EnvironmentFile", "ExecStart", "ExecStopPost",
    "Restart", "RestartSec", "RestartMode", "SuccessExitStatus", "RestartPreventExitStatus",
    "OOMPolicy", "KillMode", "KillSignal", "TimeoutStopSec", "WatchdogSec", "StandardOutput",
    "StandardError",
)  # fmt: skip
# Directives that confine a service or create its folders: they have no effect on a process machine,
# whose services are processes of the user.
SANDBOX = (
    "CapabilityBoundingSet", "LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges",
    "OOMScoreAdjust", "PrivateDevices", "PrivateTmp", "ProcSubset", "ProtectClock",
    "ProtectControlGroups", "ProtectHome", "ProtectHostname", "ProtectKernelLogs",
    "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "ProtectSystem",
    "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID",
    "RuntimeDirectory", "RuntimeDirectoryPreserve", "StateDirectory", "SystemCallArchitectures",
    "SystemCallErrorNumber", "SystemCallFilter",
)  # fmt: skip
KNOWN = {"Unit": UNIT, "Service": SERVICE + SANDBOX, "Install": ("WantedBy",)}
CHOICES = {
    "Type": ("simple", "exec", "oneshot"),
    "Restart": ("no", "on-failure", "always"),
    "RestartMode": ("normal", "direct"),
    "OOMPolicy": ("continue",),
    "KillMode": ("control-group", "mixed"),
    "StandardError": ("inherit",),
}
SECONDS_IN = {"ms": 0.001, "s": 1.0, "": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class UnitError(ValueError):
    """Something in a unit file that a process machine does not support."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One service; paths are as in the file, without the machine's root."""

    name: str
    after: tuple[str, ...]
    wants: tuple[str, ...]
    on_failure: tuple[str, ...]
    start_limit_seconds: float
    start_limit_burst: int
    kind: str
    working_directory: str
    environment: Mapping[str, str]
    environment_files: tuple[str, ...]
    exec_start: tuple[str, ...]
    exec_stop_post: tuple[tuple[str, ...], ...]
    restart: str
    restart_seconds: float
    restart_mode: str
    success_statuses: frozenset[int]
    prevent_statuses: frozenset[int]
    kill_mode: str
    kill_signal: signal.Signals
    stop_timeout_seconds: float
    watchdog_seconds: float
    log_file: str | None
    wanted_by: tuple[str, ...]


def parse_unit(name: str, text: str) -> Unit:
    """Parse a unit file; UnitError names the directive or value that is not supported."""
    directives = _read_directives(name, text)

    def last(directive: str, default: str) -> str:
        value = directives.get(directive, [default])[-1]
        if directive in CHOICES and value not in CHOICES[directive]:
            known = ", ".join(CHOICES[directive])
            raise UnitError(f"{name}: process machines support {directive}= {known}, got {value!r}")
        return value

    def words(directive: str) -> tuple[str, ...]:
        return tuple(word for value in directives.get(directive, []) for word in shlex.split(value))

    last("StandardError", "inherit")
    last("OOMPolicy", "continue")
    starts = directives.get("ExecStart", [])
    if len(starts) != 1:
        raise UnitError(f"{name}: a service has one ExecStart=, this one has {len(starts)}")
    return Unit(
        name=name,
        after=words("After"),
        wants=words("Wants"),
        on_failure=words("OnFailure"),
        start_limit_seconds=parse_seconds(last("StartLimitIntervalSec", "10s")),
        start_limit_burst=int(last("StartLimitBurst", "5")),
        kind=last("Type", "simple"),
        working_directory=last("WorkingDirectory", "/"),
        environment=dict(word.split("=", 1) for word in words("Environment")),
        environment_files=words("EnvironmentFile"),
        exec_start=_command(name, starts[0]),
        exec_stop_post=tuple(_command(name, line) for line in directives.get("ExecStopPost", [])),
        restart=last("Restart", "no"),
        restart_seconds=parse_seconds(last("RestartSec", "100ms")),
        restart_mode=last("RestartMode", "normal"),
        success_statuses=frozenset(int(word) for word in words("SuccessExitStatus")),
        prevent_statuses=frozenset(int(word) for word in words("RestartPreventExitStatus")),
        kill_mode=last("KillMode", "control-group"),
        kill_signal=signal.Signals[last("KillSignal", "SIGTERM")],
        stop_timeout_seconds=parse_seconds(last("TimeoutStopSec", "90s")),
        watchdog_seconds=parse_seconds(last("WatchdogSec", "infinity")),
        log_file=_log_file(name, last("StandardOutput", "journal")),
        wanted_by=words("WantedBy"),
    )


def parse_seconds(text: str) -> float:
    """Read a systemd time span: 5, 500ms, 1min 30s, infinity."""
    if text == "infinity":
        return float("inf")
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    if not parts or any(unit not in SECONDS_IN for _, unit in parts):
        raise UnitError(f"{text!r} is not a time span that process machines support")
    return sum(float(number) * SECONDS_IN[unit] for number, unit in parts)


def parse_environment_file(text: str) -> dict[str, str]:
    """Read NAME=value lines with systemd's quotes."""
    lines = (line for line in text.splitlines() if line.strip() and line[0] not in "#;")
    pairs = (line.partition("=") for line in lines)
    return {name.strip(): " ".join(shlex.split(value)) for name, _, value in pairs}


def load_units(folder: Path) -> dict[str, Unit]:
    """Return all services of a folder by name."""
    paths = sorted(folder.glob("*.service"))
    return {path.name: parse_unit(path.name, path.read_text()) for path in paths}


def _read_directives(name: str, text: str) -> dict[str, list[str]]:
    section = ""
    directives: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.strip() or line[0] in "#;":
            continue
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
            continue
        directive, separator, value = (part.strip() for part in line.partition("="))
        if not separator or line.endswith("\\") or directive not in KNOWN.get(section, ()):
            raise UnitError(
                f"{name}: process machines do not support {line.strip()!r} in [{section}]; add it "
                "to rehearsal/machines/services.py or remove it"
            )
        directives.setdefault(directive, []).append(value)
    return directives


def _command(name: str, line: str) -> tuple[str, ...]:
    if re.match(r"[-@:+!|]", line) or re.search(r"[$%]", line):
        raise UnitError(f"{name}: process machines run only plain command lines, got {line!r}")
    return tuple(shlex.split(line))


def _log_file(name: str, value: str) -> str | None:
    if value == "journal":
        return None
    kind, _, path = value.partition(":")
    if kind != "append" or not path.startswith("/"):
        raise UnitError(f"{name}: process machines need StandardOutput=append:/path, got {value!r}")
    return path


def stop_order(units: Sequence[Unit]) -> list[Unit]:
    """Return units in stop order: a unit that starts After another stops before it."""
    known = {unit.name: unit for unit in units}
    starts_after = {name: known.keys() & unit.after for name, unit in known.items()}
    try:
        names = list(TopologicalSorter(starts_after).static_order())
    except CycleError as error:
        raise UnitError(f"After= is circular: {', '.join(error.args[1])}") from error
    return [known[name] for name in reversed(names)]
