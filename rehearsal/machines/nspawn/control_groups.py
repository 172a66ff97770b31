"""Control groups, one per machine: to list its processes, kill them and limit their memory.

Each is below the rehearsal's own group, so that a clean-up need not know the machines.
"""

import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# Some hosts mount version 2 alongside version 1, which then controls memory.
VERSION_1_MEMORY = ROOT / "memory"
PATIENCE_SECONDS = 60.0
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlGroup:
    """One machine's control group; `memory_mib` limits the memory of all its processes together."""

    machine: str
    memory_mib: int | None = None

    @property
    def name(self) -> str:
        """Its path below the root of a hierarchy."""
        return f"{rehearsal_group()}/{self.machine}"

    @property
    def folder(self) -> Path:
        """Its folder in version 2's hierarchy."""
        return version_2() / self.name

    def make(self) -> list[Path]:
        """Create it; return the folders that the machine's first process must join."""
        self.folder.mkdir(parents=True)
        if self.memory_mib is None:
            return [self.folder]
        limit = str(self.memory_mib * _MIB)
        if VERSION_1_MEMORY.exists():
            memory = VERSION_1_MEMORY / self.name
            memory.mkdir(parents=True)
            (memory / "memory.limit_in_bytes").write_text(limit)
            with suppress(OSError):  # a kernel that does not count swap
                (memory / "memory.memsw.limit_in_bytes").write_text(limit)
            return [self.folder, memory]
        for above in (version_2(), self.folder.parent):
            (above / "cgroup.subtree_control").write_text("+memory")
        (self.folder / "memory.max").write_text(limit)
        with suppress(OSError):  # a kernel without swap
            (self.folder / "memory.swap.max").write_text("0")
        return [self.folder]

    def processes(self) -> list[int]:
        """Return the ids of the processes in it."""
        return _processes_in(self.folder)

    def kill(self) -> int:
        """Kill everything in it at once; return how many processes there were."""
        count = len(self.processes())
        (self.folder / "cgroup.kill").write_text("1")
        return count

    def remove(self) -> None:
        """Remove it, and the groups of this name that systemd-nspawn made in other hierarchies."""
        _remove(self.name)


def all_processes() -> list[int]:
    """Return the ids of the processes in all machines of this rehearsal."""
    return _processes_in(version_2() / rehearsal_group())


def _processes_in(group: Path) -> list[int]:
    found = []
    for folder, _, _ in os.walk(group):
        with suppress(OSError):  # a service whose group is just gone
            found += [int(word) for word in Path(folder, "cgroup.procs").read_text().split()]
    return found


def version_2() -> Path:
    """Return the root of version 2's hierarchy."""
    unified = ROOT / "unified"
    return unified if unified.exists() else ROOT


def are_possible() -> bool:
    """Whether this host allows groups that can be killed at once."""
    try:
        group = Path(tempfile.mkdtemp(prefix="of-rehearsal-", dir=version_2()))
    except OSError:
        return False
    is_killable = (group / "cgroup.kill").exists()
    group.rmdir()
    return is_killable


def rehearsal_group() -> str:
    """Return the name of the group that contains all groups of this rehearsal's machines."""
    # No two process namespaces have the same number at the same time.
    return f"rehearsal-{Path('/proc/self/ns/pid').stat().st_ino}"


def remove_groups(name: str) -> None:
    """Kill whatever still runs in a rehearsal's groups, and remove them."""
    with suppress(FileNotFoundError):
        (version_2() / name / "cgroup.kill").write_text("1")
    _remove(name)


def _remove(name: str) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    for hierarchy in (ROOT, *ROOT.iterdir()):
        top = hierarchy / name
        while top.is_dir():
            try:
                folders = [each for each in top.rglob("*") if each.is_dir()]
                for folder in (*sorted(folders, reverse=True), top):
                    folder.rmdir()
            except OSError:
                # Killed processes are still exiting.
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.02)
