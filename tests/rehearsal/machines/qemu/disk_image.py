"""The root disk of QEMU machines: nspawn's root image with a kernel, as a disk; built once."""

import hashlib
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rehearsal.machines.commands import run
from rehearsal.machines.nspawn.machine import IMAGE_FILES as NSPAWN_FILES
from rehearsal.machines.nspawn.machine import interpreter_files
from rehearsal.machines.nspawn.root_image import DEFAULT, VARIABLE, read_source

IMAGE_FILES = Path(__file__).parent / "image"
# NVMe, ext4 and PCI hot-plug are built in: no initramfs is needed.
KERNEL = "linux-image-cloud-amd64"
# All else that nspawn's machines have of ours stands in for what is real here.
NETWORK = "etc/systemd/network"
MIB = 2**20
DISK_MIB = 3072
# The disk signature, by which the kernel finds / wherever the disk is attached, as on EC2's images.
SIGNATURE = 0x0EC20EC2
SECTOR_BYTES = 512
LINUX = 0x83
# What machines see of the host is below this folder, read-only, under the host's own paths.
HOST = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskImage:
    """A folder with all that a machine boots from."""

    folder: Path

    @property
    def disk(self) -> Path:
        """The root disk; machines write to an overlay over it."""
        return self.folder / "root.img"

    @property
    def kernel(self) -> Path:
        """The kernel, as a boot loader would read it from the disk."""
        return self.folder / "vmlinuz"

    @property
    def ssh_key(self) -> Path:
        """The private key that root's account accepts."""
        return self.folder / "id_ed25519"


def disk_image(root_image: Path, say: Callable[[str], None]) -> DiskImage:
    """Return the root disk; builds it if this host has none yet."""
    files = [*IMAGE_FILES.rglob("*"), *(NSPAWN_FILES / NETWORK).rglob("*"), Path(__file__)]
    recipe = sorted(path for path in files if path.is_file())
    content = b"".join(path.read_bytes() for path in recipe) + _fstab().encode()
    folder = root_image.with_name(
        f"qemu-{root_image.name}-{hashlib.sha256(content).hexdigest()[:12]}"
    )
    if folder.exists():
        return DiskImage(folder=folder)
    say(f"building the machines' root disk, {folder.name}: once, about a minute")
    new = folder.with_name(f"{folder.name}.{os.getpid()}")
    new.mkdir()
    try:
        _build(root_image, new)
        # Another rehearsal may have been faster.
        if not folder.exists():
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return DiskImage(folder=folder)


def seen_of_host() -> list[Path]:
    """Return what machines see of the host: the virtual environment first, then its Python."""
    environment = Path(sys.prefix).resolve()
    return [environment, *interpreter_files(environment)]


def _mounts() -> list[tuple[Path, Path]]:
    """Return each of them with its place in the machine: programs name each other by their paths.

    The environment is /opt/pytorch as well.
    """
    seen = seen_of_host()
    return [*((path, path) for path in seen), (seen[0], Path("/opt/pytorch"))]


def _fstab() -> str:
    lines = [f"/{HOST}{path} {place} none bind 0 0" for path, place in _mounts()]
    return "\n".join([f"{HOST} /{HOST} virtiofs ro 0 0", *lines, ""])


def _build(root_image: Path, new: Path) -> None:
    packages, root = new / "packages", new / "root"
    suite, mirror = read_source(os.environ.get(VARIABLE, DEFAULT))
    run(
        *("mmdebstrap", "--mode=root", "--variant=extract", "--quiet"),
        *(f"--include={KERNEL}", suite, packages, *mirror),
    )
    (kernel,) = (packages / "boot").glob("vmlinuz-*")
    version = kernel.name.removeprefix("vmlinuz-")
    run("cp", "--archive", root_image, root)
    run("cp", "--archive", packages / "lib/modules", root / "usr/lib/modules")
    run("chroot", root, "depmod", version)
    shutil.copytree(NSPAWN_FILES / NETWORK, root / NETWORK, dirs_exist_ok=True)
    shutil.copytree(IMAGE_FILES, root, dirs_exist_ok=True)
    (root / "etc/fstab").write_text(_fstab())
    (root / HOST).mkdir()
    for path, place in _mounts():
        make_place(root / place.relative_to("/"), path)
    image = DiskImage(folder=new)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", image.ssh_key)
    keys = root / "root/.ssh/authorized_keys"
    keys.parent.mkdir(mode=0o700, exist_ok=True)
    keys.write_text(image.ssh_key.with_suffix(".pub").read_text())
    shutil.copy(kernel, image.kernel)
    _write_disk(image.disk, root)
    for folder in (packages, root):
        shutil.rmtree(folder)


def make_place(place: Path, source: Path) -> None:
    """Make what a folder or a file can be mounted on."""
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _write_disk(disk: Path, root: Path) -> None:
    """Write a partition table, and the only partition with the files of `root`."""
    sectors, first = DISK_MIB * MIB // SECTOR_BYTES, MIB // SECTOR_BYTES
    partition = struct.pack("<B3sB3sII", 0x80, b"", LINUX, b"", first, sectors - first)
    table = struct.pack("<440xI2x16s48x2s", SIGNATURE, partition, b"\x55\xaa")
    with disk.open("wb") as file:
        file.write(table)
        file.truncate(DISK_MIB * MIB)
    run("mke2fs", "-q", "-t", "ext4", "-d", root, "-E", f"offset={MIB}", disk, f"{DISK_MIB - 1}M")
