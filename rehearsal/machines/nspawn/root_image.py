"""The root image of nspawn machines: Debian or Ubuntu with systemd and cloud-init, built once."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rehearsal.machines.commands import run

# What the Deep Learning AMI's Ubuntu has of what boot touches; Python and its packages are bound.
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "systemd-resolved",
    "udev",
    "dbus",
    "cloud-init",
    "isc-dhcp-client",
    "python3",
    "ca-certificates",
    "curl",
    "iproute2",
    "e2fsprogs",
    "xfsprogs",
    "util-linux",
    "kmod",
    "sudo",
    "procps",
    "unattended-upgrades",
    "openssh-server",
    "locales",
)
UNITS = ("systemd-networkd.service", "systemd-resolved.service")
SUITE = "bookworm"


def root_image(say: Callable[[str], None]) -> Path:
    """Return the folder of the root image; builds it if this host has none yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rehearsal"
    recipe = " ".join((SUITE, *PACKAGES, *UNITS))
    image = cache / f"{SUITE}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if image.exists():
        return image
    say(f"building the machines' root image, {image.name}: once, about a minute")
    new = image.with_name(f"{image.name}.{os.getpid()}")
    new.mkdir(parents=True)
    try:
        run(
            *("mmdebstrap", "--mode=root", "--variant=minbase", "--quiet"),
            *(f"--include={','.join(PACKAGES)}", SUITE, new),
        )
        run("systemctl", f"--root={new}", "enable", *UNITS)
        (new / "etc/machine-id").write_text("")
        new.rename(image)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return image
