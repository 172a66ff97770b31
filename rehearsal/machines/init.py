"""Process 1 of a process machine: runs the user data once and the services, and reaps orphans.

It kills all of the machine's processes, itself last, once the rehearsal that started it is gone
(its end of a socket closes) or on SIGTERM (services stop first). Only process.py starts it.
"""

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rehearsal.machines import aws_cli
from rehearsal.machines.processes import kill_processes, reap_orphans
from rehearsal.machines.services import (
    ServiceError,
    SystemdService,
    UnitError,
    kill_group,
    load_units,
    spawn,
    stop_order,
)

SOCKET = "systemd.socket"
UNITS = "etc/systemd/system"
PR_SET_CHILD_SUBREAPER = 36
REAP_SECONDS = 1.0
# The time after which a program run by the rehearsal is killed.
EXECUTE_SECONDS = 60.0


@dataclass(kw_only=True, slots=True)
class Init:
    """The services of one machine, and systemctl's operations on them."""

    root: Path
    environment: Mapping[str, str]
    services: dict[str, SystemdService] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def answer(self, verb: str, units: Sequence[str], options: Mapping[str, str]) -> str:
        """Execute one systemctl call; ServiceError and UnitError go back to its caller."""
        if verb == "daemon-reload":
            self._reload()
            return ""
        answers = []
        for unit in units:
            service = self._service(unit)
            if verb in ("enable", "start"):
                await self._start(service, verb, options)
            elif verb == "stop":
                await service.stop()
            elif verb == "kill":
                service.kill_main(signal.Signals[options["signal"]])
            elif verb == "is-active":
                answers.append(service.active_state)
            elif verb == "show":
                answers.append(_show(service, options))
            else:
                raise ServiceError(f"process machines do not support systemctl {verb}")
        return "\n".join(answers)

    def _reload(self) -> None:
        for name, unit in load_units(self.root / UNITS).items():
            known = self.services.get(name)
            if known is not None:
                known.unit = unit
            else:
                self.services[name] = SystemdService(
                    unit=unit,
                    root=self.root,
                    environment=self.environment,
                    on_failure=self._start_on_failure,
                )

    def _service(self, name: str) -> SystemdService:
        if name not in self.services:
            raise ServiceError(f"Unit {name} could not be found.")
        return self.services[name]

    async def _start(self, service: SystemdService, verb: str, options: Mapping[str, str]) -> None:
        if verb == "enable":
            for target in service.unit.wanted_by:
                folder = self.root / UNITS / f"{target}.wants"
                folder.mkdir(parents=True, exist_ok=True)
                link = folder / service.unit.name
                if not link.is_symlink():
                    link.symlink_to(f"../{service.unit.name}")
            if "now" not in options:
                return
        for name in service.unit.wants:
            if name in self.services:
                self._keep(self.services[name].start())
        task = self._keep(service.start())
        if service.unit.kind == "oneshot" and "no-block" not in options:
            await asyncio.wait((task,))
        elif "no-block" not in options:
            while service.active_state == "activating" and service.sub_state == "start":
                await asyncio.sleep(0.005)

    def _start_on_failure(self, names: Sequence[str]) -> None:
        for name in names:
            self._keep(self._service(name).start())

    def _keep(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        # The event loop itself holds only weak references to tasks.
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def stop_all(self) -> None:
        """Stop every service in shutdown order."""
        for unit in stop_order([service.unit for service in self.services.values()]):
            await self.services[unit.name].stop()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one systemctl process."""
        request = json.loads(await reader.readline())
        try:
            text = await self.answer(request["verb"], request["units"], request["options"])
            reply = {"output": text}
        except (ServiceError, UnitError) as error:
            reply = {"error": str(error)}
        writer.write(json.dumps(reply).encode() + b"\n")
        await writer.drain()
        writer.close()

    def offer_aws_cli(self) -> None:
        """Listen for the machine's `aws`; the first call starts the process that answers all."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(aws_cli.SOCKET)
        listener.listen(64)
        loop = asyncio.get_running_loop()

        async def start() -> None:
            with listener:
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    aws_cli.__file__,
                    env=dict(self.environment),
                    stdin=listener.fileno(),
                    process_group=0,
                )

        def begin() -> None:
            loop.remove_reader(listener)
            self._keep(asyncio.create_task(start()))

        loop.add_reader(listener, begin)

    async def obey(self, rehearsal: socket.socket) -> None:
        """Run the programs that the rehearsal requests; return when it is gone."""
        reader, writer = await asyncio.open_connection(sock=rehearsal)
        while line := await reader.readline():
            # Not awaited: the rehearsal may go away while the program runs.
            self._keep(asyncio.create_task(self._execute(json.loads(line), writer)))

    async def _execute(self, command: Sequence[str], writer: asyncio.StreamWriter) -> None:
        try:
            pipe = asyncio.subprocess.PIPE
            process = await spawn(command, self.root, self.environment, pipe)
        except OSError as error:
            reply = {"status": 127, "output": "", "error": str(error)}
        else:
            reply = await _outcome(process)
        writer.write(json.dumps(reply).encode() + b"\n")


async def _outcome(process: asyncio.subprocess.Process) -> dict[str, Any]:
    try:
        output, error = await asyncio.wait_for(process.communicate(), EXECUTE_SECONDS)
    except TimeoutError:
        kill_group(process.pid, signal.SIGKILL)
        why = f"it did not end within {EXECUTE_SECONDS:g} s"
        return {"status": await process.wait(), "output": "", "error": why}
    printed = {"output": output.decode(errors="replace"), "error": error.decode(errors="replace")}
    return {"status": process.returncode, **printed}


def _show(service: SystemdService, options: Mapping[str, str]) -> str:
    known = {
        "ActiveState": service.active_state,
        "SubState": service.sub_state,
        "Result": service.result,
        "MainPID": str(service.main_pid),
        "NRestarts": str(service.restarts),
        "ExecMainStatus": str(service.main_status),
        "InvocationID": "",  # a process machine has no journal in which to look it up
    }
    wanted = options["property"].split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ServiceError(f"process machines do not support the property {', '.join(unknown)}")
    pairs = [known[name] if "value" in options else f"{name}={known[name]}" for name in wanted]
    return "\n".join(pairs)


async def boot(root: Path, environment: Mapping[str, str], rehearsal: socket.socket) -> None:
    """Run the user data and serve until the machine shuts down."""
    init = Init(root=root, environment=environment)
    # When the rehearsal ends or powers off, every process of the session ends, including this one.
    off = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, off.set)
    # A relative path: the address of a Unix socket is limited to about 100 characters.
    os.chdir(root / "run")
    server = await asyncio.start_unix_server(init.serve, SOCKET)
    init.offer_aws_cli()
    user_data = root / "var/lib/cloud/instance/user-data.txt"
    with (root / "var/log/cloud-init-output.log").open("ab") as output:
        await spawn([str(user_data)], root, environment, output)
    gone = asyncio.create_task(init.obey(rehearsal))
    waiting = [gone, asyncio.create_task(off.wait())]
    while not any(task.done() for task in waiting):
        reap_orphans()
        await asyncio.wait(waiting, timeout=REAP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    if not gone.done():
        stopping = asyncio.create_task(init.stop_all())
        await asyncio.wait((stopping, gone), return_when=asyncio.FIRST_COMPLETED)
    server.close()
    kill_processes(os.getpid())


def main() -> None:
    """Become the machine's first process; argv has its folder and the rehearsal's socket."""
    root, rehearsal = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    environment = json.loads((root / "run/machine.json").read_text())
    if sys.platform == "linux":
        # Makes orphans children of this process, so that it finds them.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Ctrl-C in the rehearsal's terminal is for the rehearsal to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(boot(root, environment, rehearsal))
    finally:
        kill_processes(os.getpid())


if __name__ == "__main__":
    main()
