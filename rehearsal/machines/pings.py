"""WatchdogSec= of process machines: the socket that a service pings, and missed pings."""

import asyncio
import contextlib
import math
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path


class Pings:
    """The watchdog pings of one run of a service; with infinity none is expected."""

    def __init__(self, watchdog_seconds: float) -> None:
        self.is_missed = False
        self.environment: Mapping[str, str] = {}
        self._seconds = watchdog_seconds
        self._socket: socket.socket | None = None
        self._folder: Path | None = None

    def __enter__(self) -> "Pings":
        if math.isfinite(self._seconds):
            # Not below the machine's root: a Unix socket's address is limited to about 100 bytes.
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
        """Return when no ping came within the watchdog's time; never without a watchdog."""
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
