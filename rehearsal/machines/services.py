"""Runs services as systemd does, as far as units.py reads them: limits, restarts, OnFailure.

Each unit has a `SystemdService`, all in the event loop of the machine's init. A process group
stands in for a service's control group.
"""

import asyncio
import contextlib
import math
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rehearsal.machines.units import Unit, parse_environment_file

# Signals that systemd counts as a clean exit, except for oneshot services.
CLEAN_SIGNALS = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE}


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
            # Outside the machine's root: a Unix socket's address is limited to about 100 bytes.
            self._folder = Path(tempfile.mkdtemp(prefix="notify-"))
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
            return await asyncio.create_subprocess_exec(
                program,
                *command[1:],
                cwd=self._here(self.unit.working_directory),
                env={**self.environment, **self._unit_environment(), **extra},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

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


def kill_group(leader: int, number: signal.Signals) -> None:
    """Send a signal to a process group, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)
