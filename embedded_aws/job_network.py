"""The network of a training job's hosts: a network namespace each, with an address of its own.

This needs root on Linux. Elsewhere, hosts are processes that share this machine's loopback, and so
the port on which the first one listens: only one job with several hosts can run at a time.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

# Files here, by namespace, replace those of /etc under `ip netns exec`.
_ETC = Path("/etc/netns")
_GATEWAY = 254


class QuietHandler(WSGIRequestHandler):
    """Werkzeug's request handler: it logs only errors, not every request."""

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class JobNetwork:
    """The hosts of one job, under SageMaker's names for them; `close` removes everything."""

    def __init__(self, count: int, application: Any = None) -> None:
        """`application` is the AWS that hosts in namespaces find at their gateway."""
        self.hosts = tuple(f"algo-{k}" for k in range(1, count + 1))
        self.interface = "eth0"
        self.environment: dict[str, str] = {}  # AWS's endpoint, if it differs from this machine's
        self.is_isolated = count > 1 and has_namespaces()  # each in a namespace of its own
        self._bridge = ""
        self._stack = ExitStack()
        if count == 1:
            return
        if not self.is_isolated:
            self.hosts = tuple(f"127.0.0.{k}" for k in range(1, count + 1))
            self.interface = socket.if_nameindex()[0][1]
            return
        with ExitStack() as failing:
            failing.callback(self.close)
            self._lay(application)
            failing.pop_all()

    def command(self, host: str) -> list[str]:
        """Return the command prefix that runs a program in a host's namespace (by exec)."""
        return ["ip", "netns", "exec", self._namespace(host)] if self._bridge else []

    def cut(self, host: str, *, is_cut: bool) -> None:
        """Cut a host off from the network, or reconnect it; works only with namespaces."""
        assert self._bridge, "hosts on one loopback cannot be cut off"
        _ip("-n", self._namespace(host), "link", "set", "eth0", "down" if is_cut else "up")

    def close(self) -> None:
        """Take everything down."""
        self._stack.close()
        self._bridge = ""
        with suppress(OSError):  # other jobs may have folders there
            _ETC.rmdir()

    def _namespace(self, host: str) -> str:
        return f"{self._bridge}-{os.getpid()}-{host}"

    def _lay(self, application: Any) -> None:
        subnet = self._take_bridge()
        known = [f"{subnet}.{k} {host}\n" for k, host in enumerate(self.hosts, start=1)]
        for number, host in enumerate(self.hosts, start=1):
            name, outside = self._namespace(host), f"{self._bridge}v{number}"
            _ip("netns", "add", name)
            self._stack.callback(_ip, "netns", "delete", name)
            (_ETC / name).mkdir(parents=True)
            self._stack.callback(shutil.rmtree, _ETC / name)
            (_ETC / name / "hosts").write_text("".join(["127.0.0.1 localhost\n", *known]))
            _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            # The end of the namespace removes it only later, but the next job needs its name.
            self._stack.callback(_ip, "link", "delete", outside)
            _ip("link", "set", outside, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{subnet}.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        if application is not None:
            self._serve(application, f"{subnet}.{_GATEWAY}")

    def _take_bridge(self) -> str:
        """Make a bridge with the gateway's address; its name reserves the subnet for this job."""
        for number in range(256):
            # RFC 2544 reserves 198.18.0.0/15 for tests, so it does not hide a real network.
            self._bridge, subnet = f"job{number}", f"198.18.{number}"
            with suppress(FileExistsError):
                _ip("link", "add", self._bridge, "type", "bridge", "forward_delay", "0")
                break
        else:
            raise OSError("bridges of 256 jobs exist; `ip link delete` those left behind")
        self._stack.callback(_ip, "link", "delete", self._bridge)
        _ip("addr", "add", f"{subnet}.{_GATEWAY}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        return subnet

    def _serve(self, application: Any, address: str) -> None:
        server = make_server(address, 0, application, threaded=True, request_handler=QuietHandler)
        self._stack.callback(server.server_close)
        self._stack.callback(server.shutdown)
        poll = {"poll_interval": 0.05}
        threading.Thread(target=server.serve_forever, kwargs=poll, daemon=True).start()
        endpoint = f"http://{address}:{server.port}"
        self.environment = dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"), endpoint)


@cache
def has_namespaces() -> bool:
    """Whether this process may create network namespaces; a container's root often may not."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"probe{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except OSError:
        return False
    _ip("netns", "delete", name)
    return True


def _ip(*words: str) -> None:
    """Run an iproute2 command; raise OSError with its output if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        kind = FileExistsError if "File exists" in done.stderr else OSError
        raise kind(f"ip {' '.join(words)}: {done.stderr.strip()}")
