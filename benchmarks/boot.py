"""Seconds from power-on to the first optimizer step, by what a machine did when.

The machines of one rehearsal boot one after the other, alone on the host: each is killed at its
first step, and its replacement boots. Rows are times since power-on; steps overlap. The first
machine also prepares the features; the others find them, and wait for the killed one's lease.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rehearsal.__main__ import child_environment
from rehearsal.aws import EmbeddedAws
from rehearsal.aws.event_bus import EventBus
from rehearsal.drill.cdk import run_cdk
from rehearsal.drill.children import Children
from rehearsal.drill.deployment import Deployment, RehearsalFailed, synth_arguments
from rehearsal.drill.fleet import Fleet, Life
from rehearsal.drill.interruptions import Drill
from rehearsal.drill.lineage import Files, read_events
from rehearsal.drill.run_files import bucket_files
from rehearsal.machines.nspawn.host import nspawn_host
from rehearsal.machines.nspawn.machine import NspawnMachine
from rehearsal.machines.nspawn.namespaces import check_host, enter_namespaces
from rehearsal.machines.nspawn.root_image import root_image
from rehearsal.machines.quirks import Quirks
from rehearsal.scenarios.scenario import NSPAWN, PROCESS

REPOSITORY = Path(__file__).parent.parent
FOLDER = REPOSITORY / "out" / "benchmarks" / "boot"
MACHINES = (PROCESS, NSPAWN)
CLIPS = 240
LIMIT_SECONDS = 300.0
CONTEXT = {
    "size": "g5.xlarge",
    "workload": "trajectory",
    "recipe": "laptop",
    "overrides": "single_frame_epochs=1 epochs=1",
    "lease_ttl_seconds": "6",
}
# Up to the user data, which the last of them runs.
UNITS = ("cloud-init-local", "cloud-init", "cloud-config", "cloud-final")
_USERSPACE = "UserspaceTimestampMonotonic"
FIRST_STEP = "first optimizer step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that a machine did, in seconds since its power-on."""

    what: str
    begins: float
    ends: float


def measure(*, machines: int, machine: str) -> list[dict[str, Any]]:
    """Boot that many machines of a kind in one rehearsal; return one row for each step."""
    if machines < 1:
        raise ValueError(f"a benchmark needs at least one machine, got {machines}")
    image = None
    if machine == NSPAWN:
        check_host()
        image = root_image(_say)
        enter_namespaces()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with ExitStack() as stack:
        aws = stack.enter_context(EmbeddedAws())
        environment = child_environment(aws)
        children = stack.enter_context(
            Children(say=_say, environment=environment, folder=REPOSITORY)
        )
        nspawn = None
        if image is not None:
            network = FOLDER / "network"
            nspawn = stack.enter_context(nspawn_host(image, network, aws.application, aws.region))
        deployment = Deployment(folder=FOLDER, aws=aws, children=children, nspawn=nspawn)
        _deploy(deployment)
        return rows(_boot(deployment, machines))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _deploy(deployment: Deployment) -> None:
    workload, assembly = CONTEXT["workload"], FOLDER / "cdk.out"
    making = deployment.start_dataset(workload=workload, count=CLIPS, seed=0)
    deployment.bootstrap()
    run_cdk(deployment.children, "cdk synth", *synth_arguments(assembly, CONTEXT))
    deployment.deploy(assembly, "DatasetStack")
    making.expect()
    deployment.upload(workload)
    deployment.deploy(assembly, "TrainingStack")


def _boot(deployment: Deployment, machines: int) -> list[list[Span]]:
    """Boot one machine after the other, each to its first step; return what they did."""
    aws, identifier = deployment.aws, deployment.fleet_id()
    fleet = Fleet(
        aws=aws,
        bus=EventBus(aws=aws, code_folder=FOLDER / "functions"),
        id=identifier,
        arn=f"arn:aws:ec2:{aws.region}:{aws.account}:spot-fleet-request/{identifier}",
        boot=lambda instance: deployment.machine(instance, FOLDER / "machines", 120.0, Quirks()),
        say=_say,
    )
    run = bucket_files(aws.client("s3"), deployment.output("TrainingStack", "RunUri"))
    drill = Drill(fleet=fleet, run=run, plan=[])
    found: list[list[Span]] = []
    try:
        while len(found) < machines:
            fleet.step()
            drill.step()
            for life in fleet.running():
                if life.seconds > LIMIT_SECONDS:
                    raise RehearsalFailed(
                        f"{life.instance.id} made no step in {LIMIT_SECONDS:g} s; its logs are in "
                        f"{FOLDER / 'machines'}"
                    )
                if life.instance.id in drill.first_step:
                    found.append(_spans(life, run, drill))
                    fleet.interrupt(life, notice=False)
            time.sleep(0.05)
    finally:
        fleet.close()
        fleet.bus.close()
    return found


def _spans(life: Life, run: Files, drill: Drill) -> list[Span]:
    """What this machine did until its first step, in the order in which it ended."""
    power_on = time.time() - (time.monotonic() - life.started)
    found = _before_user_data(life)
    for event in _wait_for_events(run, life.instance.id):
        ends = datetime.fromisoformat(event["time"]).timestamp() - power_on
        found.append(Span(what=event["name"], begins=ends - event.get("seconds", 0.0), ends=ends))
    found.append(
        Span(what="first sign of work", begins=0, ends=drill.first_progress[life.instance.id])
    )
    found.append(Span(what=FIRST_STEP, begins=0, ends=drill.first_step[life.instance.id]))
    return found


def _wait_for_events(run: Files, instance_id: str) -> list[dict[str, Any]]:
    """The machine's events, which it sends in batches every two seconds."""
    give_up_at = time.monotonic() + 30
    while True:
        events = [each for each in read_events(run) if each["instance_id"] == instance_id]
        if any(each["name"] == "boot" for each in events) or time.monotonic() > give_up_at:
            return events
        time.sleep(0.2)


def _before_user_data(life: Life) -> list[Span]:
    """What a machine with systemd did first, by the host's monotonic clock, which it shares."""
    machine = life.machine
    if not isinstance(machine, NspawnMachine):
        return []

    def seconds(name: str, *unit: str) -> float:
        value = machine.execute("systemctl", "show", f"--property={name}", "--value", *unit)
        return int(value) / 1e6 - life.started

    found = [Span(what="power-on to systemd", begins=0.0, ends=seconds(_USERSPACE))]
    for unit in UNITS:
        begins = seconds("ExecMainStartTimestampMonotonic", f"{unit}.service")
        ends = seconds("ExecMainExitTimestampMonotonic", f"{unit}.service")
        found.append(Span(what=f"{unit}.service", begins=begins, ends=max(begins, ends)))
    return found


def rows(machines: Sequence[Sequence[Span]]) -> list[dict[str, Any]]:
    """Return a row for each span, in the order of the first machine, with columns by machine."""
    names = list(dict.fromkeys(span.what for spans in machines for span in spans))
    table = []
    for name in names:
        row: dict[str, Any] = {"what": name}
        for number, spans in enumerate(machines, 1):
            span = next((each for each in spans if each.what == name), None)
            row[f"{number}, from s"] = span and round(span.begins, 2)
            row[f"{number}, to s"] = span and round(span.ends, 2)
        table.append(row)
    return table
