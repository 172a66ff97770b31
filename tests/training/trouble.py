"""A way to S3 that is in trouble for a while: errors, refused, reset and silent connections."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

Trouble: TypeAlias = Literal["500", "503", "refused", "reset", "silent"]
_ANSWERS = {
    "500": (b"500 Internal Server Error", b"InternalError"),
    "503": (b"503 Slow Down", b"SlowDown"),
}
_RESET = struct.pack("ii", 1, 0)


class TroubledWay:
    """Passes each connection on to a server; while in trouble, every connection feels it."""

    def __init__(self, endpoint: str) -> None:
        there = urlsplit(endpoint)
        self._there = there.hostname, there.port
        self._trouble: Trouble | None = None
        self._open = set[socket.socket]()
        self._lock = threading.Lock()
        self._is_closing = False
        self.num_met = 0  # requests and connections that met trouble
        self._listening = self._listen(0)
        self.port = self._listening.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "TroubledWay":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closing = True
        self.end()
        self._stop_listening()

    def begin(self, trouble: Trouble) -> None:
        """Be in trouble from now on, on connections that are open, too."""
        self._trouble = trouble
        if trouble == "refused":
            self._stop_listening()
        if trouble in ("refused", "reset"):
            with self._lock:
                for each in list(self._open):
                    self._break(each)

    def end(self) -> None:
        """Be as before."""
        was, self._trouble = self._trouble, None
        if was == "refused" and not self._is_closing:
            self._listening = self._listen(self.port)

    def trouble_for(self, trouble: Trouble, seconds: float) -> None:
        """Be in trouble for a time, and return at once."""
        self.begin(trouble)
        threading.Timer(seconds, self.end).start()

    @contextmanager
    def in_trouble(self, trouble: Trouble) -> Iterator[None]:
        self.begin(trouble)
        yield
        self.end()

    def _listen(self, port: int) -> socket.socket:
        listening = socket.create_server(("127.0.0.1", port), backlog=128)
        threading.Thread(target=self._accept, args=(listening,), daemon=True).start()
        return listening

    def _stop_listening(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            if self._trouble in ("refused", "reset"):
                self.num_met += 1
                self._break(client)
                continue
            with self._lock:
                self._open.add(client)
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _break(self, client: socket.socket) -> None:
        with suppress(OSError):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.shutdown(socket.SHUT_RD)
        with suppress(OSError):
            client.close()

    def _pass_on(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        try:
            while data := client.recv(65536):
                if self._trouble is not None:
                    self.num_met += 1
                    self._answer(client, self._trouble)
                    return
                if server is None:
                    server = socket.create_connection(self._there)
                    back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                    back.start()
                server.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open.discard(client)
            for each in filter(None, (server, client)):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _answer(self, client: socket.socket, trouble: Trouble) -> None:
        if trouble == "silent":
            while self._trouble == "silent" and not self._is_closing:
                time.sleep(0.05)
            return
        if trouble not in _ANSWERS:
            return
        status, code = _ANSWERS[trouble]
        body = b"<Error><Code>%s</Code><Message>trouble</Message></Error>" % code
        head = b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n" % (
            status,
            len(body),
        )
        client.sendall(head + b"Connection: close\r\n\r\n" + body)
        # A reset would overtake the answer while the request's body is still arriving.
        client.shutdown(socket.SHUT_WR)
        client.settimeout(5)
        while client.recv(65536):
            pass


def _pump(server: socket.socket, client: socket.socket) -> None:
    with suppress(OSError):
        while data := server.recv(65536):
            client.sendall(data)
    with suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
