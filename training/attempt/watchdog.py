"""Ends a trainer that hangs, so that it is restarted from its last commit; pings systemd.

A thread checks when the main thread last reported. If no thread can run (the interpreter's lock is
held in C++), faulthandler's own timer dumps the stacks and exits, as does systemd by WatchdogSec=.
Imports no torch.
"""

import contextlib
import faulthandler
import socket
import threading
import time
from collections.abc import Callable, Iterator

# systemd's WatchdogSec= is five minutes, so a late ping on a busy machine does no harm.
_PING_SECONDS = 10.0
# How long the thread may take to end the process properly, before faulthandler just exits.
_GRACE_SECONDS = 30.0
STDERR = 2


class Watchdog:
    """Calls `when_hung` after `limit_seconds` without a report; 0: never."""

    def __init__(
        self,
        limit_seconds: float,
        when_hung: Callable[[str], None],
        notify_socket: str | None = None,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._when_hung = when_hung
        # Whether silence is legitimate now, because the main thread waits for something outside.
        self.excuse: Callable[[], bool] = lambda: False
        self._notify_socket = notify_socket
        self._last_beat = time.monotonic()
        self._allowed_seconds = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start watching and pinging."""
        self._last_beat = time.monotonic()
        if self._limit_seconds or self._notify_socket:
            self._thread.start()

    def close(self) -> None:
        """Stop, because the attempt has ended."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def beat(self) -> None:
        """Report that the main thread makes progress."""
        self._last_beat = time.monotonic()

    @contextlib.contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        """Context of legitimate work that may take `seconds` longer than the limit."""
        before, self._allowed_seconds = self._allowed_seconds, self._allowed_seconds + seconds
        self.beat()
        try:
            yield
        finally:
            self.beat()
            self._allowed_seconds = before

    def _watch(self) -> None:
        interval = min(_PING_SECONDS, self._limit_seconds / 4 or _PING_SECONDS)
        notify(self._notify_socket, "WATCHDOG=1")
        try:
            while not self._stop.wait(interval):
                limit = self._limit_seconds + self._allowed_seconds
                silent = time.monotonic() - self._last_beat
                if self._limit_seconds and silent > limit:
                    if self.excuse():
                        self.beat()  # the main thread gets the limit again from here on
                    else:
                        self._when_hung(f"the trainer made no progress for {silent:.0f} s")
                if self._limit_seconds:
                    later = limit - silent + _GRACE_SECONDS
                    # Not sys.stderr: a notebook's or a test's has no file descriptor.
                    faulthandler.dump_traceback_later(
                        max(later, _GRACE_SECONDS), exit=True, file=STDERR
                    )
                notify(self._notify_socket, "WATCHDOG=1")
        finally:
            if self._limit_seconds:
                faulthandler.cancel_dump_traceback_later()


def notify(address: str | None, message: str) -> None:
    """Send one message to systemd (sd_notify); no-op where none listens."""
    if address is None:
        return
    # An @ stands for the zero byte of Linux's abstract names.
    target = "\0" + address[1:] if address.startswith("@") else address
    # If a ping is lost, systemd misses it and acts.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(OSError):
        sender.setblocking(False)  # without a reader the watchdog itself must not block
        sender.sendto(message.encode(), target)
