"""The main job, end to end: deploy, train, interrupt, resume, finish, prove (`make demo`)."""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from contract.keys import HEAD
from rehearsal.aws import EmbeddedAws
from rehearsal.aws.event_bus import EventBus
from rehearsal.drill.cdk import run_cdk
from rehearsal.drill.children import Child, Children
from rehearsal.drill.fleet import Fleet, Instance
from rehearsal.drill.interruptions import Drill, PlannedInterruption
from rehearsal.drill.lineage import read_json
from rehearsal.drill.narrator import Narrator
from rehearsal.drill.receipt import Rehearsed
from rehearsal.drill.run_files import BucketFiles, FolderFiles, bucket_files
from rehearsal.machines import ProcessMachine
from rehearsal.machines.metadata import MetadataServer

REPOSITORY = Path(__file__).parents[2]
STACKS = ("DatasetStack", "TrainingStack")
POLL_SECONDS = 0.2
# EC2 gives 120 s and the interruption handler polls every 2 s; a shorter notice keeps the ratio.
NOTICE_SECONDS, HANDLER_POLL_SECONDS = 120.0, 2.0
# The Guard runs every ten minutes; a rehearsal of a few minutes would never see that.
GUARD_TICK_SECONDS = 30.0


class RehearsalFailed(RuntimeError):
    """The rehearsal stopped before its end; the message says where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """What a demo does; the defaults are those of `make demo`."""

    folder: Path
    size: str
    workload: str
    recipe: str
    overrides: str
    clips: int
    seed: int
    checkpoint_interval: str
    notice_seconds: float
    lease_ttl_seconds: float
    plan: Sequence[PlannedInterruption]
    timeout_seconds: float


@dataclass(kw_only=True, slots=True)
class Demo:
    """One rehearsal from deploy to receipt, phase by phase."""

    settings: DemoSettings
    aws: EmbeddedAws
    children: Children
    say: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)

    def run(self) -> Rehearsed:
        """Run all phases; raise RehearsalFailed or ChildFailed if one fails."""
        self._deploy()
        resources = self.check_resources()
        reference_folder = self.settings.folder / "uninterrupted"
        reference = self._start_reference(reference_folder)
        fleet, run = self._fleet()
        drill = Drill(fleet=fleet, run=run, plan=self.settings.plan)
        try:
            self._train(fleet, drill, run, reference)
        finally:
            fleet.close()
        drill.finish()
        self.say("the fleet is at zero; waiting for the uninterrupted run, to compare with it")
        reference.expect()
        fleet.bus.close()
        return Rehearsed(
            run=run,
            reference=FolderFiles(folder=reference_folder),
            lives=list(fleet.lives.values()),
            drill=drill,
            resources=resources,
            target_capacity=fleet.target_capacity(),
            processes_left=len(processes_below(self.settings.folder)),
            guard=[asdict(invocation) for invocation in fleet.bus.invocations],
            notice_seconds=self.settings.notice_seconds,
            seconds=time.monotonic() - self.started,
        )

    def _deploy(self) -> None:
        dataset = self.settings.folder / "dataset"
        making = self._start_python(
            "dataset",
            *("-m", "training", "data", "make", "--workload", self.settings.workload),
            *("--out", str(dataset), "--count", str(self.settings.clips)),
            *("--seed", str(self.settings.seed)),
        )
        run_cdk(
            self.children,
            "cdk bootstrap",
            "bootstrap",
            f"aws://{self.aws.account}/{self.aws.region}",
        )
        assembly = str(self.settings.folder / "cdk.out")
        context = (
            f"size={self.settings.size}",
            f"workload={self.settings.workload}",
            f"recipe={self.settings.recipe}",
            f"overrides={self.settings.overrides}",
            f"checkpoint_interval={self.settings.checkpoint_interval}",
            f"notice_budget_seconds={self.settings.notice_seconds:g}",
            f"lease_ttl_seconds={self.settings.lease_ttl_seconds:g}",
        )
        options = [word for pair in context for word in ("-c", pair)]
        run_cdk(self.children, "cdk synth", "synth", "--quiet", "--output", assembly, *options)
        deploy = (
            "deploy",
            "--app",
            assembly,
            "--require-approval",
            "never",
            "--progress",
            "events",
        )
        run_cdk(self.children, "cdk deploy DatasetStack", *deploy, "DatasetStack")
        making.expect()
        bucket = self._output("DatasetStack", "DatasetBucketName")
        self._start_python(
            "upload",
            *("-m", "training", "data", "upload", str(dataset)),
            *("--dataset-uri", f"s3://{bucket}/{self.settings.workload}"),
        ).expect()
        run_cdk(self.children, "cdk deploy TrainingStack", *deploy, "TrainingStack")

    def check_resources(self) -> dict[str, int]:
        """Count the deployed resources by type; raise if a service does not know one."""
        missing = self.aws.missing_resources(list(STACKS))
        if missing:
            raise RehearsalFailed(f"deployed, but missing: {', '.join(missing)}")
        counts: dict[str, int] = {}
        for stack in STACKS:
            found = self.aws.client("cloudformation").describe_stack_resources(StackName=stack)
            for resource in found["StackResources"]:
                kind = resource["ResourceType"]
                counts[kind] = counts.get(kind, 0) + 1
        self.say(f"{sum(counts.values())} resources exist, each checked by its own API")
        return counts

    def _start_reference(self, folder: Path) -> Child:
        settings = self.settings
        overrides = [word for pair in settings.overrides.split() for word in ("--override", pair)]
        return self._start_python(
            "uninterrupted",
            *("-m", "training", "run", "--workload", settings.workload),
            *("--recipe", settings.recipe, *overrides),
            *("--dataset-uri", str(settings.folder / "dataset"), "--run-uri", str(folder)),
            *("--checkpoint-interval", settings.checkpoint_interval),
            relayed=lambda line: False,
        )

    def _fleet(self) -> tuple[Fleet, BucketFiles]:
        fleet_id = self.aws.client("ssm").get_parameter(Name="/TrainingStack/fleet-id")
        self.aws.capacity.notice_seconds = self.settings.notice_seconds
        bus = EventBus(aws=self.aws, code_folder=self.settings.folder / "functions")
        identifier = fleet_id["Parameter"]["Value"]
        fleet = Fleet(
            aws=self.aws,
            bus=bus,
            id=identifier,
            arn=f"arn:aws:ec2:{self.aws.region}:{self.aws.account}:spot-fleet-request/{identifier}",
            boot=self._machine,
            say=self.say,
        )
        fleet.step()
        if not fleet.running():
            raise RehearsalFailed(f"fleet {identifier} started no instance")
        run_uri = self._output("TrainingStack", "RunUri")
        return fleet, bucket_files(self.aws.client("s3"), run_uri)

    def _train(self, fleet: Fleet, drill: Drill, run: BucketFiles, reference: Child) -> None:
        narrator = Narrator(say=self.say)
        next_tick = time.monotonic() + GUARD_TICK_SECONDS
        while not self._is_over(fleet, run):
            fleet.step()
            drill.step()
            for life in fleet.lives.values():
                narrator.relay(life)
            if reference.process.poll() not in (None, 0):
                reference.expect()
            if time.monotonic() >= next_tick:
                fleet.bus.tick()
                next_tick = time.monotonic() + GUARD_TICK_SECONDS
            if time.monotonic() - self.started > self.settings.timeout_seconds:
                raise RehearsalFailed(
                    f"not finished after {self.settings.timeout_seconds:g} s; "
                    f"the machines' logs are in {self.settings.folder / 'machines'}"
                )
            time.sleep(POLL_SECONDS)

    def _is_over(self, fleet: Fleet, run: BucketFiles) -> bool:
        if fleet.running() or fleet.target_capacity() > 0:
            return False
        head = read_json(run, HEAD)
        if head is None or head["state"] != "finished":
            state = "no head" if head is None else f"{head['state']}: {head['reason']}"
            raise RehearsalFailed(
                f"the fleet went to zero but the run did not finish ({state}); "
                f"the machines' logs are in {self.settings.folder / 'machines'}"
            )
        return True

    def _machine(self, instance: Instance) -> ProcessMachine:
        metadata = MetadataServer(
            instance_id=instance.id,
            instance_type=instance.type,
            ami_id=instance.image_id,
            zone=instance.zone,
            account=self.aws.account,
            market=instance.market,
            tags=instance.tags,
            user_data=instance.user_data,
        )
        return ProcessMachine(
            folder=self.settings.folder / "machines" / instance.id,
            instance_id=instance.id,
            instance_type=instance.type,
            user_data=instance.user_data,
            environment={**self.aws.environment(), "POLL_SECONDS": f"{self._handler_poll():g}"},
            metadata=metadata,
        )

    def _handler_poll(self) -> float:
        return min(1.0, self.settings.notice_seconds / NOTICE_SECONDS) * HANDLER_POLL_SECONDS

    def _output(self, stack: str, name: str) -> str:
        found = self.aws.client("cloudformation").describe_stacks(StackName=stack)["Stacks"][0]
        outputs = {item["OutputKey"]: item["OutputValue"] for item in found["Outputs"]}
        return str(outputs[name])

    def _start_python(
        self, name: str, *arguments: str, relayed: Callable[[str], bool] = bool
    ) -> Child:
        command = [sys.executable, *arguments]
        return self.children.start(name, command, relayed=relayed, PYTHONUNBUFFERED="1")


def processes_below(folder: Path) -> list[psutil.Process]:
    """List the running processes of every machine whose root is below the folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            root = process.environ().get("MACHINE_ROOT")
            if root is not None and Path(root).is_relative_to(folder):
                found.append(process)
    return found


def clear(folder: Path) -> None:
    """Make an empty folder; remove what an earlier demo left."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
