"""The main job, end to end: deploy, train, interrupt, resume, finish, prove (`make demo`)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from contract.keys import HEAD
from rehearsal.aws import EmbeddedAws
from rehearsal.aws.event_bus import EventBus
from rehearsal.drill.cdk import run_cdk
from rehearsal.drill.children import Child, Children
from rehearsal.drill.deployment import Deployment, RehearsalFailed, synth_arguments
from rehearsal.drill.fleet import BootableMachine, Fleet, Instance
from rehearsal.drill.interruptions import Drill, PlannedInterruption
from rehearsal.drill.lineage import read_json
from rehearsal.drill.narrator import Narrator
from rehearsal.drill.outcome import Rehearsed
from rehearsal.drill.program import RehearsedProgram
from rehearsal.drill.run_files import BucketFiles, FolderFiles, bucket_files
from rehearsal.machines.nspawn.host import NspawnHost
from rehearsal.machines.quirks import Quirks

POLL_SECONDS = 0.2
# The Guard runs every ten minutes; a rehearsal of a few minutes would never see that.
GUARD_TICK_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoSettings:
    """What a demo does; the defaults are those of `make demo`."""

    folder: Path
    size: str
    program: RehearsedProgram | None
    workload: str
    recipe: str
    overrides: str
    count: int
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
    nspawn: NspawnHost | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def deployment(self) -> Deployment:
        """The stacks that this demo deploys."""
        return Deployment(
            folder=self.settings.folder,
            aws=self.aws,
            children=self.children,
            nspawn=self.nspawn,
        )

    def run(self) -> Rehearsed:
        """Run all phases; raise RehearsalFailed or ChildFailed if one fails."""
        self._deploy()
        resources = self.deployment.check_resources()
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
            processes_left=self.deployment.processes_left(self.settings.folder),
            guard=[asdict(invocation) for invocation in fleet.bus.invocations],
            notice_seconds=self.settings.notice_seconds,
            seconds=time.monotonic() - self.started,
        )

    def _start_reference(self, folder: Path) -> Child:
        if self.settings.program is not None:
            return self.settings.program.start_reference(self.deployment, folder)
        return self.deployment.start_reference(
            folder,
            workload=self.settings.workload,
            recipe=self.settings.recipe,
            overrides=self.settings.overrides,
            interval=self.settings.checkpoint_interval,
        )

    def _deploy(self) -> None:
        settings, deployment = self.settings, self.deployment
        making = self._start_dataset()
        deployment.bootstrap()
        assembly = settings.folder / "cdk.out"
        context = {
            "size": settings.size,
            **self._what_trains(),
            "notice_budget_seconds": f"{settings.notice_seconds:g}",
            "train.lease_ttl_seconds": f"{settings.lease_ttl_seconds:g}",
        }
        run_cdk(self.children, "cdk synth", *synth_arguments(assembly, context))
        deployment.deploy(assembly, "DatasetStack")
        if making is not None:
            making.expect()
        program = settings.program
        deployment.upload(settings.workload if program is None else program.name)
        self.aws.capacity.notice_seconds = settings.notice_seconds
        deployment.deploy(assembly, "TrainingStack")

    def _start_dataset(self) -> Child | None:
        settings = self.settings
        if settings.program is not None:
            return settings.program.make_data(self.deployment)
        return self.deployment.start_dataset(
            workload=settings.workload, count=settings.count, seed=settings.seed
        )

    def _what_trains(self) -> dict[str, str]:
        """Return the stack's parameters of the workload, or of the program."""
        settings = self.settings
        if settings.program is not None:
            return settings.program.context()
        return {
            "workload": settings.workload,
            "recipe": settings.recipe,
            "overrides": settings.overrides,
            "train.checkpoint_interval": settings.checkpoint_interval,
        }

    def _fleet(self) -> tuple[Fleet, BucketFiles]:
        identifier = self.deployment.fleet_id()
        bus = EventBus(aws=self.aws, code_folder=self.settings.folder / "functions")
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
        run_uri = self.deployment.output("TrainingStack", "RunUri")
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
        if not fleet.is_over():
            return False
        head = read_json(run, HEAD)
        if head is None or head["state"] != "finished":
            state = "no head" if head is None else f"{head['state']}: {head['reason']}"
            raise RehearsalFailed(
                f"the fleet went to zero but the run did not finish ({state}); "
                f"the machines' logs are in {self.settings.folder / 'machines'}"
            )
        return True

    def _machine(self, instance: Instance) -> BootableMachine:
        folder = self.settings.folder / "machines"
        return self.deployment.machine(instance, folder, self.settings.notice_seconds, Quirks())
