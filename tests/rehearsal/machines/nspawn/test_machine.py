"""Machines that really boot: systemd, cloud-init, disks, network, reboots; they leave nothing."""

import os
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.rehearsal.machines.nspawn.conftest import Boot, left_behind

pytestmark = pytest.mark.machine
USERDATA = Path(__file__).parents[4] / "userdata"

USER_DATA = r"""#!/bin/bash
set -o errexit
lsblk --json --paths --output NAME,TYPE,MODEL,SERIAL,MOUNTPOINTS
mkfs.xfs -q /dev/nvme2n1
mkdir -p /data
mount UUID=$(blkid -s UUID -o value /dev/nvme2n1) /data
echo "mounted: $(findmnt --noheadings --output FSTYPE /data)"
token=$(curl -sS -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' \
  http://169.254.169.254/latest/api/token)
echo "type: $(curl -sS -H "X-aws-ec2-metadata-token: $token" \
  http://169.254.169.254/latest/meta-data/instance-type)"
/opt/pytorch/bin/python -c 'import urllib.request, ssl, certifi
context = ssl.create_default_context(cafile=certifi.where())
print(urllib.request.urlopen("https://s3.us-east-1.amazonaws.com/", context=context).read())'
echo "failed units: $(systemctl --failed --no-legend --no-pager)."
echo "variables: $(env | grep -e AWS_ -e MACHINE_ROOT)."
echo the end of the user data
"""

EC2 = """
print("its own /run:", *sorted(each.name for each in Path("/run").iterdir()))
cut = make()
cut.start()
print("killed at once:", cut.kill())
cut.remove()
machine = make()
machine.start()
said(machine, "the end of the user data")
print("\\n".join(machine.log_lines()))
print(machine.user_data_file.read_bytes() == user_data)
print(machine.execute("sh", "-c", 'home=$(pwd); echo "in $home ${home}"; cat /proc/self/cgroup'))
try:
    machine.execute("sh", "-c", "echo no >&2; exit 3")
except CommandFailed as error:
    print(error)
print("killed", machine.kill())
machine.remove()
"""


@pytest.mark.slow
def test_user_data_finds_a_machine_of_ec2_s_and_a_power_cut_leaves_nothing(
    tmp_path: Path, boot: Boot
) -> None:
    process = boot(EC2, USER_DATA)
    said, errors = process.communicate(timeout=600)
    assert process.returncode == 0, said + errors
    assert "its own /run: netns systemd udev\n" in said
    assert "killed at once: " in said
    assert '"name": "/dev/nvme1n1", "type": "disk", "model": "Amazon EC2 NVMe Instance' in said
    assert "mounted: xfs\n" in said
    assert "type: g5.xlarge\n" in said
    assert "b'its AWS'" in said
    assert "failed units: .\n" in said
    assert "variables: .\n" in said, "as on EC2, no endpoint is given"
    assert "the end of the user data\n" in said
    assert "\nTrue\nin / /\n" in said, "user data byte for byte, and what execute runs"
    assert "0::/system.slice/run-" in said, "executed as a service of the machine"
    assert "ended with status 3: no" in said
    assert int(said.rpartition("killed ")[2]) > 5
    assert left_behind(tmp_path) == []


AT_BOOT = r"""#!/bin/bash
mkfs.xfs -q /dev/nvme2n1
cat >/etc/systemd/system/at-boot.service <<'END'
[Service]
Type=oneshot
ExecStart=sh -c 'mkdir -p /data; mount /dev/nvme2n1 /data && date >>/data/boots; wc -l /data/boots'
StandardOutput=append:/var/log/training/boot.log
[Install]
WantedBy=multi-user.target
END
mkdir -p /var/log/training
systemctl enable at-boot.service
systemctl start --no-block at-boot.service
"""

# In an order in which nothing waits for nothing: the late volume comes while it reboots.
QUIRKS = """
import os, signal
machine = make(Quirks(
    lacks=("safetensors",),
    memory_mib=400,
    disks=(
        Volume(),
        Volume(device_name="sdg", content="ext4", mib=64, late_seconds=15),
        Volume(device_name="sdh", content="partition table", mib=64),
    ),
))
machine.start()
said(machine, "1 /data/boots")
for command in (
    "/opt/pytorch/bin/python -c 'import boto3, safetensors'",
    "python3 -c 'bytearray(700 * 2**20)'",
):
    try:
        print("did:", machine.execute("sh", "-c", command))
    except CommandFailed as error:
        print(error)
print(machine.execute("blkid", "--probe", "/dev/nvme4n1"))
machine.execute("systemctl", "--no-block", "reboot")
said(machine, "2 /data/boots")
os.kill(machine._first_process(), signal.SIGINT)  # as EC2 does: Ctrl-Alt-Del
said(machine, "3 /data/boots")
while "/dev/nvme3n1" not in machine.execute("lsblk", "--json", "--paths"):
    time.sleep(0.1)
print(machine.execute("sh", "-ec", "mount /dev/nvme3n1 /mnt; cat /mnt/kept.txt; df /mnt"))
machine.shut_down()
while not machine.is_off:
    time.sleep(0.1)
print("off", machine.kill())
machine.remove()
"""


@pytest.mark.slow
def test_a_machine_reboots_and_lacks_what_a_drill_takes_from_it(tmp_path: Path, boot: Boot) -> None:
    process = boot(QUIRKS, AT_BOOT)
    said, errors = process.communicate(timeout=900)
    assert process.returncode == 0, said + errors
    assert "did:" not in said
    assert "No module named 'safetensors'" in said
    assert "ended with status 137: Killed" in said, "by the kernel, for its memory"
    assert 'PTTYPE="dos"' in said
    assert "not to be lost" in said
    assert "off 0\n" in said, "shut down in order, nothing was left to kill"
    assert left_behind(tmp_path) == []


WAITS = """
machine = make()
machine.start()
said(machine, "the end")
print("booted", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_nothing_outlives_a_rehearsal_and_the_next_starts_clean(
    number: signal.Signals, tmp_path: Path, boot: Boot
) -> None:
    for run in range(2):
        process = boot(WAITS, "#!/bin/sh\necho the end\n")
        assert process.stdout is not None
        assert any(line == "booted\n" for line in process.stdout)
        assert left_behind(tmp_path) != []
        if number == signal.SIGINT:
            # As `pkill -f` does, whose pattern fits the sweeper too; it has a session of its own.
            for child in psutil.Process(process.pid).children():
                if os.getsid(child.pid) == child.pid:
                    child.send_signal(number)
        process.send_signal(number)
        process.wait()
        give_up_at = time.monotonic() + 60
        # What nobody waits for ends a moment later.
        while (left := left_behind(tmp_path)) and time.monotonic() < give_up_at:
            time.sleep(0.1)
        assert left == []
        # Its disks are files like any others.
        (tmp_path / "machine").rename(tmp_path / f"of run {run}")


# The unit of userdata/ with another trainer, which takes three seconds to save on the volume.
TRAINER = r"""#!/bin/bash
set -o errexit
mkfs.xfs -q /dev/nvme2n1
mkdir -p /data /var/log/training /etc/systemd/system/training.service.d
uuid=$(blkid -s UUID -o value /dev/nvme2n1)
echo "UUID=$uuid /data xfs defaults,nofail,noatime,x-systemd.device-timeout=30 0 2" >>/etc/fstab
cat >/etc/systemd/system/training.service <<'END'
{unit}
END
cat >/etc/systemd/system/training.service.d/other.conf <<'END'
[Service]
WorkingDirectory=/
ExecStart=
ExecStart=bash /root/trainer.sh
ExecStopPost=
END
cat >/root/trainer.sh <<'END'
save() {{
    sleep 3
    echo "saves on $(findmnt --noheadings --output FSTYPE --mountpoint /data || echo no volume)"
    curl -sS http://169.254.169.254/latest/api/token -X PUT -o /dev/null \
        -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' && echo "has a network"
    exit 75
}}
trap save TERM
echo "may open $(ulimit -Sn)"
echo listens
while :; do sleep 0.1; done
END
systemctl daemon-reload
mount /data
systemctl start --no-block training.service
"""

SHUT_DOWN = """
machine = make()
machine.start()
said(machine, "listens")
machine.shut_down()
while not machine.is_off:
    time.sleep(0.1)
print((machine.root / TRAINING).read_text())
print("off", machine.kill())
machine.remove()
"""


@pytest.mark.slow
def test_at_a_shutdown_the_trainer_saves_while_volume_and_network_are_there(
    tmp_path: Path, boot: Boot
) -> None:
    unit = (USERDATA / "units/training.service").read_text()
    process = boot(SHUT_DOWN, TRAINER.format(unit=unit))
    said, errors = process.communicate(timeout=600)
    assert process.returncode == 0, said + errors
    assert "saves on xfs\nhas a network\n" in said
    # No more than the host's processes, in a machine of namespaces; systemd's default is 1,024.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert f"may open {min(524_288, most)}\n" in said
    assert "off 0\n" in said
    assert left_behind(tmp_path) == []
