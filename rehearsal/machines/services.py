"""Runs systemd services as systemd does, as far as a process machine supports their units.

An unsupported directive is refused by name: a rehearsal that ignored one would prove nothing about
the real machine. Each unit has a `SystemdService`, all in the event loop of the machine's init. A
process group stands in for a service's control group.
"""

import asyncio
import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import IO

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
    "CapabilityBoundingSet", "LimitNOFILE", "LockPersonality", "MemoryDenyWriteExecute",
    "NoNewPrivileges", "OOMScoreAdjust", "PrivateDevices", "PrivateTmp", "ProcSubset",
    "ProtectClock", "ProtectControlGroups", "ProtectHome", "ProtectHostname", "ProtectKernelLogs",
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


# Signals that systemd counts as a clean exit, except for oneshot services.
CLEAN_SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE}


# Outside the machine's root: a Unix socket's address is limited to about 100 bytes. The folder's
# name has the pid of the machine's init, so that whoever kills that can remove it.
SOCKETS, NOTIFY = Path("/tmp"), "notify-"


class ServiceError(RuntimeError):
    """A request that systemd would refuse, in its words."""


class Pings:
    """The watchdog pings (WatchdogSec=) of one run of a service; with infinity, none are due."""

    def __init__(self, watchdog_seconds: float) -> None:
        self.is_missed = False
        self.environment: Mapping[str, str] = {}
        self._seconds = watchdog_seconds
        self._socket: socket.socket | None = None
        self._folder: Path | None = None

    def __enter__(self) -> "Pings":
        if math.isfinite(self._seconds):
            self._folder = Path(tempfile.mkdtemp(prefix=f"{NOTIFY}{os.getpid()}-", dir=SOCKETS))
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(str(self._folder / "socket"))
            self._socket.setblocking(False)
            self.environment = {
                "NOTIFY_SOCKET": str(self._folder / "socket"),
                "WATCHDOG_USEC": str(round(self._seconds * 1e6)),
            }
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def wait_for_a_missed_one(self) -> None:
        """Return once no ping came within the watchdog's time; without a watchdog, never return."""
        if self._socket is None:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(self._seconds):
                    while b"WATCHDOG=1" not in await loop.sock_recv(self._socket, 4096):
                        pass
        self.is_missed = True


@dataclass(kw_only=True, slots=True)
class SystemdService:
    """One service with everything that `systemctl show` prints."""

    unit: Unit
    root: Path
    environment: Mapping[str, str]
    on_failure: Callable[[Sequence[str]], None]
    active_state: str = "inactive"
    sub_state: str = "dead"
    result: str = "success"
    main_status: int = 0
    restarts: int = 0
    _main: asyncio.subprocess.Process | None = None
    _started: deque[float] = field(default_factory=deque)
    _task: asyncio.Task[None] | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def main_pid(self) -> int:
        """The main process's id, or 0."""
        return self._main.pid if self._main is not None else 0

    def start(self) -> "asyncio.Task[None]":
        """Start unless running; the returned task ends with the service, after all restarts."""
        if self._task is None or self._task.done():
            self._stop = asyncio.Event()
            self.restarts = 0
            self._set("activating", "start")
            self._task = asyncio.create_task(self._run())
        return self._task

    async def stop(self) -> None:
        """Stop as at shutdown: send KillSignal, wait, send SIGKILL, run ExecStopPost=."""
        if self._task is None or self._task.done():
            return
        self._stop.set()
        await self._task

    def kill_main(self, number: signal.Signals) -> None:
        """Send a signal to the main process."""
        if self._main is None or self._main.returncode is not None:
            raise ServiceError(f"Failed to kill unit {self.unit.name}: No main process to kill")
        os.kill(self._main.pid, number)

    async def _run(self) -> None:
        while True:
            if not self._may_start():
                self._fail("start-limit-hit")
                return
            await self._activate()
            failed = self.result != "success"
            if self._stop.is_set() or not self._shall_restart():
                break
            if failed and self.unit.restart_mode == "normal":
                # As in systemd since version 254, every failure triggers OnFailure.
                self._fail(self.result)
            self._set("activating", "auto-restart")
            if await self._is_stopped_within(self.unit.restart_seconds):
                break
            self.restarts += 1
        if self.result == "success":
            self._set("inactive", "dead")
        else:
            self._fail(self.result)

    def _may_start(self) -> bool:
        now, limit = time.monotonic(), self.unit.start_limit_seconds
        while self._started and now - self._started[0] > limit:
            self._started.popleft()
        if limit > 0 and len(self._started) >= self.unit.start_limit_burst:
            return False
        self._started.append(now)
        return True

    def _shall_restart(self) -> bool:
        if self.main_status in self.unit.prevent_statuses:
            return False
        wanted = {"no": False, "always": True, "on-failure": self.result != "success"}
        return wanted[self.unit.restart]

    async def _activate(self) -> None:
        """Run the service once, from ExecStart= to the exit of its last process."""
        self.result = "success"
        with Pings(self.unit.watchdog_seconds) as pings:
            try:
                self._main = await self._spawn(self.unit.exec_start, pings.environment)
            except OSError as error:
                self._log(f"{self.unit.exec_start[0]}: {error}")
                self.result, self.main_status = "exit-code", 203
                return
            oneshot = self.unit.kind == "oneshot"
            self._set(*(("activating", "start") if oneshot else ("active", "running")))
            main = self._main
            watching = asyncio.create_task(self._abort_without(pings, main))
            timed_out = await self._wait_or_stop(main)
            watching.cancel()
        status = main.returncode
        assert status is not None
        self._set("deactivating", "stop-post")
        self._judge(status, timed_out)
        if pings.is_missed:
            self.result = "watchdog"
        self._main = None
        for command in self.unit.exec_stop_post:
            if await self._stop_post(command, main.pid, status) != 0 and self.result == "success":
                self.result = "exit-code"
        kill_group(main.pid, signal.SIGKILL)

    async def _abort_without(self, pings: Pings, main: asyncio.subprocess.Process) -> None:
        """Abort a main process that no longer pings."""
        await pings.wait_for_a_missed_one()
        self._log(f"no ping within {self.unit.watchdog_seconds:g} s: aborting")
        os.kill(main.pid, signal.SIGABRT)

    async def _wait_or_stop(self, main: asyncio.subprocess.Process) -> bool:
        """Wait for the exit; a stop signals first, then kills after the timeout (returns True)."""
        ended = asyncio.create_task(main.wait())
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if ended.done():
            return False
        self._set("deactivating", "stop-sigterm")
        if self.unit.kill_mode == "mixed":
            os.kill(main.pid, self.unit.kill_signal)
        else:
            kill_group(main.pid, self.unit.kill_signal)
        done, _ = await asyncio.wait((ended,), timeout=self.unit.stop_timeout_seconds)
        if not done:
            kill_group(main.pid, signal.SIGKILL)
            await ended
        return not done

    def _judge(self, status: int, timed_out: bool) -> None:
        self.main_status = abs(status)
        if timed_out:
            self.result = "timeout"
        elif status < 0:
            clean = self.unit.kind != "oneshot" and -status in CLEAN_SIGNALS
            self.result = "success" if clean else "signal"
        elif status != 0 and status not in self.unit.success_statuses:
            self.result = "exit-code"

    async def _stop_post(self, command: Sequence[str], main_pid: int, status: int) -> int:
        described = {
            "SERVICE_RESULT": self.result,
            "EXIT_CODE": "killed" if status < 0 else "exited",
            "EXIT_STATUS": signal.Signals(-status).name[3:] if status < 0 else str(status),
            "MAINPID": str(main_pid),
        }
        process = await self._spawn(command, described)
        try:
            return await asyncio.wait_for(process.wait(), self.unit.stop_timeout_seconds)
        except TimeoutError:
            kill_group(process.pid, signal.SIGKILL)
            return await process.wait()

    async def _spawn(
        self, command: Sequence[str], extra: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        program = self._here(command[0]) if command[0].startswith("/") else command[0]
        log = self._log_path()
        with log.open("ab") as output:
            variables = {**self.environment, **self._unit_environment(), **extra}
            folder = self._here(self.unit.working_directory)
            return await spawn([program, *command[1:]], folder, variables, output)

    def _unit_environment(self) -> dict[str, str]:
        variables = dict(self.unit.environment)
        for name in self.unit.environment_files:
            path = Path(self._here(name.removeprefix("-")))
            if path.exists() or not name.startswith("-"):
                variables |= parse_environment_file(path.read_text())
        return variables

    def _here(self, path: str) -> str:
        return f"{self.root}{path}" if path != "/" else str(self.root)

    def _log_path(self) -> Path:
        return Path(self._here(self.unit.log_file or "/var/log/journal.log"))

    def _log(self, text: str) -> None:
        with self._log_path().open("a") as file:
            file.write(f"{self.unit.name}: {text}\n")

    async def _is_stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _fail(self, result: str) -> None:
        self.result = result
        self._set("failed", "failed")
        self.on_failure(self.unit.on_failure)

    def _set(self, active_state: str, sub_state: str) -> None:
        self.active_state, self.sub_state = active_state, sub_state


async def spawn(
    words: Sequence[str], folder: Path | str, variables: Mapping[str, str], output: IO[bytes] | int
) -> asyncio.subprocess.Process:
    """Start a process of the machine, without input, as the leader of a group."""
    return await asyncio.create_subprocess_exec(
        *words,
        cwd=folder,
        env=dict(variables),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,
    )


def kill_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process group, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)
