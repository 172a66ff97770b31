"""The units under a real systemd: their sandboxes, and what a failure starts, old and new."""

import json
from pathlib import Path

import pytest

from rehearsal.machines.nspawn.root_image import DEFAULT, VARIABLE
from tests.rehearsal.machines.nspawn.conftest import Boot, left_behind

NEWER = "trixie"  # its systemd is newer than Ubuntu 24.04's, and the default's is older
WORKING = r"""
FIELDS = ("CapBnd", "CapEff", "NoNewPrivs", "Seccomp")
answer = b""
machine = make()
machine.start()
said(machine, "the end of the user data")
root = machine.root
for name in ("contract", "userdata"):
    shutil.copytree(name, root / "opt/training/bundle" / name)
for name in ("etc/training", "var/log/training"):
    (root / name).mkdir()
(root / "etc/training/run.env").write_text(
    "RUN_URI=s3://runs/runs/one\nAWS_REGION=us-east-1\nSTACK_NAME=Stack\n"
    "NOTICE_BUDGET_SECONDS=30\nWORKLOAD=trajectory\n"
)
(root / "opt/training/machine.env").write_text("INSTANCE_ID=i-0123\nPOLL_SECONDS=0.2\n")
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
machine.notice(60)
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
def test_handler_and_senders_do_their_work_without_capabilities_or_devices(
    tmp_path: Path, boot: Boot
) -> None:
    process = boot(WORKING, "#!/bin/sh\necho the end of the user data\n")
    said, errors = process.communicate(timeout=600)
    assert process.returncode == 0, said + errors
    found = json.loads(said.splitlines()[-1])
    assert found["trainer"] == "ExecMainStatus=10", "SIGUSR1 arrived"
    for service, state in found["state"].items():
        assert int(state["CapBnd"], 16) == int(state["CapEff"], 16) == 0, service
        assert (state["NoNewPrivs"], state["Seccomp"], state["root"]) == ("1", "2", "ro"), service
        assert "null" in state["devices"] and "nvme1n1" not in state["devices"], service
    assert left_behind(tmp_path) == []


# The unit of userdata/ with another trainer, and a note in place of what ends the machine.
FAILING = r"""#!/bin/bash
set -o errexit
mkdir -p /var/log/training /etc/systemd/system/training{{,-failed}}.service.d
cat >/etc/systemd/system/training.service <<'END'
{training}
END
cat >/etc/systemd/system/training-failed.service <<'END'
{failed}
END
cat >/etc/systemd/system/training.service.d/other.conf <<'END'
[Service]
WorkingDirectory=/
ExecStart=
ExecStart=sh -c 'echo starts >>/root/said; exit $(cat /root/status)'
ExecStopPost=
RestartSec=0.1
END
cat >/etc/systemd/system/training-failed.service.d/other.conf <<'END'
[Service]
WorkingDirectory=/
ExecStart=
ExecStart=sh -c 'systemctl show --property=ActiveState training.service >>/root/said'
END
systemctl daemon-reload
for status in 75 1; do
    echo $status >/root/status
    systemctl start training.service
    sleep 8
done
echo "said: $(xargs </root/said) by $(systemctl --version | head -n 1)"
"""

FAILS = """
machine = make()
machine.start()
said(machine, "said: ")
print(*(line for line in machine.log_lines() if "said: " in line))
machine.kill()
machine.remove()
"""


@pytest.mark.machine
@pytest.mark.parametrize(("suite", "systemd"), [(DEFAULT, 252), (NEWER, 257)])
def test_only_the_last_failure_starts_what_ends_the_machine(
    tmp_path: Path, boot: Boot, monkeypatch: pytest.MonkeyPatch, suite: str, systemd: int
) -> None:
    """As from systemd 254 on only RestartMode=direct makes it; older ones do not know that."""
    monkeypatch.setenv(VARIABLE, suite)
    training, failed = (
        Path(f"userdata/units/{name}.service").read_text()
        for name in ("training", "training-failed")
    )
    process = boot(FAILS, FAILING.format(training=training, failed=failed))
    said, errors = process.communicate(timeout=900)
    assert process.returncode == 0, said + errors
    # Saved and stopped, then three failures.
    expected = "said: starts starts starts starts ActiveState=failed by systemd"
    assert f"{expected} {systemd} " in said
    assert left_behind(tmp_path) == []
