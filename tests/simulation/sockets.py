"""The sockets by which hosts meet, in virtual time: what ranks.py asks of `socket` and `select`.

A process that ends breaks its connections at once, where the network brings word of it. A machine
without power, or cut off, says nothing: Linux's probes find out within 7 s. There are none while
something that was sent is not acknowledged: that is repeated for TCP_USER_TIMEOUT, or for a quarter
of an hour.
"""

import errno
import itertools
import math
import socket as real
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.clock import CLOCK, Event, Process, sleep
from training.durable.attempt import ranks as ranks_file

if TYPE_CHECKING:
    from tests.simulation.containers import Container

# Of ranks.py: 2 s of silence and five probes, one each second, the last of which waits, too.
_PROBED_SECONDS = 7.0
_REPEATED_SECONDS = 924.0  # net.ipv4.tcp_retries2 is 15


def _error(number: int) -> OSError:
    return OSError(number, errno.errorcode[number])


class Network:
    """The hosts of a job by name, and the sockets between them."""

    def __init__(self, process: Process) -> None:
        self.process = process  # of the world
        self.hosts: dict[str, Container] = {}
        self.sockets: list[_Socket] = []
        self.known: set[Process] = set()
        self.numbers = itertools.count(32768)  # of free ports, none of them twice

    def own(self, made: "_Socket") -> None:
        """End a socket with the process that has made it, as the kernel does."""
        self.sockets.append(made)
        process = made.process
        if process not in self.known:
            self.known.add(process)
            CLOCK.start(self.process, lambda: self._end_with(process))

    def _end_with(self, process: Process) -> None:
        process.ended.wait()
        for each in [one for one in self.sockets if one.process is process]:
            each.close()
        self.sockets = [one for one in self.sockets if not one.is_closed or one.unsent]

    def has_changed(self) -> None:
        """What is on its way arrives, where it can; who hears nothing begins to count."""
        for each in [*self.sockets]:
            each.look()


class _Socket:
    """A socket: it listens, or is one end of a connection."""

    def __init__(self, host: "Container", process: Process) -> None:
        self.host, self.process = host, process
        self.peer: _Socket | None = None
        self.inbox, self.unsent = b"", list[bytes]()  # b"": its end
        self.queue: list[_Socket] = []  # that have connected
        self.changed = Event()
        self.error: OSError | None = None
        self.is_probed = self.is_timed = self.has_ended = self.is_shut = self.is_closed = False
        self.silent_since = math.inf
        self._timeout: float | None = None
        self._port = 0
        host.world.network.own(self)

    # -- what ranks.py calls

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setsockopt(self, level: int, name: int, value: int) -> None:
        self.is_probed |= name == real.SO_KEEPALIVE and bool(value)
        self.is_timed |= name == real.TCP_USER_TIMEOUT and value == 1000 * _PROBED_SECONDS

    def getsockname(self) -> tuple[str, int]:
        return "", self._port

    def listen(self, port: int) -> "_Socket":
        ports = self.host.ports
        self._port = port or next(self.host.world.network.numbers)
        if self._port in ports:
            raise _error(errno.EADDRINUSE)
        ports[self._port] = self
        return self

    def accept(self) -> tuple["_Socket", str]:
        self._await(lambda: bool(self.queue))
        return self.queue.pop(0), ""

    def sendall(self, data: bytes) -> None:
        if self.error or self.is_closed or self.peer is None:
            raise self.error or _error(errno.EBADF)
        self.unsent.append(data)
        self.look()
        sleep(CLOCK.luck.uniform(0.0001, 0.002))

    def recv(self, size: int) -> bytes:
        self._await(lambda: self.is_readable)
        if self.error:
            raise self.error
        found, self.inbox = self.inbox[:size], self.inbox[size:]
        return found

    def shutdown(self, how: int) -> None:
        if self.error or self.is_closed:
            raise self.error or _error(errno.ENOTCONN)
        self._end()

    def close(self) -> None:
        if not self.is_closed:
            self._end()
            self.is_closed = True
            self.host.ports.pop(self._port, None)
            for each in self.queue:
                each.close()

    def __enter__(self) -> "_Socket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- what happens to it

    @property
    def is_readable(self) -> bool:
        return bool(self.inbox or self.has_ended or self.error)

    def _await(self, is_so: Any) -> None:
        until = math.inf if self._timeout is None else CLOCK.now + self._timeout
        while not is_so():
            if CLOCK.now >= until:
                raise TimeoutError
            self.changed.clear()
            self.changed.wait(until - CLOCK.now)

    def _end(self) -> None:
        if not self.is_shut:
            self.is_shut = self.has_ended = True
            self.unsent.append(b"")
            self.changed.set()
            self.look()

    def break_with(self, number: int) -> None:
        self.error, self.unsent = self.error or _error(number), []
        self.changed.set()

    def look(self) -> None:
        """Send what can be sent; count how long nothing comes back."""
        peer = self.peer
        if peer is None or self.error:
            return
        if not self.host.reaches(peer.host):
            if self.silent_since == math.inf:
                self.silent_since = CLOCK.now
                CLOCK.start(self.host.world.process, self._probe)
            return
        self.silent_since = math.inf
        unsent, self.unsent = self.unsent, []
        for data in unsent:
            peer.inbox += data
            peer.has_ended |= not data
        if unsent:
            peer.changed.set()
        if peer.error or (peer.is_closed and any(unsent)):
            self.break_with(errno.ECONNRESET)

    def _probe(self) -> None:
        since = self.silent_since
        sleep(_PROBED_SECONDS - CLOCK.luck.uniform(0, 2))
        if not (self.is_timed if self.unsent else self.is_probed):
            sleep(_REPEATED_SECONDS)
        if self.silent_since == since and (self.is_probed or self.unsent):
            self.break_with(errno.ETIMEDOUT)


def _here() -> "Container":
    found: Container = CLOCK.process.supervisor.host
    return found


def _create_server(address: tuple[str, int]) -> _Socket:
    return _Socket(_here(), CLOCK.process).listen(address[1])


def _create_connection(address: tuple[str, int], timeout: float) -> _Socket:
    own, (name, port) = _here(), address
    host = own.world.network.hosts.get(name)
    if host is None:
        raise OSError(f"{name} is not known")  # its container has not started
    if not own.reaches(host):
        sleep(timeout)
        raise TimeoutError
    sleep(CLOCK.luck.uniform(0.0002, 0.004))
    server = host.ports.get(port)
    if server is None or server.is_closed:
        raise _error(errno.ECONNREFUSED)
    ours, theirs = _Socket(own, CLOCK.process), _Socket(host, server.process)
    ours.peer, theirs.peer = theirs, ours
    server.queue.append(theirs)
    server.changed.set()
    return ours


def _select(readers: list[_Socket], _: Any, __: Any, seconds: float) -> tuple[list[_Socket], ...]:
    (one,) = readers
    if not one.is_readable:
        one.changed.clear()
        one.changed.wait(seconds)
    return ([one] if one.is_readable else []), [], []


_NAMES = (
    "SHUT_RDWR", "SOL_SOCKET", "SO_KEEPALIVE", "IPPROTO_TCP", "TCP_KEEPIDLE", "TCP_KEEPINTVL",
    "TCP_KEEPCNT", "TCP_USER_TIMEOUT",
)  # fmt: skip
_SOCKET = SimpleNamespace(
    socket=_Socket,
    create_server=_create_server,
    create_connection=_create_connection,
    **{name: getattr(real, name) for name in _NAMES},
)
STUBS: tuple[tuple[Any, str, Any], ...] = (
    (ranks_file, "socket", _SOCKET),
    (ranks_file, "select", SimpleNamespace(select=_select)),
    (ranks_file, "_POLL_SECONDS", 1.0),  # each poll takes real time
)
