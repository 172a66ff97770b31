"""A machine in systemd-nspawn: real systemd, cloud-init and disks; it boots user data verbatim.

Its disks are loop devices under NVMe names, described in /etc/disks.json. The machine's own
systemd-tmpfiles creates their device files at each boot, as udev would.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Timer

import certifi

from rehearsal.machines import agent
from rehearsal.machines.commands import CommandFailed, run
from rehearsal.machines.machine import PYTORCH, RehearsedMachine
from rehearsal.machines.nspawn.control_groups import ControlGroup
from rehearsal.machines.nspawn.network import CARD, Card, MachineNetwork
from rehearsal.machines.quirks import (
    EBS,
    KEPT,
    KEPT_TEXT,
    PARTITION_TABLE,
    Volume,
    lend_environment,
)

INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
INSTANCE_STORE_MIB = 512
LOOP_MAJOR = 7
PARTITIONS_AT = 446  # in a master boot record
DESCRIPTION, DEVICE_FILES = "etc/disks.json", "etc/tmpfiles.d/disks.conf"
_MIB = 2**20
# linux/loop.h
LOOP_CTL_GET_FREE = 0x4C82
LOOP_CONFIGURE = 0x4C0A
LO_FLAGS_AUTOCLEAR = 4
BLOCK_BYTES = 512
# struct loop_config: fd and block size, then struct loop_info64, of which only lo_flags is set.
_CONFIG_BYTES = 304
_FLAGS_AT = 60
_ROOT_DISK = {
    "name": "/dev/nvme0n1",
    "model": EBS,
    "serial": "vol00112233445566778",
    "device_name": "sda1",
    "loop": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeDisk:
    """One disk other than the root disk; its kernel name does not tell what it holds."""

    name: str
    model: str
    serial: str
    device_name: str  # under which EC2 attached it; empty for an instance store
    volume: Volume


def disks_of(volumes: Sequence[Volume]) -> list[NvmeDisk]:
    """Return a machine's disks; whoever trusts kernel names formats the instance store."""
    store = NvmeDisk(
        name="/dev/nvme1n1",
        model=INSTANCE_STORE,
        serial="AWS1234567890ABCDEF0",
        device_name="",
        volume=Volume(mib=INSTANCE_STORE_MIB),
    )
    return [
        store,
        *(
            NvmeDisk(
                name=f"/dev/nvme{number}n1",
                model=EBS,
                serial=f"vol0d1a2b3c4d5e6f7{number:02d}",
                device_name=volume.device_name,
                volume=volume,
            )
            for number, volume in enumerate(volumes, start=2)
        ),
    ]


class LoopDevice:
    """A file as a block device, which the kernel detaches once it is neither open nor mounted."""

    def __init__(self, file: Path) -> None:
        control = os.open("/dev/loop-control", os.O_RDWR)
        backing = os.open(file, os.O_RDWR)
        try:
            while True:
                self.number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                self._device = os.open(self.path, os.O_RDWR)
                try:
                    fcntl.ioctl(self._device, LOOP_CONFIGURE, _config(backing))
                    return
                except OSError as error:
                    os.close(self._device)
                    if error.errno != errno.EBUSY:
                        raise
                    # Another process took the device first.
        finally:
            os.close(backing)
            os.close(control)

    @property
    def path(self) -> Path:
        """The device's file."""
        return Path(f"/dev/loop{self.number}")

    def close(self) -> None:
        """Close it; the kernel detaches it once it is no longer mounted anywhere."""
        os.close(self._device)


def _config(backing: int) -> bytes:
    config = bytearray(_CONFIG_BYTES)
    struct.pack_into("=II", config, 0, backing, BLOCK_BYTES)
    struct.pack_into("=I", config, _FLAGS_AT, LO_FLAGS_AUTOCLEAR)
    return bytes(config)


@dataclass(kw_only=True)
class Disks:
    """All disks of one machine; `folder` has a file for each."""

    folder: Path
    disks: Sequence[NvmeDisk]
    _loops: dict[str, LoopDevice] = field(default_factory=dict)

    def make(self) -> None:
        """Create the files, with the volumes' content."""
        for disk in self.disks:
            file = self._file(disk)
            with file.open("wb") as opened:
                opened.truncate(disk.volume.mib * _MIB)
            _fill(file, disk.volume.content)

    def attach(self, root: Path, seconds: float) -> None:
        """Attach the disks present this long after power-on; the machine creates device files."""
        for disk in self.disks:
            if disk.volume.late_seconds <= seconds and disk.name not in self._loops:
                self._loops[disk.name] = LoopDevice(self._file(disk))
        lines = [
            f"b {path} 0660 root disk - {LOOP_MAJOR}:{loop.number}\n"
            for name, loop in self._loops.items()
            for path in (loop.path, name)
        ]
        _write(root / DEVICE_FILES, "".join(lines))

    def describe(self, root: Path) -> None:
        """Describe the attached disks to the machine's programs, which then list them."""
        rows = [_ROOT_DISK]
        for disk in self.disks:
            if disk.name in self._loops:
                about = {name: text for name, text in asdict(disk).items() if name != "volume"}
                rows.append({**about, "loop": str(self._loops[disk.name].path)})
        _write(root / DESCRIPTION, json.dumps(rows))

    def delete(self) -> None:
        """Detach and delete all disks, as EC2 does after an instance's termination."""
        for loop in self._loops.values():
            loop.close()
        self._loops.clear()
        for disk in self.disks:
            self._file(disk).unlink(missing_ok=True)

    def _file(self, disk: NvmeDisk) -> Path:
        return self.folder / f"{Path(disk.name).name}.img"


def _write(path: Path, text: str) -> None:
    """Replace a running machine's file atomically, so that the machine never reads half of it."""
    new = path.with_name(f"{path.name}.new")
    new.parent.mkdir(parents=True, exist_ok=True)
    new.write_text(text)
    new.rename(path)


def _fill(file: Path, content: str) -> None:
    if content == PARTITION_TABLE:
        with file.open("r+b") as disk:
            disk.seek(PARTITIONS_AT)
            # One partition of type Linux, from the first MiB on, and the table's signature.
            disk.write(struct.pack("<4xB3xII48x2s", 0x83, 2048, 8192, b"\x55\xaa"))
    elif content:
        options = {"xfs": ["-q"], "ext4": ["-q", "-F"]}[content]
        run(f"mkfs.{content}", *options, file)
        mounted = file.with_suffix(".mounted")
        mounted.mkdir()
        run("mount", "-o", "loop", file, mounted)
        (mounted / KEPT).write_text(KEPT_TEXT)
        run("umount", mounted)
        mounted.rmdir()


IMAGE_FILES = Path(__file__).parent / "image"
# systemd in a container treats this signal like the power button.
POWER_OFF = signal.SIGRTMIN + 4
POWER_ON = Path(__file__).parent / "power_on.sh"
# Those that the image's own programs trust.
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
AGENT = "opt/aws/amazon-cloudwatch-agent/bin/amazon-cloudwatch-agent-ctl"
# By this prefix cloud-init recognizes EC2 in a container, which has no DMI data.
UUID = "ec2a1b2c-3d4e-5f60-7182-93a4b5c6d7e8"
# The time after which a program run by the rehearsal is killed.
EXECUTE_LIMIT = ("--property=RuntimeMaxSec=60",)
# Where systemd's services look for programs, with those of quirks first.
PROGRAMS = "usr/local/sbin"
PATH = ("usr/local/bin", "usr/sbin", "usr/bin")
# The machine's PCI bus; without devices/, it counts as a machine without a bus.
PCI, PCI_FILES = "sys/bus/pci/", "etc/rehearsal/pci/"
# Folders that are mounted at each boot, which hides their files on disk.
MADE_AT_BOOT = ("dev/", "proc/", "run/", "sys/", "tmp/")


def place_of(name: str) -> str:
    """Return the path on the machine's disk of a file that it is to see under this name."""
    path = name.lstrip("/")
    if path.startswith(PCI):
        return PCI_FILES + path.removeprefix(PCI)
    if path.startswith(MADE_AT_BOOT):
        raise ValueError(
            f"nspawn machines cannot start with the file {name!r}: files in "
            f"{', '.join(MADE_AT_BOOT)} are created at boot, except for {PCI}"
        )
    return path


def interpreter_files(environment: Path, base: Path = Path(sys.base_prefix)) -> list[Path]:
    """Return the parts of an environment's Python that a machine needs: program, library, modules.

    All links on the way to the program are included. Never return all of `base`, which may be /usr
    or /usr/local: the machine has its own.
    """
    programs = []
    link = environment / "bin/python"
    while link.is_symlink():
        link = Path(os.path.normpath(link.parent / link.readlink()))
        if not link.is_relative_to(environment):
            programs.append(link)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [*programs, base / "lib" / version, *sorted(base.glob(f"lib/lib{version}*.so*"))]


@dataclass(kw_only=True)
class NspawnMachine(RehearsedMachine):
    """One machine: an overlay over the root image, and a file for each disk."""

    image: Path
    network: MachineNetwork
    _nspawn: subprocess.Popen[bytes] | None = None
    _card: Card | None = None
    _disks: Disks = field(init=False)
    _late: list[Timer] = field(default_factory=list)

    @property
    def root(self) -> Path:
        """The path of the machine's / on the host."""
        return self.folder.resolve() / "root"

    @property
    def _lent(self) -> Path:
        """A copy of the environment without the packages that the machine lacks."""
        return self.folder.resolve() / "pytorch"

    @property
    def user_data_file(self) -> Path:
        """The user data that cloud-init runs."""
        return self.root / f"var/lib/cloud/instances/{self.instance_id}/user-data.txt"

    @property
    def is_off(self) -> bool:
        """Whether it does not run."""
        return self._nspawn is None or self._nspawn.poll() is not None

    def __post_init__(self) -> None:
        self._disks = Disks(folder=self.folder, disks=disks_of(self.quirks.volumes))

    def start(self) -> None:
        """Power on; the user data starts by itself."""
        if not self.root.exists():
            self._furnish()
        self._card = self.network.attach(self.metadata)
        self.metadata.more = self._card.metadata()
        self._disks.attach(self.root, 0.0)
        self._disks.describe(self.root)
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        with (self.folder / "console.log").open("ab") as log:
            self._nspawn = subprocess.Popen(
                [
                    *("nsenter", f"--net={self._card.namespace}", "unshare", "--mount"),
                    *(str(word) for word in (POWER_ON, CARD, empty, *self.group.make(), "--")),
                    *self._command,
                ],
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for seconds in {volume.late_seconds for volume in self.quirks.volumes} - {0.0}:
            timer = Timer(seconds, self._attach_late, [seconds])
            timer.daemon = True
            timer.start()
            self._late.append(timer)

    @property
    def group(self) -> ControlGroup:
        """The control group of everything in the machine."""
        return ControlGroup(machine=self.instance_id, memory_mib=self.quirks.memory_mib)

    def _attach_late(self, seconds: float) -> None:
        if self.is_off:
            return
        self._disks.attach(self.root, seconds)
        # This fails before systemd runs, which then creates the device files by itself.
        with suppress(CommandFailed):
            self.execute("systemd-tmpfiles", "--create", f"/{DEVICE_FILES}")
        self._disks.describe(self.root)

    def kill(self) -> int:
        """Cut the power and delete the disks except /; return how many processes that killed."""
        if self._nspawn is None:
            return 0
        for timer in self._late:
            timer.cancel()
        # Stop the starting program first: it may be about to join the group, and must not boot.
        self._nspawn.kill()
        self._nspawn.wait()
        count = self.group.kill()
        self._release()
        return count

    def shut_down(self) -> None:
        """Begin to shut down without waiting; EC2 presses the power button."""
        if self._nspawn is not None and not self.is_off:
            with suppress(CommandFailed):  # too early: nothing listens to the button yet
                os.kill(self._first_process(), POWER_OFF)

    def remove(self) -> None:
        """Cut the power and delete the disks."""
        self.kill()
        if self.root.exists():
            run("umount", "--lazy", self.root)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, *command: str) -> str:
        """Run a program in the machine as root; return what it printed."""
        assert self._nspawn is not None, "execute needs a machine that is on"
        leader = self._first_process()
        spaces = ("--uts", "--ipc", "--net", "--pid", "--cgroup", "--mount")
        # As a service of the machine, it gets the machine's environment and control group.
        service = ("systemd-run", "--quiet", "--pipe", "--wait", "--collect", *EXECUTE_LIMIT, "--")
        # systemd would expand variables in the words.
        words = [word.replace("$", "$$") for word in command]
        return run("nsenter", f"--target={leader}", *spaces, *service, *words)

    def _first_process(self) -> int:
        """Return the id of the machine's systemd: below power_on.sh and systemd-nspawn."""
        assert self._nspawn is not None
        pid = self._nspawn.pid
        for _ in range(2):
            found = []
            with suppress(OSError):  # the process has just ended
                found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if not found:
                raise CommandFailed(f"{self.instance_id} is not up: its systemd does not run")
            pid = int(found[0])
        return pid

    def log_lines(self) -> Sequence[str]:
        """Return the log lines so far; raise if systemd-nspawn itself has failed."""
        if self._nspawn is not None and self._nspawn.poll():
            lines = (self.folder / "console.log").read_text(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "no output"
            raise CommandFailed(f"systemd-nspawn of {self.instance_id} failed: {last}")
        return super().log_lines()

    @property
    def _command(self) -> list[str]:
        pytorch = Path("/opt/pytorch")
        authorities = Path(certifi.where()).resolve().relative_to(PYTORCH)
        return [
            *("systemd-nspawn", "--quiet", f"--directory={self.root}", "--boot"),
            *(f"--machine={self.instance_id}", "--register=no", "--keep-unit", "--settings=no"),
            *("--console=pipe", "--link-journal=no", "--resolv-conf=off", "--timezone=off"),
            *("--capability=all", f"--network-interface={CARD}"),
            f"--bind-ro={self.folder.resolve()}/hypervisor-uuid:/sys/hypervisor/uuid",
            # A virtual environment's programs name the interpreter by its absolute path.
            *(f"--bind-ro={path}" for path in (PYTORCH, *interpreter_files(PYTORCH))),
            f"--bind-ro={self._lent if self.quirks.lacks else PYTORCH}:{pytorch}",
            *(
                f"--bind-ro={self.network.authorities.resolve()}:{place / authorities}"
                # A lent environment consists of links into PYTORCH.
                for place in ((PYTORCH,) if self.quirks.lacks else (PYTORCH, pytorch))
            ),
            f"--bind-ro={self.network.authorities.resolve()}:{AUTHORITIES}",
        ]

    def _furnish(self) -> None:
        folder = self.folder.resolve()
        for name in ("root", "upper", "work"):
            (folder / name).mkdir(parents=True)
        layers = f"lowerdir={self.image},upperdir={folder}/upper,workdir={folder}/work"
        run("mount", "-t", "overlay", "overlay", "-o", layers, self.root)
        shutil.copytree(IMAGE_FILES, self.root, dirs_exist_ok=True, symlinks=True)
        (self.root / AGENT).parent.mkdir(parents=True)
        shutil.copy(agent.__file__, self.root / AGENT)
        (self.root / PCI_FILES).mkdir(parents=True)
        self._furnish_quirks()
        (folder / "hypervisor-uuid").write_text(f"{UUID}\n")
        self._disks.make()

    def _furnish_quirks(self) -> None:
        """Write the quirks: programs first in every service's PATH, the environment for systemd."""
        if self.quirks.lacks:
            lend_environment(PYTORCH, self._lent, self.quirks.lacks)
        self.quirks.write_programs(self.root / PROGRAMS, self._real_program)
        self.quirks.write_files(self.root, place_of)
        if self.quirks.environment:
            pairs = " ".join(f'"{name}={text}"' for name, text in self.quirks.environment.items())
            pairs = pairs.replace("%", "%%")
            configuration = self.root / "etc/systemd/system.conf.d/90-quirks.conf"
            configuration.parent.mkdir(parents=True, exist_ok=True)
            configuration.write_text(f"[Manager]\nDefaultEnvironment={pairs}\n")

    def _real_program(self, name: str) -> str:
        folder = next((p for p in PATH if (self.root / p / name).exists()), "opt/pytorch/bin")
        return f"/{folder}/{name}"

    def _release(self) -> None:
        self._nspawn = None
        self.group.remove()
        self._disks.delete()
        if self._card is not None:
            self.network.detach(self._card)
            self._card = None
