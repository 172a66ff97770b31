"""The host's folders in a machine, read-only, over virtiofs: what stands for /opt/pytorch."""

import socket
import subprocess
from pathlib import Path

import certifi

from rehearsal.machines.commands import run
from tests.rehearsal.machines.qemu.disk_image import make_place, seen_of_host

DAEMON = Path("/usr/lib/qemu/virtiofsd")


def serve(authorities: Path, folder: Path, log: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Serve them until the machine's power is cut; return the daemon and its socket."""
    shared, address = folder / "host", folder / "virtiofs"
    if not shared.exists():
        _lay_out(shared, authorities)
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    with log.open("ab") as said:
        daemon = subprocess.Popen(
            [DAEMON, f"--fd={listener.fileno()}", "-f", *("-o", f"source={shared},cache=always")],
            pass_fds=[listener.fileno()],
            stdout=said,
            stderr=said,
        )
    listener.close()
    return daemon, address


def _lay_out(shared: Path, authorities: Path) -> None:
    """Show what machines see of the host; its Python trusts the network's authorities."""
    shared.mkdir()
    for path in seen_of_host():
        place = shared / path.relative_to("/")
        make_place(place, path)
        run("mount", "--bind", "-o", "ro", path, place)
    trusted = Path(certifi.where()).resolve()
    run("mount", "--bind", authorities, shared / trusted.relative_to("/"))
