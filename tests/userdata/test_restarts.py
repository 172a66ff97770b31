"""The plan's restarts against machines that boot, sync over a line of a known rate, and train."""

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from embedded_aws import Fault
from rehearsal.machines.machine import TRAINING
from rehearsal.machines.process import ProcessMachine
from rehearsal.machines.quirks import Quirks
from sizing.models.constants import Constants
from sizing.models.data_path import Rate
from sizing.models.footprints import counted_stages
from sizing.models.restart import Restart, Sync
from sizing.plan.plan_inputs import read_manifest
from tests.userdata.rig import NO_TORCH, REPOSITORY, Rig, boot_program, files_of_the_bundle

# One file at a time, and small shards: on an instance, one shard of a thousand is in flight.
ONE_BY_ONE = Quirks(
    files={
        "opt/training/packages/sitecustomize.py": "import importlib.util\n"
        'if importlib.util.find_spec("training"):\n'
        "    from training.durable.store import dataset\n"
        "    from training.durable.store.s3 import S3Store\n\n"
        "    S3Store.num_threads, dataset._MORE_THREADS = 1, 1\n"
    }
)
MAKE = """
import sys
from training.cli.main import main
from training.workloads.imagenet import packing
packing._SHARD_BYTES = 800_000
sys.exit(main(["data", "make", *sys.argv[1:]]))
"""
COUNTS = {"trajectory": 132, "imagenet": 1600, "detection": 60, "growth": 3000}
OVERRIDES = {
    "trajectory": "baselines=false epochs=40",
    "imagenet": "epochs=9",
    "detection": "epochs=9 drop_epoch=8",
    "growth": "dense_steps=60 experts_steps=10 grown_steps=10",
}
# The trainer of a slow machine is told to end only by the test.
PATIENCE_SECONDS = 1500.0
UNKNOWN = Rate(baseline=0.0, burst=0.0, burst_seconds=0.0)


@dataclass(kw_only=True)
class Seen:
    """Seconds of one machine: its boot, to its first work, and of the epoch that began with it."""

    boot: float
    taken_over: float  # from its boot's end to the run's take-over, which asks for no data
    first_work: float
    epoch: float | None = None


def upload(rig: Rig, workload: str, data: Path) -> dict[str, str]:
    """Make a workload's data and upload it with the bundle; return the run.env."""
    count = str(COUNTS[workload])
    make = [sys.executable, "-c", MAKE, "--workload", workload, "--count", count]
    subprocess.run([*make, "--out", str(data)], check=True)
    s3 = rig.aws.client("s3")
    for path in (path for path in data.rglob("*") if path.is_file() and path.name[0] != "."):
        s3.upload_file(str(path), "datasets", f"{rig.run_id}/{path.relative_to(data)}")
    path = data.parent / "bundle.zip"
    with zipfile.ZipFile(path, "w") as bundle:
        for file in files_of_the_bundle():
            bundle.write(file, file.relative_to(REPOSITORY).as_posix())
        bundle.writestr("userdata/torch.py", NO_TORCH)
    rig.bundle = f"{rig.run_id}.zip"
    s3.upload_file(str(path), "assets", rig.bundle)
    return rig.run_env(
        WORKLOAD=workload,
        OVERRIDES=f'"{OVERRIDES[workload]}"',
        PREDICTION='""',
        DATASET_URI=f"s3://datasets/{rig.run_id}",
        TRAINER_OPTIONS='"lease_ttl_seconds=2 checkpoint_interval=5s"',
    )


def follow(rig: Rig, machine: ProcessMachine, *, to_epochs_end: bool) -> Seen:
    """Watch a machine to its first work, or to the end of the epoch that it began; take it away."""
    began, first, epoch = datetime.now(UTC), None, None
    while (now := (datetime.now(UTC) - began).total_seconds()) < PATIENCE_SECONDS:
        time.sleep(0.1)
        if not (lines := work(machine)):
            continue
        # A step's numbers are read one step late, so its line may come after a wait.
        at = lines[0].get("time")
        first = first or (now if at is None else seconds_between(began, at))
        if not to_epochs_end:
            break
        epochs = [line.get("epoch", -1) for line in lines if line["kind"] == "step"]
        if epochs and epochs[-1] > epochs[0]:
            epoch = now - first
            break
    machine.kill()
    assert first is not None, "\n".join(machine.log_lines())
    of_name = {event["name"]: event for event in rig.events()}  # the last of each
    boot, taken = of_name["boot"], of_name["take-over"]
    return Seen(
        boot=boot["seconds"],
        taken_over=seconds_between(datetime.fromisoformat(boot["time"]), taken["time"]),
        first_work=first,
        epoch=epoch,
    )


def seconds_between(one: datetime, other: str) -> float:
    return (datetime.fromisoformat(other) - one).total_seconds()


def work(machine: ProcessMachine) -> list[Mapping[str, Any]]:
    """The trainer's lines of work so far, or one that says that a program has begun to train."""
    if (log := machine.root / TRAINING).exists() and "epoch 1 step" in log.read_text():
        return [{"kind": "program"}]
    if not machine.metrics_file.exists():
        return []
    lines = machine.metrics_file.read_text().splitlines()[:-1]
    return [line for line in map(json.loads, lines) if line["kind"] in ("step", "prepare")]


@pytest.mark.timeout(3600)
@pytest.mark.slow  # minutes, most of which a sync waits for its line
@pytest.mark.parametrize("workload", ["trajectory", "growth", "imagenet", "detection", "program"])
def test_a_restart_and_its_first_epoch_take_as_long_as_planned(
    rig: Rig, tmp_path: Path, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_program, data = workload == "program", tmp_path / "data"
    if is_program:
        data.mkdir()
        (data / "unread.bin").write_bytes(bytes(10_000_000))
        variables = boot_program(rig, "plain", tmp_path, epochs=40)
    else:
        variables = upload(rig, workload, data)
    manifest = read_manifest(data / "manifest.json")
    stages = [] if is_program else counted_stages(workload, "laptop")
    first_files = stages[-1].first_files if stages else None
    slows = first_files is not None
    # At full speed, then on a line for which the machine's own times are short.
    quick = follow(rig, rig.machine(variables=variables, quirks=ONE_BY_ONE), to_epochs_end=slows)
    own_epoch = quick.epoch or 1.0
    seconds = 60 + 2 * quick.first_work + 2 * own_epoch * slows
    rate = manifest.num_bytes / seconds
    line = Fault(action="s3:GetObject", key=f"{rig.run_id}/*", bytes_per_second=rate)
    mb_per_second = rate / 1e6
    sync = Sync(
        network=Rate(baseline=mb_per_second, burst=mb_per_second, burst_seconds=0.0),
        volume=UNKNOWN,
        num_bytes=manifest.num_bytes,
        first_bytes=sum(manifest.file_bytes[:first_files]),
        epoch_seconds=own_epoch,
        in_flight_bytes=manifest.num_bytes / len(manifest.file_bytes),
        is_of_program=is_program,
    )
    variables["RUN_URI"] += "-2"
    variables["RUN_ID"] = rig.run_id = f"{rig.run_id}-2"
    rig.aws.faults.begin([line])
    try:
        for which in ("first", "replacement"):
            machine = rig.machine(variables=variables, quirks=ONE_BY_ONE)
            seen = follow(rig, machine, to_epochs_end=slows and which == "first")
            planned = sync.restart(own_times(quick, quick if is_program else seen))
            with capsys.disabled():
                print(f"\n{workload}, {which}: {shown(planned, seen, own_epoch, sync)}")
            assert seen.first_work == pytest.approx(planned.to_training, rel=0.2)
            if seen.epoch:
                assert seen.epoch == pytest.approx(own_epoch + planned.data_wait, rel=0.2)
    finally:
        rig.aws.faults.end()


def own_times(quick: Seen, seen: Seen) -> Constants:
    """The times of a machine's own work: load makes each machine's differ.

    What follows the take-over is taken from a machine that waited for no data.
    """
    after = quick.first_work - quick.boot - quick.taken_over
    return Constants(
        launch_seconds=0.0,
        user_data_seconds=seen.boot,
        first_step_seconds=seen.taken_over + after,
    )


def shown(planned: Restart, seen: Seen, own_epoch: float, sync: Sync) -> str:
    text = (
        f"{sync.num_bytes / 1e6:.1f} MB at {sync.network.baseline:.3f} MB/s; boot to first work "
        f"{planned.to_training:.1f} s planned, {seen.first_work:.1f} measured"
    )
    if seen.epoch:
        planned_epoch = own_epoch + planned.data_wait
        text += (
            f"; its epoch {planned_epoch:.1f} planned ({own_epoch:.1f} at full speed), "
            f"{seen.epoch:.1f} measured"
        )
    return text
