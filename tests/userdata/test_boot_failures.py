"""Boots that fail: what is tried again, what ends the machine, and the little that ends the run."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from rehearsal.machines.machine import BOOT, TRAINING
from rehearsal.machines.metadata import Credentials, MetadataServer, RehearsedInstance
from rehearsal.machines.process import EC2_DISKS, SHIMS, ProcessMachine
from rehearsal.machines.quirks import Quirks
from stacks.user_data import render
from tests.machine_key import machine_key
from tests.userdata.rig import USERDATA, Rig, calls, run_on, wait, wait_until

SYSTEMCTL = str(SHIMS / "systemctl")
NO_PATIENCE = {"DISK_WAIT_SECONDS": "0", "FETCH_ATTEMPTS": "1"}
SCRIPTS = (
    "run_state",
    "interpreter",
    "services",
    "data_volume",
    "interruption_handler",
    "dataset",
    "training",
)


def reason_of_the_runs_end(rig: Rig, machine: ProcessMachine) -> str:
    """Wait until the fleet is at zero; hold head and events to it; return the reason."""
    wait(machine, f"[ok] fleet {rig.fleet_id} to zero")
    assert rig.target_capacity() == 0
    head = rig.read("head.json")
    assert head["state"] == "failed"
    assert any(event["status"] == "failed" for event in rig.events())
    assert calls(machine, "run") == []
    return str(head["reason"])


def reason_of_the_machines_end(rig: Rig, machine: ProcessMachine) -> str:
    """Wait until EC2 terminates the instance; the run goes on; return the event's message."""
    wait(machine, f"[ok] machine {machine.instance_id}: EC2 terminates it")
    assert rig.instance_state(machine) in ("shutting-down", "terminated")
    assert rig.target_capacity() == 1
    assert calls(machine, "fail") == []
    (event,) = [each for each in rig.events() if each["name"] == "machine-failed"]
    assert (event["status"], event["instance_id"]) == ("failed", machine.instance_id)
    return str(event["message"])


def test_steps_that_fail_once_are_tried_again_and_a_restart_finds_its_way(rig: Rig) -> None:
    faults = " ".join(f"{name}.sh:once" for name in SCRIPTS)
    machine = rig.machine(environment={"FAULTS": faults})
    wait(machine, "trainer listens")
    log = (machine.root / BOOT).read_text()
    for name in SCRIPTS:
        step = name.replace("_", "-")
        assert f"[retry] {step}: attempt 1 of 3 failed: {name}.sh is made to fail once" in log
        assert f"[ok] {step}: " in log

    run_on(machine, SYSTEMCTL, "stop", "training.service")
    # After a restart of the machine /run is empty, and systemd starts what is enabled.
    shutil.rmtree(machine.folder / "run/training")
    enabled = sorted((machine.folder / "etc/systemd/system/multi-user.target.wants").iterdir())
    # The trainer itself waits until the volume is mounted and the dataset is whole.
    assert "training.service" not in {link.name for link in enabled}
    for link in enabled:
        run_on(machine, SYSTEMCTL, "start", link.name)
    wait_until(lambda: (machine.root / TRAINING).read_text().count("trainer listens") == 2)
    assert "[failed]" not in (machine.root / BOOT).read_text()


def test_a_machine_that_may_not_end_itself_says_so_once_and_goes_on_asking(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its image was made of a machine that has trained.
    left = (
        'mkdir -p "$MACHINE_ROOT"/{opt,var/log}/training\n'
        "printf 'PYTHON=python3\\nINSTANCE_ID=i-0ther\\n' "
        '>"$MACHINE_ROOT/opt/training/machine.env"\n'
        "echo 'uncorrectable ECC error' >\"$MACHINE_ROOT/var/log/training/training.log\"\n"
    )
    begin = "#!/bin/bash\n"
    monkeypatch.setattr(
        "tests.userdata.rig.render", lambda known: render(known).replace(begin, begin + left, 1)
    )
    machine = rig.machine(environment={"FAULTS": "dataset.sh:always"})
    rig.protect(machine, True)
    refused = f"[failed] machine {machine.instance_id}: it cannot terminate itself: An error"
    wait_until(lambda: "\n".join(machine.log_lines()).count(refused) > 1)
    rig.protect(machine, False)
    reason = reason_of_the_machines_end(rig, machine)
    assert reason == "boot failed at dataset: dataset.sh is made to fail"
    assert (machine.root / BOOT).read_text().count("[retry]") == 2
    assert calls(machine, "run") == []
    (event,) = [each for each in rig.events() if each["name"] == "terminate-failed"]
    assert event["message"].startswith("the Guard terminates this machine: An error")
    assert {each["instance_id"] for each in rig.events()} == {machine.instance_id}


def test_a_machine_says_its_first_word_before_any_step_that_may_take_long(rig: Rig) -> None:
    rig.machine(environment={"FAULTS": "interpreter.sh:always", "STEP_RETRY_SECONDS": "600"})
    wait_until(lambda: "boot-fetch" in [each["name"] for each in rig.events()])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_that_always_fails_ends_the_machine_and_never_the_run(rig: Rig, name: str) -> None:
    machine = rig.machine(environment={"FAULTS": f"{name}.sh:always"})
    reason = reason_of_the_machines_end(rig, machine)
    assert reason == f"boot failed at {name.replace('_', '-')}: {name}.sh is made to fail"
    assert calls(machine, "run") == []


@pytest.mark.slow
def test_without_a_data_volume_the_machine_ends_and_lists_what_is_there(rig: Rig) -> None:
    machine = rig.machine(disks=EC2_DISKS[1:], environment=NO_PATIENCE)
    reason = reason_of_the_machines_end(rig, machine)
    assert "no EBS disk attached as /dev/sdf" in reason
    assert (
        "/dev/nvme1n1 (Amazon Elastic Block Store, vol00112233445566778, sda1, holds /)" in reason
    )


def test_without_a_bundle_the_machine_ends(rig: Rig) -> None:
    variables = rig.run_env(BUNDLE_URI="s3://assets/missing.zip")
    machine = rig.machine(variables=variables, environment=NO_PATIENCE)
    reason = reason_of_the_machines_end(rig, machine)
    assert "boot failed at fetch: no boot started from s3://assets/missing.zip: " in reason
    assert "(404)" in reason


OLD_PYTHON = """case "$1" in
-c) exit 1 ;;
--version) echo Python 3.10.12; exit ;;
esac
exec "$real" "$@"
"""


@pytest.mark.parametrize(
    ("quirks", "has"),
    [
        (Quirks(lacks=("aws",)), "no AWS CLI, neither aws on the PATH nor in /opt/pytorch/bin"),
        (Quirks(programs={"python3": OLD_PYTHON}), "Python 3.10.12, and the boot needs 3.11"),
    ],
    ids=["without aws", "with an old python3"],
)
def test_an_image_that_no_boot_could_use_ends_the_machine_and_is_named(
    rig: Rig, quirks: Quirks, has: str
) -> None:
    machine = rig.machine(quirks=quirks)
    reason = reason_of_the_machines_end(rig, machine)
    assert reason.startswith(f"boot failed at fetch: the image has {has}")
    assert "; use a Deep Learning AMI with PyTorch (context pytorch_ami_parameter); " in reason


def test_user_data_ends_the_machine_wherever_it_fails(rig: Rig, tmp_path: Path) -> None:
    machine = rig.instance()
    (tmp_path / "var/lib/cloud/data").mkdir(parents=True)
    (tmp_path / "var/lib/cloud/data/instance-id").write_text(f"{machine}\n")
    (tmp_path / "etc/training").mkdir(parents=True)
    shutil.copy(USERDATA / "end_machine.py", tmp_path / "etc/training")
    (tmp_path / "opt").write_text("no folder can be made here")
    # Nobody reads what it says.
    with (
        MetadataServer(
            instance=RehearsedInstance(id=machine),
            credentials=Credentials(access_key_id=machine_key(rig.aws)),
        ) as metadata,
        Path("/dev/full").open("w") as log,
    ):
        subprocess.run(
            ["bash", USERDATA / "first_boot.sh"],
            env={
                "MACHINE_ROOT": str(tmp_path),
                "PATH": "/usr/bin:/bin",
                "AWS_ENDPOINT_URL": rig.aws.endpoint,
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.endpoint,
                "TERMINATE_RETRY_SECONDS": "0.1",
            },
            stdout=log,
            stderr=log,
            check=False,
        )
    assert rig.state_of(machine) in ("shutting-down", "terminated")


def test_a_killed_bootstrap_ends_the_machine(rig: Rig) -> None:
    rig.order(run="wait", sync="until notice")
    machine = rig.machine()
    wait(machine, "[ok] interruption-handler")
    (bootstrap,) = [
        process
        for process in machine.processes()
        if process.cmdline()[1:] == ["bundle/userdata/bootstrap.sh"]
        and process.parent().pid in {os.getsid(process.pid)}
    ]
    bootstrap.send_signal(signal.SIGKILL)
    reason = reason_of_the_machines_end(rig, machine)
    assert reason == "boot failed at no step: bootstrap.sh ended (signal, exit status 9)"


def test_fails_on_unknown_and_missing_variables_by_their_names(rig: Rig) -> None:
    variables = rig.run_env(LEARNING_RATE="3", RECIPE=None)
    machine = rig.machine(variables=variables, environment=NO_PATIENCE)
    reason = reason_of_the_runs_end(rig, machine)
    assert "unknown variable LEARNING_RATE" in reason
    assert "variable RECIPE is missing" in reason


def test_fails_without_a_dataset_and_says_how_to_upload_one(rig: Rig) -> None:
    rig.order(run="wait", sync=3)
    machine = rig.machine(variables=rig.run_env(DATASET_WAIT_SECONDS="7"))
    reason = reason_of_the_runs_end(rig, machine)
    assert "no s3://datasets/trajectory/manifest.json after 7 s" in reason
    assert "python -m training data upload DIR --dataset-uri s3://datasets/trajectory" in reason
