"""The root image of nspawn machines: Debian or Ubuntu with systemd and cloud-init, built once."""

import hashlib
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from rehearsal.machines.commands import CommandFailed, run
from rehearsal.machines.nspawn.namespaces import NotPossible

# The packages of the Deep Learning AMI's Ubuntu that a boot uses; torch's Python is bind-mounted.
PACKAGES = (
    "systemd", "systemd-sysv", "systemd-resolved", "udev", "dbus", "cloud-init",
    "isc-dhcp-client", "python3", "ca-certificates", "curl", "iproute2", "e2fsprogs", "xfsprogs",
    "util-linux", "kmod", "sudo", "procps", "openssh-server",
)  # fmt: skip
UNITS = ("systemd-networkd.service", "systemd-resolved.service")
VARIABLE, DEFAULT = "REHEARSAL_IMAGE", "bookworm"
# The keyring that verifies Ubuntu's packages: the host's, or that of this package, pinned by hash.
UBUNTU_KEYRING = Path("usr/share/keyrings/ubuntu-archive-keyring.gpg")
_KEYRING_PACKAGE = "pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb"
_KEYRING_SHA256 = "36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8"


def root_image(say: Callable[[str], None]) -> Path:
    """Return the folder of the root image; build it if this host does not have it yet.

    The variable REHEARSAL_IMAGE sets another suite, and a mirror for its packages.
    """
    suite, mirror = read_source(os.environ.get(VARIABLE, DEFAULT))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rehearsal"
    recipe = " ".join((suite, *mirror, *PACKAGES, *UNITS))
    image = cache / f"{suite}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if image.exists():
        return image
    say(f"building the machines' root image, {image.name}: once, about a minute")
    new = image.with_name(f"{image.name}.{os.getpid()}")
    new.mkdir(parents=True)
    try:
        _build(new, suite, mirror)
        # Another rehearsal may have built it first.
        if not image.exists():
            new.rename(image)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return image


def read_source(text: str) -> tuple[str, list[str]]:
    """Parse SUITE or SUITE MIRROR."""
    suite, *mirror = text.split() or [""]
    if not suite or len(mirror) > 1:
        raise ValueError(
            f"{VARIABLE} is {text!r}; set it to a suite, or to a suite and a mirror, like "
            "'noble http://archive.ubuntu.com/ubuntu'"
        )
    return suite, mirror


def _build(folder: Path, suite: str, mirror: Sequence[str]) -> None:
    where = f" from {mirror[0]}" if mirror else ""
    try:
        with tempfile.TemporaryDirectory() as keys:
            run(
                *("mmdebstrap", "--mode=root", "--variant=minbase"),
                *(f"--include={','.join(PACKAGES)}", *_sources(folder, suite, mirror, Path(keys))),
            )
    except (CommandFailed, OSError) as error:
        raise NotPossible(
            f"the root image of {suite}{where} could not be built ({VARIABLE}): {_reason(error)}"
        ) from None
    run("systemctl", f"--root={folder}", "enable", *UNITS)
    (folder / "etc/machine-id").write_text("")


def _sources(folder: Path, suite: str, mirror: Sequence[str], keys: Path) -> list[str | Path]:
    """Return mmdebstrap's suite, folder and sources; `keys` is where a keyring may be put."""
    if not mirror or "ubuntu" not in mirror[0]:
        return [suite, folder, *mirror]
    # Half of the packages that a machine needs are not in Ubuntu's main.
    sources: list[str | Path] = [suite, folder, f"deb {mirror[0]} {suite} main universe"]
    if (Path("/") / UBUNTU_KEYRING).exists():
        return sources
    with urllib.request.urlopen(f"{mirror[0]}/{_KEYRING_PACKAGE}", timeout=60) as answer:
        package = answer.read()
    if (found := hashlib.sha256(package).hexdigest()) != _KEYRING_SHA256:
        raise OSError(f"SHA-256 of {_KEYRING_PACKAGE} there is {found}, not {_KEYRING_SHA256}")
    (keys / "keyring.deb").write_bytes(package)
    run("dpkg-deb", "--extract", keys / "keyring.deb", keys)
    return [f"--keyring={keys / UBUNTU_KEYRING}", *sources]


def _reason(error: Exception) -> str:
    """Return the line in which mmdebstrap or apt states the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("E: ")), lines[-1]).removeprefix("E: ")
