"""The whole boot on process machines: order, events, and what happens when it is done twice."""

import json
import os
import re
import subprocess

from rehearsal.machines.machine import BOOT
from rehearsal.machines.process import EC2_DISKS, JsonDisk, ProcessMachine
from tests.userdata.rig import USERDATA, Rig, calls, run_on, trainer_notes, wait, wait_until
from training.cli.main import _parser

STEPS = [
    "run-env",
    "run-state",
    "interpreter",
    "services",
    "data-volume",
    "cloudwatch-agent",
    "interruption-handler",
    "keep-bundle",
    "dataset",
    "torch",
    "training",
]
XFS = JsonDisk(
    name="nvme0n1",
    serial="vol0d1a2b3c4d5e6f708",
    device_name="/dev/sdf",
    signatures=("xfs",),
    tags={"TYPE": "xfs", "UUID": "8f5b0b5e-0000-4000-8000-000000000001"},
)


def disk(machine: ProcessMachine, name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((machine.folder / f"sys/disks/{name}.json").read_text())
    return content


def test_boot_takes_its_steps_in_order_and_sends_the_fleet_to_zero_when_done(rig: Rig) -> None:
    rig.order(run="finish")
    machine = rig.machine()
    wait(machine, f"fleet {rig.fleet_id} to zero: the run is finished")
    verdicts = [line for line in (machine.root / BOOT).read_text().splitlines() if line[0] == "["]
    passed = [line.removeprefix("[ok] ").partition(":")[0] for line in verdicts]
    # The import of torch runs beside the others: it may end before the last of them.
    assert [name for name in passed if name != "torch"] == [s for s in STEPS if s != "torch"]
    assert passed.index("torch") < passed.index("training")
    assert rig.target_capacity() == 0
    events = {event["name"]: event for event in rig.events()}
    assert {f"boot-{step}" for step in (*STEPS, "fetch")} <= events.keys()
    assert "fleet-to-zero" in events
    # The interruption handler reads there that the notice to come is our own doing.
    assert (machine.folder / "run/training/stopping").exists()
    for step in STEPS:
        assert events[f"boot-{step}"]["status"] == "ok"
        assert events[f"boot-{step}"]["seconds"] >= 0
        assert events[f"boot-{step}"]["instance_id"] == machine.instance_id
    assert (machine.folder / "data").readlink() == machine.folder.resolve() / "sys/disks/nvme0n1"


def test_trainer_gets_run_env_as_arguments_that_training_knows(booted: Rig) -> None:
    machine = booted.machines[0]
    (run,) = calls(machine, "run")
    options = _parser("run").parse_args(run)
    root = machine.folder.resolve()
    assert (options.workload, options.recipe) == ("trajectory", "laptop")
    assert options.override == ["epochs=2", "width=64"]
    assert (options.run_uri, options.run_id) == (f"s3://runs/runs/{booted.run_id}", booted.run_id)
    assert options.artifacts_uri == "s3://runs/artifacts"
    assert options.writer == machine.instance_id
    # Where a replacement finds it after a deploy that lets instances read another bundle only.
    kept = f"runs/{booted.run_id}/bundles/bundle.zip"
    assert options.bundle_uri == f"s3://runs/{kept}"
    s3 = booted.aws.client("s3")
    began_with, copy = (
        s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        for bucket, key in (("assets", "bundle.zip"), ("runs", kept))
    )
    assert copy == began_with
    assert options.dataset_uri == str(root / "data/dataset")
    assert options.scratch == root / "data/scratch"
    assert options.notice_file == root / "run/training/notice.json"
    assert options.metrics_file == machine.metrics_file.resolve()
    (sync,) = calls(machine, "data")
    assert _parser("data").parse_args(sync).wait_seconds == 1800


def test_machine_gets_its_credentials_from_the_metadata_alone(booted: Rig) -> None:
    machine = booted.machines[0]
    environment = trainer_notes(machine)[-1]["environment"]
    forbidden = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED")
    assert [name for name in forbidden if name in environment] == []
    assert environment["AWS_CONFIG_FILE"].startswith(str(machine.folder.resolve()))


def test_what_one_machine_has_read_of_torch_the_next_reads_ahead(booted: Rig) -> None:
    machine, s3 = booted.machines[0], booted.aws.client("s3")
    # Left by the first machine of these tests, all of which have one image.
    key = f"artifacts/reads/{machine.metadata.instance.image_id}.json"
    wait_until(lambda: s3.list_objects_v2(Bucket="runs", Prefix=key)["KeyCount"] == 1)
    printed = machine.folder / "printed"
    bundle = machine.folder / "opt/training/bundle"
    run_on(machine, "bash", "-c", f"cd {bundle} && bash userdata/steps/read_ahead.sh >{printed}")
    assert re.search(
        r"read-ahead: (\d+) of \1 blocks of 512 KiB read ahead in", printed.read_text()
    )


def test_booting_twice_changes_nothing(booted: Rig) -> None:
    machine = booted.machines[0]
    before = (machine.folder / "etc/fstab").read_text()
    marker = machine.folder / "data/marker"
    marker.write_text("stays")
    run_on(machine, str(machine.folder / "var/lib/cloud/instance/user-data.txt"))
    wait_until(lambda: (machine.root / BOOT).read_text().count("[ok] training:") == 2)
    assert "[failed]" not in (machine.root / BOOT).read_text()
    assert (machine.folder / "etc/fstab").read_text() == before
    assert before.count("\n") == 1
    assert disk(machine, "nvme0n1")["times_formatted"] == 1
    assert marker.read_text() == "stays"
    assert len(calls(machine, "run")) == 1


def test_no_upgrade_of_a_package_restarts_the_trainer(booted: Rig) -> None:
    etc = booted.machines[0].folder / "etc"
    assert 'APT::Periodic::Enable "0";' in (etc / "apt/apt.conf.d/99-training.conf").read_text()
    program = (
        "do $ARGV[0]; die $@ if $@; my ($rule) = keys %{$nrconf{override_rc}};"
        "for (@ARGV[1 .. $#ARGV]) { /$rule/ or die $_ }; 'sshd.service' !~ /$rule/ or die"
    )
    units = [path.name for path in (USERDATA / "units").iterdir()]
    rules = etc / "needrestart/conf.d/training.conf"
    subprocess.run(["perl", "-e", program, rules, *units], check=True)


def test_a_finished_run_sends_the_fleet_to_zero_before_anything_is_synced(rig: Rig) -> None:
    rig.put("head.json", {"state": "finished"})
    machine = rig.machine()
    wait(machine, f"fleet {rig.fleet_id} to zero: the run is finished already")
    assert rig.target_capacity() == 0
    assert trainer_notes(machine) == []
    assert not (machine.folder / "data").exists()


def test_a_machine_that_cannot_stop_the_fleet_of_an_ended_run_ends_once_it_is_reopened(
    rig: Rig,
) -> None:
    """It idled, and was paid, until the Guard took its silence for the run's."""
    rig.put("head.json", {"state": "failed"})
    soon = {"FLEET_ATTEMPTS": "1", "BOOT_RETRY_SECONDS": "0.1", "AWS_MAX_ATTEMPTS": "1"}
    rig.aws.client("ssm").delete_parameter(Name=rig.parameter)
    machine = rig.machine(environment=soon)
    wait(machine, "[failed] fleet to zero: see above")
    rig.put("head.json", {"state": "released"})
    wait(machine, "EC2 terminates it")
    assert rig.target_capacity() == 1


def test_a_replacement_runs_the_run_s_first_bundle_and_formats_no_formatted_volume(
    rig: Rig,
) -> None:
    rig.put("head.json", {"state": "released"})
    kept = f"s3://runs/runs/{rig.run_id}/bundles/bundle.zip"
    s3 = rig.aws.client("s3")
    s3.copy({"Bucket": "assets", "Key": "bundle.zip"}, "runs", kept.removeprefix("s3://runs/"))
    rig.put("config.json", {"bundle_uri": kept})
    variables = rig.run_env(BUNDLE_URI="s3://assets/torch.zip")
    machine = rig.machine(variables=variables, disks=(XFS, EC2_DISKS[1]))
    (machine.folder / "sys/disks/nvme0n1").mkdir()
    wait(machine, "trainer listens")
    assert "times_formatted" not in disk(machine, "nvme0n1")
    assert disk(machine, "nvme0n1")["mounted"] == "/data"
    fstab = (machine.folder / "etc/fstab").read_text()
    assert fstab.startswith("UUID=8f5b0b5e-0000-4000-8000-000000000001 /data xfs ")
    assert "noatime" in fstab
    (run,) = calls(machine, "run")
    assert run[run.index("--bundle-uri") + 1] == kept
    assert (machine.folder / "opt/training/bundle/userdata/torch.py").exists()
    assert (machine.root / BOOT).read_text().count("[ok] run-env") == 2


def test_boot_leaves_the_rehearsing_user_alone(booted: Rig) -> None:
    machine = booted.machines[0]
    sessions = {os.getsid(process.pid) for process in machine.processes()}
    assert os.getsid(0) not in sessions
