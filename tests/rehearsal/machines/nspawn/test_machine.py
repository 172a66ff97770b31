"""A machine that really boots: systemd, cloud-init, disks, network; and that it leaves nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

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
echo "variables: $(env | grep AWS_)."
echo the end of the user data
"""

PROGRAM = """
import sys
from pathlib import Path
from rehearsal.machines.metadata import MetadataServer
from rehearsal.machines.nspawn.machine import NspawnMachine
from rehearsal.machines.nspawn.namespaces import check_host, enter_namespaces
from rehearsal.machines.nspawn.network import Network
from rehearsal.machines.nspawn.root_image import root_image

folder, user_data = Path(sys.argv[1]), sys.argv[2].encode()
check_host()
image = root_image(print)
enter_namespaces()

def application(environ, start):
    start("200 OK", [("Content-Length", "7")])
    return [b"its AWS"]

with Network(folder=folder / "network") as network:
    network.serve_aws(application, "us-east-1")
    machine = NspawnMachine(
        folder=folder / "machine", image=image, instance_id="i-0123", network=network,
        metadata=MetadataServer(
            instance_id="i-0123", instance_type="g5.xlarge", user_data=user_data
        ),
    )
    machine.start()
    assert machine.wait(180, "the end of the user data"), machine.log_lines()
    print("\\n".join(machine.log_lines()))
    print("killed", machine.kill())
    machine.remove()
"""


@pytest.mark.machine
@pytest.mark.slow  # the root image takes a minute, the first time
def test_user_data_finds_a_machine_of_ec2_s_and_a_power_cut_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), USER_DATA]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert '"name": "/dev/nvme1n1", "type": "disk", "model": "Amazon EC2 NVMe Instance' in said
    assert "mounted: xfs\n" in said
    assert "type: g5.xlarge\n" in said
    assert "b'its AWS'" in said
    assert "failed units: .\n" in said
    assert "variables: .\n" in said, "as on EC2, no endpoint is given"
    assert int(said.rpartition("killed ")[2]) > 5
    loops = subprocess.run(["losetup", "--list"], capture_output=True, text=True, check=True)
    assert str(tmp_path) not in loops.stdout
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert not list(Path("/sys/fs/cgroup").rglob("rehearsal-i-0123"))
