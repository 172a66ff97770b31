"""A machine in QEMU: kernel, PCI bus, NVMe controllers of its own; it boots user data verbatim."""

import shlex
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rehearsal.machines.commands import CommandFailed, run
from rehearsal.machines.metadata import MetadataServer
from rehearsal.machines.nspawn.machine import INSTANCE_STORE, UUID
from rehearsal.machines.nspawn.network import BRIDGE, Card, MachineNetwork
from rehearsal.machines.quirks import EBS
from tests.rehearsal.machines.qemu import host_folders, identity
from tests.rehearsal.machines.qemu.disk_image import MIB, SIGNATURE, DiskImage
from tests.rehearsal.machines.qemu.monitor import Monitor, Refused

KERNEL_ARGUMENTS = (
    f"root=PARTUUID={SIGNATURE:08x}-01 rw console=ttyS0 panic=-1 quiet mitigations=off "
    # As on EC2's images: a volume may be late, and is waited for.
    "nvme_core.io_timeout=4294967295"
)
# A folder of the rehearsal's own in its mount namespace, short enough for a socket's address.
RUN = Path("/run/systemd/nspawn")
CARD_SLOT = 5  # of the PCI bus: its card is ens5, as on EC2


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """One disk behind a controller of its own; `name` is ours, the guest never sees it."""

    name: str
    identity: identity.Identity
    mib: int


ROOT = identity.Identity(model=EBS, serial="vol00112233445566778", device_name="/dev/sda1")
STORE = Disk(
    name="store",
    identity=identity.Identity(model=INSTANCE_STORE, serial="AWS1234567890ABCDEF0"),
    mib=512,
)
DATA = Disk(
    name="data",
    identity=identity.Identity(model=EBS, serial="vol0d1a2b3c4d5e6f708", device_name="/dev/sdf"),
    mib=4096,
)


@dataclass(kw_only=True)
class QemuMachine:
    """One machine in `folder`: an overlay over the root disk, and a file for each other disk."""

    folder: Path
    image: DiskImage
    network: MachineNetwork
    metadata: MetadataServer
    # In the order of their slots, in which the kernel names them.
    disks: Sequence[Disk] = (STORE, DATA)
    memory_mib: int = 1536
    _qemu: subprocess.Popen[bytes] | None = None
    _virtiofs: subprocess.Popen[bytes] | None = None
    _monitor: Monitor | None = None
    _card: Card | None = None
    _nodes: int = 0

    @property
    def is_off(self) -> bool:
        """Whether it does not run."""
        return self._qemu is None or self._qemu.poll() is not None

    @property
    def run(self) -> Path:
        """Its sockets."""
        return RUN / self.metadata.instance.id

    def start(self) -> None:
        """Power on; the user data starts by itself."""
        if not self._root.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            backing = ("-b", self.image.disk, "-F", "raw")
            run("qemu-img", "create", "-q", "-f", "qcow2", *backing, self._root)
        self.run.mkdir(parents=True, exist_ok=True)
        self._card = self._card or self.network.admit(self.metadata)
        run("ip", "tuntap", "add", "dev", self._card.host_end, "mode", "tap")
        run("ip", "link", "set", self._card.host_end, "master", BRIDGE, "up")
        self.metadata.more = self._card.metadata()
        log = self.folder / "qemu.log"
        authorities = self.network.authorities
        self._virtiofs, address = host_folders.serve(authorities, self.run, log)
        ours, its = socket.socketpair()
        with log.open("ab") as said:
            self._qemu = subprocess.Popen(
                [*self._command(its.fileno(), address), "-S"],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[its.fileno()],
            )
        its.close()
        try:
            self._monitor = Monitor(ours)
        except Refused as error:
            lines = log.read_text(errors="replace").splitlines()
            last = lines[-1] if lines else "it said nothing"
            raise CommandFailed(f"QEMU of {self.metadata.instance.id} failed: {last}") from error
        self._attach("root", ROOT, self._root, "qcow2", slot=4)
        for number, disk in enumerate(self.disks):
            self._attach(disk.name, disk.identity, self._file(disk), "raw", slot=6 + number)
        self._monitor.tell("cont")

    def attach(self, disk: Disk) -> None:
        """Attach a disk while it runs, as EC2's AttachVolume does."""
        assert self._monitor is not None
        self._monitor.tell("stop")
        self._attach(disk.name, disk.identity, self._file(disk), "raw", slot=None)
        self._monitor.tell("cont")

    def detach(self, disk: Disk) -> None:
        """Detach a disk while it runs, whether or not it is mounted: DetachVolume with force."""
        assert self._monitor is not None
        self._monitor.tell("device_del", id=disk.name)
        self._monitor.wait_for("DEVICE_DELETED", disk.name)

    def shut_down(self) -> None:
        """Begin to shut down, as EC2 does by the power button; do not wait."""
        if self._monitor is not None and not self.is_off:
            self._monitor.tell("system_powerdown")

    def kill(self) -> None:
        """Cut the power."""
        if self._qemu is None:
            return
        for process in (self._qemu, self._virtiofs):
            if process is not None:
                process.kill()
                process.wait()
        if self._monitor is not None:
            self._monitor.close()
        assert self._card is not None
        run("ip", "link", "delete", self._card.host_end)
        self._qemu = self._virtiofs = self._monitor = None

    def remove(self) -> None:
        """Cut the power and delete the disks."""
        self.kill()
        if self._card is not None:
            self.network.metadata.pop(self._card.address, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, *command: str) -> str:
        """Run a program in the machine as root; return what it printed."""
        assert self._card is not None
        options = (
            "BatchMode=yes",
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "ConnectTimeout=20",
            # A connection that outlives the machine, as at a reboot, ends.
            "ServerAliveInterval=20",
        )
        words = [word for option in options for word in ("-o", option)]
        key = ("-F", "none", "-i", self.image.ssh_key)
        return run("ssh", *key, *words, f"root@{self._card.address}", shlex.join(command))

    @property
    def _root(self) -> Path:
        return self.folder.resolve() / "root.qcow2"

    def _file(self, disk: Disk) -> Path:
        file = self.folder.resolve() / f"{disk.name}.img"
        if not file.exists():
            with file.open("wb") as empty:
                empty.truncate(disk.mib * MIB)
        return file

    def _attach(
        self, name: str, about: identity.Identity, file: Path, form: str, slot: int | None
    ) -> None:
        """Add a controller with one disk; the machine stands still meanwhile."""
        assert self._monitor is not None and self._qemu is not None
        self._nodes += 1
        node = f"{name}-{self._nodes}"
        backend = {"driver": "file", "filename": str(file)}
        self._monitor.tell("blockdev-add", node_name=node, driver=form, file=backend)
        place = {} if slot is None else {"addr": f"{slot:x}"}
        device = {"driver": "nvme", "id": name, "drive": node, "serial": about.serial}
        self._monitor.tell("device_add", **device, **place)
        process = Path(f"/proc/{self._qemu.pid}")
        identity.give(about, process / "mem", process / "maps")

    def _command(self, monitor: int, virtiofs: Path) -> list[str]:
        assert self._card is not None
        memory = f"memory-backend-memfd,id=memory,size={self.memory_mib}M,share=on"
        card = f"virtio-net-pci,netdev=card,mac={self._card.mac},addr={CARD_SLOT}"
        return [
            *("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none"),
            # Nitro attaches volumes as this machine does: through ACPI, to slots of one PCI bus.
            *("-machine", "pc,memory-backend=memory", "-object", memory),
            *("-m", f"{self.memory_mib}M"),
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"),
            *("-smbios", "type=0,vendor=Amazon EC2,version=1.0"),
            *(
                "-smbios",
                f"type=1,manufacturer=Amazon EC2,product={self.metadata.instance.type},"
                f"uuid={UUID},serial={UUID}",
            ),
            *("-smbios", f"type=2,manufacturer=Amazon EC2,asset={self.metadata.instance.id}"),
            *("-kernel", str(self.image.kernel), "-append", KERNEL_ARGUMENTS),
            *("-chardev", f"file,id=console,path={self.folder.resolve()}/console.log,append=on"),
            *("-serial", "chardev:console"),
            *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "monitor,mode=control"),
            *("-netdev", f"tap,id=card,ifname={self._card.host_end},script=no,downscript=no"),
            *("-device", card, "-device", "virtio-rng-pci"),
            *("-chardev", f"socket,id=host,path={virtiofs}"),
            *("-device", "vhost-user-fs-pci,chardev=host,tag=host"),
        ]
