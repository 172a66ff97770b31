"""The host's folders in a machine, read-only, over virtiofs: what stands for /opt/pytorch."""

import socket
import subprocess
from pathlib import Path

import certifi

from rehearsal.machines.commands import run
from rehearsal.machines.qemu.disk_image import host_folders

DAEMON = Path("/usr/lib/qemu/virtiofsd")


def serve(authorities: Path, folder: Path, log: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Serve them until the machine's power is cut; return the daemon and its socket."""
    shared, address = folder / "host", folder / "virtiofs"
    for name, place in host_folders().items():
        (shared / name).mkdir(parents=True, exist_ok=True)
        run("mount", "--bind", "-o", "ro", place, shared / name)
    bundle = Path(certifi.where()).resolve().relative_to(host_folders()["environment"])
    run("mount", "--bind", authorities, shared / "environment" / bundle)
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    with log.open("ab") as said:
        daemon = subprocess.Popen(
            [
                DAEMON,
                f"--fd={listener.fileno()}",
                "-f",
                "-o",
                f"source={shared}",
                "-o",
                "cache=always",
            ],
            pass_fds=[listener.fileno()],
            stdout=said,
            stderr=said,
        )
    listener.close()
    return daemon, address
