"""The network of nspawn machines: addresses by DHCP, metadata at its address, AWS under its names.

It is in the rehearsal's own network namespace (namespaces.py) and ends with it.
"""

import re
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from rehearsal.machines.commands import run
from rehearsal.machines.metadata import MetadataHandler, MetadataServer, QuietServer

METADATA_ADDRESS = "169.254.169.254"
GATEWAY = "10.77.0.1"
PREFIX_BITS = 16
BRIDGE = "region"
CARD = "ens5"
# Where `ip netns` keeps its names.
NETWORK_NAMESPACES = Path("/run/netns")
MAX_MACHINES = 250


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One machine's network card, whose addresses follow from its number."""

    number: int

    @property
    def mac(self) -> str:
        """The hardware address."""
        return f"0e:00:00:00:00:{self.number:02x}"

    @property
    def address(self) -> str:
        """The address that DHCP assigns."""
        return f"10.77.1.{self.number}"

    @property
    def host_end(self) -> str:
        """The name of the end that is attached to the bridge."""
        return f"card{self.number}"

    @property
    def namespace(self) -> Path:
        """The network namespace that the card is in, which outlives a reboot of the machine."""
        return NETWORK_NAMESPACES / f"machine{self.number}"

    def metadata(self) -> dict[str, str]:
        """Return the network's description in the metadata, which cloud-init reads."""
        about = f"network/interfaces/macs/{self.mac}"
        return {
            "mac": self.mac,
            "local-ipv4": self.address,
            "local-hostname": f"ip-{self.address.replace('.', '-')}.ec2.internal",
            f"{about}/mac": self.mac,
            f"{about}/device-number": "0",
            f"{about}/local-ipv4s": self.address,
            f"{about}/subnet-ipv4-cidr-block": f"10.77.0.0/{PREFIX_BITS}",
        }


class _Handler(MetadataHandler):
    """Answers each machine, identified by its address, with its own metadata."""

    network: "MachineNetwork"

    def handle_one_request(self) -> None:
        found = self.network.metadata.get(self.client_address[0])
        if found is None:
            self.close_connection = True
            return
        self.metadata = found
        super().handle_one_request()


class _QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing."""


class BucketInPath:
    """Moves the bucket from the host name into the path, where the embedded AWS expects it."""

    def __init__(self, application: Any) -> None:
        self._application = application

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        host = environ.get("HTTP_HOST", "")
        if found := re.fullmatch(r"(.+)\.s3(\.[a-z0-9-]+)?\.amazonaws\.com", host):
            for name in ("PATH_INFO", "RAW_URI", "REQUEST_URI"):
                if name in environ:
                    environ[name] = f"/{found[1]}{environ[name]}"
        return self._application(environ, start_response)


@dataclass(kw_only=True)
class MachineNetwork:
    """Bridge, DHCP, names, metadata and AWS's endpoints; a context manager."""

    folder: Path
    metadata: dict[str, MetadataServer] = field(default_factory=dict)
    _count: int = 0
    _dhcp: subprocess.Popen[bytes] | None = None
    _servers: list[ThreadingHTTPServer | BaseWSGIServer] = field(default_factory=list)

    @property
    def authorities(self) -> Path:
        """The network's own certificate authority, which machines trust."""
        return self.folder / "authorities.pem"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        _make_folders()
        run("ip", "link", "add", BRIDGE, "type", "bridge", "forward_delay", "0")
        run("ip", "address", "add", f"{GATEWAY}/{PREFIX_BITS}", "dev", BRIDGE)
        run("ip", "address", "add", f"{METADATA_ADDRESS}/32", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        self._start_dhcp()
        handler = type("Handler", (_Handler,), {"network": self})
        self._serve(QuietServer((METADATA_ADDRESS, 80), handler))
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        if self._dhcp is not None:
            self._dhcp.terminate()
            self._dhcp.wait()
        run("ip", "link", "delete", BRIDGE)

    def serve_aws(self, application: Any, region: str) -> None:
        """Serve *.amazonaws.com to the machines, with a certificate that they trust."""
        key, certificate = self.folder / "key.pem", self.folder / "certificate.pem"
        bases = ("amazonaws.com", f"{region}.amazonaws.com", "s3.amazonaws.com")
        names = [*bases, f"s3.{region}.amazonaws.com"]
        alternatives = ",".join(f"DNS:*.{name}" for name in names)
        run(
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2"),
            *("-keyout", key, "-out", certificate, "-subj", "/CN=rehearsal"),
            *("-addext", f"subjectAltName={alternatives}"),
        )
        # Just this one: machines connect only here, and SDKs parse the whole file per connection.
        self.authorities.write_text(certificate.read_text())
        server = make_server(
            GATEWAY,
            443,
            BucketInPath(application),
            threaded=True,
            request_handler=_QuietHandler,
            ssl_context=(str(certificate), str(key)),
        )
        # Handshakes happen in each connection's thread, so that a stalled one delays no other.
        listener: Any = server.socket
        listener.do_handshake_on_connect = False
        self._serve(server)

    def attach(self, metadata: MetadataServer) -> Card:
        """Create a machine's card and serve it its metadata."""
        card = self.admit(metadata)
        run("ip", "netns", "add", card.namespace.name)
        ends = ("type", "veth", "peer", "name", CARD, "netns", card.namespace.name)
        run("ip", "link", "add", card.host_end, *ends)
        run("ip", "-n", card.namespace.name, "link", "set", CARD, "address", card.mac)
        run("ip", "link", "set", card.host_end, "master", BRIDGE, "up")
        return card

    def admit(self, metadata: MetadataServer) -> Card:
        """Serve one more machine its metadata; its card is yet to be created."""
        self._count += 1
        if self._count > MAX_MACHINES:
            raise ValueError(f"a rehearsal has addresses for {MAX_MACHINES} machines")
        card = Card(number=self._count)
        self.metadata[card.address] = metadata
        return card

    def detach(self, card: Card) -> None:
        """Remove a machine's card."""
        self.metadata.pop(card.address, None)
        run("ip", "netns", "delete", card.namespace.name)
        # The machine's namespace takes it along when it ends, which may still be in progress.
        command = ["ip", "link", "delete", card.host_end]
        subprocess.run(command, capture_output=True, check=False)

    def _start_dhcp(self) -> None:
        cards = [Card(number=number) for number in range(1, MAX_MACHINES + 1)]
        self._dhcp = subprocess.Popen(
            [
                *("dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--user=root"),
                *("--pid-file=", "--no-resolv", "--no-hosts", f"--interface={BRIDGE}"),
                *("--bind-interfaces", f"--address=/amazonaws.com/{GATEWAY}"),
                "--dhcp-range=10.77.1.1,static,255.255.0.0,12h",
                *(f"--dhcp-host={card.mac},{card.address}" for card in cards),
                f"--dhcp-option=option:router,{GATEWAY}",
                f"--dhcp-option=option:dns-server,{GATEWAY}",
                f"--dhcp-leasefile={self.folder / 'leases'}",
                f"--log-facility={self.folder / 'dnsmasq.log'}",
            ]
        )

    def _serve(self, server: ThreadingHTTPServer | BaseWSGIServer) -> None:
        self._servers.append(server)
        poll = {"poll_interval": 0.05}
        threading.Thread(target=server.serve_forever, kwargs=poll, daemon=True).start()


def _make_folders() -> None:
    """Create a separate /run with the folders that nspawn and `ip netns` need."""
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    for folder in (Path("/run/systemd/nspawn"), Path("/run/udev/data"), NETWORK_NAMESPACES):
        folder.mkdir(parents=True)
