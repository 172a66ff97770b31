"""Which hosts can run QEMU machines."""

import shutil

from rehearsal.machines.nspawn import namespaces
from rehearsal.machines.nspawn.namespaces import NotPossible
from tests.rehearsal.machines.qemu.host_folders import DAEMON

# What the host must have beside what nspawn machines need, and the Debian package that has it.
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    str(DAEMON): "qemu-system-common",
    "qemu-img": "qemu-utils",
    "mke2fs": "e2fsprogs",
    "ssh": "openssh-client",
}


def check_host() -> None:
    """Refuse a host that cannot run QEMU machines."""
    namespaces.check_host()
    missing = sorted({package for name, package in PROGRAMS.items() if not shutil.which(name)})
    if missing:
        raise NotPossible(
            f"QEMU machines need what is not installed here: apt-get install {' '.join(missing)}"
        )
