"""All that a program prints: on our standard output, in a local file, and in the store.

S3 cannot append, so a part is rewritten as it grows, up to a few hundred kilobytes, and then the
next begins. Only the current part and the last lines are kept in memory.
"""

import contextlib
import gzip
import io
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from contract.keys import LOGS
from training.durable.store.protocol import Store, StoreError

_log = logging.getLogger(__name__)

_FIRST_SECONDS, _SEND_SECONDS = 2.0, 10.0
# Pauses between the last attempts to send the end.
_LAST_PAUSES = (0.2, 1.0)
_PART_BYTES = 2 * 1024 * 1024  # before compression
_READ_BYTES = 65536
# Longer lines, such as a printed tensor, are cut for those who read lines.
_LINE_BYTES = 16384
_TAIL_LINES = 200
# A progress bar redraws its line: except on a terminal, one state in so many seconds is enough.
_REDRAW_SECONDS = 5.0


class ProgramLog:
    """Reads the program's output from a pipe until its end; `output` is the pipe's other end."""

    def __init__(
        self, store: Store, writer: str, local: Path, read_lines: Callable[[list[bytes]], None]
    ) -> None:
        """`writer` is <generation>-<nonce>; `read_lines` gets all lines, in the reading thread."""
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._read_lines = read_lines
        self._reader, self.output = os.pipe()
        self._splitter = _LineSplitter(self._take_lines)
        local.parent.mkdir(parents=True, exist_ok=True)
        self._local = local.open("w+b", buffering=0)
        self._store = store
        self._writer = writer
        self._size = 0  # of the local file, as far as it is written
        self._start = 0  # of the current part
        self._sent = 0
        self._number = 1
        self._is_full = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="program-log", daemon=True)
        self._sender = threading.Thread(target=self._send, name="program-log-parts", daemon=True)

    @property
    def tail(self) -> list[str]:
        """The last lines that were not blank."""
        return [line.decode(errors="replace").rstrip() for line in self._tail]

    def start(self) -> None:
        """Begin to read; the program has the other end by now."""
        os.close(self.output)
        self._thread.start()
        self._sender.start()

    def close(self, seconds: float) -> None:
        """Read to the end, once the program has ended, and send the rest; wait up to `seconds`."""
        if self._thread.ident is None:  # the program could not be started
            os.close(self.output)
            os.close(self._reader)
            self._local.close()
            return
        deadline = time.monotonic() + seconds
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._ended.set()
        self._sender.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive() and not self._sender.is_alive():
            self._local.close()

    def _read(self) -> None:
        while data := os.read(self._reader, _READ_BYTES):
            self._keep(data)
            self._splitter.feed(data)
        os.close(self._reader)
        self._splitter.end()

    def _keep(self, data: bytes) -> None:
        """Write to the local file; the program must not stop because the disk is full."""
        try:
            while data and not self._is_full:
                written = self._local.write(data)
                self._size += written
                data = data[written:]
        except OSError as error:
            self._is_full = True
            _log.warning(f"[log] {self._local.name}: {error}; further output is shown, not kept")

    def _take_lines(self, lines: list[bytes], is_redrawn: bool) -> None:
        self._read_lines(lines)
        if not is_redrawn:
            self._tail.extend(text for line in lines if (text := line.rstrip()))

    def _send(self) -> None:
        seconds = _FIRST_SECONDS
        while not self._ended.wait(seconds):
            seconds = _SEND_SECONDS
            self._try_to_send("retrying")
        for pause in (*_LAST_PAUSES, None):
            if self._try_to_send("retrying" if pause else "its end is not kept") or pause is None:
                return
            time.sleep(pause)

    def _try_to_send(self, then: str) -> bool:
        """Send what is new: full parts once, the current one again; return whether that worked."""
        try:
            while self._sent < (size := self._size):
                count = min(_PART_BYTES, size - self._start)
                data = os.pread(self._local.fileno(), count, self._start)
                key = f"{LOGS}{self._writer}-{self._number:05d}.log.gz"
                self._store.put(key, gzip.compress(data, 6, mtime=0))
                self._sent = self._start + len(data)
                if len(data) == _PART_BYTES:
                    self._start, self._number = self._sent, self._number + 1
        except StoreError as error:
            _log.warning(f"[log] {error}; {then}")
            return False
        return True


class _LineSplitter:
    """Splits bytes into lines, shows them on standard output, and cuts those of megabytes."""

    def __init__(self, take: Callable[[list[bytes], bool], None]) -> None:
        """`take(lines, is_redrawn)`: one that ends in \\r was redrawn, as by a progress bar."""
        self._take = take
        self._rest = bytearray()
        self._held = b""
        self._lines: list[bytes] = []  # to be shown
        self._is_cut = False
        self._is_terminal = sys.stdout.isatty()
        self._shown = float("-inf")

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        if self._is_terminal:
            _show(data)
        # Whether a newline follows is not known yet.
        data, self._held = self._held + data, b""
        if data.endswith(b"\r"):
            data, self._held = data[:-1], b"\r"
        lines = data.replace(b"\r\n", b"\n").split(b"\n")
        longest = max(map(len, lines)) + len(self._rest)
        if b"\r" in data.replace(b"\r\n", b"") or self._is_cut or longest > _LINE_BYTES:
            for line in io.BytesIO(data.replace(b"\r\n", b"\n").replace(b"\r", b"\r\n")):
                self._add(line)
        elif lines[1:]:  # most output, and there may be millions of lines
            lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray(lines.pop())
            self._lines += () if self._is_terminal else (b"\n".join(lines), b"\n")
            self._take(lines, False)
        else:
            self._rest += lines[0]
        self._show_lines()

    def end(self) -> None:
        """Take what is left without a line end."""
        if self._rest:
            self._finish(is_redrawn=False)
            self._show_lines()

    def _show_lines(self) -> None:
        """Print what was read in one write: one for each line cost a noisy program its time."""
        if lines := b"".join(self._lines):
            _show(lines)
        self._lines.clear()

    def _add(self, piece: bytes) -> None:
        room = _LINE_BYTES - len(self._rest)
        content = piece.removesuffix(b"\n").removesuffix(b"\r")
        self._rest += content[: max(0, room)]
        self._is_cut |= len(content) > room
        if piece.endswith(b"\n"):
            self._finish(is_redrawn=piece.endswith(b"\r\n"))

    def _finish(self, *, is_redrawn: bool) -> None:
        line = bytes(self._rest) + (b" ..." if self._is_cut else b"")
        self._rest.clear()
        self._is_cut = False
        if not self._is_terminal:
            now = time.monotonic()
            is_due = line.strip() and now - self._shown >= _REDRAW_SECONDS
            if not is_redrawn or is_due:
                self._shown = now if is_redrawn else self._shown
                self._lines.append(line + b"\n")
        self._take([line], is_redrawn)


def _show(data: bytes) -> None:
    """Print; the reader may be gone or the disk full, which must not stop the program."""
    stream = getattr(sys.stdout, "buffer", None)
    with contextlib.suppress(OSError):
        if stream is None:  # a test's or a notebook's
            sys.stdout.write(data.decode(errors="replace"))
        else:
            sys.stdout.flush()
            stream.write(data)
        sys.stdout.flush()
