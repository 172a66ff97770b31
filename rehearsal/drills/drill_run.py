"""A drill on deployed stacks: boot, apply the drill's faults, follow the run to its end."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from embedded_aws import EventBus, Fault
from rehearsal.demo.action import Action
from rehearsal.demo.deployment import DeployedStacks, handler_poll
from rehearsal.demo.fleet import BootableMachine, MachineLife, instances_of
from rehearsal.demo.interruptions import RehearsedRun
from rehearsal.drills.drill import IN_PLACE, Drill
from rehearsal.machines.metadata import RehearsedInstance

# Replaces the Guard's ten minutes in a run of seconds.
_TICK_SECONDS = 4.0
# Shorter waits between a boot's attempts, for the same reason.
WAITS = {"STEP_RETRY_SECONDS": "0.5", "FETCH_ATTEMPTS": "1", "TERMINATE_RETRY_SECONDS": "5"}


@dataclass(kw_only=True, slots=True)
class DrillRun:
    """One drill on its own run id; `context` has its stack's parameters."""

    drill: Drill
    stacks: DeployedStacks
    context: dict[str, str]
    folder: Path
    say: Callable[[str], None]
    log: Callable[[str], None]
    unmet: list[Fault] = field(default_factory=list)
    _run: RehearsedRun | None = None

    @property
    def run(self) -> RehearsedRun:
        assert self._run is not None
        return self._run

    @property
    def is_deployed(self) -> bool:
        return self._run is not None

    def rehearse(self, assembly: Path) -> None:
        """Deploy, follow the run to its end, leave nothing running; raise if it does not end."""
        aws = self.stacks.aws
        self._synthesize()
        aws.update_in_place(["AWS::EC2::SpotFleet"] if self.drill.fleet_update == IN_PLACE else [])
        aws.capacity.reset()
        aws.capacity.follow(self.drill.capacity)
        aws.faults.begin(self.drill.faults)
        self.stacks.deploy(assembly, self.stacks.training)
        bus = EventBus(
            aws=aws,
            code_folder=self.folder / "functions",
            variables=self.drill.guard,
            invokes=self.drill.guard_is_invoked,
        )
        fleet = self.stacks.fleet(bus, self._machine, self._tell)
        self._run = RehearsedRun(
            fleet=fleet,
            files=self.stacks.run_files(),
            plan=self.drill.actions,
            tell=self._tell,
            do=self._do,
        )
        try:
            fleet.follow(
                self._step,
                tell=self.log,
                tick_seconds=_TICK_SECONDS,
                timeout_seconds=self.drill.timeout_seconds,
                logs=self.folder / "machines",
            )
        finally:
            fleet.close()
            done = self.drill.actions[: self.run.done]
            begun = [*self.drill.faults, *(fault for each in done for fault in each.faults)]
            self.unmet = [fault for fault in begun if fault not in aws.faults.met]
            # First, as closing the bus may raise, and the next drill uses the same AWS.
            aws.faults.end()
            bus.close()

    def _step(self) -> bool:
        """Do the next action if it is due; return whether everything is over."""
        fleet = self.run.fleet
        # Actions after the end wait until all events are delivered: the Guard reacts late.
        is_over = fleet.is_over() and (not self.run.undone or fleet.bus.is_idle)
        return not self.run.step(is_over=is_over) and is_over

    def _do(self, action: Action, life: MachineLife | None) -> None:
        aws, fleet = self.stacks.aws, self.run.fleet
        if life is not None and action.do == "execute":
            # Only process machines have this variable; for others it is empty.
            command = f': "${{MACHINE_ROOT=}}"\n{action.command}'
            self.log(life.machine.execute("bash", "-euc", command))
        elif life is not None and action.do == "rebalance":
            fleet.rebalance(life)
        elif action.do == "capacity":
            aws.capacity.follow(action.capacity)
        elif action.do == "faults":
            aws.faults.begin(action.faults)
        elif action.do == "clock":
            aws.faults.clock_ahead_seconds = action.seconds or 0.0
        elif action.do == "guard":
            fleet.bus.invokes = True
        elif action.do == "operate":
            uri = self.stacks.output(self.stacks.training, "RunUri")
            owner = ["bash", "-euc", action.command]
            self.stacks.children.start("operate", owner, FLEET_ID=fleet.id, RUN_URI=uri).expect()
        elif action.do == "deploy":
            # Keep stepping the fleet: CloudFormation waits for machines that it shuts down.
            assembly = self._assembly(self.run.done)
            self.stacks.deploy(assembly, self.stacks.training, meanwhile=fleet.step)
            fleet.id = self.stacks.fleet(fleet.bus, self._machine, self._tell).id

    def _assembly(self, number: int) -> Path:
        return self.folder / f"cdk.out-{number}"

    def _synthesize(self) -> None:
        """Synthesize what the actions deploy beforehand, as it would take too long in mid-run."""
        for number, action in enumerate(self.drill.actions, start=1):
            if action.do == "deploy":
                context = {**self.context, **action.parameters}
                self.stacks.synthesize(self._assembly(number), context).expect()

    def _machine(self, instance: RehearsedInstance) -> BootableMachine:
        quirks = self.drill.quirks(len(self.run.fleet.lives) + 1)
        notice_seconds = self.stacks.aws.capacity.notice_seconds
        environment = {**WAITS, **handler_poll(notice_seconds), **quirks.environment}
        return self.stacks.machine(
            instance,
            self.folder / "machines",
            notice_seconds,
            replace(quirks, environment=environment),
        )

    def _tell(self, text: str) -> None:
        self.say(f"{self.drill.name}: {text}")
        self.log(text)

    def end_what_is_left(self) -> None:
        """Terminate every instance, so that the next drill finds none."""
        if alive := list(instances_of(self.stacks.aws)):
            self.stacks.aws.client("ec2").terminate_instances(InstanceIds=alive)
