"""QEMU's monitor: commands and events of one machine (QMP, JSON lines over a socket)."""

import json
import socket
from typing import Any

# A device is gone when the guest has let go of it, which takes a guest without KVM some seconds.
PATIENCE_SECONDS = 120.0


class Refused(RuntimeError):
    """QEMU refused a command; the message has the command and its words."""


class Monitor:
    """Speaks with one QEMU until `close`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_SECONDS)
        self._connection = connection
        self._lines = connection.makefile("rwb")
        self._events: list[dict[str, Any]] = []
        self._read()  # the greeting
        self.tell("qmp_capabilities")

    def tell(self, command: str, **arguments: Any) -> Any:
        """Give a command; return its answer."""
        words = {name.replace("_", "-"): value for name, value in arguments.items()}
        line = json.dumps({"execute": command, "arguments": words})
        self._lines.write(f"{line}\n".encode())
        self._lines.flush()
        while "event" in (answer := self._read()):
            self._events.append(answer)
        if "error" in answer:
            raise Refused(f"{command} {words}: {answer['error']['desc']}")
        return answer["return"]

    def wait_for(self, event: str, device: str) -> None:
        """Wait until QEMU has said that this happened to a device."""
        while not any(
            seen["event"] == event and seen.get("data", {}).get("device") == device
            for seen in self._events
        ):
            self._events.append(self._read())
        self._events.clear()

    def close(self) -> None:
        """Hang up."""
        self._lines.close()
        self._connection.close()

    def _read(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise Refused("QEMU has hung up")
        answer: dict[str, Any] = json.loads(line)
        return answer
