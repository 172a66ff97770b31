"""The units' sandboxes under a real systemd: they are in force, and all that is theirs works."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

PROGRAM = r"""
import json, shutil, sys, time
from pathlib import Path
from rehearsal.machines.metadata import MetadataServer
from rehearsal.machines.nspawn.machine import NspawnMachine
from rehearsal.machines.nspawn.namespaces import check_host, enter_namespaces
from rehearsal.machines.nspawn.network import MachineNetwork
from rehearsal.machines.nspawn.root_image import root_image

folder = Path(sys.argv[1])
check_host()
image = root_image(print)
enter_namespaces()
asked = []
FIELDS = ("CapBnd", "CapEff", "NoNewPrivs", "Seccomp")

def application(environ, start):
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    asked.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']} {body[:200]}")
    start("200 OK", [("Content-Length", "0"), ("ETag", '"0"')])
    return [b""]

def wait_for(text, found):
    give_up_at = time.monotonic() + 60
    while not any(text in each for each in found()):
        assert time.monotonic() < give_up_at, (text, list(found()))
        time.sleep(0.1)

with MachineNetwork(folder=folder / "network") as network:
    network.serve_aws(application, "us-east-1")
    user_data = b"#!/bin/sh\necho the end of the user data\n"
    metadata = MetadataServer(
        instance_id="i-0units", instance_type="g5.xlarge", user_data=user_data
    )
    machine = NspawnMachine(
        folder=folder / "machine", image=image, instance_id="i-0units", network=network,
        metadata=metadata,
    )
    machine.start()
    assert machine.wait(180, "the end of the user data"), machine.log_lines()
    root = machine.root
    for name in ("contract", "userdata"):
        shutil.copytree(name, root / "opt/training/bundle" / name)
    for name in ("etc/training", "var/log/training"):
        (root / name).mkdir()
    (root / "etc/training/run.env").write_text(
        "RUN_URI=s3://runs/runs/one\nAWS_REGION=us-east-1\nSTACK_NAME=Stack\n"
        "NOTICE_BUDGET_SECONDS=30\nWORKLOAD=trajectory\n"
    )
    (root / "opt/training/machine.env").write_text("INSTANCE_ID=i-0units\nPOLL_SECONDS=0.2\n")
    for unit in Path("userdata/units").iterdir():
        shutil.copy(unit, root / "etc/systemd/system")
    # In the trainer's place.
    (root / "etc/systemd/system/training.service").write_text(
        "[Service]\nExecStart=sleep infinity\n"
    )
    services = ["interruption-handler", "training-events", "training-metrics"]
    machine.execute("systemctl", "start", "training", *services)
    state = {}
    for service in services:
        pid = machine.execute("systemctl", "show", "--property=MainPID", "--value", service)
        lines = machine.execute("cat", f"/proc/{pid.strip()}/status").splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        mounts = machine.execute("cat", f"/proc/{pid.strip()}/mounts").splitlines()
        state[service] = {
            **{name: status[name].strip() for name in FIELDS},
            "root": next(line.split()[3][:2] for line in mounts if line.split()[1] == "/"),
            "devices": machine.execute("ls", f"/proc/{pid.strip()}/root/dev").split(),
        }
    metadata.notice(60)
    log = root / "var/log/training/interruption.log"
    wait_for("SIGUSR1 to training.service: sent", lambda: [log.read_text()])
    wait_for("-notice.json", lambda: asked)
    wait_for("notice_without_commit", lambda: asked)
    result = machine.execute("systemctl", "show", "--property=ExecMainStatus", "training").strip()
    print(json.dumps({"state": state, "trainer": result}))
    machine.kill()
    machine.remove()
"""


@pytest.mark.machine
@pytest.mark.slow  # half a minute; the drills on nspawn machines show the same as a whole
def test_handler_and_senders_do_their_work_without_capabilities_or_devices(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["trainer"] == "ExecMainStatus=10", "SIGUSR1 arrived"
    for service, state in found["state"].items():
        assert int(state["CapBnd"], 16) == int(state["CapEff"], 16) == 0, service
        assert (state["NoNewPrivs"], state["Seccomp"], state["root"]) == ("1", "2", "ro"), service
        assert "null" in state["devices"] and "nvme1n1" not in state["devices"], service
