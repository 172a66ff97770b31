"""Network, mount and process namespaces of a rehearsal's own, which end with it.

Everything that a rehearsal with nspawn machines starts lives in them: machines, DHCP server, their
network and their mounts are gone once its first process is, however it ends.
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

# What the host must have, and the Debian package that has it.
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
    """This host cannot run nspawn machines; the message says what is missing."""


def check_host() -> None:
    """Refuse a host that cannot run nspawn machines."""
    if platform.system() != "Linux":
        raise NotPossible(f"nspawn machines need Linux, and this is {platform.system()}")
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
            "nspawn machines need control groups of version 2 with cgroup.kill (Linux 5.14), and "
            f"below {version_2()} none can be made"
        )


def enter_namespaces() -> None:
    """Go on in a child process, in namespaces of our own; this process waits and exits as it does.

    Call it before any thread starts.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    sweeper, tell = _start_sweeper()
    if libc.unshare(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NotPossible(
            f"nspawn machines need namespaces of their own, but unshare failed: {why}"
        )
    child = os.fork()
    if child != 0:
        status = _wait(child)
        os.close(tell)
        _, swept = os.waitpid(sweeper, 0)
        sys.exit(status or os.waitstatus_to_exitcode(swept))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The number is ours: a group of this name is of a rehearsal whose sweeper was killed.
    remove_groups(rehearsal_group())
    os.write(tell, rehearsal_group().encode())
    os.close(tell)
    run("mount", "--make-rprivate", "/")
    run("mount", "-t", "proc", "proc", "/proc")
    run("ip", "link", "set", "lo", "up")


def _start_sweeper() -> tuple[int, int]:
    """Start a process that removes the control groups when this process is gone, even by SIGKILL.

    Namespaces end by themselves, groups do not. Return its id and the pipe that is to tell it their
    name; it begins once nobody has the pipe open.
    """
    reader, writer = os.pipe()
    sweeper = os.fork()
    if sweeper != 0:
        os.close(reader)
        return sweeper, writer
    os.setsid()
    # What is meant for the rehearsal, as by `pkill -f rehearsal`, would end its sweeper too.
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
