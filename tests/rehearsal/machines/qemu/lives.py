"""Three boots of one QEMU machine with the template's user data, reported as JSON.

Run: python -m tests.rehearsal.machines.qemu.lives FOLDER (root)
"""

import json
import shlex
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from embedded_aws import EmbeddedAws
from rehearsal.machines.commands import CommandFailed
from rehearsal.machines.metadata import Credentials, MetadataServer, RehearsedInstance
from rehearsal.machines.nspawn.namespaces import enter_namespaces
from rehearsal.machines.nspawn.network import MachineNetwork
from rehearsal.machines.nspawn.root_image import root_image
from stacks.user_data import render
from tests.machine_key import machine_key
from tests.rehearsal.machines.qemu.disk_image import DiskImage, disk_image
from tests.rehearsal.machines.qemu.host import check_host
from tests.rehearsal.machines.qemu.machine import DATA, STORE, QemuMachine
from tests.userdata.conftest import make_rig
from tests.userdata.rig import REPOSITORY, Rig

# Another volume that is attached as the data volume; what is on it is somebody's.
FOREIGN = replace(
    DATA, name="foreign", identity=replace(DATA.identity, serial="vol0f0f0f0f0f0f0f0f0"), mib=64
)
PATIENCE_SECONDS = 600.0
IDENTIFY = """
import sys
from userdata.find_data_disk import identify_controller, list_disks
disks = {disk.path: str(disk) for disk in list_disks()}
for path, said in disks.items():
    data = identify_controller(path)
    words = [data[4:24].decode(), data[24:64].decode(), data[3072:3104].decode(), said]
    print(len(data), data[:2].hex(), *words, sep="|")
"""
# As a trainer that takes memory until the kernel kills it; what the unit runs after it has enough.
HUNGRY = """[Service]
MemoryMax=200M
ExecStart=
ExecStart=tail /dev/zero
"""
# As a trainer that writes its scratch file.
WRITER = """
import os, time
with open("/data/scratch", "wb") as file:
    while True:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
        time.sleep(0.2)
"""


class Life:
    """One machine, and what is looked at in it."""

    def __init__(self, machine: QemuMachine) -> None:
        self.machine = machine
        self.started = time.monotonic()

    def shell(self, line: str) -> str:
        """Return what a line prints; the bundle's folder is the working directory."""
        folder = "cd /opt/training/bundle 2>/dev/null || cd /"
        return self.machine.execute("bash", "-c", f"{{ {folder}; {line}; }} 2>&1 || true").strip()

    def until(self, line: str, is_so: Callable[[str], bool]) -> str:
        """Run a line again and again until it prints what is waited for; return that."""
        give_up_at, said = time.monotonic() + PATIENCE_SECONDS, ""
        while time.monotonic() < give_up_at:
            with suppress(CommandFailed):  # nobody can log in yet
                if is_so(said := self.shell(line)):
                    return said
            time.sleep(2)
        raise AssertionError(f"after {PATIENCE_SECONDS:g} s `{line}` still prints: {said}")

    def seconds(self) -> float:
        """Return the seconds since the last look at this clock."""
        before, self.started = self.started, time.monotonic()
        return round(self.started - before, 1)


def boot_log(words: str, count: int = 1) -> tuple[str, Callable[[str], bool]]:
    """Return how to wait for the nth line of the boot's log with these words."""
    return (
        f"grep -sF '{words}' /var/log/training/boot.log",
        lambda said: len(said.splitlines()) >= count,
    )


def first_boot(life: Life) -> dict[str, Any]:
    """Power on a machine whose volumes are empty."""
    life.machine.start()
    ok = life.until(*boot_log("[ok] data-volume"))
    seconds = life.seconds()
    life.shell("systemctl stop training-boot.service; echo kept >/data/kept.txt; sync")
    return {
        "seconds": seconds,
        "data_volume": ok,
        "user_data": life.shell("cat /var/lib/cloud/instance/user-data.txt"),
        "cloud": life.shell("cloud-id"),
        "dmi": life.shell("cd /sys/class/dmi/id; cat sys_vendor product_name board_asset_tag"),
        "variables": life.shell("systemctl show-environment; cat /proc/1/environ"),
        "identify": life.shell(f"python3 -c '{IDENTIFY}'").splitlines(),
        "driver": life.shell("readlink -f /sys/block/nvme2n1/device/device/driver"),
        "store": life.shell("wipefs /dev/nvme1n1; blkid --probe /dev/nvme1n1"),
        "fstab": life.shell("grep /data /etc/fstab"),
        **mounted(life),
    }


def reboot(life: Life) -> dict[str, Any]:
    """Let the machine reboot by its own command."""
    boot = life.shell("cat /proc/sys/kernel/random/boot_id")
    with suppress(CommandFailed):
        life.shell("systemctl --no-block reboot")
    life.until("cat /proc/sys/kernel/random/boot_id", lambda said: said not in ("", boot))
    lines = life.until(*boot_log("[ok] data-volume", 2)).splitlines()
    seconds = life.seconds()
    life.shell("systemctl stop training-boot.service")
    times = "systemctl show --value -p ActiveEnterTimestampMonotonic"
    return {
        "seconds": seconds,
        "data_volume": lines[-1],
        "mounted_at": int(life.shell(f"{times} data.mount")),
        "boot_began_at": int(life.shell("systemctl show --value -p InactiveExitTimestampMonotonic"
                                        " training-boot.service")),
        **mounted(life),
    }  # fmt: skip


def without_volume(life: Life) -> dict[str, Any]:
    """Power off, and on again without its volumes; they come late, the other one last."""
    life.machine.shut_down()
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while not life.machine.is_off:
        assert time.monotonic() < give_up_at, "the power button did nothing"
        time.sleep(0.5)
    life.machine.kill()
    life.machine.disks = ()
    life.machine.start()
    said = life.until(*boot_log("[retry] data-volume"))
    without = {
        "says": said,
        "local_fs": life.shell("systemctl is-active local-fs.target emergency.target"),
        "before": life.shell("findmnt /data"),
    }
    life.machine.attach(DATA)
    life.machine.attach(STORE)
    late = life.until(*boot_log("[ok] data-volume", 3)).splitlines()[-1]
    seconds = life.seconds()
    life.shell("systemctl stop training-boot.service")
    return {"seconds": seconds, "data_volume": late, **without, **mounted(life)}


def out_of_memory(life: Life, rig: Rig) -> dict[str, Any]:
    """Let the kernel kill the trainer for its memory until systemd gives it up."""
    folder = "/run/systemd/system/training.service.d"
    life.shell(f"mkdir -p {folder}; printf %s {shlex.quote(HUNGRY)} >{folder}/hungry.conf")
    life.shell("systemctl daemon-reload")
    messages = training_fails(life, rig)
    life.shell(f"rm -r {folder} /var/log/training/training.log; systemctl daemon-reload")
    life.shell("systemctl reset-failed training.service")
    return {"seconds": life.seconds(), "messages": messages}


def lost(life: Life, rig: Rig) -> dict[str, Any]:
    """Detach the volume while a program writes to it; then the trainer would start again."""
    unit = "systemd-run --quiet --unit=writer --property=StandardError=file:/tmp/writer"
    life.shell(f"{unit} python3 -c '{WRITER}'; sleep 2")
    life.machine.detach(DATA)
    writer = life.until("cat /tmp/writer", lambda said: "Error" in said)
    life.until("findmnt /data", lambda said: said == "")
    messages = training_fails(life, rig)
    keys = rig.aws.client("s3").list_objects_v2(Bucket="runs")["Contents"]
    return {
        "seconds": life.seconds(),
        "writer": writer.splitlines()[-1],
        "messages": messages,
        "heads": [item["Key"] for item in keys if item["Key"].endswith("/head.json")],
        "target_capacity": rig.target_capacity(),
    }


def foreign(life: Life) -> dict[str, Any]:
    """Attach a volume with something on it that is no file system."""
    file = life.machine.folder / f"{FOREIGN.name}.img"
    label = (b"\0" * 446 + b"\x80\0\0\0\x83\0\0\0" + (2048).to_bytes(4, "little")
             + (4096).to_bytes(4, "little")).ljust(510, b"\0") + b"\x55\xaa"  # fmt: skip
    content = label.ljust(FOREIGN.mib * 2**20, b"\0")
    file.write_bytes(content)
    life.machine.attach(FOREIGN)
    said = life.shell("bash userdata/steps/data_volume.sh")
    life.machine.kill()
    return {"says": said, "is_untouched": file.read_bytes() == content}


def training_fails(life: Life, rig: Rig) -> list[str]:
    """Start the trainer, wait until its failure ends the machine; return what machines said."""
    life.shell("systemctl start training.service")
    life.until("cat /var/log/training/training.log", lambda said: "EC2 terminates it" in said)
    return [each["message"] for each in rig.events() if each["name"] == "machine-failed"]


def mounted(life: Life) -> dict[str, str]:
    """Look at what is mounted at /data."""
    return {
        "source": life.shell("findmnt --noheadings --output SOURCE,FSTYPE,UUID /data"),
        "kept": life.shell("cat /data/kept.txt"),
    }


def upload_bundle(rig: Rig) -> None:
    """Put the folders that run on an instance where run.env says."""
    path = rig.folder / "bundle.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as bundle:
        for folder in ("contract", "training", "userdata"):
            for file in sorted((REPOSITORY / folder).rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    bundle.write(file, file.relative_to(REPOSITORY))
    rig.aws.client("s3").put_object(Bucket="assets", Key=rig.bundle, Body=path.read_bytes())


def live(folder: Path, image: DiskImage) -> dict[str, Any]:
    """Run all of it in this process's namespaces; return what was seen, by scene."""
    with EmbeddedAws() as aws, MachineNetwork(folder=folder / "network") as network:
        for bucket in ("runs", "datasets", "assets"):
            aws.client("s3").create_bucket(Bucket=bucket)
        rig = make_rig(aws, folder / "rig")
        upload_bundle(rig)
        network.serve_aws(aws.application, aws.region)
        ran = aws.client("ec2").describe_instances()["Reservations"][0]["Instances"][0]
        user_data = render(rig.run_env())
        machine = QemuMachine(
            folder=folder / "machine",
            image=image,
            network=network,
            metadata=MetadataServer(
                instance=RehearsedInstance(id=ran["InstanceId"], user_data=user_data.encode()),
                credentials=Credentials(access_key_id=machine_key(aws)),
            ),
        )
        life = Life(machine)
        report: dict[str, Any] = {"user_data": user_data, "instance_id": ran["InstanceId"]}
        scenes: dict[str, Callable[[], dict[str, Any]]] = {
            "first_boot": lambda: first_boot(life),
            "reboot": lambda: reboot(life),
            "without_volume": lambda: without_volume(life),
            "out_of_memory": lambda: out_of_memory(life, rig),
            "lost": lambda: lost(life, rig),
            "foreign": lambda: foreign(life),
        }
        try:
            for name, scene in scenes.items():
                report[name] = scene()
                print(f"{name}: {report[name].get('seconds')} s", file=sys.stderr, flush=True)
        finally:
            machine.remove()
        return report


if __name__ == "__main__":
    check_host()
    built = disk_image(root_image(lambda said: None), lambda said: None)
    enter_namespaces()
    print(json.dumps(live(Path(sys.argv[1]), built)))
