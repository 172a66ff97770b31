"""A machine in systemd-nspawn: real systemd, cloud-init and disks; it boots user data verbatim."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import certifi

from rehearsal.machines.commands import CommandFailed, run
from rehearsal.machines.logs import USER_DATA, Logs, wait_for
from rehearsal.machines.metadata import MetadataServer
from rehearsal.machines.nspawn.loop_device import LoopDevice
from rehearsal.machines.nspawn.network import CARD, Card, Network
from rehearsal.machines.quirks import Quirks

IMAGE_FILES = Path(__file__).parent / "image"
EBS = "Amazon Elastic Block Store"
INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"
# By this cloud-init knows EC2 in a container, which reads no DMI data.
HYPERVISOR_UUID = "ec2a1b2c-3d4e-5f60-7182-93a4b5c6d7e8\n"
# After which a program of the rehearsal is killed.
EXECUTE_LIMIT = ("--property=RuntimeMaxSec=60",)
# Where systemd's services look for programs, those of quirks first.
PROGRAMS = "usr/local/sbin"
PATH = ("usr/local/bin", "usr/sbin", "usr/bin")
# What the machine has as its PCI bus; without devices/ it counts as a machine without a bus.
PCI, PCI_FILES = "/sys/bus/pci/", "etc/rehearsal/pci/"
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmeDisk:
    """One disk beside that of /; its name is the kernel's, which says nothing about what it is."""

    name: str
    model: str
    serial: str
    device_name: str  # under which EC2 attached it; none for an instance store
    mib: int


# The root disk first, the data volume last: to trust kernel names is to format the instance store.
DISKS = (
    NvmeDisk(
        name="/dev/nvme1n1",
        model=INSTANCE_STORE,
        serial="AWS1234567890ABCDEF0",
        device_name="",
        mib=512,
    ),
    NvmeDisk(
        name="/dev/nvme2n1",
        model=EBS,
        serial="vol0d1a2b3c4d5e6f708",
        device_name="sdf",
        mib=4096,
    ),
)
_ROOT_DISK = {
    "name": "/dev/nvme0n1",
    "model": EBS,
    "serial": "vol00112233445566778",
    "device_name": "sda1",
    "loop": "",
}


@dataclass(kw_only=True)
class NspawnMachine:
    """One machine in `folder`: an overlay over the root image, and a file for each disk."""

    folder: Path
    image: Path
    instance_id: str
    network: Network
    metadata: MetadataServer
    pytorch: Path = field(default_factory=lambda: Path(sys.prefix).resolve())
    disks: Sequence[NvmeDisk] = DISKS
    quirks: Quirks = field(default_factory=Quirks)
    _nspawn: subprocess.Popen[bytes] | None = None
    _card: Card | None = None
    _loops: list[LoopDevice] = field(default_factory=list)
    _logs: Logs = field(default_factory=Logs)

    @property
    def root(self) -> Path:
        """The machine's / as the host sees it."""
        return self.folder.resolve() / "root"

    @property
    def metrics_file(self) -> Path:
        """The file to which the trainer appends JSON lines."""
        return self.root / "var/log/training/metrics.jsonl"

    @property
    def user_data_log(self) -> Path:
        """The log of the user data, which starts the boot."""
        return self.root / USER_DATA

    @property
    def is_off(self) -> bool:
        """Whether it does not run."""
        return self._nspawn is None or self._nspawn.poll() is not None

    def start(self) -> None:
        """Power on; the user data starts by itself."""
        if not self.root.exists():
            self._furnish()
        self._card = self.network.attach(self.metadata)
        self.metadata.more = self._card.metadata()
        self._attach_disks()
        self.group.mkdir()
        with (self.folder / "console.log").open("ab") as log:
            self._nspawn = subprocess.Popen(
                ["sh", "-c", f'echo 0 >{self.group}/cgroup.procs; exec "$@"', "sh", *self._command],
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def group(self) -> Path:
        """The control group of everything in the machine."""
        # Some hosts have version 2 beside version 1.
        version_2 = CONTROL_GROUPS / "unified"
        groups = version_2 if version_2.exists() else CONTROL_GROUPS
        return groups / f"rehearsal-{self.instance_id}"

    def notice(self, seconds: float) -> None:
        """Announce in the metadata that the machine goes away in `seconds`."""
        self.metadata.notice(seconds)

    def rebalance(self) -> None:
        """Announce a rebalance recommendation in the metadata."""
        self.metadata.rebalance()

    def kill(self) -> int:
        """Cut the power; return how many processes that ended. The disks stay as they are."""
        if self._nspawn is None:
            return 0
        count = sum(len(path.read_text().split()) for path in self.group.rglob("cgroup.procs"))
        (self.group / "cgroup.kill").write_text("1")
        self._nspawn.wait()
        self._release()
        return count

    def shut_down(self) -> None:
        """Begin to shut down, as EC2 does by the power button; do not wait."""
        if self._nspawn is not None and not self.is_off:
            # nspawn hands this on to the machine's systemd: an orderly power-off.
            self._nspawn.send_signal(signal.SIGTERM)

    def remove(self) -> None:
        """Cut the power and delete the disks."""
        self.kill()
        if self.root.exists():
            run("umount", "--lazy", self.root)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, *command: str) -> str:
        """Run a program in the machine as root; return what it printed."""
        assert self._nspawn is not None, "execute needs a machine that is on"
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children")
        leader = children.read_text().split()[0]
        spaces = ("--uts", "--ipc", "--net", "--pid", "--cgroup", "--mount")
        # As a service of the machine: it has its environment and its control group.
        service = ("systemd-run", "--quiet", "--pipe", "--wait", "--collect", *EXECUTE_LIMIT, "--")
        return run("nsenter", f"--target={leader}", *spaces, "--wdns=/", *service, *command)

    def log_lines(self) -> list[str]:
        """Return the lines of boot and training so far, in the order in which we saw them."""
        if self._nspawn is not None and self._nspawn.poll():
            said = (self.folder / "console.log").read_text(errors="replace").strip().splitlines()
            raise CommandFailed(f"systemd-nspawn of {self.instance_id} failed: {said[-1:]}")
        return self._logs.read(self.root)

    def wait(self, seconds: float, log_has: str) -> bool:
        """Wait for a log line that contains the text; return False if none came."""
        return wait_for(self.log_lines, seconds, log_has)

    @property
    def _command(self) -> list[str]:
        environment = self.pytorch.resolve()
        pytorch = Path("/opt/pytorch")
        authorities = Path(certifi.where()).resolve().relative_to(environment)
        interpreter = Path(sys.base_prefix).resolve()
        disks = [
            f"--bind={loop.path}:{place}"
            for loop, disk in zip(self._loops, self.disks, strict=True)
            for place in (loop.path, disk.name)
        ]
        return [
            *("systemd-nspawn", "--quiet", f"--directory={self.root}", "--boot"),
            *(f"--machine={self.instance_id}", "--register=no", "--keep-unit", "--settings=no"),
            *("--console=pipe", "--link-journal=no", "--resolv-conf=off", "--timezone=off"),
            *("--capability=all", f"--network-interface={CARD}", *disks),
            f"--bind-ro={self.folder.resolve()}/hypervisor-uuid:/sys/hypervisor/uuid",
            # Programs of a virtual environment name their interpreter by its own path.
            *(f"--bind-ro={path}" for path in (environment, interpreter)),
            f"--bind-ro={environment}:{pytorch}",
            *(
                f"--bind-ro={self.network.authorities.resolve()}:{place / authorities}"
                for place in (environment, pytorch)
            ),
        ]

    def _furnish(self) -> None:
        folder = self.folder.resolve()
        for name in ("root", "upper", "work"):
            (folder / name).mkdir(parents=True)
        layers = f"lowerdir={self.image},upperdir={folder}/upper,workdir={folder}/work"
        run("mount", "-t", "overlay", "overlay", "-o", layers, self.root)
        shutil.copytree(IMAGE_FILES, self.root, dirs_exist_ok=True, symlinks=True)
        (self.root / PCI_FILES).mkdir(parents=True)
        self._furnish_quirks()
        (folder / "hypervisor-uuid").write_text(HYPERVISOR_UUID)
        for disk in self.disks:
            with (folder / f"{Path(disk.name).name}.img").open("wb") as file:
                file.truncate(disk.mib * _MIB)

    def _furnish_quirks(self) -> None:
        """Programs come first in the PATH of every service; the environment is systemd's own."""
        if self.quirks.lacks:
            raise ValueError(
                f"nspawn machines cannot lack packages: {', '.join(self.quirks.lacks)}"
            )
        for name, script in self.quirks.programs.items():
            program = self.root / PROGRAMS / name
            real = next((p for p in PATH if (self.root / p / name).exists()), "opt/pytorch/bin")
            program.write_text(f"#!/bin/sh\nreal='/{real}/{name}'\n{script}\n")
            program.chmod(0o755)
        for name, text in self.quirks.files.items():
            path = self.root / name.replace(PCI, f"/{PCI_FILES}").lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if self.quirks.environment:
            pairs = " ".join(f'"{name}={text}"' for name, text in self.quirks.environment.items())
            configuration = self.root / "etc/systemd/system.conf.d/quirks.conf"
            configuration.parent.mkdir(parents=True, exist_ok=True)
            configuration.write_text(f"[Manager]\nDefaultEnvironment={pairs}\n")

    def _attach_disks(self) -> None:
        files = [self.folder / f"{Path(disk.name).name}.img" for disk in self.disks]
        self._loops = [LoopDevice(file) for file in files]
        pairs = zip(self.disks, self._loops, strict=True)
        rows = [_ROOT_DISK, *({**asdict(disk), "loop": str(loop.path)} for disk, loop in pairs)]
        (self.root / "etc/disks.json").write_text(json.dumps(rows, indent=1))

    def _release(self) -> None:
        self._nspawn = None
        while "populated 1" in (self.group / "cgroup.events").read_text():
            time.sleep(0.02)
        # nspawn makes one in the hierarchy of systemd's names too, where a host has version 1.
        for group in CONTROL_GROUPS.glob(f"**/{self.group.name}"):
            for folder in sorted(group.rglob("*"), reverse=True):
                if folder.is_dir():
                    folder.rmdir()
            group.rmdir()
        for loop in self._loops:
            loop.close()
        self._loops = []
        if self._card is not None:
            self.network.detach(self._card)
            self._card = None
