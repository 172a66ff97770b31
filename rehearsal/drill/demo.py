"""The main job, end to end: deploy, train, interrupt, resume, finish, prove (`make demo`)."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contract.keys import HEAD
from rehearsal.aws.event_bus import EventBus
from rehearsal.drill.children import run_cdk
from rehearsal.drill.deployment import DATASET, DeployedStacks, synth_arguments
from rehearsal.drill.fleet import BootableMachine, Fleet, RehearsalFailed, RunningInstance
from rehearsal.drill.interruptions import Drill, PlannedInterruption
from rehearsal.drill.program import RehearsedProgram
from rehearsal.drill.receipt import Rehearsed
from rehearsal.drill.run_files import Files, FolderFiles, read_json
from rehearsal.drill.workload import RehearsedWorkload
from rehearsal.machines.quirks import Quirks

# The Guard runs every ten minutes; a rehearsal of a few minutes would never see that.
_GUARD_TICK_SECONDS = 30.0


@dataclass(kw_only=True, slots=True)
class Demo:
    """One rehearsal from deploy to receipt, phase by phase."""

    trained: RehearsedWorkload | RehearsedProgram
    plan: Sequence[PlannedInterruption]
    options: argparse.Namespace  # of `demo`
    stacks: DeployedStacks
    say: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)

    @property
    def _machines(self) -> Path:
        return self.stacks.folder / "machines"

    def run(self) -> Rehearsed:
        """Run all phases; raise RehearsalFailed or ChildFailed if one fails."""
        self._deploy()
        stacks, folder = self.stacks, self.stacks.folder / "uninterrupted"
        resources = stacks.check_resources()
        reference = self.trained.start_reference(stacks, folder)
        bus = EventBus(aws=stacks.aws, code_folder=stacks.folder / "functions")
        fleet, run = stacks.fleet(bus, self._machine, self.say), stacks.run_files()
        fleet.step()
        if not fleet.running():
            raise RehearsalFailed(f"fleet {fleet.id} started no instance")
        drill = Drill(fleet=fleet, run=run, plan=self.plan)

        def is_over() -> bool:
            drill.step()
            if reference.process.poll() not in (None, 0):
                reference.expect()
            return self._is_over(fleet, run)

        try:
            fleet.follow(
                is_over,
                tell=self.say,
                tick_seconds=_GUARD_TICK_SECONDS,
                timeout_seconds=self.options.timeout_seconds,
                logs=self._machines,
            )
        finally:
            fleet.close()
        for life in fleet.lives.values():
            life.read_metrics()
        self.say("the fleet is at zero; waiting for the uninterrupted run, to compare with it")
        reference.expect()
        bus.close()
        return Rehearsed(
            run=run,
            reference=FolderFiles(folder=folder),
            drill=drill,
            resources=resources,
            processes_left=stacks.processes_left(stacks.folder),
            notice_seconds=self.options.notice_seconds,
            seconds=time.monotonic() - self.started,
        )

    def _deploy(self) -> None:
        stacks, options = self.stacks, self.options
        making = self.trained.make_data(stacks)
        stacks.bootstrap()
        assembly = stacks.folder / "cdk.out"
        context = {
            "size": options.size,
            **self.trained.context(),
            "notice_budget_seconds": f"{options.notice_seconds:g}",
            "train.lease_ttl_seconds": f"{options.lease_ttl_seconds:g}",
        }
        run_cdk(stacks.children, "cdk synth", *synth_arguments(assembly, context))
        stacks.deploy(assembly, DATASET)
        if making is not None:
            making.expect()
        stacks.upload(self.trained.dataset)
        stacks.aws.capacity.notice_seconds = options.notice_seconds
        stacks.deploy(assembly, stacks.training)

    def _is_over(self, fleet: Fleet, run: Files) -> bool:
        if not fleet.is_over():
            return False
        head = read_json(run, HEAD)
        if head is None or head["state"] != "finished":
            state = "no head" if head is None else f"{head['state']}: {head['reason']}"
            raise RehearsalFailed(
                f"the fleet went to zero but the run did not finish ({state}); "
                f"the machines' logs are in {self._machines}"
            )
        return True

    def _machine(self, instance: RunningInstance) -> BootableMachine:
        seconds = self.options.notice_seconds
        return self.stacks.machine(instance, self._machines, seconds, Quirks())
