"""The other ranks of an attempt: those of this machine, started from its first, and other hosts.

Does not use torchrun: signals must reach the process that saves, torchrun turns exit code 75 into
1, and it kills a rank 0 that is still uploading 30 s after the first other rank has exited. If
torchrun is used anyway, its variables are honoured.

The first host leads: it listens, and the others connect and report what they will train. These
connections stay open during the attempt and carry one byte, at an orderly end; one that breaks
means a lost host, unless that host has finished. The kernel probes them, so that no long call into
C++ looks like a lost host; rank 0's watchdog finds a host that hangs. Imports no torch.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, TypeAlias

from contract.errors import UserError
from training.durable.errors import AttemptEndedError, InterruptedRunError

# How long another rank may take to notice that rank 0 has exited, before it is killed.
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_HELLO_SECONDS = 5.0
# A machine that is gone, or cut off, answers no probe: it is lost 7 s after its last answer.
_PROBE_AFTER_SECONDS, _PROBE_EVERY_SECONDS, _MOST_PROBES = 2, 1, 5
# How long a host may take to end by itself after another one has ended in order.
_GRACE_SECONDS = 5.0
_LEFT, _FINISHED = b"l", b"f"
_MOST_LINE_BYTES = 1 << 20  # a program has up to 100 hyperparameters of 2,500 characters


class RankProcess(Protocol):
    """A rank's process: the part of subprocess.Popen that is used here."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The pipe whose closing signals that the machine's first rank has exited."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; TimeoutExpired after `timeout` seconds. For any thread."""

    def send_signal(self, sig: int) -> None:
        """Send a signal; no-op once the process has exited."""

    def kill(self) -> None:
        """Send SIGKILL."""


# Starts one rank, given its environment variables besides this process's own.
StartRank: TypeAlias = Callable[[Mapping[str, str]], RankProcess]


def interpreters(arguments: Sequence[str], scratch: Path) -> StartRank:
    """Start each rank in a new interpreter with this process's arguments."""

    def start(variables: Mapping[str, str]) -> RankProcess:
        return subprocess.Popen(
            [sys.executable, "-m", "training", *arguments, f"--scratch={scratch}"],
            env={**os.environ, **variables},
            # The pipe closes when this process exits, however that happens.
            stdin=subprocess.PIPE,
        )

    return start


class OtherRanks:
    """The other ranks of this machine; each exits by itself when this process does."""

    def __init__(
        self, start: StartRank, own_rank: int, num_here: int, num_ranks: int, rendezvous: str
    ) -> None:
        """This process is `own_rank`, the first of `num_here` here, of `num_ranks` in all."""
        self._processes = {}
        for local in range(1, num_here):
            variables = {
                "RANK": str(own_rank + local),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(num_ranks),
                "TRAINING_RENDEZVOUS": rendezvous,
                "TRAINING_LEADER": "stdin",
            }
            self._processes[own_rank + local] = start(variables)

    def watch(self, when_lost: Callable[[str], None]) -> None:
        """Call `when_lost` with one sentence if a rank exits by itself."""
        for rank, process in self._processes.items():

            def wait(rank: int = rank, process: RankProcess = process) -> None:
                when_lost(f"rank {rank} exited with {process.wait()}")

            threading.Thread(target=wait, name=f"rank-{rank}", daemon=True).start()

    def show_stacks(self) -> None:
        """Make each rank print the stacks of its threads (faulthandler) and exit."""
        for process in self._processes.values():
            process.send_signal(signal.SIGABRT)

    def close(self) -> None:
        """End the other ranks, because this process ends."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# Takes why a host is lost, and ends the attempt unless it ends by itself within these seconds.
_Report: TypeAlias = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The hosts of an attempt by name, in an order that all of them know; the first one leads."""

    # Next to 7777, which SageMaker's own toolkit uses for torch.
    PORT: ClassVar[int] = 7778

    names: tuple[str, ...]
    own: str
    port: int = PORT  # on the first one
    # As long as SageMaker's toolkit waits for all names: other machines may still be starting.
    meeting_seconds: float = 15 * 60.0

    @property
    def number(self) -> int:
        """This host's number, from 0."""
        return self.names.index(self.own)

    @classmethod
    def parse(cls, text: str) -> "Hosts | None":
        """Parse OWN@FIRST:PORT,SECOND,...; None if one machine trains alone."""
        own, _, rest = text.partition("@")
        first, *others = rest.split(",")
        first, _, port = first.partition(":")
        names = (first, *others)
        if own not in names or len(set(names)) < len(names) or not (port or "1").isdecimal():
            raise UserError(
                f"{text!r} is not a list of hosts; pass this machine's name and then all, each "
                "once, as in b@a,b"
            )
        return cls(names=names, own=own, port=int(port or cls.PORT)) if others else None


class _Meeting:
    """The connections of one host while an attempt goes on: to the leader, or to all others."""

    def __init__(
        self, address: str, connections: Mapping[str, socket.socket], message: str = ""
    ) -> None:
        self.address = address  # where the ranks meet, in torch.distributed's form
        self.message = message  # from the first host to all
        self._connections = connections
        self._is_over = False

    def watch(self, report: _Report) -> None:
        """Call `report` when a host is lost, or has ended before this one."""
        for name, connection in self._connections.items():
            about = (name, connection, report)
            where = f"host-{name}"
            threading.Thread(target=self._listen, args=about, name=where, daemon=True).start()

    def close(self, *, has_finished: bool = False) -> None:
        """Signal that this host ends in order, or that the others may go on without it."""
        self._is_over = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it may be gone already
                connection.sendall(_FINISHED if has_finished else _LEFT)
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _listen(self, name: str, connection: socket.socket, report: _Report) -> None:
        try:
            end = connection.recv(1)
        except OSError:
            end = b""
        if self._is_over or end == _FINISHED:
            return
        if end == _LEFT:
            report(f"host {name} has ended", _GRACE_SECONDS)
        else:
            report(f"host {name} is lost", 0.0)


def meet(
    hosts: Hosts, facts: Mapping[str, Any], waiting: Callable[[], None], message: str = ""
) -> _Meeting:
    """Wait for all hosts, calling `waiting` all the while; UserError if their facts differ.

    The first host's message is in `_Meeting.message` on all of them.
    """
    end = time.monotonic() + hosts.meeting_seconds
    facts = json.loads(json.dumps(facts))  # as they arrive
    if hosts.number:
        return _join(hosts, facts, waiting, end)
    found: dict[str, socket.socket] = {}
    try:
        _gather(hosts, facts, waiting, end, found)
        # A free port: that of the meeting may still be in use by an earlier attempt.
        with socket.create_server(("", 0)) as free:
            address = f"tcp://{hosts.own}:{free.getsockname()[1]}"
        for name, connection in found.items():
            try:
                _send(connection, {"address": address, "said": message})
            except OSError as error:
                raise _lost(name) from error
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return _Meeting(address, found, message)


def _gather(
    hosts: Hosts,
    facts: Mapping[str, Any],
    waiting: Callable[[], None],
    end: float,
    found: dict[str, socket.socket],
) -> None:
    """Accept every other host into `found`; one that connects again was restarted."""
    with socket.create_server(("", hosts.port)) as server:
        server.settimeout(_POLL_SECONDS)
        while missing := [name for name in hosts.names[1:] if name not in found]:
            waiting()
            if time.monotonic() > end:
                raise _late(hosts, missing)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            _probe(connection)
            try:
                hello = _receive(connection)
                name, theirs = str(hello["host"]), hello["facts"]
            except (OSError, ValueError, KeyError, TypeError):
                connection.close()  # not one of our hosts
                continue
            if name in found:
                found[name].close()
            found[name] = connection
            for what in {**theirs, **facts}:  # either may have one that the other has not
                if theirs.get(what) != facts.get(what):
                    refused = (
                        f"host {name} has the {what} {theirs.get(what)!r}, and {hosts.own} "
                        f"{facts.get(what)!r}; give all hosts the same"
                    )
                    _send(connection, {"refused": refused})
                    raise UserError(refused)


def _join(
    hosts: Hosts, facts: Mapping[str, Any], waiting: Callable[[], None], end: float
) -> _Meeting:
    """Connect to the first host, whose name may not be known yet, and wait for its answer."""
    leader = hosts.names[0]
    while True:
        waiting()
        try:
            connection = socket.create_connection((leader, hosts.port), _HELLO_SECONDS)
            break
        except OSError:
            if time.monotonic() > end:
                raise _late(hosts, [leader]) from None
            time.sleep(_POLL_SECONDS)
    with contextlib.ExitStack() as failing:
        failing.enter_context(connection)
        try:
            _probe(connection)
            _send(connection, {"host": hosts.own, "facts": dict(facts)})
            while not select.select([connection], [], [], _POLL_SECONDS)[0]:
                waiting()
            answer = _receive(connection)
        except OSError as error:
            raise _lost(leader) from error
        if "refused" in answer:
            raise UserError(answer["refused"])
        failing.pop_all()
    return _Meeting(answer["address"], {leader: connection}, answer["said"])


def _lost(name: str) -> InterruptedRunError:
    return InterruptedRunError(f"host {name} was lost before all hosts had met")


def _late(hosts: Hosts, missing: list[str]) -> AttemptEndedError:
    return AttemptEndedError(
        f"host {', '.join(missing)} did not come within {hosts.meeting_seconds:g} s; see its log, "
        "and whether a security group lets the hosts reach each other"
    )


def _probe(connection: socket.socket) -> None:
    """Have the kernel check that the other machine is there (with Linux's option names)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_EVERY_SECONDS),
        ("TCP_KEEPCNT", _MOST_PROBES),
        # What is sent is not probed for: without this it is repeated for a quarter of an hour.
        ("TCP_USER_TIMEOUT", 1000 * (_PROBE_AFTER_SECONDS + _PROBE_EVERY_SECONDS * _MOST_PROBES)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(connection: socket.socket, record: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(record).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Read one line and not a byte more, which would be lost to the next reader."""
    connection.settimeout(_HELLO_SECONDS)
    line = b""
    while not line.endswith(b"\n"):
        read = connection.recv(1)
        if not read or len(line) > _MOST_LINE_BYTES:
            raise OSError("closed")
        line += read
    connection.settimeout(None)
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    return record
