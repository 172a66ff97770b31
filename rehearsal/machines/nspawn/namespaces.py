"""The network, mount and process namespaces of a rehearsal, which end with it.

Everything that a rehearsal with nspawn machines starts lives in them: machines, DHCP server,
network and mounts are gone once its first process is, however that ends.
"""

import ctypes
import os
import platform
import shutil
import signal
import sys

from rehearsal.machines.commands import run
from rehearsal.machines.nspawn.control_groups import (
    are_possible,
    rehearsal_group,
    remove_groups,
    version_2,
)

# Programs that the host must have, and the Debian package of each.
PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "dnsmasq": "dnsmasq-base",
    "ip": "iproute2",
    "openssl": "openssl",
    "nsenter": "util-linux",
}
# linux/sched.h, linux/prctl.h
CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG = 1


class NotPossible(ValueError):
    """A host that cannot run nspawn machines; the message says what is missing."""


def check_host() -> None:
    """Refuse a host that cannot run nspawn machines."""
    if platform.system() != "Linux":
        raise NotPossible(f"nspawn machines need Linux, but this is {platform.system()}")
    if os.geteuid() != 0:
        raise NotPossible("nspawn machines need root: use sudo, or machines of kind process")
    missing = sorted({package for name, package in PROGRAMS.items() if not shutil.which(name)})
    if missing:
        raise NotPossible(
            "nspawn machines need packages that are not installed: apt-get install "
            + " ".join(missing)
        )
    if not are_possible():
        raise NotPossible(
            "nspawn machines need control groups of version 2 with cgroup.kill (Linux 5.14), but "
            f"none can be created below {version_2()}"
        )


def enter_namespaces() -> None:
    """Continue in a child process with its own namespaces; this process waits and exits like it.

    Call this before any thread starts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    sweeper, pipe = _start_sweeper()
    if libc.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NotPossible(
            f"nspawn machines need namespaces of their own, but unshare failed: {why}"
        )
    child = os.fork()
    if child != 0:
        status = _wait(child)
        os.close(pipe)
        _, swept = os.waitpid(sweeper, 0)
        sys.exit(status or os.waitstatus_to_exitcode(swept))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The number in the name is ours: such a group is left from a rehearsal whose sweeper died.
    remove_groups(rehearsal_group())
    os.write(pipe, rehearsal_group().encode())
    os.close(pipe)
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")
    run("ip", "link", "set", "lo", "up")


def _start_sweeper() -> tuple[int, int]:
    """Start a process that removes the control groups when this process is gone, even by SIGKILL.

    Namespaces end by themselves, groups do not. Return its id and a pipe for the groups' name; it
    begins once the pipe is closed everywhere.
    """
    reader, writer = os.pipe()
    sweeper = os.fork()
    if sweeper != 0:
        os.close(reader)
        return sweeper, writer
    os.setsid()
    # Signals meant for the rehearsal, as from `pkill -f rehearsal`, must not end its sweeper.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(writer)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    name = os.read(reader, 100).decode()
    while os.read(reader, 1):
        pass
    if name:
        remove_groups(name)
    os._exit(0)


def _wait(child: int) -> int:
    """Forward signals until the child exits; return its exit code as a shell would."""
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in ends if signal.getsignal(number) != signal.SIG_IGN]  # by nohup
    for number in heard:
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    for number in heard:
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
